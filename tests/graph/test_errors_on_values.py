"""Operators that raise on some values raise in a graph as in the plain loop, and no parameter moves.

PYTEST_DONT_REWRITE: an assert of a loss here is the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import anabranch as ab
from anabranch.graph.effects import is_random
from anabranch.graph.run.rollback import GraphRaised, Rollback

TABLE = torch.arange(10.0).view(5, 2)
RIGHT, SINGULAR, IDS, OUTSIDE = torch.eye(3), torch.zeros(3, 3), torch.tensor([1, 2, 0]), torch.tensor([1, 7, 0])


def unused(value: object) -> float:
    return 0.0


def asserted(ids: Tensor) -> float:
    assert ids.max() < 5, "an id outside the table"
    return 0.0


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor | float], Tensor, Tensor]] = {
    "cholesky": (lambda scale, a: torch.linalg.cholesky(a * scale).sum(), RIGHT, -RIGHT),
    "inv": (lambda scale, a: torch.linalg.inv(a * scale).sum(), RIGHT, SINGULAR),
    "solve": (lambda scale, a: torch.linalg.solve(a * scale, RIGHT).sum(), RIGHT, SINGULAR),
    "unused inv": (lambda scale, a: unused(torch.linalg.inv(a)), RIGHT, SINGULAR),
    "assert": (lambda scale, ids: asserted(ids), IDS, OUTSIDE),
    "one_hot": (lambda scale, ids: F.one_hot(ids, 5).sum() * scale, IDS, OUTSIDE),
    "unused lookup": (lambda scale, ids: unused(F.embedding(ids, TABLE).exp()), IDS, OUTSIDE),
    "unused selection": (lambda scale, ids: unused(TABLE.index_select(0, ids)), IDS, OUTSIDE),
    "unused loss": (lambda scale, ids: unused(F.cross_entropy(TABLE[:3].repeat(1, 2), ids)), IDS, OUTSIDE),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", CASES)
def test_it_raises_in_a_graph_too_and_nothing_has_moved(name: str) -> None:
    term, right, wrong = CASES[name]

    def run(engine: Any) -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)

        def loss(model: Any, batch: Any) -> Any:
            return model(batch[0]).square().mean() + term(model.bias[0].exp(), batch[1])

        step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.01))
        weights, raised = [], []
        with ab.Executor(step, engine=engine) as executor:
            for index in range(4):
                try:
                    executor.run(batch=(torch.ones(3, 3), wrong if index == 2 else right))
                except (RuntimeError, IndexError, AssertionError) as error:
                    raised.append((index, type(error), str(error)))
                weights.append(model.weight.detach().clone())
            assert executor.engine() == engine
        return weights, raised

    (theirs, expected), (ours, found) = run("tape"), run("graph")
    assert found == expected
    assert [index for index, *_ in found] == [2]
    assert all(map(torch.equal, theirs, ours))


class Writes(nn.Module):
    """Counts in Python, then writes in place where an index may lie outside; nothing else of it may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(3, 2), 0
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, ids: Tensor) -> Tensor:
        self.count += 1
        self.seen[ids] = 1.0
        return self.layer(torch.ones(1, 3)).square().sum() * self.seen.sum()


def test_a_write_in_place_that_fails_is_the_tapes_too() -> None:
    model = Writes()
    step = ab.TrainStep(model, lambda m, ids: m(ids), torch.optim.SGD(model.parameters(), lr=0.001))
    with ab.Executor(step, engine="graph") as executor:
        for index in range(4):
            if index == 2:
                with pytest.raises(IndexError) as raised:
                    executor.run(batch=OUTSIDE)
                assert raised.value.__context__ is None
            else:
                executor.run(batch=IDS)
        assert executor.engine() == "graph"
    assert model.count == 4, model.count


class Remembers(nn.Module):
    """Changes buffers, draws random numbers and counts in Python before a lookup that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.table = nn.Embedding(5, 4)
        self.count = 0

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.count += 1
        hidden = self.layers(x.clone()) * 0.9**self.count
        x.mul_(2)
        try:
            found = torch.linalg.cholesky(x[:, :3].clone())
        except torch.linalg.LinAlgError:
            found = torch.eye(3) * 7
        return (hidden * self.table(ids)).square().mean() + found.sum() * self.table.weight.mean()


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_after_an_error_everything_is_as_after_the_plain_loops(accumulate: int) -> None:
    """Batch 5 raises in a lookup, batch 7 takes the other branch of an ``except``."""

    def run(engine: Any) -> tuple[list[Any], list[str]]:
        torch.manual_seed(0)
        model, kept, engines = Remembers(), [], []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step = ab.TrainStep(model, lambda m, b: m(*b), optimizer, accumulate=accumulate, rows=lambda b: 3)
        with ab.Executor(step, engine=engine) as executor:
            for index in range(10):
                x = torch.eye(3) * (-1 if index == 7 else 1)
                try:
                    result: object = executor.run(batch=(x, OUTSIDE if index == 5 else IDS))["loss"].clone()
                except IndexError as error:
                    result = str(error)
                state = [value.clone() for value in model.state_dict().values()]
                kept.append((result, model.count, x, torch.get_rng_state(), *state))
                engines.append(executor.engine())
        return kept, engines

    (expected, _), (found, _) = run("tape"), run("graph")
    for theirs, ours in zip(expected, found, strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_an_evaluation_that_raises_is_the_users_own() -> None:
    """Batch 3 takes the other branch of an ``except``."""
    model = nn.Embedding(5, 2)

    def outputs(model: Any, ids: Tensor) -> dict[str, Tensor]:
        try:
            return {"found": model(ids)}
        except IndexError:
            return {"found": torch.full((3, 2), -1.0)}

    with ab.Executor(ab.EvalStep(model, outputs), engine="graph") as executor:
        found = [executor.run(batch=OUTSIDE if index == 3 else IDS)["found"] for index in range(5)]
        assert executor.engine() == "graph"
    assert [bool((value == -1).all()) for value in found] == [False, False, False, True, False]


def test_the_generators_of_other_devices_are_put_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        """Stands for ``torch.cuda``; the state of its generator is the number of its draws."""

        state = 0

        def get_rng_state(self, device: torch.device) -> int:
            assert device.type == "cuda"
            return self.state

        def set_rng_state(self, state: int, device: torch.device) -> None:
            self.state = state

    there = Device()
    graph = ab.capture(lambda x, ids: F.dropout(x, 0.5).sum() + F.embedding(ids, TABLE).sum(), torch.ones(3), IDS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        mask = torch.empty(3, device="cuda")
    for node in filter(is_random, graph.fx.nodes):
        node.meta["val"] = mask
    monkeypatch.setattr(torch, "get_device_module", lambda device: there)

    def program(*free: object) -> None:
        there.state += 1
        raise IndexError("an id outside the table")

    with pytest.raises(GraphRaised):
        Rollback(graph).run(program, [torch.ones(3), IDS])
    assert there.state == 0
