"""A shard that is killed at any point comes back with every push that was acknowledged, to the bit."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError, SchemaError
from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.parameter_server.server.durable import push_log
from anabranch.parameter_server.server.durable.log_format import Preamble, Record
from anabranch.parameter_server.server.durable.ownership import Ownership
from anabranch.parameter_server.server.durable.push_log import PushLog
from anabranch.parameter_server.server.durable.recovery import LogReader
from anabranch.record.fault_points import on_fault_point
from anabranch.tables import Constant, Normal, RowOptimizer, TableSpec
from anabranch.tables.kernels.row_versions import WITH_STATE
from anabranch.tensors.packing import Compression
from anabranch.testing import MemoryTransport, faults
from covering import slow_except
from programs import Program, Programs
from waiting import join

ADAM = RowOptimizer.from_factory(functools.partial(torch.optim.Adam, lr=0.01))
FIXED = TableSpec("fixed", 12, 4, initial=Normal(), every_row_moves=True)
DYNAMIC = TableSpec("dynamic", None, 4, initial=Normal(), capacity=5, eviction="frequency", admission=0.7)
SHARD = [
    "push_log.before_append",
    "push_log.mid_append",
    "push_log.after_append",
    "push_log.before_sync",
    "push_log.after_sync",
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
    network = MemoryTransport()
    acknowledged, passed = 0, 0
    aside: list[int] = []

    def put_aside(name: str) -> None:
        nonlocal passed
        passed += name == point
        if name == point and passed == nth + 3:  # three changes make the tables
            shutil.copytree(tmp_path / "state", tmp_path / "aside")
            aside.append(acknowledged)

    with (
        ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path / "state") as server,
        ParameterClient([server.endpoint], transport=network) as client,
        on_fault_point(put_aside),
    ):
        make(client)
        for number in range(12):
            if number == 6:
                server.checkpoint()
            push(client, number)
            acknowledged += 1
    with (
        ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path / "aside") as server,
        ParameterClient([server.endpoint], transport=network) as client,
    ):
        found = state(client)
    done = aside[0]
    allowed = [expected(done), expected(done, then_pulled=True), expected(done + 1)]
    assert any(same(found, one) for one in allowed)


MORTAL = """
import os, signal, sys
from anabranch.record.fault_points import on_fault_point
from anabranch.parameter_server import ParameterServer

endpoint, directory, point, nth = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
passed = 0

def strike(name):
    global passed
    passed += name == point
    if name == point and passed == nth:
        os.kill(os.getpid(), signal.SIGKILL)

with on_fault_point(strike), ParameterServer(listen=endpoint, durability="log", checkpoint_dir=directory) as server:
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("point", SHARD)
def test_a_killed_shard_restarts_and_the_client_continues(point: str, tmp_path: Path, programs: Programs) -> None:
    """The shard's process is a child that is killed at the point; the client goes on with the one started anew."""
    directory = tmp_path / "socket"
    directory.mkdir(mode=0o700)
    endpoint = f"unix:{directory}/shard"

    with ExitStack() as stack:

        def start(nth: int) -> Program:
            process = stack.enter_context(programs.start(MORTAL, endpoint, tmp_path / "state", point, str(nth)))
            assert process.stdout.readline() == "ready\n"
            return process

        first = start(8)

        def revive() -> None:
            first.wait()
            start(10**9)

        reviver = threading.Thread(target=revive)
        reviver.start()
        with ParameterClient([endpoint], timeout=60, retries=200) as client:
            make(client)
            for number in range(12):
                push(client, number)
            join(reviver)
            assert first.returncode == -signal.SIGKILL
            found = state(client)
    assert same(found, expected(12))


@pytest.mark.parametrize("way", ["killed", "stopped"])
@pytest.mark.parametrize("released", [False, True])
def test_a_restarted_shard_knows_the_norm_of_its_held_pushes(released: bool, way: str, tmp_path: Path) -> None:
    """A worker that asked after another's release, and after a restart, was told that nothing is held of the step."""
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
                client.push_many({"t": (ids, grads)}, step=0, hold=True)
            norm = clients[0].squared_norm(0)
            if released:
                clients[0].release(0, 0.5)
            shutil.copytree(tmp_path / "state", tmp_path / "aside")  # as one that is killed leaves it
        directory = tmp_path / ("aside" if way == "killed" else "state")
        with ParameterServer(listen=endpoint, transport=network, durability="log", checkpoint_dir=directory):
            if not released:
                clients[0].release(0, 0.5)
            assert clients[1].squared_norm(0) == norm
            clients[1].release(0, 0.5)
            assert clients[0].squared_norm(0) == norm
            found = clients[1].pull("t")
    moved = torch.zeros(6, 4).index_add_(0, ids.repeat(2), gradients.view(6, 4) / 2)
    assert norm == pytest.approx(moved.double().square().sum().item())
    torch.testing.assert_close(found, -0.5 * moved)


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
                lambda: replaced.push_many({"t": (ids, -100 * grad)}, step=0, hold=True),
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
    network = MemoryTransport()

    def serve(place: str) -> ParameterServer:
        return ParameterServer(transport=network, durability=durability, checkpoint_dir=tmp_path / place)

    with serve("state") as server, ParameterClient([server.endpoint], transport=network) as client:
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
    with serve("aside") as server, ParameterClient([server.endpoint], transport=network) as client:
        acknowledged = 6 if durability == "log" or point == "durability.before_forgetting" else 3
        assert same(state(client), expected(acknowledged))


def test_leaving_the_block_commits_the_state(tmp_path: Path) -> None:
    network = MemoryTransport()
    for round_ in range(3):
        with (
            ParameterServer(transport=network, durability="checkpoint", checkpoint_dir=tmp_path) as server,
            ParameterClient([server.endpoint], transport=network) as client,
        ):
            make(client)
            push(client, round_)
    with (
        ParameterServer(transport=network, durability="checkpoint", checkpoint_dir=tmp_path) as server,
        ParameterClient([server.endpoint], transport=network) as client,
    ):
        assert same(state(client), expected(3))


def test_pushes_that_wait_for_another_worker_survive_a_checkpoint(tmp_path: Path) -> None:
    network = MemoryTransport()
    rule = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
    spec = TableSpec("t", 4, 2, initial=Constant(0.0))

    def serve() -> ParameterServer:
        return ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path)

    ids, grad = torch.tensor([1]), torch.ones(1, 2)
    with serve() as server, ParameterClient([server.endpoint], worker=Worker(0, 2), transport=network) as first:
        first.init_table(spec, rule)
        first.push_many({"t": (ids, grad)}, step=0)
        server.checkpoint()
        assert first.sparse_pull("t", ids).tolist() == [[0.0, 0.0]]
    with serve() as server, ParameterClient([server.endpoint], worker=Worker(1, 2), transport=network) as second:
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
        log = max(tmp_path.glob("*/log-*")).stat()
        found.append((synced[log.st_ino], log.st_size))

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    network = MemoryTransport()
    with (
        ParameterServer(transport=network, durability="log", checkpoint_dir=tmp_path) as server,
        ParameterClient([server.endpoint], worker=Worker(0, 2), transport=network) as first,
    ):
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
    network = MemoryTransport()
    serve = functools.partial(ParameterServer, transport=network, durability="log")
    ids, grads = draw(0)
    with serve(checkpoint_dir=tmp_path / "state") as server:
        with ParameterClient([server.endpoint], transport=network, compression=compression) as client:
            make(client)
            known = {"dynamic": torch.tensor([-1, 0, WITH_STATE, -1])}
            client.pull_many({"dynamic": ids}, training=True, known=known, widths={"dynamic": 12})
            client.push_many({"dynamic": (ids, grads), "fixed": (ids, grads)}, squares={"fixed": torch.rand(4)})
            wanted = state(client)
        shutil.copytree(tmp_path / "state", tmp_path / "aside")
    with serve(checkpoint_dir=tmp_path / "aside") as server:
        assert server.statistics().replayed
        with ParameterClient([server.endpoint], transport=network, compression=compression) as client:
            assert same(state(client), wanted)


def records(directory: Path) -> list[str]:
    return [record.verb for record, _ in LogReader(directory)]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, int, int]:
    """A log of four records in one file, where the first begins, and how long each is."""
    with PushLog(tmp_path) as log:
        for number in range(4):
            log.append(Record(f"v{number}", b"x"), [torch.arange(3), torch.ones(2, 2).bfloat16()])
    path = tmp_path / "log-00000001"
    begin = len(Preamble(1, 0, 0, 1).encode())
    return path, begin, (path.stat().st_size - begin) // 4


def test_a_truncated_write_is_cut_off_and_reported(
    written: tuple[Path, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    path, begin, size = written
    whole = path.read_bytes()
    for cut in range(begin, len(whole)):
        path.write_bytes(whole[:cut])
        caplog.clear()
        kept = (cut - begin) // size
        assert records(path.parent) == [f"v{number}" for number in range(kept)]
        torn = cut - begin - kept * size
        assert ("was cut short" in caplog.text) == (torn > 0)
        assert path.stat().st_size == cut - torn


def test_a_flipped_bit_is_damage_if_a_valid_record_follows(written: tuple[Path, int, int]) -> None:
    path, begin, size = written
    whole = path.read_bytes()
    for at in range(begin + 2 * size, begin + 3 * size):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(
            CheckpointError, match=rf"log-00000001 at byte {begin + 2 * size}: .*1 complete records follow"
        ):
            records(path.parent)
    assert path.stat().st_size == len(whole)


def test_a_log_that_ends_before_its_durable_position_is_damaged(written: tuple[Path, int, int]) -> None:
    """Cut between two records nothing in the file tells; the owner's position does."""
    path, begin, size = written
    whole = path.read_bytes()
    with Ownership(path.parent) as owner:
        known = owner.found
    assert known is not None
    assert known.records == 4
    for cut in (begin, begin + 2 * size, begin + 3 * size + 5):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=rf"{4 - (cut - begin) // size} acknowledged changes .*--repair"):
            list(LogReader(path.parent, known=known))
    for damage in (lambda: path.write_bytes(b""), path.unlink):
        damage()
        with pytest.raises(CheckpointError, match="4 acknowledged changes after record 0"):
            list(LogReader(path.parent, known=known))


def test_a_missing_or_foreign_file_is_damage(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        with PushLog(tmp_path / name) as log:
            for number in range(6):
                log.append(Record(f"{name}{number}", b"x"))
                if number % 2:
                    log.rotate()
    mine = tmp_path / "mine"
    assert records(mine) == [f"mine{number}" for number in range(6)]
    second = (mine / "log-00000002").read_bytes()
    (mine / "log-00000002").unlink()
    with pytest.raises(CheckpointError, match="log-00000002 is missing"):
        records(mine)
    shutil.copy(tmp_path / "other" / "log-00000002", mine)
    with pytest.raises(CheckpointError, match="belongs to another log"):
        records(mine)
    (mine / "log-00000002").write_bytes(second)
    (mine / "log-00000001").unlink()
    with pytest.raises(CheckpointError, match="begins with record 2, and no checkpoint holds the earlier ones"):
        records(mine)


def test_a_repair_keeps_the_records_before_the_damage_and_sets_the_rest_aside(
    written: tuple[Path, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    path, begin, size = written
    whole = bytearray(path.read_bytes())
    whole[begin + size + 30] ^= 4
    path.write_bytes(whole)
    with Ownership(path.parent) as owner:
        reader = LogReader(path.parent, known=owner.found, repair=True)
        assert [record.verb for record, _ in reader] == ["v0"]
        reader.repair()
        assert "3 acknowledged changes after record 1 cannot be read" in caplog.text
        assert (path.parent / "set-aside" / path.name).read_bytes() == whole
        with PushLog(path.parent, owner, reader.end) as log:
            log.append(Record("after", b""))
    assert records(path.parent) == ["v0", "after"]


def test_tensors_come_back_from_the_log_as_they_were(tmp_path: Path) -> None:
    given = [
        torch.arange(3),
        torch.randn(2, 3).bfloat16(),
        torch.randn(2, 2).double(),
        torch.empty(0, 4),
        torch.ones(()),
    ]
    with PushLog(tmp_path) as log:
        log.append(Record("push", b"facts", b"e" * 16, 7), given)
    ((record, found),) = LogReader(tmp_path)
    assert (record.payload, record.epoch, record.sequence) == (b"facts", b"e" * 16, 7)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(given, found, strict=True))


def test_many_commits_share_one_sync(tmp_path: Path) -> None:
    syncs, started = [], threading.Event()

    def slow(name: str) -> None:
        if name == "push_log.before_sync":
            syncs.append(name)
            started.wait(timeout=60)

    with PushLog(tmp_path) as log, on_fault_point(slow):
        positions = [log.append(Record("push", b"")) for _ in range(8)]
        threads = [threading.Thread(target=log.commit, args=(position, Deadline.after(60.0))) for position in positions]
        for thread in threads:
            thread.start()
        started.set()
        join(*threads)
    assert len(syncs) == 1


@pytest.mark.parametrize("where", ["push_log.before_append", "push_log.mid_append", "push_log.after_append"])
def test_a_record_that_finds_no_room_is_cut_off_and_the_next_one_follows(tmp_path: Path, where: str) -> None:
    def fail(name: str) -> None:
        if name == where:
            raise OSError(28, "No space left on device")

    with PushLog(tmp_path) as log:
        log.append(Record("first", b""))
        for _ in range(2):
            with on_fault_point(fail), pytest.raises(CheckpointError, match="No space left.* will be retried"):
                log.append(Record("second", b"facts"))
        log.commit(log.append(Record("third", b"")), Deadline.after(60.0))
    assert records(tmp_path) == ["first", "third"]


def test_a_file_that_cannot_be_begun_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with PushLog(tmp_path) as log:
        log.append(Record("first", b""))
        with monkeypatch.context() as patch:
            patch.setattr(push_log, "write_all", refuse)
            with pytest.raises(CheckpointError, match="no new log file can be started"):
                log.rotate()
        log.append(Record("second", b""))
        log.rotate()
        log.append(Record("third", b""))
    assert records(tmp_path) == ["first", "second", "third"]


def test_a_disk_that_fails_to_sync_is_reported_and_further_pushes_are_refused(tmp_path: Path) -> None:
    def fail(name: str) -> None:
        if name == "push_log.before_sync":
            raise OSError(5, "Input/output error")

    with PushLog(tmp_path) as log:
        position = log.append(Record("first", b""))
        with on_fault_point(fail), pytest.raises(CheckpointError, match="Input/output error.* restart this server"):
            log.commit(position, Deadline.after(60.0))
        with pytest.raises(CheckpointError, match="Input/output error"):
            log.append(Record("second", b""))
    assert records(tmp_path) == ["first"]


@pytest.mark.parametrize("fault", [{"durability": "sometimes"}, {"durability": "log"}, {"shard": 2, "shards": 2}])
def test_a_server_that_cannot_be_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="durability|shard"):
        ParameterServer(**fault)
