"""Experts inside a training step of the executor: the plain loop's numbers, on the tape and in the graph alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import pytest
import torch
from expert_modules import expert_of, served, sgd
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.errors import BoundaryError, NotFound, RemoteError
from anabranch.experts.client.finder import FailureBackoff
from anabranch.testing import FakeClock
from anabranch.transport import Client
from toys import plain_step

Engine = Literal["tape", "graph"]
ENGINES: tuple[Engine, ...] = ("tape", "graph")
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Layers around an expert or a mixture."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.expert, self.after = nn.Linear(4, 4), expert, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        answer, extra = self.expert(self.before(x)), 0.0
        if isinstance(answer, tuple):
            answer, extra = answer
        return self.after(torch.relu(answer)) + extra  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()  # type: ignore[no-any-return]


def batch_of(rows: int = 3) -> Batch:
    return torch.randn(rows, 4), torch.randn(rows, 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_with_an_expert_is_the_plain_loop(engine: Engine) -> None:
    here = Model(nn.Linear(4, 4))
    module = copy.deepcopy(here.expert)
    backend, plain = expert_of(module, uid="linear.0"), sgd(here)
    with served(backend) as server:
        there = Model(ab.RemoteExpert("linear.0", server.endpoint))
        with ab.Executor({"train": ab.TrainStep(there, loss, sgd(there))}, engine=engine) as executor:
            for batch in map(batch_of, (5, 5, 3, 5)):
                expected = plain_step(here, loss, plain, batch)
                assert torch.equal(executor.run("train", batch)["loss"], expected)
            assert executor.engine("train") == engine
    assert torch.equal(module.weight, here.expert.weight)  # type: ignore[arg-type]
    assert torch.equal(there.before.weight, here.before.weight)
    assert backend.updates == 4  # once a step


class Faulty(nn.Linear):
    fault: Exception | None = None
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return super().forward(x)


class Grid(NamedTuple):
    directory: ab.Directory
    experts: dict[str, Faulty]
    backends: dict[str, ab.ExpertBackend]


@contextmanager
def grid() -> Iterator[Grid]:
    """Six experts on two servers, the same every time."""
    torch.manual_seed(0)
    experts = {f"ffn.{i}.{j}": Faulty(4, 4) for i in range(2) for j in range(3)}
    backends = {uid: expert_of(module, uid=uid) for uid, module in experts.items()}
    directory, (first, second) = ab.Directory(), ([*backends.values()][::2], [*backends.values()][1::2])
    with served(*first, directory=directory), served(*second, directory=directory):
        yield Grid(directory, experts, backends)


def mixed(directory: ab.Directory, *, switch: bool = False, **options: Any) -> Model:
    kind = ab.RemoteSwitchMixtureOfExperts if switch else ab.RemoteMixtureOfExperts
    torch.manual_seed(1)
    return Model(kind(4, [2, 3], directory, "ffn", **options))


def train(engine: Engine, grid: Grid, dead: str | None, **options: Any) -> list[Tensor]:
    """Three steps under a scheduler; the losses, and all state in the end, the experts' too."""
    model = mixed(grid.directory, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    step = ab.TrainStep(model, loss, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    if dead is not None:
        grid.experts[dead].fault = ValueError("out of order")
    with ab.Executor({"train": step}, engine=engine) as executor:
        losses = [executor.run("train", batch_of(6))["loss"] for _ in range(3)]
        assert executor.engine("train") == engine
    theirs = [parameter for expert in grid.experts.values() for parameter in expert.parameters()]
    return [*losses, *model.state_dict().values(), *(parameter.detach().clone() for parameter in theirs)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("dead", [None, "ffn.1.2"])
def test_a_graph_with_a_mixture_is_the_tape_to_the_bit(
    switch: bool, dead: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.experts.client.finder.FailureBackoff", lambda: FailureBackoff(FakeClock()))
    options = {} if switch else {"k_best": 3, "k_min": 1}
    results = []
    for engine in ENGINES:
        with grid() as there:
            results.append(train(engine, there, dead, switch=switch, **options))
            updates = {uid: backend.updates for uid, backend in there.backends.items()}
            assert max(updates.values()) in (2, 3)  # once a step, for those who were asked in it
            assert dead is None or updates[dead] == 0
            results[-1].append(torch.tensor(list(updates.values())))
    assert all(map(torch.equal, *results))


def step_of(model: nn.Module) -> ab.TrainStep:
    return ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.1, fused=True))


def failing(engine: Engine, grid: Grid, model: nn.Module, batch: Batch) -> Exception:
    """What a run raises when all experts fail; the executor works before and after, and nothing here has moved."""

    def set_fault(fault: Exception | None) -> int:
        for expert in grid.experts.values():
            expert.fault = fault
        return sum(expert.calls for expert in grid.experts.values())

    with ab.Executor({"train": step_of(model)}, engine=engine) as executor:
        for _ in range(2):
            executor.run("train", batch)
        here = parameters_here(model).values()
        before = [parameter.detach().clone() for parameter in here]
        set_fault(ValueError("out of order"))
        with pytest.raises(Exception, match="out of order") as raised:
            executor.run("train", batch)
        assert all(map(torch.equal, before, here))
        calls = set_fault(None)
        assert executor.run("train", batch)["loss"].isfinite()
        assert set_fault(None) > calls
        return raised.value


@pytest.mark.parametrize("kind", [pytest.param("expert", marks=pytest.mark.slow), "mixture"])
def test_a_failing_expert_is_the_same_error_on_either_engine_and_the_next_run_works(kind: str) -> None:
    batch, errors = batch_of(), []
    for engine in ENGINES:
        with grid() as there:
            model = mixed(there.directory, k_best=2, k_min=2)
            if kind == "expert":
                model = Model(ab.RemoteExpert("ffn.0.0", there.directory))
            errors.append(failing(engine, there, model, batch))
    tape, graph = errors
    assert type(tape) is type(graph) is (RemoteError if kind == "expert" else BoundaryError)
    assert message(tape) == message(graph)


def message(error: Exception) -> str:
    return re.sub(r"\d+\.\d+ s|unix:\S+|after .*", "", str(error)).split("\n")[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["expert", "mixture"])
def test_an_expert_that_is_not_served_is_named(kind: str, engine: Engine) -> None:
    directory = ab.Directory()
    model, error, says = Model(ab.RemoteExpert("nobody.0", directory)), NotFound, "no server for 'nobody.0'"
    if kind == "mixture":
        model, error, says = mixed(directory), BoundaryError, "lists no expert ffn"
    with ab.Executor({"train": step_of(model)}, engine=engine) as executor, pytest.raises(error, match=says):
        executor.run("train", batch_of())


def test_an_expert_that_moves_is_found_again_by_a_graph() -> None:
    directory, batch = ab.Directory(), batch_of()
    with Client(retries=2) as client:
        model = Model(ab.RemoteExpert("linear.0", directory, client=client))
        with ab.Executor({"train": step_of(model)}, engine="graph") as executor:
            for _ in range(2):
                backend = expert_of(nn.Linear(4, 4), uid="linear.0")
                with served(backend, directory=directory):
                    for _ in range(2):
                        assert executor.run("train", batch)["loss"].isfinite()
                assert backend.updates == 2
