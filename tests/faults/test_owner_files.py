"""The ``owner`` file of a durable directory: a start without it, with an emptied one, with another directory's."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anabranch.checkpoint.generations import manifest_path
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError, RolledBack
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.parameter_server.server.durable.log_format import Preamble, Record, log_path
from anabranch.parameter_server.server.durable.ownership import Ownership
from anabranch.parameter_server.server.durable.push_log import PushLog
from anabranch.parameter_server.server.durable.recovery import LogReader
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.testing import MemoryTransport

HERE = "memory:shard"
SGD = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
SPEC = TableSpec("t", 8, 2, initial=Constant(0.0))
ONE = torch.tensor([1])
PUSHES = 6


def serve(directory: Path, network: MemoryTransport | None = None, **options: bool) -> ParameterServer:
    return ParameterServer(
        listen=HERE, transport=network or MemoryTransport(), durability="log", checkpoint_dir=directory, **options
    )


def value(client: ParameterClient) -> float:
    return float(client.sparse_pull("t", ONE)[0, 0])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The directories of two shards that were killed after some acknowledged pushes; one had pushed more."""
    found = {}
    for name, pushes in {"ours": PUSHES, "another": PUSHES - 4}.items():
        found[name] = tmp_path_factory.mktemp(name)
        network = MemoryTransport()
        server = serve(found[name], network).__enter__()
        with ParameterClient([HERE], transport=network, timeout=20) as client:
            client.init_table(SPEC, SGD)
            for _ in range(pushes):
                client.sparse_push("t", ONE, -torch.ones(1, 2))
        server._persistence.checkpoint = lambda: None  # type: ignore[method-assign]
        server.__exit__(None, None, None)
    return found


@pytest.fixture
def ours(written: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(written["ours"], tmp_path / "copy")
    return tmp_path / "copy" / "shard-0-of-1"


def remove(owner: Path) -> None:
    owner.unlink()


def empty(owner: Path) -> None:
    owner.write_bytes(b"")


def make_zeros(owner: Path) -> None:
    owner.write_bytes(bytes(1024))


def whole(log: Path) -> None:
    pass


def cut(log: Path) -> None:
    """At the end of a record, where nothing in the log tells."""
    numbers = [at for at in range(len(log.read_bytes())) if log.read_bytes()[at:].startswith(b"\xabrec")]
    log.write_bytes(log.read_bytes()[: numbers[4]])


def overwrite(log: Path) -> None:
    shutil.copy(manifest_path(log.parent, 1), log)


def cut_to_its_beginning(log: Path) -> None:
    log.write_bytes(log.read_bytes()[:40])


@pytest.mark.parametrize("harm", [whole, cut, overwrite, empty, cut_to_its_beginning])
@pytest.mark.parametrize("lose", [remove, empty, make_zeros])
def test_a_log_without_its_owner_file_is_damaged(
    lose: Callable[[Path], None], harm: Callable[[Path], None], ours: Path
) -> None:
    """A shard began with fewer pushes than it had acknowledged, or with none, and without a word."""
    lose(ours / "owner")
    harm(max(ours.glob("log-*")))
    for _ in range(2):  # a refused start leaves nothing that lets the next one pass
        with pytest.raises(CheckpointError, match=r"log is damaged: .*owner is (missing|empty).*--repair"):
            serve(ours.parent)


@pytest.mark.parametrize("lose", [remove, empty])
def test_a_checkpoint_without_its_owner_file_is_damaged_too(lose: Callable[[Path], None], ours: Path) -> None:
    lose(ours / "owner")
    for log in ours.glob("log-*"):
        log.unlink()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"owner is (missing|empty).*--repair"):
            serve(ours.parent)


@pytest.mark.parametrize("harm", [whole, cut])
def test_the_owner_of_another_directory_is_refused(
    harm: Callable[[Path], None], ours: Path, written: dict[str, Path]
) -> None:
    """It knew of fewer pushes than this log had, so a cut of them passed."""
    shutil.copy(written["another"] / ours.name / "owner", ours / "owner")
    log = max(ours.glob("log-*"))
    harm(log)
    before = log.read_bytes()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"log is damaged: .*owner belongs to another log .*--repair"):
            serve(ours.parent)
    assert log.read_bytes() == before


def test_a_new_owner_file_beside_a_log_is_refused(ours: Path, tmp_path: Path) -> None:
    with Ownership(tmp_path / "new"):
        pass
    shutil.copy(tmp_path / "new" / "owner", ours / "owner")
    with pytest.raises(CheckpointError, match="belongs to another log"):
        serve(ours.parent)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_repair_accepts_the_log_as_found_and_reports_the_loss(
    foreign: bool, ours: Path, written: dict[str, Path]
) -> None:
    network = MemoryTransport()
    with (
        serve(ours.parent, network) as server,
        ParameterClient([HERE], transport=network, timeout=20) as client,
        ParameterClient([HERE], transport=network, timeout=20) as reader,
    ):
        assert value(client) == value(reader) == PUSHES
        server.checkpoint()
        client.sparse_push("t", ONE, -torch.ones(1, 2))
        server._persistence.checkpoint = lambda: None  # type: ignore[method-assign]
        server.__exit__(None, None, None)
        if foreign:
            shutil.copy(written["another"] / ours.name / "owner", ours / "owner")
        else:
            remove(ours / "owner")
        cut_to_its_beginning(max(ours.glob("log-*")))
        with serve(ours.parent, network, repair=True):
            with pytest.raises(RolledBack) as told:
                value(client)
            assert (told.value.lost, value(client), value(reader)) == (1, PUSHES, PUSHES)
    with serve(ours.parent, network), ParameterClient([HERE], transport=network, timeout=20) as client:
        assert value(client) == PUSHES  # repaired for good


def test_a_first_start_that_was_killed_anywhere_is_gone_on_from(tmp_path: Path) -> None:
    """Between the owner file and its contents, between that and the log, and before the owner knew of the log."""
    with Ownership(tmp_path / "model"):
        pass
    owner = (tmp_path / "model" / "owner").read_bytes()
    begun = Preamble(1, 0, 12345, 1).encode()
    states = [(b"", None), (bytes(len(owner)), None), (owner, None)]
    states += [(owner, begun[:size]) for size in (0, 1, 20, len(begun))]
    for number, (contents, log) in enumerate(states):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "owner").write_bytes(contents)
        if log is not None:
            log_path(directory, 1).write_bytes(log)
        for expected in ([], ["first"]):
            with Ownership(directory) as right:
                reader = LogReader(directory, known=right.found)
                assert [record.verb for record, _ in reader] == expected, number
                with PushLog(directory, right, reader.end) as pushes:
                    pushes.commit(pushes.append(Record("first", b"")), Deadline.after(20.0))
