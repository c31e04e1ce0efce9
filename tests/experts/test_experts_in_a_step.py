"""Experts inside a training step of the executor: the plain loop's numbers, on the tape and in the graph alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.errors import BoundaryError, NotFound, RemoteError
from anabranch.experts.client.finder import FailureBackoff
from anabranch.testing import FakeClock
from anabranch.transport import Client

Engine = Literal["tape", "graph"]
ENGINES: tuple[Engine, ...] = ("tape", "graph")


class Model(nn.Module):
    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.expert = expert
        self.after = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.relu(self.expert(self.before(x))))  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_with_an_expert_is_the_plain_loop(engine: Literal["tape", "graph"]) -> None:
    here = Model(nn.Linear(4, 4))
    module = copy.deepcopy(here.expert)
    backend = ab.ExpertBackend(
        "linear.0", module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[ab.TensorSpec(4)]
    )
    plain = torch.optim.SGD(here.parameters(), lr=0.1)
    batches = [(torch.randn(rows, 4), torch.randn(rows, 1)) for rows in (5, 5, 3, 5)]
    with ab.ExpertServer([backend]) as server:
        there = Model(ab.RemoteExpert("linear.0", server.endpoint))
        there.before.load_state_dict(here.before.state_dict())
        there.after.load_state_dict(here.after.state_dict())
        optimizer = torch.optim.SGD(there.parameters(), lr=0.1)
        step = ab.TrainStep(there, loss, optimizer)
        with ab.Executor({"train": step}, engine=engine) as executor:
            for batch in batches:
                plain.zero_grad()
                expected = loss(here, batch)
                expected.backward()
                plain.step()
                assert torch.equal(executor.run("train", batch)["loss"], expected.detach())
            assert executor.engine("train") == engine
    assert torch.equal(module.weight, here.expert.weight)  # type: ignore[arg-type]
    assert torch.equal(there.before.weight, here.before.weight)
    assert backend.updates == 4  # once a step


class Faulty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fault: Exception | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fault is not None:
            raise self.fault
        return self.linear(x)  # type: ignore[no-any-return]


@dataclass
class Grid:
    directory: ab.Directory
    experts: dict[str, Faulty]
    backends: dict[str, ab.ExpertBackend]


@contextmanager
def grid() -> Iterator[Grid]:
    """Six experts on two servers, the same every time."""
    torch.manual_seed(0)
    experts = {f"ffn.{i}.{j}": Faulty() for i in range(2) for j in range(3)}
    backends = {
        uid: ab.ExpertBackend(uid, module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[ab.TensorSpec(4)])
        for uid, module in experts.items()
    }
    directory = ab.Directory()
    with ExitStack() as stack:
        for mine in (list(backends.values())[::2], list(backends.values())[1::2]):
            stack.enter_context(ab.ExpertServer(mine, directory=directory, drain_seconds=0.1))
        yield Grid(directory, experts, backends)


class Mixed(nn.Module):
    def __init__(self, directory: ab.Directory, *, switch: bool, **options: object) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(4, 4)
        kind = ab.RemoteSwitchMixtureOfExperts if switch else ab.RemoteMixtureOfExperts
        self.mixture = kind(4, [2, 3], directory, "ffn", **options)  # type: ignore[arg-type]
        self.after = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        mixed = self.mixture(x)
        mixed, extra = mixed if isinstance(mixed, tuple) else (mixed, 0.0)
        return self.after(x + mixed) + extra  # type: ignore[no-any-return]


def train(engine: Engine, grid: Grid, *, dead: str | None = None, **options: object) -> list[Tensor]:
    """Three steps under a scheduler; the losses, and all state in the end, the experts' too."""
    model = Mixed(grid.directory, **options)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    step = ab.TrainStep(model, loss, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    losses = []
    if dead is not None:
        grid.experts[dead].fault = ValueError("out of order")
    with ab.Executor({"train": step}, engine=engine) as executor:
        for _ in range(3):
            batch = torch.randn(6, 4), torch.randn(6, 1)
            losses.append(executor.run("train", batch)["loss"])
        assert executor.engine("train") == engine
    theirs = [parameter for expert in grid.experts.values() for parameter in expert.parameters()]
    return [*losses, *model.state_dict().values(), *(parameter.detach().clone() for parameter in theirs)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("switch", "dead"),
    [
        (False, "ffn.1.2"),
        (True, None),
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(True, "ffn.1.2", marks=pytest.mark.slow),
    ],
)
def test_a_graph_with_a_mixture_is_the_tape_to_the_bit(
    switch: bool, dead: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.experts.client.finder.FailureBackoff", lambda: FailureBackoff(FakeClock()))
    options = {} if switch else {"k_best": 3, "k_min": 1}
    found = []
    for engine in ENGINES:
        with grid() as there:
            found.append(train(engine, there, dead=dead, switch=switch, **options))
            updates = {uid: backend.updates for uid, backend in there.backends.items()}
            assert max(updates.values()) in (2, 3)  # once a step, for those who were asked in it
            if dead is not None:
                assert updates[dead] == 0
            found[-1].append(torch.tensor(list(updates.values())))
    assert all(map(torch.equal, *found))


def step_of(model: nn.Module) -> ab.TrainStep:
    return ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.1, fused=True))


def failing(engine: Engine, grid: Grid, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Exception:
    """What a run raises when all experts fail; the executor works before and after, and nothing here has moved."""
    with ab.Executor({"train": step_of(model)}, engine=engine) as executor:
        for _ in range(2):
            executor.run("train", batch)
        here = parameters_here(model).values()
        before = [parameter.detach().clone() for parameter in here]
        for expert in grid.experts.values():
            expert.fault = ValueError("out of order")
        with pytest.raises(Exception, match="out of order") as raised:
            executor.run("train", batch)
        assert all(map(torch.equal, before, here))
        for expert in grid.experts.values():
            expert.fault = None
        calls = sum(expert.calls for expert in grid.experts.values())
        assert executor.run("train", batch)["loss"].isfinite()
        assert sum(expert.calls for expert in grid.experts.values()) > calls
        return raised.value


@pytest.mark.parametrize("kind", [pytest.param("expert", marks=pytest.mark.slow), "mixture"])
def test_a_failing_expert_is_the_same_error_on_either_engine_and_the_next_run_works(kind: str) -> None:
    batch = torch.randn(3, 4), torch.randn(3, 1)
    errors = []
    for engine in ENGINES:
        with grid() as there:
            if kind == "expert":
                model: nn.Module = Model(ab.RemoteExpert("ffn.0.0", there.directory))
            else:
                model = Mixed(there.directory, switch=False, k_best=2, k_min=2)
            errors.append(failing(engine, there, model, batch))
    tape, graph = errors
    assert type(tape) is type(graph)
    assert type(graph) is (RemoteError if kind == "expert" else BoundaryError)
    assert message(tape) == message(graph)


def message(error: Exception) -> str:
    return re.sub(r"\d+\.\d+ s|unix:\S+|after .*", "", str(error)).split("\n")[0]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["expert", "mixture"])
def test_an_expert_that_is_not_served_is_named(kind: str, engine: Engine) -> None:
    directory = ab.Directory()
    model: nn.Module = Model(ab.RemoteExpert("nobody.0", directory))
    error, says = NotFound, "no server for 'nobody.0'"
    if kind == "mixture":
        model, error, says = Mixed(directory, switch=False), BoundaryError, "lists no expert ffn"
    with ab.Executor({"train": step_of(model)}, engine=engine) as executor, pytest.raises(error, match=says):
        executor.run("train", (torch.randn(3, 4), torch.randn(3, 1)))


def test_an_expert_that_moves_is_found_again_by_a_graph() -> None:
    directory = ab.Directory()
    client = Client(retries=2)
    model = Model(ab.RemoteExpert("linear.0", directory, client=client))
    batch = torch.randn(3, 4), torch.randn(3, 1)
    with client, ab.Executor({"train": step_of(model)}, engine="graph") as executor:
        for _ in range(2):
            backend = ab.ExpertBackend("linear.0", nn.Linear(4, 4), args_schema=[ab.TensorSpec(4)])
            with ab.ExpertServer([backend], directory=directory, drain_seconds=0.1):
                assert executor.run("train", batch)["loss"].isfinite()
                assert executor.run("train", batch)["loss"].isfinite()
            assert backend.updates == 2
