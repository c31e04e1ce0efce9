"""Beside a graph: optimizers with state of their own, as other libraries have, and changes that no guard sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import TrainingCase, check, linear, mean_square, nothing


class CountsInItself(torch.optim.Optimizer):
    """Steps by a rate that falls with a count of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.counts: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counts.append(1)
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1 / len(self.counts))


def test_an_optimizer_that_is_not_torchs_steps_behind_the_graph() -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = CountsInItself(model.parameters())
        return TrainingCase(model, mean_square, optimizer, seen=lambda: optimizer.counts)

    got = check(build, "graph")
    assert got.engines == ["graph"] * 9
    assert got.by_itself == "CountsInItself is not an optimizer of torch.optim"


class Accumulating(torch.optim.SGD):
    """Clears gradients every second time."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        if self.calls % 2:
            super().zero_grad(set_to_none)


class Counting(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


@pytest.mark.parametrize("engine", ["tape", "graph"])
def test_a_zero_grad_of_ones_own_is_called(engine: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = Counting(model.parameters(), lr=0.1)
        return TrainingCase(model, mean_square, optimizer, nothing, seen=lambda: optimizer.calls)

    assert check(build, engine).refused_at is None


def test_a_parameter_added_to_a_second_group_is_refused() -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return TrainingCase(
            model, mean_square, optimizer, lambda k: optimizer.param_groups.append(optimizer.param_groups[0])
        )

    assert "is in two parameter groups" in check(build, "graph").refusal


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_zero_grad_that_leaves_gradients_is_refused(accumulate: int) -> None:
    model = linear()
    step = ab.TrainStep(model, mean_square, Accumulating(model.parameters(), lr=0.1), accumulate=accumulate)
    with ab.Executor(step) as executor:
        for _ in range(accumulate):
            executor.run(batch=torch.ones(2, 4))
        model.weight.grad = torch.ones_like(model.weight)
        with pytest.raises(ValueError, match="zero_grad of an optimizer leaves gradients"):
            executor.run(batch=torch.ones(2, 4))


def test_a_step_is_fixed_once_it_is_made() -> None:
    """The tape read some attributes anew in each step, which graphs had taken up: they could not both be right."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = ab.TrainStep(model, mean_square, optimizer, clip_grad_norm=1.0)
    evaluate = ab.EvalStep(model, lambda model, x: {"y": model(x)})
    for step in (train, evaluate):
        for name in vars(step):
            with pytest.raises(AttributeError, match=f"{name!r} of a {type(step).__name__} .* make a new"):
                setattr(step, name, getattr(step, name))
    assert train.optimizers == (optimizer,)
    assert train.schedulers == ()


def test_an_exception_of_the_loss_refuses_its_steps_alone() -> None:
    def run(engine: Any) -> tuple[dict[int, Exception], list[Tensor]]:
        torch.manual_seed(0)
        model, raises, raised = nn.Linear(4, 3), [""], dict[int, Exception]()

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            if raises[0] == "value":
                raise ValueError("mine")
            if raises[0] == "stop":
                raise StopIteration
            return mean_square(model, x)

        with ab.Executor(
            ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1)), engine=engine
        ) as executor:
            for i in range(7):
                raises[0] = {2: "value", 3: "stop"}.get(i, "")
                try:
                    executor.run(batch=torch.full((5, 4), i / 9))
                except Exception as error:  # noqa: BLE001 - compared below
                    raised[i] = error
            assert executor.engine() == engine
        return raised, list(model.parameters())

    (plain, theirs), (refused, ours) = run("tape"), run("graph")
    assert [*plain] == [*refused] == [2, 3]
    assert all(isinstance(error, ab.CaptureError) for error in refused.values())
    assert "mine" in str(refused[2])
    assert all(map(torch.equal, theirs, ours))


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
