"""Optimizers that keep numbers, lists and tensors of their own, as those of other libraries do, on every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import Play, check, linear, mean_square, nothing, taken_for_a_library


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


class CountsInTheGroup(Own):
    def begin(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        parameter.sub_(parameter.grad, alpha=group["lr"] / group["step"])


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


class ReplacesItsState(Own):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state["mean"] = 0.9 * state.get("mean", 0.0) + parameter.grad
        parameter.sub_(state["mean"], alpha=group["lr"])


class KeepsAHistory(Own):
    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        state.setdefault("past", []).append(parameter.grad.clone())
        parameter.sub_(torch.stack(state["past"]).sum(0), alpha=group["lr"])


class HoldsTensors(Own):
    """All that changes is in tensors, wherever they are kept: one graph."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, step=torch.zeros(()))
        self.total = torch.zeros(())

    def begin(self, group: dict[str, Any]) -> None:
        group["step"] += 1
        self.total += 0.5

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["means"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]
        first, second = state["means"]
        first.lerp_(parameter.grad, 0.1)
        second.lerp_(parameter.grad.square(), 0.01)
        parameter.sub_(group["lr"] * self.total / group["step"] * first / (second.sqrt() + 0.1))


class ReadsAList(Own):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, betas=[0.5, 0.5])

    def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state["mean"] = torch.zeros_like(parameter)
        state["mean"].mul_(group["betas"][0]).add_(parameter.grad)
        parameter.sub_(state["mean"], alpha=group["lr"])


class Wrapping(Own):
    """Shares groups and state with an optimizer inside, which does the work."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.state = self.inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


BY_THEMSELVES = {
    CountsInTheGroup: "changes param_groups[0]['step'] in Python",
    CountsInTheState: "replaces its state 'step'",
    CountsInItself: "changes counts in Python",
    ReplacesItsState: "replaces its state 'mean'",
    KeepsAHistory: "replaces its state 'past'",
    Wrapping: "Wrapping.inner (SGD) may change in a way that a graph would not see",
}
CAPTURED = (HoldsTensors, ReadsAList)


def play_of(kind: type[Own], patch: pytest.MonkeyPatch | None = None) -> Play:
    """With a ``patch``, as if the optimizer were a library's."""
    if patch is not None:
        taken_for_a_library(patch)
    model = linear()
    optimizer = kind(model.parameters())  # type: ignore[call-arg]
    inner = getattr(optimizer, "inner", optimizer)
    own = {name: value for name, value in vars(optimizer).items() if name in ("counts", "total")}
    seen = lambda: [inner.state_dict(), own, vars(optimizer).get("counts")]  # noqa: E731
    return Play(model, mean_square, optimizer, nothing, seen=seen)


ENGINES = {"auto": ["tape"] * 3 + ["graph"] * 6, "graph": ["graph"] * 9}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [*BY_THEMSELVES, *CAPTURED])
def test_an_optimizer_of_a_library_leaves_what_the_plain_loop_leaves(kind: type[Own], engine: str) -> None:
    """The trial of a graph leaves no trace in them; forward and backward are a graph in any case."""
    got = check(lambda patch: play_of(kind, patch), engine)
    assert got.engines == ENGINES[engine]
    assert ("the optimizer steps by itself" in got.explained) == (kind in BY_THEMSELVES)
    assert BY_THEMSELVES.get(kind, "") in got.explained


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [CountsInItself, HoldsTensors])
def test_an_optimizer_of_ones_own_steps_by_itself(kind: type[Own], engine: str) -> None:
    got = check(lambda patch: play_of(kind), engine)
    assert got.engines == ENGINES[engine]
    assert "the optimizer steps by itself" in got.explained
    assert "is code of your own, and a graph would not see what it reads change" in got.explained


@pytest.mark.parametrize("engine", ENGINES)
def test_a_number_in_a_list_of_a_group_is_noticed_when_it_changes(engine: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> Play:
        play = play_of(ReadsAList, patch)
        betas = play.optimizer.param_groups[0]["betas"]
        play.change = lambda k: betas.__setitem__(0, 0.9 / k)
        return play

    assert "graph" in check(build, engine).engines[5:]


def test_a_step_that_branches_on_what_it_computes_is_said_without_a_tracers_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken_for_a_library(monkeypatch)

    class Branching(Own):
        def update(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            state.setdefault("step", torch.zeros(())).add_(1)
            if state["step"] > 3:
                parameter.sub_(parameter.grad, alpha=group["lr"])

    model = nn.Linear(4, 3)
    with ab.Executor(ab.TrainStep(model, mean_square, Branching(model.parameters())), engine="graph") as executor:
        for _ in range(3):
            executor.run(batch=torch.ones(2, 4))
        assert executor.explain().endswith("such as to branch on the number of steps")
