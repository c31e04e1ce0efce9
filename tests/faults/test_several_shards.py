"""Pushes that one shard refuses and another takes, and checkpoints of shards that stand at different steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.parameter_server import ParameterClient, ParameterServer, Shard
from anabranch.parameter_server.client.saved_tables import restore
from anabranch.testing import MemoryTransport
from toys import job_servers

SGD = functools.partial(torch.optim.SGD, lr=1.0)
ADAM = functools.partial(torch.optim.Adam, lr=0.1)
IDS = torch.arange(8)


@pytest.fixture
def shards() -> Iterator[tuple[MemoryTransport, list[str]]]:
    network = MemoryTransport()
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(shard, 2, transport=network)) for shard in range(2)]
        yield network, [server.endpoint for server in servers]


def client_of(shards: tuple[MemoryTransport, list[str]], **options: Any) -> ParameterClient:
    network, endpoints = shards
    return ParameterClient(endpoints, transport=network, timeout=60, **options)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The shards that have no memory for a push; none at first."""
    taken, numbers = Shard.push, set[int]()

    def push(self: Shard, *args: Any, **keywords: Any) -> Any:
        if self.shard in numbers:
            raise MemoryError("none left")
        return taken(self, *args, **keywords)

    monkeypatch.setattr(Shard, "push", push)
    return numbers


def test_a_bare_push_that_one_shard_refuses_says_that_the_other_took_its_part(shards: Any, full: set[int]) -> None:
    with client_of(shards) as client:
        client.init("t", (8, 1), "rows", optimizer=SGD)
        client.push_many({"t": (IDS, torch.ones(8, 1))})
        full.add(1)
        with pytest.raises(ab.Overloaded) as raised:
            client.push_many({"t": (IDS, torch.ones(8, 1))})
        assert raised.value.__notes__ == ["1 other shards had already applied their parts of this push"]
        assert set(client.sparse_pull("t", IDS).flatten().tolist()) == {-1.0, -2.0}


def test_a_dense_gradient_of_another_shape_is_refused_before_anything_is_sent(shards: Any) -> None:
    with client_of(shards) as client:
        client.init("bias", (2, 1), optimizer=SGD)
        with pytest.raises(ab.SchemaError, match=r"bias is \(2, 1\), its gradient \(3, 1\); nothing was pushed"):
            client.push("bias", torch.ones(3, 1))
        assert not client.pull("bias").any()


@pytest.mark.parametrize("refuses", [0, 1])
def test_a_shard_that_does_not_answer_counts_for_more_than_one_that_refuses(
    refuses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may have applied its part, so nobody may take the push for one that changed nothing."""
    lost = 1 - refuses

    def push(self: Shard, *args: Any, **keywords: Any) -> None:
        raise ab.SchemaError("refused")

    with ExitStack() as stack:
        network = MemoryTransport()
        servers = [ParameterServer(shard, 2, transport=network) for shard in range(2)]
        for server in servers:
            server.__enter__()
        stack.callback(servers[refuses].__exit__, None, None, None)
        endpoints = [server.endpoint for server in servers]
        client = stack.enter_context(ParameterClient(endpoints, transport=network, timeout=60, retries=0))
        client.init("t", (8, 1), "rows", optimizer=SGD)
        servers[lost].__exit__(None, None, None)
        monkeypatch.setattr(Shard, "push", push)
        with pytest.raises(ab.PeerLost):
            client.push_many({"t": (IDS, torch.ones(8, 1))})


@pytest.mark.parametrize(("consistency", "halves"), [("bsp", False), ("asp", True)])
def test_an_executor_does_not_save_half_a_step(
    consistency: str, halves: bool, full: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        stack.enter_context(job_servers(2, monkeypatch))
        model = nn.Sequential(nn.Embedding(8, 1, sparse=True))
        first = model[0].weight.detach().clone()
        step = ab.TrainStep(
            model, lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters(), lr=10.0), reduction="sum"
        )
        executor = stack.enter_context(ab.Executor(step, "Hybrid", engine="tape", timeout=60, consistency=consistency))
        executor.run(batch=IDS)
        full.add(1)
        with pytest.raises(ab.Overloaded):
            executor.run(batch=IDS)
        full.clear()
        if not halves:  # the other shard held its half, and drops it
            executor.run(batch=IDS)
            executor.save(tmp_path)
            assert torch.equal(executor.state_dict()["0.weight"], first - 10.0 - 10.0)
            return
        for _ in range(2):
            with pytest.raises(ab.BoundaryError, match="restart the job"):
                executor.run(batch=IDS)
        with pytest.raises(ab.BoundaryError, match="restart the job"):
            executor.save(tmp_path)
        with pytest.raises(ab.BoundaryError, match="restart the job"):
            executor.close()


@pytest.mark.parametrize("rule", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("behind", [0, 1])
def test_shards_that_took_different_numbers_of_pushes_are_saved_and_loaded(
    shards: Any, full: set[int], tmp_path: Path, rule: Any, behind: int
) -> None:
    with client_of(shards) as client:
        client.init("t", (8, 1), "rows", optimizer=rule)
        client.init("other", (8, 1), "rows", optimizer=rule)
        client.push_many({"t": (IDS, torch.ones(8, 1)), "other": (IDS, torch.ones(8, 1))})
        full.add(behind)
        for _ in range(4):  # a push that one shard refuses moves the other on
            with pytest.raises(ab.Overloaded):
                client.push_many({"t": (IDS, torch.ones(8, 1))})
        full.clear()
        before = {name: client.sparse_pull(name, IDS) for name in ("t", "other")}
        client.save(tmp_path)
        client.push_many({"t": (IDS, torch.ones(8, 1))})
        client.load(tmp_path)
        for name, rows in before.items():
            assert torch.equal(client.sparse_pull(name, IDS), rows)
        client.push_many({"t": (IDS, torch.ones(8, 1))})
        assert bool((client.sparse_pull("t", IDS) < before["t"]).all())


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("0.stamps", lambda stamps: stamps + 5, "stamps of 0 to 2"),
        ("0.weights", lambda weights: weights.repeat(1, 2), "weights of"),
        ("0.ids", lambda ids: ids[[0] * len(ids)], "an id is there twice"),
        ("0.ids", lambda ids: ids + 8, "ids from"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_leaves_the_tables_there(
    shards: Any, name: str, damage: Any, why: str
) -> None:
    with client_of(shards) as client:
        client.init("t", (8, 1), "rows", optimizer=SGD)
        client.push_many({"t": (IDS, torch.ones(8, 1))})
        with client.collect() as saved:
            groups = {name: dict(group) for name, group in saved.groups()}
        groups["rows-0"][name] = damage(groups["rows-0"][name])
        with pytest.raises(ab.CheckpointError, match=f"nothing was changed: table t: {why}"):
            restore(client, saved.state, groups)
        assert client.sparse_pull("t", IDS).flatten().tolist() == [-1.0] * 8
