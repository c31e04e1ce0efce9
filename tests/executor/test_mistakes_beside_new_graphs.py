"""A graph runs only once the tape has taken a batch of it: an error of the tape is raised again at every such step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.executor.engines.engine import Engine

SGD = torch.optim.SGD
Loss: TypeAlias = Callable[[Any, Any], Tensor]
TrainingCase: TypeAlias = Callable[[int, Any], Tensor]
"""``case(i, model)`` changes the model before step ``i``, and returns its batch."""


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def outcomes(
    model: nn.Module, steps: Iterable[int], case: TrainingCase, run: Callable[[Tensor], Tensor]
) -> list[object]:
    """The loss of each step, or the type of what it raised."""
    torch.manual_seed(1)
    found: list[object] = []
    for i in steps:
        batch = case(i, model)
        try:
            found.append(run(batch).item())
        except Exception as error:  # noqa: BLE001 - any, to compare with the plain loop's
            found.append(type(error))
    return found


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def expect_the_plain_loop(
    make: Callable[[], nn.Module], loss: Loss, case: TrainingCase, steps: int, raises: list[int]
) -> None:
    plain, model = made(make), made(make)  # a copy of the first would not share memory as it does
    optimizer = SGD(plain.parameters(), lr=0.1)

    def run(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        value = loss(plain, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    expected = outcomes(plain, range(steps), case, run)
    assert [i for i, found in enumerate(expected) if isinstance(found, type)] == raises, "so PyTorch does"
    step = ab.TrainStep(model, loss, SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor:
        found = outcomes(model, range(steps), case, lambda batch: executor.run(batch=batch)["loss"])  # type: ignore[arg-type,return-value]
        assert found == expected
        assert executor.engine() == "graph"
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


def test_batches_of_inference_mode_are_refused_at_every_step() -> None:
    def case(i: int, _model: nn.Module) -> Tensor:
        with torch.inference_mode(3 <= i < 6):
            return torch.randn(5, 4)

    expect_the_plain_loop(lambda: nn.Linear(4, 3), square, case, 7, [3, 4, 5])


class ChangesWhatIsSaved(nn.Module):
    """Multiplies by a buffer, and changes a part of it before backward, by another name, if told to."""

    scale: Tensor
    part: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("part", self.scale[1:])
        self.changes = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale
        if self.changes:
            with torch.no_grad():
                self.part.mul_(1.1)
        return y  # type: ignore[no-any-return]


def test_a_buffer_that_is_changed_before_backward_is_refused_at_every_step() -> None:
    def case(i: int, model: Any) -> Tensor:
        model.changes = i < 3
        return torch.randn(5, 4)

    expect_the_plain_loop(ChangesWhatIsSaved, square, case, 6, [0, 1, 2])


def test_an_exception_that_the_loss_raises_at_times_is_the_users_own() -> None:
    class Raising(nn.Linear):
        error: Exception | None = None

    def loss(model: Raising, x: Tensor) -> Tensor:
        if model.error is not None:
            raise model.error
        return square(model, x)

    def case(i: int, model: Any) -> Tensor:
        model.error = {2: ValueError("mine"), 3: StopIteration()}.get(i)
        return torch.randn(5, 4)

    expect_the_plain_loop(lambda: Raising(4, 3), loss, case, 6, [2, 3])


def test_an_interrupt_beside_a_new_graph_costs_one_step_and_no_second_capture(
    captures: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 3)
    step = ab.TrainStep(model, square, SGD(model.parameters(), lr=0.1))
    real = Engine.step
    with ab.Executor(step, engine="graph") as executor:

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.run(batch=torch.ones(5, 4))
        monkeypatch.setattr(Engine, "step", real)
        losses = [float(executor.run(batch=torch.ones(5, 4))["loss"]) for _ in range(3)]  # type: ignore[arg-type]
        assert losses == sorted(losses, reverse=True)
        assert executor.engine() == "graph"
    assert len(captures) == 1


class AsksWhetherItIsCompiled(nn.Linear):
    asks = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (1.0 if self.asks and torch.compiler.is_compiling() else 0.0)


def test_an_evaluation_as_another_graph_is_compared_as_the_first_was() -> None:
    model, x = AsksWhetherItIsCompiled(4, 3), torch.ones(2, 4)
    step = ab.EvalStep(model, lambda model, x: {"y": model(x)})
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(2):
            assert torch.equal(executor.run(batch=x)["y"], model(x))  # type: ignore[arg-type]
        assert executor.engine() == "graph"
        model.asks = True
        assert torch.equal(executor.run(batch=x)["y"], model(x))  # type: ignore[arg-type]
        with pytest.raises(ab.CaptureError, match="the graph was not bitwise equal to the tape, .* the result 'y'"):
            executor.run(batch=x)


def test_an_evaluation_that_eager_mode_refuses_is_refused_at_every_run() -> None:
    def outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        if not torch.compiler.is_compiling():
            raise ValueError("mine")
        return {"y": model(x)}

    step = ab.EvalStep(nn.Linear(4, 3), outputs)
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(3):
            with pytest.raises(ValueError, match="mine"):
                executor.run(batch=torch.ones(2, 4))


class Reentrant(nn.Module):
    """A frozen table and a block behind it that a reentrant checkpoint gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=True))  # type: ignore[no-any-return]


def test_a_gradient_that_only_the_graph_has_is_a_difference() -> None:
    torch.manual_seed(0)
    model = Reentrant()
    weight = model.block.weight.detach().clone()
    x = torch.ones(2, 4)
    step = ab.TrainStep(model, square, SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(), ab.Executor(step, engine="graph") as executor:
        warnings.simplefilter("ignore")  # of PyTorch's checkpoint: no input requires a gradient
        executor.run(batch=x)
        with pytest.raises(ab.CaptureError, match="which parameters have a gradient"):
            executor.run(batch=x)
    assert torch.equal(model.block.weight, weight)
