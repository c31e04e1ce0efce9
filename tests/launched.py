"""Launchers of jobs, as forks of the tests' fork server; their own fork server is a fork of it too: milliseconds.

Started anew, a fork server imports torch, which takes seconds of a core. Here only that is left out: the launcher, be
it ``anabranch run`` or a script with a ``LocalJob``, is a process of its own that gets signals, has a terminal, prints,
and ends with its code. The tests of what a process does as it starts run the real one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from anabranch.launch.forks.fork_server import run_as_main
from anabranch.launch.python_program import PythonProgram as Runnable
from programs import PIPE, Program, start

_PATIENT = "patient"


def start_launcher(script: Path, *arguments: object) -> Program:
    """Start a script; its first fork server is a fork of ours, and it must start no other."""
    return start(Path(__file__), script, *arguments)


def start_run(
    *arguments: object,
    command: str = "run",
    patient: bool = False,
    stdin: int = PIPE,
    stdout: int = PIPE,
    stderr: int = PIPE,
) -> Program:
    """Start ``anabranch run``, or ``anabranch plan``, with these arguments.

    A ``patient`` launcher stops and kills nobody who ends within a minute, as all do on a machine that is not busy.
    """
    words = (_PATIENT, command) if patient else (command,)
    return start(Path(__file__), *words, *arguments, stdin=stdin, stdout=stdout, stderr=stderr)


def run(
    *arguments: object, command: str = "run", patient: bool = False, timeout: float = 200.0
) -> subprocess.CompletedProcess[str]:
    """Run ``anabranch run``, ``plan`` or ``status`` to its end, as ``subprocess.run`` with its output captured."""
    with start_run(*arguments, command=command, patient=patient) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(["anabranch", command, *map(str, arguments)], process.wait(), out, err)


class _ForkedServer:
    """The part of ``subprocess.Popen`` that ``ForkServer`` needs, for a running server that waits for its channel."""

    def __init__(self, pid: int, door: socket.socket) -> None:
        self.pid = pid
        self._door = door
        self._code: int | None = None

    def __call__(self, command: list[str], *, stdin: int, **options: object) -> _ForkedServer:
        socket.send_fds(self._door, [b"serve"], [stdin])
        return self

    def poll(self) -> int | None:
        return self._waited(os.WNOHANG)

    def wait(self, timeout: float) -> int:
        code = self._waited(0)
        assert code is not None
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _waited(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _wait_for_channel(door: socket.socket) -> None:
    """Put the channel in the place of stdin; ends this process if the command never requests a fork server."""
    os.setsid()
    with suppress(OSError):
        _, descriptors, _, _ = socket.recv_fds(door, 16, 1)
        if descriptors:
            os.dup2(descriptors[0], 0)
            os.close(descriptors[0])
            door.close()
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), 1)
            return
    os._exit(0)


def _main() -> Callable[[], None]:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        from anabranch.launch.forks import fork_server

        ours.close()
        _wait_for_channel(theirs)
        return fork_server.main
    from anabranch import cli
    from anabranch.launch.forks import launcher_side

    theirs.close()
    if sys.argv[1] == _PATIENT:
        from anabranch.launch.supervision.supervisor import Patience

        del sys.argv[1]
        Patience.__init__.__defaults__ = (60.0, 60.0, 60.0)
    launcher_side.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _ForkedServer(pid, ours)})  # type: ignore[assignment]
    if sys.argv[1] not in ("run", "plan", "status"):
        return partial(run_as_main, Runnable(sys.argv[1], tuple(sys.argv[2:])))
    sys.argv[0] = "anabranch"
    return cli.main


if __name__ == "__main__":
    _main()()
