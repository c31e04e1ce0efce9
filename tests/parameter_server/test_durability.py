"""A shard that is killed at any point comes back with every push that was acknowledged, to the bit."""

from __future__ import annotations

import functools
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from clusters import durable_shard

from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError, SchemaError
from anabranch.parameter_server import Merging, ParameterClient, ParameterServer, Worker
from anabranch.parameter_server.messages import Compression, InitMessage, PushMessage, PushPart
from anabranch.parameter_server.server import durability, push_log
from anabranch.parameter_server.server.durability import AppliedRequests
from anabranch.parameter_server.server.push_log import PREAMBLE_BYTES, Bodies, PushLog, Record, body_path, log_of
from anabranch.record.spans import on_fault_point
from anabranch.tables import Constant, Normal, RowOptimizer, TableSpec
from anabranch.tables.kernels.caches import WITH_STATE
from anabranch.testing import MemoryTransport, faults
from covering import slow_except
from programs import Program, Programs
from waiting import join, wait_until

ADAM = RowOptimizer.from_factory(functools.partial(torch.optim.Adam, lr=0.01))
SGD = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
FIXED = TableSpec("fixed", 12, 4, initial=Normal(), every_row_moves=True)
DYNAMIC = TableSpec("dynamic", None, 4, initial=Normal(), capacity=5, eviction="frequency", admission=0.7)
SHARD = [
    "push_log.before_append",
    "push_log.mid_append",
    "push_log.after_append",
    "push_log.before_sync",
    "push_log.after_sync",
    "push_log.after_commit",
    "transport.before_reply",
]


def make(client: ParameterClient) -> None:
    client.init_table(FIXED, ADAM)
    client.init_table(DYNAMIC, ADAM)
    client.init("bias", (3,), optimizer=functools.partial(torch.optim.Adam, lr=0.01))


def draw(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 12, (4,), generator=generator), torch.randn(4, 4, generator=generator)


def pull(client: ParameterClient, number: int) -> None:
    """Admits ids, for which others may leave: a change of its own."""
    client.pull_many({"dynamic": draw(number)[0]}, training=True)


def push(client: ParameterClient, number: int) -> None:
    ids, grads = draw(number)
    pull(client, number)
    client.push_many({"fixed": (ids, grads), "dynamic": (ids, grads), "bias": (ids[:0], grads[0, :3])})


def state(client: ParameterClient) -> list[torch.Tensor]:
    everyone = torch.arange(12)
    return [client.pull("fixed"), client.sparse_pull("dynamic", everyone), client.pull("bias")]


@functools.cache
def expected(count: int, *, then_pulled: bool = False) -> list[torch.Tensor]:
    with ParameterClient() as client:
        make(client)
        for number in range(count):
            push(client, number)
        if then_pulled:
            pull(client, count)
        return state(client)


def same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        pytest.param(point, nth, marks=[] if nth == (1, 5, 11)[number % 3] else pytest.mark.slow)
        for number, point in enumerate(SHARD)
        for nth in (1, 5, 11)
    ],
)
def test_at_any_point_the_disk_holds_every_acknowledged_push_and_no_half_of_one(
    point: str, nth: int, tmp_path: Path
) -> None:
    """The files as a death at the point would leave them are put aside, and a shard is started from them."""
    acknowledged, passed = 0, 0
    aside: list[int] = []

    def put_aside(name: str) -> None:
        nonlocal passed
        passed += name == point
        if name == point and passed == nth + 3:  # three changes make the tables
            shutil.copytree(tmp_path / "state", tmp_path / "aside")
            aside.append(acknowledged)

    with durable_shard(tmp_path / "state") as (server, client), on_fault_point(put_aside):
        make(client)
        for number in range(12):
            if number == 6:
                server.checkpoint()
            push(client, number)
            acknowledged += 1
    (done,) = aside
    allowed = [expected(done), expected(done, then_pulled=True), expected(done + 1)]
    with durable_shard(tmp_path / "aside") as (_, client):
        assert any(same(state(client), one) for one in allowed)


SERVE = """
import sys
from anabranch.parameter_server import ParameterServer

with ParameterServer(listen=sys.argv[1], durability="log", checkpoint_dir=sys.argv[2]):
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("kills", slow_except([1, 8], 1))
def test_pushes_of_several_clients_are_there_once_however_often_their_shard_is_killed(
    kills: int, tmp_path: Path, programs: Programs
) -> None:
    directory = tmp_path / "socket"
    directory.mkdir(mode=0o700)
    endpoint, pushed, stop = f"unix:{directory}/shard", [0, 0, 0], threading.Event()

    def push_on(number: int) -> None:
        while not stop.is_set():
            clients[number].sparse_push("t", torch.tensor([number]), -torch.ones(1, 4))
            pushed[number] += 1

    with ExitStack() as stack:

        def start() -> Program:
            process = stack.enter_context(programs.start(SERVE, endpoint, tmp_path / "state"))
            assert process.stdout.readline() == "ready\n"
            return process

        process = start()
        clients = [stack.enter_context(ParameterClient([endpoint], timeout=60, retries=200)) for _ in pushed]
        clients[0].init("t", (3, 4), kind="rows", optimizer=functools.partial(torch.optim.SGD, lr=1.0), init=0.0)
        threads = [threading.Thread(target=push_on, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(kills):
            before = list(pushed)
            wait_until(lambda before=before: all(now > then + 5 for now, then in zip(pushed, before, strict=True)))
            process.kill()
            process.wait()
            process = start()
        stop.set()
        join(*threads)
        assert clients[0].pull("t")[:, 0].tolist() == pushed


@pytest.mark.parametrize("way", ["killed", "stopped"])
@pytest.mark.parametrize("released", [False, True])
def test_a_restarted_shard_holds_what_it_held_and_is_told_again_of_releases(
    released: bool, way: str, tmp_path: Path
) -> None:
    network = MemoryTransport()
    ids, gradients = torch.tensor([1, 4, 1]), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    with ExitStack() as stack:
        with ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path / "state") as server:
            endpoint = server.endpoint
            clients = [
                stack.enter_context(ParameterClient([endpoint], worker=Worker(rank, 2), transport=network))
                for rank in range(2)
            ]
            for client in clients:
                client.init("t", (6, 4), kind="rows", optimizer=functools.partial(torch.optim.SGD, lr=1.0))
            for client, grads in zip(clients, gradients, strict=True):
                client.push_many({"t": (ids, grads)}, step=0, merging=Merging(hold=True))
            norm = clients[0].squared_norm(0)
            if released:
                clients[0].release(0, 0.5)
            shutil.copytree(tmp_path / "state", tmp_path / "aside")  # as one that is killed leaves it
        directory = tmp_path / ("aside" if way == "killed" else "state")
        with ParameterServer(listen=endpoint, transport=network, durability="log", checkpoint_dir=directory):
            assert clients[1].squared_norm(0) == norm
            clients[1].release(0, 0.5)
            assert not clients[1].pull("t").any()  # which has no step, and is answered at once
            if not released:
                clients[0].release(0, 0.5)
            every = torch.arange(6)
            found = clients[0].pull_many({"t": every}, step=1)["t"].rows
            shutil.copytree(directory, tmp_path / "seen")
    with durable_shard(tmp_path / "seen") as (_, reader):
        assert torch.equal(reader.sparse_pull("t", every), found)  # in the log before it was seen
    moved = torch.zeros(6, 4).index_add_(0, ids.repeat(2), gradients.view(6, 4) / 2)
    assert norm == pytest.approx(moved.double().square().sum().item())
    torch.testing.assert_close(found, -0.5 * moved)


@pytest.mark.parametrize("scale", [0.5, None])
@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_restarted_shard_knows_of_the_step_that_it_has_applied_and_another_still_holds(
    way: str, scale: float | None, tmp_path: Path
) -> None:
    """A worker dies when one of two shards has heard of its step; that one restarts, and a job takes over."""
    network, ids = MemoryTransport(), torch.arange(10)
    with ExitStack() as stack:
        durable = functools.partial(ParameterServer, transport=network, durability="log")
        other = stack.enter_context(durable(1, 2, checkpoint_dir=tmp_path / "state"))
        with durable(0, 2, checkpoint_dir=tmp_path / "state") as server:
            endpoints = [server.endpoint, other.endpoint]
            client = stack.enter_context(ParameterClient(endpoints, worker=Worker(0, 1), transport=network))
            client.init("t", (10, 1), kind="rows", optimizer=functools.partial(torch.optim.SGD, lr=1.0))
            for step, outcome in enumerate([1.0, scale]):
                client.push_many({"t": (ids, -torch.ones(10, 1))}, step=step, merging=Merging(hold=True))
                client.decide(step, outcome)
                if step == 0:
                    client.tell()
                    client.wait_for_turn(1)
            client.calls.all([client._word(0)])
            shutil.copytree(tmp_path / "state" / "shard-0-of-2", tmp_path / "aside" / "shard-0-of-2")
        directory = tmp_path / ("aside" if way == "killed" else "state")
        stack.enter_context(durable(0, 2, listen=endpoints[0], checkpoint_dir=directory))
        with ParameterClient(endpoints, transport=network) as successor:
            successor.settle()
            assert successor.pull("t").unique().tolist() == [1.0 + (scale or 0.0)]


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_replaced_worker_stays_replaced_when_its_server_restarts(way: str, tmp_path: Path) -> None:
    network = MemoryTransport()
    ids, grad = torch.tensor([1]), torch.ones(1, 1)
    with ExitStack() as stack:
        with ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path / "state") as server:
            endpoint = server.endpoint
            replaced, present = (
                stack.enter_context(ParameterClient([endpoint], worker=Worker(0, 1), transport=network))
                for _ in range(2)
            )
            present.init("t", (2, 1), kind="rows", optimizer=functools.partial(torch.optim.SGD, lr=1.0))
            shutil.copytree(tmp_path / "state", tmp_path / "aside")  # as one that is killed leaves it
        directory = tmp_path / ("aside" if way == "killed" else "state")
        with ParameterServer(listen=endpoint, transport=network, durability="log", checkpoint_dir=directory):
            for ask in (
                lambda: replaced.push_many({"t": (ids, -100 * grad)}, step=0, merging=Merging(hold=True)),
                lambda: replaced.squared_norm(0),
                lambda: replaced.release(0, 1.0),
                replaced.barrier,
            ):
                with pytest.raises(SchemaError, match="another client has joined this server as worker 0"):
                    ask()
            present.push_many({"t": (ids, -grad)}, step=0)
            assert present.pull("t").tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("point", ["durability.before_checkpoint", "durability.before_forgetting"])
@pytest.mark.parametrize("durability", slow_except(["checkpoint", "log"], "log"))
def test_a_truncated_checkpoint_leaves_the_previous_one(durability: str, point: str, tmp_path: Path) -> None:
    with durable_shard(tmp_path / "state", durability) as (server, client):
        make(client)
        for number in range(3):
            push(client, number)
        server.checkpoint()
        for number in range(3, 6):
            push(client, number)
        with faults.at(point), pytest.raises(faults.FaultInjected):
            server.checkpoint()
        assert list((tmp_path / "state" / "shard-0-of-1").iterdir())
        shutil.copytree(tmp_path / "state", tmp_path / "aside")  # as one that is killed leaves it
    with durable_shard(tmp_path / "aside", durability) as (_, client):
        acknowledged = 6 if durability == "log" or point == "durability.before_forgetting" else 3
        assert same(state(client), expected(acknowledged))


def test_pushes_that_wait_for_another_worker_survive_a_checkpoint(tmp_path: Path) -> None:
    ids, grad = torch.tensor([1]), torch.ones(1, 2)
    with durable_shard(tmp_path, worker=Worker(0, 2)) as (server, first):
        first.init_table(TableSpec("t", 4, 2, initial=Constant(0.0)), SGD)
        first.push_many({"t": (ids, grad)}, step=0)
        server.checkpoint()
        assert first.sparse_pull("t", ids).tolist() == [[0.0, 0.0]]
    with durable_shard(tmp_path, worker=Worker(1, 2)) as (_, second):
        second.push_many({"t": (ids, 3 * grad)}, step=0)
        assert second.sparse_pull("t", ids).tolist() == [[-2.0, -2.0]]


def test_pushes_that_wait_for_another_worker_are_on_disk_before_the_checkpoint_that_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, int] = {}
    found: list[tuple[int, int]] = []

    def noting(sync: Callable[[int], None]) -> Callable[[int], None]:
        def note(file: int) -> None:
            sync(file)
            synced[os.fstat(file).st_ino] = os.fstat(file).st_size

        return note

    def look() -> None:
        log = max(tmp_path.glob("*/log-bodies-*")).stat()
        found.append((synced[log.st_ino], log.st_size))

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    with durable_shard(tmp_path, worker=Worker(0, 2)) as (server, first):
        first.init("t", (4, 2), kind="rows")
        first.push_many({"t": (torch.tensor([1]), torch.ones(1, 2))}, step=0)
        with faults.at("durability.before_checkpoint", action=look):
            server.checkpoint()
    ((durable, written),) = found
    assert durable == written


@pytest.mark.parametrize("compression", [None, "bfloat16", "int8"])
def test_rows_that_travelled_rounded_and_versions_are_done_again_from_the_log(
    compression: Compression | None, tmp_path: Path
) -> None:
    """A shard's log could once be written with 8-bit rows, or with versions asked about, and then not be read."""
    ids, grads = draw(0)
    with durable_shard(tmp_path / "state", compression=compression) as (_, client):
        make(client)
        known = {"dynamic": torch.tensor([-1, 0, WITH_STATE, -1])}
        client.pull_many({"dynamic": ids}, training=True, known=known, with_state=True)
        client.push_many({"dynamic": (ids, grads), "fixed": (ids, grads)}, squares={"fixed": torch.rand(4)})
        wanted = state(client)
        shutil.copytree(tmp_path / "state", tmp_path / "aside")
    with durable_shard(tmp_path / "aside", compression=compression) as (server, client):
        assert server.statistics().replayed
        assert same(state(client), wanted)


def records(directory: Path, **options: bool) -> list[str]:
    with closing(PushLog(directory, **options)) as log:
        return [record.verb for record, _ in log.replay()]


@contextmanager
def begun(directory: Path) -> Iterator[PushLog]:
    with closing(PushLog(directory)) as log:
        assert not list(log.replay())
        yield log


SOON = functools.partial(Deadline.after, 60.0)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, int]:
    """A body file of four records that were not committed, and how long each is."""
    with begun(tmp_path) as log:
        for number in range(4):
            log.append(Record(f"v{number}", b"x"), [torch.arange(3), torch.ones(2, 2).bfloat16()])
    path = body_path(tmp_path, 1)
    return path, (path.stat().st_size - PREAMBLE_BYTES) // 4


def test_every_cut_and_every_flipped_bit_ends_the_whole_records(written: tuple[Path, int]) -> None:
    path, size = written
    whole, log = path.read_bytes(), log_of(path)
    for cut in range(PREAMBLE_BYTES, len(whole)):
        path.write_bytes(whole[:cut])
        bodies, kept = Bodies(path, log, 1, 0), (cut - PREAMBLE_BYTES) // size
        assert [record.verb for record, _ in bodies] == [f"v{number}" for number in range(kept)]
        assert bodies.at == PREAMBLE_BYTES + kept * size
        assert (bodies.fault is not None) == (bodies.at < cut)
    for at in range(PREAMBLE_BYTES + 2 * size, PREAMBLE_BYTES + 3 * size):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        bodies = Bodies(path, log, 1, 0)
        assert [record.verb for record, _ in bodies] == ["v0", "v1"]
        assert bodies.whole_behind() == 1
    for at in range(PREAMBLE_BYTES):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert Bodies(path, log, 1, 0).fault == "its first bytes are damaged"


def test_a_truncated_write_is_cut_off_and_reported(written: tuple[Path, int], caplog: pytest.LogCaptureFixture) -> None:
    path, size = written
    os.truncate(path, PREAMBLE_BYTES + 3 * size + 7)
    assert records(path.parent) == ["v0", "v1", "v2"]
    assert "was cut short" in caplog.text
    assert "7 bytes" in caplog.text
    assert path.stat().st_size == PREAMBLE_BYTES + 3 * size
    caplog.clear()
    assert records(path.parent) == ["v0", "v1", "v2"]
    assert "cut short" not in caplog.text


def test_a_damaged_record_with_a_whole_one_behind_it_is_damage_also_without_rows(written: tuple[Path, int]) -> None:
    path, size = written
    with path.open("r+b") as file:
        file.seek(PREAMBLE_BYTES + 2 * size + 30)
        file.write(b"\0\1\2")
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"at byte {PREAMBLE_BYTES + 2 * size}: .*1 complete rec"):
            records(path.parent)
    assert path.read_bytes() == before


def commit_four(directory: Path) -> int:
    """Logs four records, in one sync; returns the size of each."""
    with begun(directory) as log:
        for number in range(4):
            position = log.append(Record(f"v{number}", b"x", b"c" * 16, number))
        log.commit(position, SOON())
    return (body_path(directory, 1).stat().st_size - PREAMBLE_BYTES) // 4


@pytest.mark.parametrize("kept", [0, 2, 3.5])
def test_bodies_that_are_missing_for_a_row_are_damage(kept: float, tmp_path: Path) -> None:
    """Cut between two records nothing in the bodies tells; the rows do."""
    size = commit_four(tmp_path)
    os.truncate(body_path(tmp_path, 1), PREAMBLE_BYTES + int(kept * size))
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=rf"{4 - int(kept)} acknowledged changes after record {int(kept)} .*--repair"
        ):
            records(tmp_path)
    body_path(tmp_path, 1).unlink()
    with pytest.raises(CheckpointError, match="4 acknowledged changes after record 0"):
        records(tmp_path)


def wal_without_its_last_frame(wal: Path) -> None:
    data = bytearray(wal.read_bytes())
    data[-5] ^= 1
    wal.write_bytes(data)


@pytest.mark.parametrize("harm", [wal_without_its_last_frame, Path.unlink])
def test_bodies_rebuild_rows_that_are_gone(harm: Callable[[Path], None], tmp_path: Path) -> None:
    """A flipped bit in the newest frame of SQLite's own log hides all rows of a commit, and says nothing."""
    with begun(tmp_path / "log") as log:
        for number in range(9):
            log.commit(log.append(Record(f"v{number}", b"x", b"c" * 16, number)), SOON())
        shutil.copytree(tmp_path / "log", tmp_path / "aside")  # as one that is killed leaves it
    harm(tmp_path / "aside" / "log.db-wal")
    for _ in range(2):  # the second time with rows
        assert records(tmp_path / "aside") == [f"v{number}" for number in range(9)]
    os.truncate(body_path(tmp_path / "aside", 1), body_path(tmp_path / "aside", 1).stat().st_size - 1)
    with pytest.raises(CheckpointError, match="is damaged"):
        records(tmp_path / "aside")


def test_records_without_a_row_are_written_again_before_anything_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync that failed may have dropped them, and the next one would not tell."""
    with begun(tmp_path) as log:
        log.commit(log.append(Record("first", b"")), SOON())
        log.append(Record("second", b""))
    written: list[bytes] = []

    def pwrite(file: int, data: bytes, at: int, real: Callable[[int, bytes, int], int] = os.pwrite) -> int:
        written.append(data)
        return real(file, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    before = body_path(tmp_path, 1).read_bytes()
    assert records(tmp_path) == ["first", "second"]
    (again,) = written
    assert b"second" in again
    assert b"first" not in again
    assert body_path(tmp_path, 1).read_bytes() == before
    assert records(tmp_path) == ["first", "second"]
    assert len(written) == 1


def test_a_missing_or_foreign_file_is_damage(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        with begun(tmp_path / name) as log:
            for number in range(6):
                log.append(Record(f"{name}{number}", b"x"))
                if number % 2:
                    log.rotate()
    mine = tmp_path / "mine"
    second = body_path(mine, 2).read_bytes()
    body_path(mine, 2).unlink()
    with pytest.raises(CheckpointError, match="log-bodies-2 cannot be opened: No such file"):
        records(mine)
    shutil.copy(body_path(tmp_path / "other", 2), mine)
    with pytest.raises(CheckpointError, match="belongs to another log"):
        records(mine)
    body_path(mine, 2).write_bytes(second)
    first = body_path(mine, 1).read_bytes()
    body_path(mine, 1).unlink()
    with pytest.raises(CheckpointError, match="it continues from record 2, not from 0"):
        records(mine)
    body_path(mine, 1).write_bytes(first)
    assert records(mine) == [f"mine{number}" for number in range(6)]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("size", [None, 0, 20, PREAMBLE_BYTES])
def test_a_start_that_was_killed_anywhere_is_gone_on_from(size: int | None, again: bool, tmp_path: Path) -> None:
    """Before its body file was there, and while it was begun, of a new log or of one with records."""
    directory = tmp_path / "log"
    if again:
        commit_four(directory)
    before = records(directory)
    newest = body_path(directory, 1 + again)
    if size is None:
        newest.unlink()
    else:
        os.truncate(newest, size)
    for name in ("first", "second"):
        with closing(PushLog(directory)) as log:
            before = before if name == "first" else [*before, "first"]
            assert [record.verb for record, _ in log.replay()] == before
            log.commit(log.append(Record(name, b"")), SOON())
    assert records(directory) == [*before, "second"]


def run_script(script: str) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database:
            database.executescript(script)

    return harm


HARMS = {
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "overwritten": lambda path: path.write_bytes(b"no database " * 300),
    "without tables": run_script("DROP TABLE record; DROP TABLE state"),
    "of another schema": run_script("ALTER TABLE record ADD COLUMN place INTEGER"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_database_that_is_not_the_bodies_index_is_refused(harm: Callable[[Path], None], tmp_path: Path) -> None:
    commit_four(tmp_path)
    harm(tmp_path / "log.db")
    for _ in range(2):  # a refused start leaves nothing that lets the next one pass
        with pytest.raises(CheckpointError, match=r"log is damaged: .*log\.db (is|belongs).*--repair"):
            records(tmp_path)
    assert records(tmp_path, repair=True) == [f"v{number}" for number in range(4)]


def test_files_of_another_format_are_refused_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(durability, "_FORMAT", 1)
        with durable_shard(tmp_path):
            pass
    with pytest.raises(CheckpointError, match="another version of anabranch: finish the training with that"):
        ParameterServer(durability="log", checkpoint_dir=tmp_path)
    (tmp_path / "shard-0-of-1" / "owner").touch()
    with pytest.raises(CheckpointError, match="another format of logs: finish the training with that version, or"):
        ParameterServer(durability="log", checkpoint_dir=tmp_path)


def test_tensors_come_back_from_the_log_as_they_were(tmp_path: Path) -> None:
    tensors = [
        torch.arange(3),
        torch.randn(2, 3).bfloat16(),
        torch.randn(2, 4).double()[:, ::2],
        torch.empty(0, 4),
        torch.ones(()),
        torch.tensor([True, False]),
    ]
    with begun(tmp_path) as log:
        log.append(Record("push", b"facts", b"e" * 16, 7, 5), tensors)
    with closing(PushLog(tmp_path)) as log:
        ((record, again),) = log.replay()
    assert (record.message, record.client, record.sequence, record.settled) == (b"facts", b"e" * 16, 7, 5)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, again, strict=True))


def test_many_commits_share_one_sync(tmp_path: Path) -> None:
    """The first syncs what is committed by then, which may be its own record; the next one all others."""
    syncs, started = [], threading.Event()

    def slow(name: str) -> None:
        if name == "push_log.before_sync":
            syncs.append(name)
            started.wait(timeout=60)

    with begun(tmp_path) as log, on_fault_point(slow):
        positions = [log.append(Record("push", b"")) for _ in range(8)]
        threads = [threading.Thread(target=log.commit, args=(position, SOON())) for position in positions]
        for thread in threads:
            thread.start()
        wait_until(lambda: log._applied == 8)
        started.set()
        join(*threads)
    assert len(syncs) <= 2


@pytest.mark.parametrize("where", ["push_log.before_append", "push_log.mid_append", "push_log.after_append"])
def test_a_record_that_finds_no_room_is_cut_off_and_the_next_one_follows(tmp_path: Path, where: str) -> None:
    def fail(name: str) -> None:
        if name == where:
            raise OSError(28, "No space left on device")

    with begun(tmp_path) as log:
        log.append(Record("first", b""))
        for _ in range(2):
            with on_fault_point(fail), pytest.raises(CheckpointError, match="No space left.* will be retried"):
                log.append(Record("second", b"facts"))
        log.commit(log.append(Record("third", b"")), SOON())
    assert records(tmp_path) == ["first", "third"]


def test_a_record_that_is_taken_back_leaves_the_log_also_while_others_are_synced(tmp_path: Path) -> None:
    request = (b"c" * 16, 1)
    with begun(tmp_path) as log:
        first = log.append(Record("first", b""))
        log.append(Record("refused", b"facts", *request), [torch.ones(3)])
        with faults.at("push_log.after_sync", action=log.take_back):
            log.commit(first, SOON())
        log.commit(log.append(Record("retried", b"", *request)), SOON())
    assert records(tmp_path) == ["first", "retried"]


def test_a_file_that_cannot_be_begun_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with begun(tmp_path) as log:
        log.append(Record("first", b""))
        with monkeypatch.context() as patch:
            patch.setattr(push_log, "write_all", refuse)
            with pytest.raises(CheckpointError, match="no log file can be begun"):
                log.rotate()
        log.append(Record("second", b""))
        log.rotate()
        log.append(Record("third", b""))
    assert records(tmp_path) == ["first", "second", "third"]


@pytest.mark.parametrize("point", ["push_log.before_sync", "push_log.after_sync"])
def test_after_a_failed_sync_or_commit_nothing_is_acknowledged(point: str, tmp_path: Path) -> None:
    """Neither the others of its batch, nor later ones; a restart finds what is there, and begins a new file."""

    def fail(name: str) -> None:
        if name == point:
            raise OSError(5, "Input/output error")

    outcomes: list[str] = []

    def commit(position: int) -> None:
        try:
            log.commit(position, SOON())
        except CheckpointError as error:
            outcomes.append(str(error))

    with begun(tmp_path) as log:
        positions = [log.append(Record(f"v{number}", b"")) for number in range(4)]
        with on_fault_point(fail):
            threads = [threading.Thread(target=commit, args=(position,)) for position in positions]
            for thread in threads:
                thread.start()
            join(*threads)
        assert len(outcomes) == 4
        assert all("Input/output error" in one and "restart this server" in one for one in outcomes)
        for later in (lambda: log.commit(positions[0], SOON()), lambda: log.append(Record("v4", b"")), log.rotate):
            with pytest.raises(CheckpointError, match="Input/output error"):
                later()
    assert records(tmp_path) == [f"v{number}" for number in range(4)]


def test_a_request_is_not_logged_twice(tmp_path: Path) -> None:
    with begun(tmp_path) as log:
        for _ in range(2):
            position = log.append(Record("push", b"", b"c" * 16, 1))
        with pytest.raises(CheckpointError, match="UNIQUE"):
            log.commit(position, SOON())


def test_bodies_and_rows_before_a_checkpoint_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_log, "_ROWS", 3)
    with begun(tmp_path) as log:
        for number in range(8):
            position = log.append(Record(f"v{number}", b"", b"c" * 16, number))
        log.commit(position, SOON())
        here = log.rotate()
        log.append(Record("v8", b""))
        log.rotate()
        log.forget_before(here)
        assert log._database.execute("SELECT number FROM record").fetchall() == [(8,)]
    assert not body_path(tmp_path, 1).exists()
    with closing(PushLog(tmp_path)) as log:
        assert [record.verb for record, _ in log.replay(here)] == ["v8"]


def test_requests_that_a_client_has_settled_go_and_the_others_outlast_a_checkpoint() -> None:
    applied, again, client = AppliedRequests(), AppliedRequests(), b"c" * 16
    for sequence in range(1000):
        applied.add((client, sequence), max(sequence - 2, 0), push=True)
    again.load(applied.state())
    assert list(again.identities()) == [(client, 997), (client, 998), (client, 999)]
    assert again.pushes(client) == again.number((client, 999)) == 1000
    assert again.pushes(b"d" * 16) == 0


def test_durability_none_encodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    real = msgspec.msgpack.encode
    with ParameterServer(transport=MemoryTransport()) as server:
        server._shard.init(InitMessage("t", SGD.to_dict(), TableSpec("t", 4, 2).to_dict()))
        monkeypatch.setattr(msgspec.msgpack, "encode", lambda value: calls.append(value) or real(value))
        push = server._shard.request(PushMessage([PushPart("t", 1)], []), [torch.tensor([1]), torch.ones(2)])
        server._shard.push(push)
    assert not calls


@pytest.mark.parametrize("fault", [{"durability": "sometimes"}, {"durability": "log"}, {"shard": 2, "shards": 2}])
def test_a_server_that_cannot_be_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="durability|shard"):
        ParameterServer(**fault)
