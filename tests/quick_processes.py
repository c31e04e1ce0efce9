"""Python scripts in processes of their own that start in milliseconds: forks of the server that ``LocalJob`` keeps.

For tests of what a process does that no launcher has started. Plain processes where none can be forked.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from anabranch.launch.conditions import why_no_fork_server
from anabranch.launch.forks import kept_fork_server
from anabranch.launch.orphans import adopt_orphans
from anabranch.launch.program import Program

__all__ = ["ForkedScript", "start_script"]


class ForkedScript:
    """The part of ``subprocess.Popen`` that tests use; what a script writes must fit into a pipe (64 KiB)."""

    def __init__(self, script: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_err, theirs_err = os.pipe()
        self.stdin, self.stdout, self.stderr = os.fdopen(ours_in, "w"), os.fdopen(ours_out), os.fdopen(ours_err)
        program = Program(str(script), arguments)
        try:
            with adopt_orphans():
                server = kept_fork_server({**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"})
                self.pid = server.fork("script", program, environment, theirs_in, theirs_out, theirs_err)
        finally:
            for descriptor in (theirs_in, theirs_out, theirs_err):
                os.close(descriptor)
        self._ended = os.pidfd_open(self.pid)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._ended, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            os.close(self._ended)
        return self.returncode

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.wait(timeout)
        texts = ["" if stream.closed else stream.read() for stream in (self.stdout, self.stderr)]
        self.stdout.close()
        self.stderr.close()
        return texts[0], texts[1]


def start_script(
    script: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> ForkedScript | subprocess.Popen[str]:
    """Starts ``script`` with one thread to compute with, and pipes to talk to it."""
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    if why_no_fork_server(everything) is None:
        return ForkedScript(script, arguments, everything)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, str(script), *arguments], env=everything, text=True, **pipes)  # type: ignore[call-overload,no-any-return]
