"""One process of a job, a worker or a service: how it is started, signalled and reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from anabranch.launch.forks.launcher_side import ForkServer
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.supervision import parent_death
from anabranch.launch.supervision.budget import RestartBudget
from anabranch.launch.supervision.outcome import EndingError, Exit, Role
from anabranch.record.process import STATUS_VARIABLE, process_state, read_status


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """The command and environment of a process of the job, for its first start and for restarts.

    Attributes:
        role: what it does.
        rank: which of its role it is.
        program: what it runs.
        environment: the whole of it.
        log: the file for its output.
        screen: its stdout and stderr, where the output is shown, too, and kept.
        stdin: what it reads; nothing by default, or what the launcher reads where there is a screen.
        restarts: how often it is restarted when it dies; never by default.
        endpoint: where it listens, if that is known before.
        cwd: where it starts, of a plain process; where this process is by default.
    """

    role: Role
    rank: int
    program: PythonProgram
    environment: Mapping[str, str]
    log: Path
    screen: tuple[int, int] | None = None
    stdin: int | None = None
    restarts: RestartBudget | None = None
    endpoint: str | None = None
    cwd: str | None = None


def open_log(path: Path, *, anew: bool) -> BinaryIO:
    """Open a log to append to, or nothing where its folder was removed."""
    try:
        file = path.open("ab", buffering=0)
    except OSError:
        return open(os.devnull, "ab", buffering=0)
    if anew:
        with suppress(OSError):  # a device
            file.truncate(0)
    return file


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, as long as that takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class RoleProcess(Exit):
    """A running process of the job, the leader of its own session and process group.

    In separate sessions only the launcher gets the terminal's Ctrl-C; it passes it on and makes sure that all processes
    end.

    Args:
        spec: what to start.
        restarted: how often that was started before; its output follows what they wrote.
        server: forks it; a plain process is started where there is none.
    """

    def __init__(self, spec: ProcessSpec, restarted: int = 0, server: ForkServer | None = None) -> None:
        self._describe(spec, restarted)
        self.pid = self._start(server)
        self.pidfd = os.pidfd_open(self.pid)

    def _describe(self, spec: ProcessSpec, restarted: int) -> None:
        """Set the facts about a process that are known before it starts."""
        super().__init__(spec.role, spec.rank, spec.log)
        self.spec = spec
        self.restarted = restarted

    def _start(self, server: ForkServer | None) -> int:
        spec, screen = self.spec, self.spec.screen
        environment = {
            **spec.environment,
            "TORCHELASTIC_RESTART_COUNT": str(self.restarted),
            STATUS_VARIABLE: str(self.log.absolute().with_suffix("")),
        }
        # Appending, so that a log that is emptied meanwhile continues at its beginning.
        with open_log(self.log, anew=not screen and not self.restarted) as file, open(os.devnull, "rb") as nothing:
            shared = 0 if screen and sys.__stdin__ is not None else nothing.fileno()
            stdin = shared if spec.stdin is None else spec.stdin
            stdout, stderr = screen or (file.fileno(), file.fileno())
            if server is not None:
                name = f"{self.role}-{self.rank}"
                return server.fork(name, spec.program, environment, stdin, stdout, stderr)
            tied = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), *spec.program.command]
            process = subprocess.Popen(
                tied, env=environment, cwd=spec.cwd, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
            )
        process.returncode = 0  # reaped by `reap`, which has a pidfd; it need not be by this object
        return process.pid

    def has_served(self) -> bool:
        """Return True if it was ever ready, or if that cannot be known because the log folder is gone."""
        return self.role == "parameters" or "experts" in self._status() or not self.log.parent.exists()

    def _status(self) -> dict[str, Any]:
        return read_status(self.log, self.pid)

    @property
    def frozen(self) -> bool:
        """True if it is stopped, by SIGSTOP or a debugger."""
        return process_state(self.pid) == "stopped"

    def signal(self, number: signal.Signals) -> None:
        """Send ``number``; a frozen worker is woken to see it.

        Only to the worker, not to its child processes: one that finishes its step first still needs its DataLoader.
        """
        if not self.running:
            return
        self.stopped = True
        # The number cannot be another's by now: until reap() the worker, running or zombie, keeps it taken.
        os.kill(self.pid, number)
        os.kill(self.pid, signal.SIGCONT)

    def signal_group(self, number: int) -> None:
        """Stop, continue or kill it, and the processes that it has started."""
        if self.running:
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Take the exit code of a worker that has ended."""
        end = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
        assert end is not None, "only WNOHANG gives none"
        self._has_ended(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def abandon(self) -> None:
        """Count a worker that cannot be killed as killed."""
        self._has_ended(-signal.SIGKILL)

    def _has_ended(self, code: int) -> None:
        os.close(self.pidfd)
        self.running, self.code, self.ended_at = False, code, time.time()
        if error := self._status().get("error"):
            self.error = EndingError(**error)
