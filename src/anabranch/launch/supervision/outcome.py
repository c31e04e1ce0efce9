"""The end of a job: each process's exit, the first failure, and its description."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Role = Literal["worker", "parameters", "expert", "rendezvous"]
"""The role of a process of a job."""

_TAIL_LINES = 20
_MOST_LINES = 200
_TAIL_BYTES = 1 << 20
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


@dataclass(frozen=True, slots=True)
class EndingError:
    """The uncaught error that ended a process, from its status record.

    Attributes:
        type: the name of its class.
        message: its words, without notes.
        at: when it was raised, in seconds since the epoch.
        lost: the process whose loss it reports, or was caused by, if that is known; else ``None``.
        is_loss: whether it reports the loss of another process.
    """

    type: str
    message: str
    at: float
    lost: str | None = None
    is_loss: bool = False

    @property
    def blames_a_worker(self) -> bool:
        """True if another worker was lost, and not a server: rank 0's screen is not shown that error."""
        return self.is_loss and (self.lost or "").startswith("rank")


@dataclass(eq=False)
class Exit:
    """One process and its end.

    Attributes:
        role: what it does.
        rank: which of its role.
        log: the file with its output.
        pid: its process.
        running: it has not been reaped yet.
        code: its exit code, or minus the signal that killed it.
        ended_at: when, in seconds since the epoch.
        stopped: whether it was asked to stop, because another failed or the job was interrupted.
        forgiven: whether the job continues without it.
        early: whether it ended although there was still something to do for it, a service while workers run.
        error: the uncaught error that ended it.
        node_lost: whether its end is not known, because its Ray node was lost.
    """

    role: Role
    rank: int
    log: Path
    pid: int = 0
    running: bool = True
    code: int = 0
    ended_at: float = 0.0
    stopped: bool = False
    forgiven: bool = False
    early: bool = False
    error: EndingError | None = None
    node_lost: bool = False

    @property
    def who(self) -> str:
        """Its name for users: workers are known by their rank alone, as elsewhere in torch."""
        return f"rank {self.rank}" if self.role == "worker" else f"{self.role} {self.rank}"

    @property
    def well(self) -> bool:
        """True if the job did not fail because of it.

        A service stopped while it was still starting could not return a meaningful exit code.
        """
        told_early = self.role != "worker" and self.stopped and self.code == -signal.SIGTERM
        return (self.code == 0 and not self.early) or self.forgiven or told_early

    def describe(self) -> str:
        """One line: who, and how it ended."""
        if self.node_lost:
            return f"{self.who} was lost with its Ray node"
        if self.code >= 0:
            when = " while workers still ran" if self.early else ""
            return f"{self.who} (pid {self.pid}) exited with code {self.code}{when}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        hint = " (the kernel sends it when memory runs out)" if name == "SIGKILL" and not self.stopped else ""
        return f"{self.who} (pid {self.pid}) was killed by {name}{hint}"

    def last_words(self) -> str:
        """Return the traceback at the end of its log, with the exceptions that led to it; without one, the last
        lines.
        """
        lines = self._lines()
        start = _traceback_start(lines)
        return "\n".join(lines[-_TAIL_LINES:] if start is None else lines[start : start + _MOST_LINES])

    @property
    def failed_at(self) -> float:
        """The time of its failure, in seconds since the epoch.

        A worker that raised closes connections on which others may wait, and takes a while to end: the time of the
        error shows which worker failed first; the exit time does not.
        """
        return self.ended_at if self.error is None else min(self.ended_at, self.error.at)

    @property
    def is_consequence(self) -> bool:
        """True if its error reports that another process was lost."""
        return self.error is not None and self.error.is_loss

    def _lines(self) -> list[str]:
        with suppress(OSError), self.log.open("rb") as file:  # its folder may have been removed
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").rstrip().splitlines()
        return []


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The end of a job.

    Attributes:
        exits: one for each worker, by rank.
        services: one for each parameter server, then one for each expert process; of one that was restarted, the
            last.
        interrupted: the signal that ended the job; ``None`` if it ended on its own.
        timed_out: whether it was ended because its time limit had passed.
        seconds: how long it ran.
    """

    exits: tuple[Exit, ...]
    interrupted: signal.Signals | None
    timed_out: bool
    seconds: float
    services: tuple[Exit, ...] = ()

    @property
    def first_failure(self) -> Exit | None:
        """Return the process that failed first, on its own; ``None`` if all succeeded or were stopped.

        Clocks decide, except for one that failed because another was lost: it may be reaped before that one is.
        """
        failures = [exit_ for exit_ in (*self.exits, *self.services) if not exit_.well and not exit_.stopped]
        return min(failures, key=lambda exit_: (exit_.is_consequence, exit_.failed_at), default=None)

    @property
    def exit_code(self) -> int:
        """0 if all succeeded, 1 if one failed, 130 on Ctrl-C, 128 + signal when another one ended the job.

        Workers that finish after SIGTERM and exit with 0 have succeeded.
        """
        failed = not self.exits or any(not exit_.well for exit_ in (*self.exits, *self.services))
        if self.interrupted is not None and (failed or self.interrupted == signal.SIGINT):
            return 128 + self.interrupted
        return int(failed)


def _traceback_start(lines: list[str]) -> int | None:
    starts = [index for index, line in enumerate(lines) if line.lstrip("+| ").endswith(_TRACEBACK)]
    if not starts:
        return None
    first = starts.pop()
    while starts and any(line.endswith(_CHAINED) for line in lines[starts[-1] : first]):
        first = starts.pop()
    return first
