"""The launcher's side of the rendezvous process, see ``rendezvous_process.py``."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.launch.python_program import PythonProgram
from anabranch.launch.socket_messages import Message, channel, receive, send
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess

if TYPE_CHECKING:
    from anabranch.launch.job import Attempt

_PROGRAM = PythonProgram("anabranch.launch.meeting.rendezvous_process", is_module=True)
_START_SECONDS = 120.0
_END_SECONDS = 5.0
_BACKLOG = 1024


@contextmanager
def rendezvous(
    attempt: Attempt,
    start: Callable[[ProcessSpec, int], RoleProcess],
    directory: str | None,
    keys: Path | None,
    host: str = "127.0.0.1",
) -> Iterator[tuple[RoleProcess, int]]:
    """Run the process through which all meet until the block ends; yield it, ready, and the port of its store.

    Args:
        attempt: at the job.
        start: starts a role.
        directory: where the process serves the directory; ``None`` for none.
        keys: the directory of certificates.
        host: where the store listens; by default no other host reaches it.

    Raises:
        ConnectionError: this machine does not reach itself.
    """
    with ExitStack() as stack, socket.create_server((host, 0), backlog=_BACKLOG) as listening:  # no port is guessed
        port = int(listening.getsockname()[1])
        _check_loopback(listening.family, host, port)
        ours, theirs = map(stack.enter_context, channel())
        # It multiplies nothing, and OpenBLAS's threads spin for a while when they are started.
        env = {**attempt.base, "TORCHELASTIC_RUN_ID": attempt.run_id, "OPENBLAS_NUM_THREADS": "1"}
        log = attempt.spec.log_dir / "rendezvous-0.log"
        process = start(ProcessSpec("rendezvous", 0, _PROGRAM, env, log, stdin=theirs.fileno()), 0)
        theirs.close()
        stack.callback(_end, attempt, process, ours)
        facts: Message = {"directory": directory, "keys": None if keys is None else str(keys)}
        with suppress(OSError):  # it died: its watcher reports it
            send(ours, facts, [listening.fileno()])
            if directory is not None:
                wait_until_ready(ours)
        listening.close()
        yield process, port


def wait_until_ready(process: socket.socket) -> None:
    """Return when the directory answers, or the process has ended."""
    process.settimeout(_START_SECONDS)
    receive(process)


def _check_loopback(family: socket.AddressFamily, host: str, port: int) -> None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing; gloo would look for minutes
    except OSError as error:
        raise ConnectionError(
            f"this machine does not reach its own address {host}: {error.strerror}; is its loopback interface up?"
        ) from None


def _end(attempt: Attempt, process: RoleProcess, channel: socket.socket) -> None:
    channel.close()
    if attempt.stopped is not None:  # it may still import
        process.signal(signal.SIGKILL)
    if process.running:
        if not select.select([process.pidfd], [], [], _END_SECONDS)[0]:
            process.signal(signal.SIGKILL)
        process.reap()
    with suppress(OSError):
        if not process.early and not process.log.stat().st_size:  # shown for one that was lost
            process.log.unlink()
