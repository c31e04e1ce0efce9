"""Clients that a shard has forgotten, because many others pushed: none gets a wrong count of lost pushes."""

from __future__ import annotations

from pathlib import Path

import pytest
from mortal import SGD, SPEC, Shard, push, value

from anabranch.errors import RolledBack
from anabranch.parameter_server.server import durability
from anabranch.parameter_server.server.durability import AppliedRequests


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "_CLIENTS", 3)


def push_others(shard: Shard) -> None:
    for _ in range(4):  # more than the three that are remembered
        with shard.client() as other:
            push(other, row=2)


@pytest.mark.parametrize("durability", ["none", "checkpoint", "log"])
@pytest.mark.usefixtures("_few")
def test_a_forgotten_client_learns_that_its_pushes_are_unknown_and_continues(durability: str, tmp_path: Path) -> None:
    shard = Shard(tmp_path, durability)
    with shard.client() as client:
        client.init_table(SPEC, SGD)
        push(client, 7)
        push_others(shard)
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
        push_others(shard)
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
