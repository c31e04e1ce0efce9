"""Clients that a shard has forgotten, because many others pushed: none gets a wrong count of lost pushes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from anabranch.errors import RolledBack
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.parameter_server.server import durability
from anabranch.parameter_server.server.durability import AppliedRequests
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.testing import MemoryTransport
from anabranch.transport.failures import error_of, failure_of

SGD = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
SPEC = TableSpec("t", 8, 2, initial=Constant(0.0))
HERE = "memory:shard"
OTHERS = 4


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "_CLIENTS", 3)


class Shard:
    """A shard that remembers three clients, and can die and come back."""

    def __init__(self, directory: Path, durability: str) -> None:
        self.network = MemoryTransport()
        self._make = functools.partial(
            ParameterServer, listen=HERE, transport=self.network, durability=durability, checkpoint_dir=directory
        )
        self.start()

    def start(self) -> None:
        self.server = self._make().__enter__()

    def die(self) -> None:
        """As a killed one: nothing that was not written by now is."""
        self.server._persistence.checkpoint = lambda: None  # type: ignore[method-assign]
        self.server.__exit__(None, None, None)

    def client(self) -> ParameterClient:
        return ParameterClient([HERE], transport=self.network, timeout=20)

    def push_others(self) -> None:
        for _ in range(OTHERS):
            with self.client() as other:
                push(other, row=1)


def push(client: ParameterClient, times: int = 1, row: int = 0) -> None:
    for _ in range(times):
        client.sparse_push("t", torch.tensor([row]), -torch.ones(1, 2))


def value(client: ParameterClient) -> float:
    return float(client.sparse_pull("t", torch.tensor([0]))[0, 0])


@pytest.mark.parametrize("durability", ["none", "checkpoint", "log"])
@pytest.mark.usefixtures("_few")
def test_a_forgotten_client_learns_that_its_pushes_are_unknown_and_continues(durability: str, tmp_path: Path) -> None:
    shard = Shard(tmp_path, durability)
    with shard.client() as client:
        client.init_table(SPEC, SGD)
        push(client, 7)
        shard.push_others()
        with pytest.raises(RolledBack, match="it is unknown whether it holds the client's 7 pushes") as raised:
            push(client)
        assert raised.value.lost is None
        assert value(client) == 7
        push(client, 2)
        assert value(client) == 9
    shard.die()


@pytest.mark.usefixtures("_few")
def test_a_client_that_is_not_forgotten_learns_its_exact_loss(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "checkpoint")
    with shard.client() as client:
        client.init_table(SPEC, SGD)
        shard.push_others()
        push(client, 7)
        shard.server.checkpoint()
        push(client, 2)
        shard.die()
        shard.start()
        with pytest.raises(RolledBack) as raised:
            push(client)
        assert (raised.value.lost, value(client)) == (2, 7)
    shard.die()


@pytest.mark.usefixtures("_few")
def test_what_is_remembered_outlasts_a_checkpoint() -> None:
    applied, again = AppliedRequests(), AppliedRequests()
    clients = [bytes([number]) * 16 for number in range(6)]
    for number, client in enumerate(clients):
        for sequence in range(number + 1):
            applied.add((client, sequence), push=True)
    again.load(applied.state())
    assert [again.pushes(client) for client in clients] == [None, None, None, 4, 5, 6]
    assert list(again.identities()) == list(applied.identities())
    assert again.number((clients[5], 2)) == 3


def test_requests_that_a_client_has_settled_go() -> None:
    applied, client = AppliedRequests(), b"c" * 16
    for sequence in range(1000):
        applied.add((client, sequence), max(sequence - 2, 0), push=True)
    assert [sequence for _, sequence in applied.identities()] == [997, 998, 999]
    assert applied.pushes(client) == applied.number((client, 999)) == 1000


@pytest.mark.parametrize("lost", [0, 3, None])
def test_the_number_crosses_the_wire(lost: int | None) -> None:
    told = error_of(failure_of(RolledBack("gone", lost=lost)), peer="p", operation="push", step=None, elapsed=0.0)
    assert isinstance(told, RolledBack)
    assert told.lost == lost
