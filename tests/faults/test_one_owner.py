"""One server a durable directory: the second is refused, and one that was replaced writes nothing more."""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from anabranch.checkpoint import file_lock
from anabranch.checkpoint.file_lock import FileLock
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.parameter_server.server.durable.log_format import Record
from anabranch.parameter_server.server.durable.ownership import Ownership
from anabranch.parameter_server.server.durable.push_log import PushLog
from anabranch.parameter_server.server.durable.recovery import LogReader
from anabranch.testing import MemoryTransport
from programs import Programs


@pytest.mark.parametrize("durability", ["checkpoint", "log"])
def test_a_second_server_of_one_directory_is_refused_with_the_owner_s_name(durability: str, tmp_path: Path) -> None:
    network = MemoryTransport()

    def serve() -> ParameterServer:
        return ParameterServer(transport=network, durability=durability, checkpoint_dir=tmp_path)

    with serve() as server, ParameterClient([server.endpoint], transport=network) as client:
        client.init("bias", (2,))
        with pytest.raises(CheckpointError, match=rf"another server holds it \(process {os.getpid()}\)"):
            serve()
        client.push("bias", torch.ones(2))  # the first one serves on
    with serve() as server, ParameterClient([server.endpoint], transport=network) as client:
        assert client.pull("bias").tolist() == pytest.approx([-0.01, -0.01])


def test_the_lock_ends_with_its_process_and_is_kept_while_it_is_frozen(tmp_path: Path, programs: Programs) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from anabranch.parameter_server.server.durable.ownership import Ownership

        owner = Ownership(Path(sys.argv[1]))
        print(owner.epoch, flush=True)
        sys.stdin.readline()
        """
    )
    with programs.start(script, tmp_path) as process:
        assert process.stdout.readline() == "1\n"
        process.send_signal(signal.SIGSTOP)
        process.wait_until_stopped()
        with pytest.raises(CheckpointError, match=rf"process {process.pid}"):
            Ownership(tmp_path)
    with Ownership(tmp_path) as owner:
        assert owner.epoch == 2


def test_a_forked_child_does_not_keep_the_directory(tmp_path: Path) -> None:
    """The hook that runs in a child closes what the child has of the lock."""
    lock = FileLock(os.open(tmp_path, os.O_RDONLY))
    held = lock.descriptor
    file_lock._forget_in_child()
    assert lock.descriptor == -1
    assert not _is_open(held)
    lock.close()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_server_that_was_replaced_acknowledges_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks can be lost, on network file systems for one; here the second server does not ask for it."""
    first = PushLog(tmp_path)
    first.commit(first.append(Record("kept", b"")), Deadline.after(60.0))
    first.append(Record("on its way", b""))
    monkeypatch.setattr(Ownership, "_claim", lambda self, directory: ExitStack())  # no lock
    owner = Ownership(tmp_path)
    reader = LogReader(tmp_path, known=owner.found)
    read = [record.verb for record, _ in reader]
    second = PushLog(tmp_path, owner, reader.end)
    second.commit(second.append(Record("the second's", b"")), Deadline.after(60.0))
    with pytest.raises(CheckpointError, match="another server has taken over this directory"):
        first.commit(first.append(Record("woken up", b"")), Deadline.after(60.0))
    with pytest.raises(CheckpointError, match="taken over this directory"):
        first.append(Record("again", b""))
    second.close()
    owner.close()
    assert read[0] == "kept"
    shutil.rmtree(tmp_path / "set-aside", ignore_errors=True)
    with Ownership(tmp_path) as owner:
        assert [record.verb for record, _ in LogReader(tmp_path, known=owner.found)] == [*read, "the second's"]
    first.close()
