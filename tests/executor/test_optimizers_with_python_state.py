"""Optimizers with their own numbers, lists and tensors, like those of other libraries, on every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import TrainingCase, check, linear, mean_square, nothing


class Own(torch.optim.Optimizer):
    """Steps each parameter by ``update``."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                self.update(parameter, group, self.state[parameter])

    def begin(self, group: dict[str, Any]) -> None:
        pass

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"])


class CountsInTheState(Own):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        parameter.sub_(parameter.grad, alpha=group["lr"] / state["step"])


class CountsInItself(Own):
    counts: list[int]

    def begin(self, group: dict[str, Any]) -> None:
        vars(self).setdefault("counts", []).append(1)

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"] / len(self.counts))


class Wrapping(Own):
    """Shares groups and state with an optimizer inside, which does the work."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.state = self.inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def case_of(kind: type[Own]) -> TrainingCase:
    model = linear()
    optimizer = kind(model.parameters())
    inner = getattr(optimizer, "inner", optimizer)
    seen = lambda: [inner.state_dict(), vars(optimizer).get("counts")]  # noqa: E731
    return TrainingCase(model, mean_square, optimizer, nothing, seen=seen)


@pytest.mark.parametrize("kind", [CountsInTheState, CountsInItself, Wrapping])
def test_an_optimizer_that_is_not_torchs_steps_behind_the_graph(kind: type[Own]) -> None:
    got = check(lambda patch: case_of(kind), "graph")
    assert got.engines == ["graph"] * 9
    assert got.by_itself == f"{kind.__name__} is not an optimizer of torch.optim"


class NeverInitialised(torch.optim.Optimizer):
    """Wraps another, as lookahead optimizers do, without a call of ``super().__init__``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def test_a_wrapper_without_its_own_hooks_trains() -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        return TrainingCase(model, mean_square, NeverInitialised(torch.optim.SGD(model.parameters(), lr=0.1)), nothing)

    assert check(build, "graph").engines == ["graph"] * 9


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


@pytest.mark.parametrize(("kind", "engine"), [(Counting, "tape"), (Counting, "graph")])
def test_a_zero_grad_of_ones_own_is_called(kind: Any, engine: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = linear()
        optimizer = kind(model.parameters(), lr=0.1)
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


def test_sparse_gradients_in_windows_become_a_graph_that_lasts() -> None:
    def run(engine: Any) -> tuple[list[float], list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1))
        sparse = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
        dense = torch.optim.Adam(model[1].parameters(), lr=0.1)
        step = ab.TrainStep(model, lambda m, ids: m(ids).square().mean(), [sparse, dense], accumulate=2)
        losses, engines = [], []
        with ab.Executor(step, engine=engine) as executor:
            for index in range(16):
                losses.append(executor.run(batch=torch.tensor([index % 5, 1, 1]))["loss"].item())
                engines.append(executor.engine())
        return losses, engines

    expected, _ = run("tape")
    found, engines = run("graph")
    assert found == expected
    assert engines[-8:] == ["graph"] * 8, engines
