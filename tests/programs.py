"""Programs that tests run in processes of their own: forks of one process that has imported what they all import.

A test that kills, freezes or limits a process writes its program as text. Importing torch and the package costs seconds
of a core, so one process of a test run does it once, and a program is a fork of it, which costs milliseconds::

    test ── source, arguments, pipes ──> forker ── fork ──> waiter ── fork ──> the program
      ^                                                        │
      └──────────────────── its pid, then its exit code ───────┘

The forker has one thread and opens nothing. A program sees the environment of the test at the time that it is started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

FORKER = """
import gc, json, os, random, signal, socket, sys
import numpy, torch
import anabranch.checkpoint, anabranch.cli, anabranch.experts, anabranch.parameter_server, anabranch.testing

torch.set_num_threads(1)
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks for the waiters
door = socket.socket(fileno=int(sys.argv[1]))
while True:
    data, pipes, _, _ = socket.recv_fds(door, 1 << 20, 4)
    if not data:
        os._exit(0)
    if os.fork() == 0:
        break
    for pipe in pipes:
        os.close(pipe)
door.close()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
status = pipes.pop()
pid = os.fork()
if pid:
    for pipe in pipes:
        os.close(pipe)
    os.write(status, b"%d\\n" % pid)
    os.write(status, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)
os.close(status)
for place, pipe in enumerate(pipes):
    os.dup2(pipe, place)
    os.close(pipe)
sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
asked = json.loads(data)
os.environ.clear()
os.environ.update(asked["environment"])
sys.argv = ["-c", *asked["arguments"]]
random.seed()
numpy.random.seed()
exec(compile(asked["source"], "<program>", "exec"), {"__name__": "__main__"})
"""


class Program:
    """A process that runs a program; of ``subprocess.Popen`` what tests need. Left, it is killed."""

    def __init__(self, pid: int, stdin: int, stdout: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin = open(stdin, "w")  # noqa: SIM115 - closed by __exit__
        self.stdout = open(stdout)  # noqa: SIM115
        self._status = open(status)  # noqa: SIM115

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code, minus the signal's number if one killed it.

        Raises:
            TimeoutError: it still runs.
        """
        if self.returncode is None:
            if not _readable(self._status.fileno(), timeout):
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            self.returncode = int(self._status.readline())
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it by SIGKILL, and waits until it has ended."""
        if self.returncode is None and not _readable(self._status.fileno(), 0):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait_until_stopped(self) -> None:
        """Returns once the kernel says that the process stands still: a signal that was sent is not yet obeyed."""
        until = time.monotonic() + 60
        while _state(self.pid) not in "Tt":
            assert time.monotonic() < until, f"process {self.pid} does not stop"
            time.sleep(0.001)

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.kill()
        finally:
            for file in (self.stdin, self.stdout, self._status):
                file.close()


class Programs:
    """Starts programs; made once a test run, by the fixture ``programs``."""

    def __init__(self, door: socket.socket) -> None:
        self._door = door

    def start(self, source: str, *arguments: str, stderr: int = 2) -> Program:
        """Runs Python source text with its arguments in ``sys.argv[1:]``; its input and output are pipes."""
        asked = {"source": source, "arguments": list(map(str, arguments)), "environment": dict(os.environ)}
        theirs_in, stdin = os.pipe()
        stdout, theirs_out = os.pipe()
        status, theirs_status = os.pipe()
        given = (theirs_in, theirs_out, stderr, theirs_status)
        socket.send_fds(self._door, [json.dumps(asked).encode()], given)
        for descriptor in (theirs_in, theirs_out, theirs_status):
            os.close(descriptor)
        pid = b""
        while not pid.endswith(b"\n"):
            assert _readable(status, 60.0), "no process was started"
            some = os.read(status, 1)
            assert some, "the forker has ended"
            pid += some
        return Program(int(pid), stdin, stdout, status)

    def run(self, source: str, *arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end, as ``subprocess.run`` with its output captured."""
        with open(os.memfd_create("stderr"), "w+") as stderr:
            with self.start(source, *arguments, stderr=stderr.fileno()) as program:
                program.stdin.close()
                until = time.monotonic() + timeout
                said = b""
                while some := _read(program.stdout.fileno(), until):
                    said += some
                code = program.wait(max(until - time.monotonic(), 1.0))
            stderr.seek(0)
            return subprocess.CompletedProcess([source, *arguments], code, said.decode(), stderr.read())


@contextmanager
def forker() -> Iterator[Programs]:
    """Starts the process that imports, and forks programs; it ends with the block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", FORKER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        yield Programs(ours)
    process.wait(timeout=60)


def _read(descriptor: int, until: float) -> bytes:
    assert _readable(descriptor, max(until - time.monotonic(), 0.0)), "the program has not come to its end"
    return os.read(descriptor, 1 << 16)


def _readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
