"""Memory beside a graph: what a step leaves or keeps, what is shared or shown many times, as in the plain loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import anabranch as ab
from plain_loop import Build, TrainingCase, check, linear, mean_square, sgd


def rows(i: int, n: int = 3) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(i))


# What comes to share memory after the capture, and a step that writes to it.


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("counts", torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.sin()
        self.counts.add_(0.1)
        return self.layer(x * before) + self.scale.sin()  # type: ignore[no-any-return]


def views_of_one_batch(patch: pytest.MonkeyPatch) -> TrainingCase:
    def batch(i: int) -> tuple[Tensor, Tensor]:
        whole = rows(i, 8)
        return whole[:4], whole[2:6] if i in (5, 7) else whole[2:6].clone()

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        written, read = batch
        before = read.sin()
        written.add_(1.0)
        return (model(before) - model(read.sin())[:, :1] * 0.5).square().mean()  # type: ignore[no-any-return]

    model = linear(4, 4)
    return TrainingCase(model, loss, sgd(model), batch=batch)


def buffers_are_tied(patch: pytest.MonkeyPatch) -> TrainingCase:
    model = Buffers()

    def change(k: int) -> None:
        model.scale.data = model.counts.data if k == 1 else model.counts.data.clone()

    return TrainingCase(model, mean_square, sgd(model), change)


@pytest.mark.parametrize("build", [views_of_one_batch, buffers_are_tied])
def test_memory_that_is_shared_from_some_step_on(build: Build) -> None:
    got = check(build, "graph")
    assert got.engines[4] == "graph"
    assert "shares memory" in got.refusal


def test_parts_of_one_memory_that_do_not_overlap_are_a_graph() -> None:
    """Flat parameters and buffers, and the batches of one tensor."""
    model = Buffers()
    flat = torch.ones(8)
    model.counts.data, model.scale.data = flat[:4], flat[4:]
    whole = rows(0, 30)
    with ab.Executor(ab.TrainStep(model, mean_square, sgd(model)), engine="graph") as executor:
        for i in range(10):
            executor.run(batch=whole[3 * i : 3 * i + 3])
        assert executor.engine() == "graph"


# Results and gradients of equal values.


class TwoHeads(nn.Module):
    """Both heads' parameters have equal gradients, and so do the two offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.one, self.two = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.base(x))
        return self.first(hidden) + self.second(hidden) + (self.one + self.two)


class Decaying(Optimizer):
    """Adds its decay to the gradients in place."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(parameter, alpha=0.1)
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def test_an_optimizer_may_write_to_gradients_that_are_equal() -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = TwoHeads()
        return TrainingCase(model, mean_square, Decaying(model.parameters()))

    assert check(build, "graph").engines[-1] == "graph"


@pytest.mark.parametrize("evaluated", [False, True])
def test_results_of_equal_expressions_stay_apart(evaluated: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def both(model: Any, x: Tensor) -> dict[str, Tensor]:
        y = model(x).detach()
        return {"total": y.sum(0), "last": y.sum(0)}

    optimizer = sgd(model)
    train = ab.TrainStep(model, lambda m, x: (mean_square(m, x), both(m, x)), optimizer)
    step: Any = ab.EvalStep(model, both) if evaluated else train
    with ab.Executor({"step": step}, engine="graph") as executor:
        for index in range(3):
            results = executor.run("step", batch=rows(index))
            last = results["last"].clone()
            results["total"].add_(1)
            assert torch.equal(results["last"], last)


# Tensors that outlive a step.


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.penalty, self.view = torch.zeros(()), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.layer.weight.square().sum()
        self.view = self.layer.weight.detach()[0, :2]
        return self.layer(x).square().mean() + 0.1 * self.penalty


def test_a_tensor_that_the_model_keeps_is_never_silently_without_its_history() -> None:
    torch.manual_seed(0)
    model = Keeps()
    step = ab.TrainStep(model, lambda m, x: m(x), torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(4):
            executor.run(batch=torch.ones(4, 3))
            assert model.penalty.requires_grad
            assert not model.view.requires_grad
            model.view.clamp_(-1, 1)  # in place, as after a plain step
        assert executor.engine() == "graph"
        with pytest.raises(ab.CaptureError, match=r"recorded no history; detach\(\) it where it is kept"):
            model.penalty.backward()
