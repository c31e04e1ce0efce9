"""The launcher's side of the fork server: starting it, requesting processes, and ending it."""

from __future__ import annotations

import atexit
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict

from anabranch.launch.forks.process_state import ARGUMENTS_ROOM, ENVIRONMENT_ROOM
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.socket_messages import Message, receive, send
from anabranch.record.process import STATUS_VARIABLE, TRACE_VARIABLE

# Without the current directory, which `-c` puts first.
_CODE = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); from anabranch.launch.forks.fork_server import main; main()"
)
_START_SECONDS = 120.0  # importing torch from a cold disk, while other jobs run
_FORK_SECONDS = 60.0
_END_SECONDS = 5.0
_LONGEST_REPORT = 4096
# Left to each fork: the server has values from which every fork can be set.
_LEFT_OPEN = ("OMP_NUM_THREADS", "PYTHONFAULTHANDLER", STATUS_VARIABLE, TRACE_VARIABLE)


class ForkServerError(Exception):
    """The fork server could not be started, or did not return a process."""


class ForkServer:
    """A fork server of this process; a context manager.

    It starts in the background: ``wait_until_ready`` returns when it is ready, and ``fork`` waits for it.

    Args:
        environment: its own; those of its forks may differ as far as ``conditions.py`` allows.

    Attributes:
        environment: the same.
        pid: its process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        settled = {name: value for name, value in environment.items() if name not in _LEFT_OPEN}
        settled |= {"OPENBLAS_NUM_THREADS": "1", "ANABRANCH_ROOM": "x" * ENVIRONMENT_ROOM}
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _CODE, " " * ARGUMENTS_ROOM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=settled,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._owner = os.getpid()
        self._ready = False
        self._lock = threading.Lock()  # jobs may run in several threads

    @property
    def running(self) -> bool:
        """True while its process lives."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Return when it has imported what its forks need.

        Raises:
            ForkServerError: it could not, or not in time.
        """
        with self._lock:
            self._meet()

    def fork(
        self, name: str, program: PythonProgram, environment: Mapping[str, str], stdin: int, stdout: int, stderr: int
    ) -> int:
        """Run ``program`` in a fork that is a child of this process, and return its process id.

        This process must be a subreaper, see ``adopt_orphans``.

        Raises:
            ForkServerError: there is no such process.
        """
        role: Message = {
            "name": name,
            "program": asdict(program),
            "environment": dict(environment),
            "cwd": os.getcwd(),
            "launcher": os.getpid(),
        }
        reader, report = os.pipe()
        with open(reader, "rb", buffering=0) as answer:
            with open(report, "wb"), self._lock:
                self._meet()
                try:
                    send(self._channel, role, (stdin, stdout, stderr, report))
                except OSError as error:
                    raise ForkServerError(f"the fork server is gone: {error}") from None
            if not select.select([reader], [], [], _FORK_SECONDS)[0]:
                raise ForkServerError(f"the fork server did not answer in {_FORK_SECONDS:.0f} s")
            text = answer.read(_LONGEST_REPORT).decode(errors="replace")
        if not text.isdecimal():
            raise ForkServerError(text or "the fork server died")
        return int(text)

    def close(self) -> None:
        """End it; its forks continue to run."""
        if os.getpid() != self._owner:  # a fork of this process does not own it
            return
        self._channel.close()
        if not self._ready:  # it imports, and would notice only after that
            self._process.kill()
        try:
            self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:  # still importing, or stopped
            self._process.kill()
            self._process.wait(timeout=_END_SECONDS)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _meet(self) -> None:
        if self._ready:
            return
        self._channel.settimeout(_START_SECONDS)
        try:
            received = receive(self._channel)
        except OSError as error:
            raise ForkServerError(f"the fork server does not answer: {error}") from None
        if received is None:
            raise ForkServerError("the fork server died while it started")
        self._channel.settimeout(_FORK_SECONDS)
        self._ready = True


_kept: ForkServer | None = None
_keeping = threading.Lock()


def kept_fork_server(environment: Mapping[str, str]) -> ForkServer:
    """Return the fork server that this process keeps until it ends, started now if there is none."""
    global _kept
    with _keeping:
        if _kept is None or not _kept.running:
            _kept = ForkServer(environment)
            atexit.register(_kept.close)
        return _kept
