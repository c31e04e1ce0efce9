"""Pushes that one shard refuses and another takes, and checkpoints of shards that stand at different steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.parameter_server import ParameterClient, ParameterServer, Shard, Worker
from anabranch.testing import MemoryTransport

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
    return ParameterClient(endpoints, transport=network, timeout=20, **options)


def overflowing(row: int = 0) -> tuple[Tensor, Tensor]:
    """A gradient for every row, that of one so large that twice of it is infinite."""
    gradient = torch.ones(8, 1)
    gradient[row] = 3e38
    return torch.cat([IDS, IDS[[row]]]), torch.cat([gradient, gradient[[row]]])


def test_a_bare_push_that_one_shard_refuses_says_that_the_other_took_its_part(shards: Any) -> None:
    with client_of(shards) as client:
        client.init("t", (8, 1), "rows", optimizer=SGD)
        client.push_many({"t": (IDS, torch.ones(8, 1))})
        with pytest.raises(
            ab.NonFinite, match="on one shard; 1 other shards had already applied their parts of this push"
        ):
            client.push_many({"t": overflowing()})
        rows = client.sparse_pull("t", IDS).flatten().tolist()
        assert set(rows) == {-1.0, -2.0}
        assert rows[0] == -1.0


def test_a_push_that_holds_nan_is_taken_by_no_shard(shards: Any) -> None:
    with client_of(shards) as client:
        client.init("t", (8, 1), "rows", optimizer=SGD)
        gradient = torch.ones(8, 1)
        gradient[3] = float("nan")
        with pytest.raises(ab.NonFinite) as raised:
            client.push_many({"t": (IDS, gradient)})
        assert "had already applied" not in str(raised.value)
        assert not client.sparse_pull("t", IDS).any()


def test_a_dense_gradient_of_another_shape_is_refused_before_anything_is_sent(shards: Any) -> None:
    with client_of(shards) as client:
        client.init("t", (8, 1), "rows", optimizer=SGD)
        client.init("bias", (2, 1), optimizer=SGD)
        gradients = {"t": (IDS, torch.ones(8, 1)), "bias": (IDS[:0], torch.ones(3, 1))}
        with pytest.raises(ab.SchemaError, match=r"bias is \(2, 1\), its gradient \(3, 1\); nothing was pushed"):
            client.push_many(gradients)
        assert not client.sparse_pull("t", IDS).any()


def test_a_worker_stops_once_its_shards_differ(shards: Any, tmp_path: Path) -> None:
    with client_of(shards, worker=Worker(0, 1, "bsp")) as client:
        client.init("t", (8, 1), "rows", optimizer=SGD)
        client.join(0)
        with pytest.raises(ab.NonFinite, match="had already applied"):
            client.push_many({"t": overflowing()}, step=0)
        with pytest.raises(ab.BoundaryError, match="restart the job from its last checkpoint"):
            client.push_many({"t": (IDS, torch.ones(8, 1))}, step=0)
        with pytest.raises(ab.BoundaryError, match="restart the job from its last checkpoint"):
            client.save(tmp_path)


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
        client = stack.enter_context(ParameterClient(endpoints, transport=network, timeout=20, retries=0))
        client.init("t", (8, 1), "rows", optimizer=SGD)
        servers[lost].__exit__(None, None, None)
        monkeypatch.setattr(Shard, "push", push)
        with pytest.raises(ab.PeerLost):
            client.push_many({"t": (IDS, torch.ones(8, 1))})


def test_a_worker_stops_once_one_of_its_shards_had_no_memory(shards: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Shard.push

    def push(self: Shard, *args: Any, **keywords: Any) -> None:
        if self.shard == 1:
            raise MemoryError("none left")
        taken(self, *args, **keywords)

    monkeypatch.setattr(Shard, "push", push)
    with client_of(shards, worker=Worker(0, 1, "bsp")) as client:
        client.init("t", (8, 1), "rows", optimizer=SGD)
        client.join(0)
        with pytest.raises(ab.Overloaded) as raised:
            client.push_many({"t": (IDS, torch.ones(8, 1))}, step=0)
        assert raised.value.__notes__ == ["1 other shards had already applied their parts of this push"]
        with pytest.raises(ab.BoundaryError, match="restart the job from its last checkpoint"):
            client.push_many({"t": (IDS, torch.ones(8, 1))}, step=0)


def test_an_executor_does_not_save_half_a_step(shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(shard, 2)) for shard in range(2)]
        monkeypatch.setenv("ANABRANCH_SERVERS", ",".join(server.endpoint for server in servers))
        model = nn.Sequential(nn.Embedding(8, 1, sparse=True))
        step = ab.TrainStep(
            model,
            lambda m, b: (m(b["ids"]) * b["scale"]).sum(),
            torch.optim.SGD(model.parameters(), lr=10.0),
            reduction="sum",
        )
        scale = torch.ones(8, 1)
        executor = stack.enter_context(ab.Executor(step, "Hybrid", engine="tape", timeout=20))
        executor.run(batch={"ids": IDS, "scale": scale})
        with pytest.raises(ab.NonFinite, match="had already applied"):
            executor.run(batch={"ids": IDS, "scale": torch.cat([torch.full((1, 1), 3e38), scale[1:]])})
        for _ in range(2):
            with pytest.raises(ab.BoundaryError, match="restart the job"):
                executor.run(batch={"ids": IDS, "scale": scale})
        with pytest.raises(ab.BoundaryError, match="restart the job"):
            executor.save(tmp_path)
        with pytest.raises(ab.BoundaryError, match="restart the job"):
            executor.close()


@pytest.mark.parametrize("rule", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("behind", [0, 1])
def test_shards_that_took_different_numbers_of_pushes_are_saved_and_loaded(
    shards: Any, tmp_path: Path, rule: Any, behind: int
) -> None:
    with client_of(shards) as client:
        client.init("t", (8, 1), "rows", optimizer=rule)
        client.init("other", (8, 1), "rows", optimizer=rule)
        client.push_many({"t": (IDS, torch.ones(8, 1)), "other": (IDS, torch.ones(8, 1))})
        refusing = 0
        for _ in range(4):  # a push that one shard refuses moves the other on
            with pytest.raises(ab.NonFinite):
                client.push_many({"t": overflowing(refusing)})
            rows = client.sparse_pull("t", IDS).flatten()
            if behind == 1 and refusing == 0:
                refusing = int((rows != rows[0]).nonzero()[0])
        before = {name: client.sparse_pull(name, IDS) for name in ("t", "other")}
        client.save(tmp_path)
        client.push_many({"t": (IDS, torch.ones(8, 1))})
        client.load(tmp_path)
        for name, rows in before.items():
            assert torch.equal(client.sparse_pull(name, IDS), rows)
        client.push_many({"t": (IDS, torch.ones(8, 1))})
        assert bool((client.sparse_pull("t", IDS) < before["t"]).all())


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_tables_there(shards: Any) -> None:
    with client_of(shards) as client:
        client.init("t", (8, 1), "rows", optimizer=SGD)
        client.push_many({"t": (IDS, torch.ones(8, 1))})
        state: Any
        state, groups = client.collect()
        tensors = {name: dict(group()) if callable(group) else dict(group) for name, group in groups.items()}
        for group in tensors.values():
            for label in group:
                if label.endswith(".stamps"):
                    group[label] = group[label] + 5
        with pytest.raises(ab.CheckpointError, match="rows of step 6 and was saved at step 1.* nothing was changed"):
            client.restore(state, lambda name: tensors[name])
        assert client.sparse_pull("t", IDS).flatten().tolist() == [-1.0] * 8
