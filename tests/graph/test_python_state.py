"""What a step does to Python, and what Python does to a step: done once, noticed, or left to the tape; never lost."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from plain_loop import TrainingCase, check, mean_square, sgd


class Net(nn.Module):
    """Multiplies by what ``read(self, x)`` gives."""

    def __init__(self, held: object, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.drop, self.held, self.read = nn.Linear(4, 3), nn.Dropout(0.5), held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read(self, x)


def append(self: Any, x: Tensor) -> int:
    self.held.append(1)
    return len(self.held)


def advance(self: Any, x: Tensor) -> float:
    return float(next(self.held))


def rebind(self: Any, x: Tensor) -> Tensor:
    self.held += 1
    return self.held  # type: ignore[no-any-return]


def backward(self: Any, x: Tensor) -> float:
    self.layer(x).square().sum().backward()
    return 1.0


def replace_data(self: Any, x: Tensor) -> float:
    self.layer.weight.data = self.layer.weight.data * 0.9
    return 1.0


def recompute(self: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: self.drop(self.layer(x)), x, use_reentrant=False)  # type: ignore[no-any-return]


LOST: dict[str, tuple[Callable[[], object], Callable[[Any, Tensor], Any]]] = {
    "a deque": (lambda: collections.deque(maxlen=5), append),
    "a generator": (lambda: (n + 1.0 for n in range(9)), advance),
    "a tensor that is not a buffer": (lambda: torch.zeros(1), rebind),
    "a backward within": (lambda: None, backward),
    "the memory of a parameter": (lambda: None, replace_data),
    "a checkpoint's mask": (lambda: None, recompute),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("what", LOST)
def test_python_effects_of_a_step_happen_once_a_step_or_are_refused(what: str) -> None:
    make, read = LOST[what]

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = Net(held := make(), read)
        seen = lambda: [*held] if isinstance(held, collections.deque) else None  # noqa: E731
        return TrainingCase(model, mean_square, sgd(model, momentum=0.9), seen=seen)

    for engine in ("tape", "graph"):
        check(build, engine)


def test_modules_and_tensors_beside_the_model_are_state_too() -> None:
    """A teacher whose statistics move, whose weights follow between steps and are replaced, and a running mean."""

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = nn.Linear(4, 3)
        teacher = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.3))
        mean = torch.zeros(3)

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            scores = model(x)
            mean.mul_(0.9).add_(scores.detach().mean(0))
            return (scores - teacher(x).detach() - mean).square().mean()

        def follow(results: object) -> None:
            with torch.no_grad():
                teacher[0].weight.lerp_(model.weight, 0.5)

        def change(k: int) -> None:
            teacher[0].weight = nn.Parameter(torch.full((3, 4), float(k)))

        seen = lambda: [teacher.state_dict(), mean]  # noqa: E731
        return TrainingCase(model, loss, sgd(model, momentum=0.9), change, seen=seen, between=follow)

    assert check(build, "graph").engines[-1] == "graph"


def test_gradients_into_the_batch_and_anomaly_detection_are_refused() -> None:
    model, before = nn.Linear(4, 3), nn.Linear(4, 4)
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor:
        executor.run(batch=torch.ones(2, 4))
        for make in (Tensor.requires_grad_, before):
            with pytest.raises(ab.CaptureError):
                executor.run(batch=make(torch.ones(2, 4)))
        executor.run(batch=torch.ones(2, 4))
        with (
            warnings.catch_warnings(action="ignore"),
            torch.autograd.detect_anomaly(),
            pytest.raises(ab.CaptureError, match="anomaly detection"),
        ):
            executor.run(batch=torch.ones(2, 4))
