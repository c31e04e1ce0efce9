"""One server a durable directory: the second is refused, and the kernel lets go with the process."""

from __future__ import annotations

import os
import signal
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
import torch

from anabranch.checkpoint import generations
from anabranch.checkpoint.generations import FileLock
from anabranch.errors import CheckpointError
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.parameter_server.server.push_log import PushLog
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


@pytest.mark.parametrize("way", ["frozen", "killed"])
def test_the_directory_is_let_go_with_the_process_and_kept_while_it_is_frozen(
    way: str, tmp_path: Path, programs: Programs
) -> None:
    script = textwrap.dedent(
        """
        import sys
        from contextlib import closing
        from pathlib import Path
        from anabranch.parameter_server.server.push_log import PushLog

        with closing(PushLog(Path(sys.argv[1]))) as log:
            list(log.replay())
            print("ready", flush=True)
            sys.stdin.readline()
        """
    )
    with programs.start(script, tmp_path) as process:
        assert process.stdout.readline() == "ready\n"
        if way == "frozen":
            process.send_signal(signal.SIGSTOP)
            process.wait_until_stopped()
            with pytest.raises(CheckpointError, match=rf"another server holds it \(process {process.pid}\)"):
                PushLog(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with closing(PushLog(tmp_path)) as log:
        assert not list(log.replay())


def test_a_forked_child_does_not_keep_a_lock(tmp_path: Path) -> None:
    """The hook that runs in a child closes what the child has of the lock; one without the hook has it no more."""
    lock = FileLock(os.open(tmp_path, os.O_RDONLY))
    copy = os.dup(lock.descriptor)
    lock.close()
    lock = FileLock(os.open(tmp_path, os.O_RDONLY))
    os.close(copy)
    held = lock.descriptor
    generations._forget_in_child()
    assert lock.descriptor == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
    lock.close()
