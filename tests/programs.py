"""Programs that tests run in their own processes: forks of the server that ``LocalJob`` keeps, a millisecond each.

A test that kills, freezes or limits a process writes its program as text, see the fixture ``programs``, or starts a
file with ``start``. Importing torch and the package costs seconds of a core; a fork has done it. Where forks are
impossible they are plain processes. Each sees the environment of the test at the time that it is started.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from anabranch.launch import python_program as program
from anabranch.launch.forks import launcher_side
from anabranch.launch.forks.launcher_side import ForkServer, kept_fork_server, why_no_fork_server
from anabranch.launch.meeting.addresses import held_port
from anabranch.launch.supervision.orphans import adopt_orphans

PIPE = subprocess.PIPE

# The tests start hundreds of forks, so that their server has done more than a user's: a first capture of a graph, with
# PyTorch's tables of what it may trace and the look at its guards, and what the first call of a kernel imports. More
# than half a second of a core in each process that captures.
_WARMED = """
import anabranch.launch.forks.fork_server as server

def import_all(before=server._import_all):
    before()
    import pytest
    import torch
    import torch._dynamo.repro.after_dynamo
    from torch import nn
    import anabranch as ab

    model = nn.Linear(1, 1)
    step = ab.TrainStep(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters()))
    with ab.Executor(step, engine="graph") as executor:
        executor.run(batch=torch.ones(1, 1))
    try:
        from numba.core.registry import cpu_target
    except ModuleNotFoundError:
        return
    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    from anabranch.collectives.shared_memory import load_kernels
    from anabranch.tables.warming import compile_kernels

    for dtype in (torch.float32, torch.float64):
        compile_kernels(dtype)
        load_kernels(dtype)

server._import_all = import_all
server.main()
"""
launcher_side._CODE = launcher_side._CODE.replace(
    "from anabranch.launch.forks.fork_server import main; main()", _WARMED
)


class Program:
    """A process that runs a program, in its own session; the part of ``subprocess.Popen`` that tests need.

    Left as a context manager, it is killed.
    """

    def __init__(
        self, script: Path, arguments: tuple[str, ...], environment: Mapping[str, str], streams: tuple[int, int, int]
    ) -> None:
        ours, theirs = zip(*(_ends(stream, place) for place, stream in enumerate(streams)), strict=True)
        self.stdin = open(ours[0] if streams[0] == PIPE else os.devnull, "w")  # noqa: SIM115 - closed by __exit__
        self.stdout, self.stderr = (
            open(end if stream == PIPE else os.devnull)  # noqa: SIM115
            for end, stream in zip(ours[1:], streams[1:], strict=True)
        )
        self.returncode: int | None = None
        self._plain: subprocess.Popen[bytes] | None = None
        try:
            if why_no_fork_server(environment) is None:
                self.pid = _forked(script, arguments, environment, theirs)
            else:
                command = [sys.executable, str(script), *arguments]
                stdin, stdout, stderr = theirs
                self._plain = subprocess.Popen(
                    command, env=environment, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
                )
                self.pid = self._plain.pid
        finally:
            for stream, end in zip(streams, theirs, strict=True):
                if stream == PIPE:
                    os.close(end)
        self._ended = os.pidfd_open(self.pid)

    def wait(self, timeout: float = 120.0) -> int:
        """Return the exit code; minus the signal's number if one killed it.

        Raises:
            TimeoutError: it still runs.
        """
        if self.returncode is None:
            if not _readable(self._ended, timeout):
                raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            os.close(self._ended)
            if self._plain is not None:
                self._plain.returncode = self.returncode
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, number)

    def kill(self) -> None:
        """End it by SIGKILL, and wait for its end."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def wait_until_stopped(self) -> None:
        """Return once the kernel reports the process as stopped: a signal takes effect some time after it was sent."""
        until = time.monotonic() + 60
        while _state(self.pid) not in "Tt":
            assert time.monotonic() < until, f"process {self.pid} does not stop"
            time.sleep(0.001)

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Close its stdin, and return its stdout and stderr up to its end."""
        with suppress(BrokenPipeError):
            self.stdin.close()
        until = time.monotonic() + timeout
        said = ["", ""]

        def read(place: int, stream: TextIO) -> None:
            said[place] = stream.read()

        readers = [
            threading.Thread(target=read, args=(place, stream), daemon=True)
            for place, stream in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(max(until - time.monotonic(), 0.0))
        self.wait(max(until - time.monotonic(), 0.0))
        return said[0], said[1]

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.kill()
        finally:
            for file in (self.stdin, self.stdout, self.stderr):
                with suppress(BrokenPipeError):
                    file.close()


def start(
    script: Path,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    stdin: int = PIPE,
    stdout: int = PIPE,
    stderr: int = PIPE,
) -> Program:
    """Start a file of Python source with one computing thread; each stream is a pipe or a descriptor."""
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return Program(script, tuple(map(str, arguments)), everything, (stdin, stdout, stderr))


@contextmanager
def start_ranks(folder: Path, source: str, world: int, *arguments: object) -> Iterator[list[Program]]:
    """The ranks of a job without a launcher, the second ready: nobody but themselves watches over them."""
    script = folder / "rank.py"
    script.write_text(source)
    with held_port("127.0.0.1") as port, ExitStack() as stack:
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started = [
            stack.enter_context(start(script, *arguments, environment={**common, "RANK": str(rank)}))
            for rank in range(world)
        ]
        assert started[1].stdout.readline() == "ready\n"
        yield started


class Programs:
    """Starts programs given as text; made once a test run by the fixture ``programs``.

    Args:
        folder: where the texts are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        if why_no_fork_server(os.environ) is None:
            _server()  # so that no test is the one that starts it

    def start(
        self, source: str, *arguments: object, stderr: int = 2, environment: Mapping[str, str] | None = None
    ) -> Program:
        """Start Python source text with its arguments in ``sys.argv[1:]``; its input and output are pipes."""
        self._count += 1
        script = self._folder / f"program-{self._count}.py"
        script.write_text(source)
        return start(script, *arguments, stderr=stderr, environment=environment)

    def run(
        self, source: str, *arguments: object, timeout: float = 200.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as ``subprocess.run`` with its output captured."""
        with self.start(source, *arguments, stderr=PIPE, **options) as program:
            out, err = program.communicate(timeout)
            return subprocess.CompletedProcess([source, *map(str, arguments)], program.wait(), out, err)


def _server() -> ForkServer:
    return kept_fork_server({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"})


def _forked(script: Path, arguments: tuple[str, ...], environment: Mapping[str, str], streams: tuple[int, ...]) -> int:
    with adopt_orphans():
        return _server().fork("program", program.PythonProgram(str(script), arguments), environment, *streams)


def _ends(stream: int, place: int) -> tuple[int, int]:
    """Return our end and the program's end of one of the three streams."""
    if stream != PIPE:
        return -1, stream
    reader, writer = os.pipe()
    return (writer, reader) if place == 0 else (reader, writer)


def _readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
