"""Clients that a shard has forgotten, because many others pushed: none gets a wrong count of lost pushes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from anabranch.errors import RolledBack
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.parameter_server.server.durable.acknowledged import Acknowledged
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.testing import MemoryTransport
from anabranch.transport.failures import error_of, failure_of

SGD = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
SPEC = TableSpec("t", 8, 2, initial=Constant(0.0))
MODULE = "anabranch.parameter_server.server.durable.acknowledged"
HERE = "memory:shard"
OTHERS = 4


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


@pytest.fixture(params=["requests", "counts"])
def _few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}._CLIENTS", 3)
    if request.param == "counts":
        monkeypatch.setattr(f"{MODULE}._COUNTED", 3)


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize("durability", ["none", "checkpoint", "log"])
def test_a_forgotten_client_continues_and_learns_of_no_loss(durability: str, tmp_path: Path) -> None:
    """It was told that 6 of its 7 pushes were gone, once it had pushed again."""
    shard = Shard(tmp_path, durability)
    with shard.client() as client:
        client.init_table(SPEC, SGD)
        push(client, 7)
        for _ in range(2):
            shard.push_others()
            push(client, 2)
        assert value(client) == 11
    shard.die()


@pytest.mark.usefixtures("_few")
def test_a_forgotten_client_has_lost_nothing_when_its_shard_recovers_from_a_log(tmp_path: Path) -> None:
    shard = Shard(tmp_path, "log")
    with shard.client() as client:
        client.init_table(SPEC, SGD)
        push(client, 7)
        shard.push_others()
        for _ in range(3):
            push(client)
            shard.die()
            shard.start()
        shard.server.checkpoint()
        push(client)
        shard.die()
        shard.start()
        assert value(client) == 11
    shard.die()


def test_a_client_with_forgotten_requests_learns_its_exact_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{MODULE}._CLIENTS", 3)
    shard = Shard(tmp_path, "checkpoint")
    with shard.client() as client:
        client.init_table(SPEC, SGD)
        push(client, 7)
        shard.server.checkpoint()
        push(client, 2)
        shard.push_others()
        shard.die()
        shard.start()
        with pytest.raises(RolledBack) as told:
            push(client)
        assert (told.value.lost, value(client)) == (2, 7)
    shard.die()


@pytest.mark.parametrize("adopted", [False, True])
def test_a_loss_that_cannot_be_counted_is_reported_as_unknown(
    adopted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pushes of a client that was forgotten are gone, or are not: it was told nothing."""
    monkeypatch.setattr(f"{MODULE}._COUNTED", 3)
    shard = Shard(tmp_path, "checkpoint")
    with shard.client() as client:
        client.init_table(SPEC, SGD)
        push(client, 4)
        shard.push_others()
        shard.server.checkpoint()
        if adopted:
            push(client, 3)
        shard.push_others()
        shard.die()
        shard.start()
        with pytest.raises(RolledBack, match="it is unknown how many of its") as told:
            push(client)
        assert told.value.lost is None
        assert value(client) == 4
        push(client, 2)
        assert value(client) == 6
        shard.server.checkpoint()
        push(client, 5)
        shard.die()
        shard.start()
        with pytest.raises(RolledBack) as told:
            value(client)
        assert (told.value.lost, value(client)) == (5, 6)
    shard.die()


def test_counts_outlast_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}._CLIENTS", 2)
    monkeypatch.setattr(f"{MODULE}._COUNTED", 4)
    done, again = Acknowledged(), Acknowledged()
    clients = [bytes([number]) * 16 for number in range(6)]
    for number, client in enumerate(clients):
        for sequence in range(number + 1):
            done.add((client, sequence), push=True)
    again.load(done.state())
    assert [again.pushes(client) for client in clients] == [None, None, 3, 4, 5, 6]
    assert list(again.identities()) == list(done.identities())
    assert again.place((clients[5], 2)) == 3


@pytest.mark.parametrize("lost", [0, 3, None])
def test_the_number_crosses_the_wire(lost: int | None) -> None:
    told = error_of(failure_of(RolledBack("gone", lost=lost)), peer="p", operation="push", step=None, elapsed=0.0)
    assert isinstance(told, RolledBack)
    assert told.lost == lost
