"""A snapshot is the tables of one moment, whatever happens to them until it is read."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from clusters import cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_rows import readers

from anabranch.errors import CheckpointError, Overloaded
from anabranch.parameter_server import ParameterClient, ParameterServer, Shard
from anabranch.parameter_server.client import saved_tables
from anabranch.parameter_server.client.saved_tables import SavedTables
from anabranch.parameter_server.messages import (
    InitMessage,
    JoinMessage,
    Merging,
    PullMessage,
    PullPart,
    PushMessage,
    PushPart,
    ReleaseMessage,
    WorkerProgress,
)
from anabranch.tables import Constant, Family, RowBlock, RowOptimizer, Table, TableSpec
from anabranch.tables.arena import Arena
from anabranch.tables.kernels.vocabulary import BLOCK
from anabranch.tables.row_block import Piece
from anabranch.tables.snapshot import RowSnapshot, _Part
from anabranch.testing import MemoryTransport

RULE = RowOptimizer(Family.SGD, lr=1.0)
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MOMENTUM_RULE = RowOptimizer.from_factory(MOMENTUM)

ADAM = RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
SPECS = [
    TableSpec("fixed", 90, 3),
    TableSpec("moving", 40, 3, every_row_moves=True),
    TableSpec("oldest", None, 3, capacity=9),
    TableSpec("rarest", None, 3, capacity=7, eviction="frequency"),
    TableSpec("growing", None, 3),
    TableSpec("half", 30, 3, torch.float16),
]

Contents = dict[tuple[str, int], tuple[list[float], int, list[int]]]


class Tables:
    """Tables of two arenas, and the lock under which they change."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.arenas = [Arena(SPECS[0], ADAM), Arena(SPECS[-1], ADAM)]
        self.tables = {spec.name: self.make(spec) for spec in SPECS}

    def make(self, spec: TableSpec) -> Table:
        return Table(spec, ADAM, self.arenas[spec.dtype == torch.float16])

    def do(self, what: int, which: int, seed: int) -> None:
        """Push, read in training, or drop and fill again from what other rows were."""
        spec = SPECS[which]
        table = self.tables[spec.name]
        ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 30, 6))
        if what < 6:
            table.push(ids, torch.randn(6, 3, dtype=spec.dtype))
        elif what < 9:
            table.pull(ids, training=True)
        else:
            blocks = [piece.rows for piece in RowSnapshot([table], self.lock)]
            step, history = table.step, table.history
            table.drop()
            self.tables[spec.name] = again = self.make(spec)
            for block in blocks:
                again.restore(block)
            again.resume(step, history)

    def contents(self) -> Contents:
        """Return all rows, read from memory."""
        rows: Contents = {}
        for name, table in self.tables.items():
            arena = table.arena
            wide, pitch, apart, first, stride, behind = map(int, arena.shape)
            mine = np.repeat(arena.owner[: arena.taken] == table.number, BLOCK)
            begun = arena.words[: mine.size * pitch].reshape(-1, pitch)[:, 1] > 0
            for row in np.flatnonzero(mine & begun).tolist():
                id_, stamp = arena.words[row * pitch : row * pitch + 2].tolist()
                weights = arena.w[row * apart + first : row * apart + first + wide]
                values = weights.view(np.float16 if weights.dtype == np.int16 else weights.dtype).tolist()
                values += arena.x[row * stride + behind : row * stride + behind + arena.states].tolist()
                rows[name, id_] = values, stamp, arena.usage[row].tolist() if len(arena.usage) else []
        return rows


def read(names: list[str], pieces: list[Piece]) -> Contents:
    rows: Contents = {}
    for piece in pieces:
        block: RowBlock = piece.rows
        owners = np.repeat(piece.tables, piece.counts)
        usage = block.usage.tolist() or [[]] * len(block.ids)
        numbers = torch.cat([block.weights.to(block.states.dtype), block.states], 1).tolist()
        for k, id_, values, stamp, used in zip(
            owners, block.ids.tolist(), numbers, block.stamps.tolist(), usage, strict=True
        ):
            assert (names[k], id_) not in rows
            rows[names[k], id_] = values, stamp, used
    return rows


OPERATIONS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5), st.integers(0, 1 << 30)), max_size=40)


@settings(max_examples=12, deadline=None)
@given(before=OPERATIONS, after=OPERATIONS, rows=st.integers(1, 9), buffers=st.integers(1, 3), every=st.integers(1, 8))
def test_a_snapshot_is_a_copy_under_the_lock(
    before: list[Any], after: list[Any], rows: int, buffers: int, every: int
) -> None:
    tables = Tables()
    for one in before:
        tables.do(*one)
    names = list(tables.tables)
    with tables.lock:
        copies = [tables.contents()]
        snapshots = [RowSnapshot(list(tables.tables.values()), tables.lock, buffer=rows * 96, buffers=buffers)]
    pieces: list[list[Piece]] = [[], []]
    for k, one in enumerate(after):
        if k == len(after) // 2:
            copies.append(tables.contents())
            snapshots.append(RowSnapshot(list(tables.tables.values()), tables.lock, buffer=rows * 96, buffers=buffers))
        tables.do(*one)
        for snapshot, some in zip(snapshots, pieces, strict=False):
            if k % every == 0 and (piece := next(snapshot, None)) is not None:
                some.append(piece)
    for snapshot, some, copy in zip(snapshots, pieces, copies, strict=False):
        assert read(names, some + list(snapshot)) == copy
        assert snapshot.ended
    assert not any(arena.watchers or arena._leaving for arena in tables.arenas)


def filled(rows: int = 40) -> tuple[Table, threading.RLock]:
    table = Table(TableSpec("t", rows, 1), RowOptimizer(Family.SGD, lr=1.0))
    table.push(torch.arange(rows), torch.ones(rows, 1))
    return table, threading.RLock()


def test_a_change_never_waits_for_the_reader_and_its_writes_are_counted() -> None:
    table, lock = filled()
    snapshot = RowSnapshot([table], lock, buffer=200, buffers=2)  # four rows each
    copy = table.pull(torch.arange(40))
    table.push(torch.arange(40), torch.ones(40, 1))
    assert snapshot.spills == 8
    assert {id_: values for (_, id_), (values, *_) in read(["t"], list(snapshot)).items()} == dict(
        enumerate(copy.tolist())
    )


def test_a_full_disk_ends_the_snapshot_and_harms_no_push(monkeypatch: pytest.MonkeyPatch) -> None:
    table, lock = filled()
    snapshot = RowSnapshot([table], lock, buffer=200, buffers=2)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    table.push(torch.arange(40), torch.ones(40, 1))
    assert table.step == 2
    with pytest.raises(CheckpointError, match="No space left"):
        list(snapshot)


def test_a_snapshot_that_nobody_reads_ends_with_the_next_change() -> None:
    table, lock = filled()
    snapshot = RowSnapshot([table], lock, seconds=0.0)
    table.push(torch.arange(3), torch.ones(3, 1))
    assert not table.arena.watchers
    with pytest.raises(CheckpointError, match="nobody has read it for 0 s"):
        next(snapshot)


def test_a_dropped_tables_memory_is_free_once_the_snapshot_has_ended() -> None:
    table, lock = filled()
    arena, snapshot = table.arena, RowSnapshot([table], lock)
    table.drop()
    assert not arena._free
    assert [len(piece.rows.ids) for piece in snapshot] == [40]
    assert arena._free == [0]
    assert not arena.words[: 40 * int(arena.pitch)].any()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RowSnapshot.__init__.__kwdefaults__, "buffer", 1000)


@pytest.mark.usefixtures("small_pieces")
def test_a_save_beside_training_clients_is_one_moment_of_each_shard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It once had an id twice: evicted behind the reader, and admitted again before it."""
    part = SavedTables._part
    with cluster(2) as servers:
        saver, trainer = servers.client(), servers.client()
        saver.init_table(TableSpec("t", None, 1, capacity=120), RULE)
        saver.init("b", (2,), init=1.0, optimizer=MOMENTUM)
        for seed in range(12):
            ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 300, 40)).unique()
            saver.push_many({"t": (ids, torch.ones(len(ids), 1)), "b": (ids[:0], torch.ones(2))})
        every = torch.arange(300)
        before = saver.sparse_pull("t", every), saver.pull("b"), saver.read_state("b", MOMENTUM_RULE).states[0].clone()

        def train(*arguments: Any) -> Any:
            ids = torch.randint(0, 300, (40,)).unique()
            trainer.push_many({"t": (ids, torch.ones(len(ids), 1)), "b": (ids[:0], torch.ones(2))})
            return part(*arguments)

        monkeypatch.setattr(SavedTables, "_part", train)
        saver.save(tmp_path)
        monkeypatch.undo()
        assert not torch.equal(saver.sparse_pull("t", every), before[0])
        saver.load(tmp_path)
        after = saver.sparse_pull("t", every), saver.pull("b"), saver.read_state("b", MOMENTUM_RULE).states[0]
        assert all(map(torch.equal, after, before))


def test_a_shard_is_read_by_two_at_a_time_and_forgets_readers_that_are_gone() -> None:
    shard = Shard()
    shard.init(InitMessage("t", RULE.to_dict(), TableSpec("t", 4, 1).to_dict()))
    first, _ = shard.snapshot(seconds=60.0), shard.snapshot(seconds=60.0)
    with pytest.raises(Overloaded, match="two snapshots"):
        shard.snapshot(seconds=60.0)
    own = shard.snapshot_of_all()
    assert not list(own.rows)
    first.rows._until = 0.0
    shard.snapshot(seconds=60.0)
    assert first.rows.ended


def test_a_snapshot_that_one_shard_refuses_ends_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[list[bool]]()
    with cluster(2) as both:
        client, servers = both.client(), both.servers
        client.init_table(TableSpec("t", 4, 1), RULE)
        others = [servers[1]._shard.snapshot(seconds=600.0) for _ in range(2)]

        def pause(_: float) -> None:
            ended.append([rows.ended for rows in servers[0]._shard._snapshots])
            others.pop().rows.close()

        monkeypatch.setattr(saved_tables, "time", SimpleNamespace(sleep=pause))
        with client.collect():
            assert ended == [[True]]
            monkeypatch.setattr(saved_tables, "_PAUSE", 1e9)  # the deadline comes before it
            with pytest.raises(Overloaded, match="two snapshots"):
                client.collect()


@pytest.mark.parametrize("way", ["close", "export", "save"])
def test_three_who_read_a_shard_at_once_do_so_in_turn(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of a job do so as it closes; the third was refused."""
    rule = RowOptimizer(Family.ROW_WISE_ADAGRAD, lr=1.0, initial_accumulator_value=0.5)
    refused, pieces = threading.Event(), SavedTables.pieces

    def late(saved: SavedTables) -> Any:
        assert refused.wait(60)  # two do not end before there is a third
        yield from pieces(saved)

    def read(client: ParameterClient) -> list[float]:
        if way == "close":
            return client.read_state("fixed", rule).states[0].tolist()  # type: ignore[no-any-return]
        if way == "export":
            return client.value_blocks("dynamic")[0].whole().tolist()  # type: ignore[union-attr,no-any-return]
        client.save(tmp_path / client._client.epoch.hex())
        return []

    monkeypatch.setattr(SavedTables, "pieces", late)
    monkeypatch.setattr(saved_tables, "time", SimpleNamespace(sleep=lambda _: refused.set()))
    with cluster() as servers:
        clients = [servers.client() for _ in range(3)]
        for name, rows in (("fixed", 4), ("dynamic", None)):
            clients[0].init_table(TableSpec(name, rows, 2, initial=Constant(1.0)), rule)
            clients[0].sparse_push(name, torch.tensor([1]), torch.ones(1, 2))
        with ThreadPoolExecutor(3) as pool:
            one, *more = pool.map(read, clients)
    assert more == [one] * 2
    assert one == {"close": [0.5, 1.5, 0.5, 0.5], "export": [1], "save": []}[way]


def test_a_reader_reads_on_where_a_snapshot_is_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    table, lock = filled()
    snapshot = RowSnapshot([table], lock, buffer=200, buffers=2)
    before = set(table.pull(torch.arange(40)).flatten().tolist())
    table.push(torch.arange(40), torch.ones(40, 1))
    read_rows = os.preadv

    def close_first(*arguments: Any) -> int:
        snapshot.close()
        return read_rows(*arguments)

    monkeypatch.setattr(os, "preadv", close_first)
    while not snapshot.ended:
        assert set(next(snapshot).rows.weights.flatten().tolist()) <= before
    with pytest.raises(CheckpointError, match="it was closed"):
        next(snapshot)


def test_a_load_sends_the_constants_of_missed_steps_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with ParameterClient() as client:
        client.init_table(TableSpec("t", 9, 1, every_row_moves=True), MOMENTUM_RULE)
        for step in range(8):
            client.sparse_push("t", torch.tensor([step]), torch.ones(1, 1))
        before = client.pull("t")
        client.save(tmp_path)
        ask, sent = client.calls.request, list[int]()

        def count(shard: int, verb: str, payload: bytes = b"", tensors: Any = (), **options: Any) -> Any:
            if verb == "restore":
                sent.append(sum(len(part) == 8 and part.dtype == torch.float64 for part in tensors))
            return ask(shard, verb, payload, tensors, **options)

        monkeypatch.setattr(client.calls, "request", count)
        client.load(tmp_path)
        assert sent[0] == 1
        assert set(sent[1:]) == {0}
        assert torch.equal(client.pull("t"), before)


def test_a_part_that_failed_is_not_the_end_when_it_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard()
    shard.init(InitMessage("t", RULE.to_dict(), TableSpec("t", 4, 1).to_dict()))
    shard.push(shard.request(PushMessage([PushPart("t", 1)], []), [torch.tensor([1]), torch.ones(1)]))
    closed, without_memory = (shard.snapshot(seconds=60.0) for _ in range(2))
    closed.rows.close()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="it was closed"):
            closed.part(0)

    def full(*_: object) -> Piece:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(_Part, "piece", full)
        with pytest.raises(MemoryError):
            without_memory.part(0)
    with pytest.raises(CheckpointError, match="MemoryError"):
        without_memory.part(0)


def test_saves_of_a_shard_without_tables_do_not_end_one_another() -> None:
    with ParameterServer(heartbeat=20.0) as server, ParameterClient([server.endpoint]) as client:
        client.init("d", (2,))
        with client.collect() as first, client.collect() as second:
            for saved in (first, second):
                assert [name for name, _ in saved.groups()] == ["dense-0"]


def test_a_reader_whose_shard_restarts_takes_no_part_in_the_snapshot_of_another() -> None:
    network = MemoryTransport()
    serve = functools.partial(ParameterServer, transport=network, listen="memory:shard", heartbeat=1.0)
    with ExitStack() as stack:
        one, two = (stack.enter_context(ParameterClient(["memory:shard"], transport=network)) for _ in range(2))
        for client in (one, two):
            with serve():
                client.init("d", (2,))
                client.init("e", (2,))
                groups = stack.enter_context(client.collect()).groups()
                if client is one:
                    ours = groups
                    next(ours)
                    continue
                with pytest.raises(CheckpointError, match="has ended"):
                    next(ours)
                assert [name for name, _ in groups] == ["dense-0", "dense-1"]


def test_a_save_does_not_wait_to_end_the_snapshot_of_a_shard_that_has_gone() -> None:
    with ParameterClient(["memory:shard"], transport=(network := MemoryTransport())) as client:
        with ParameterServer(transport=network, listen="memory:shard", heartbeat=0.1):
            saved = client.collect()
        began = time.monotonic()
        saved.__exit__()
    assert time.monotonic() - began < 30.0  # of a call's 60 s


def test_a_push_that_waits_since_an_older_membership_is_in_a_shard_s_snapshot() -> None:
    """One worker has begun again from a checkpoint, the other has not yet, and the shard restarts."""
    shard, again = Shard(), Shard()
    shard.init(InitMessage("t", RULE.to_dict(), TableSpec("t", 4, 1, initial=Constant(0.0)).to_dict()))
    for rank in range(2):
        shard.join(JoinMessage(rank, 2, "bsp"))
    for rank in range(2):
        turn = WorkerProgress(0, 2, 0)
        push = PushMessage([PushPart("t", 1)], [], rank, 0, merging=Merging(hold=True), turn=turn)
        shard.push(shard.request(push, [torch.tensor([1]), torch.ones(1)]))
    shard.join(JoinMessage(0, 2, "bsp", 0, 1))
    snapshot = shard.snapshot_of_all()
    again.load(snapshot.state, readers(snapshot))
    for each in (shard, again):
        for rank in range(2):
            if rank:
                each.join(JoinMessage(rank, 2, "bsp", 0, 1))
            turn = WorkerProgress(1, 2, 0)
            push = PushMessage([PushPart("t", 1)], [], rank, 0, merging=Merging(hold=True), turn=turn)
            each.push(each.request(push, [torch.tensor([2]), torch.ones(1)]))
        for rank in range(2):
            each.release(ReleaseMessage(rank, WorkerProgress(1, 2, 1, 0)))
        pull = PullMessage([PullPart("t", 2)])
        assert each.pull(each.request(pull, [torch.tensor([1, 2])]))[1][0].tolist() == [0.0, -1.0]
