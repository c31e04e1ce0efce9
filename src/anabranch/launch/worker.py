"""One worker process: how it is started, signalled and reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.launch import leash
from anabranch.launch.screen import Screen

__all__ = ["Worker"]

_REAP_SECONDS = 5.0


class Worker:
    """A running worker, the leader of a session and process group of its own.

    Own sessions keep the terminal's Ctrl-C to the launcher, which passes it on and then sees to it that all end.

    Attributes:
        rank: which worker it is.
        log: the file that holds its output.
        exit_code: ``None`` while it runs, then its exit code, or minus the signal that killed it.
        ended_at: when it ended, in seconds since the epoch; 0.0 while it runs.
        stopped: whether the launcher had asked it to stop before it ended.
    """

    def __init__(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], log: Path, screen: Screen | None = None
    ) -> None:
        self.rank = rank
        self.log = log
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.stopped = False
        leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *command]
        with log.open("ab" if screen else "wb") as file:
            self._process = subprocess.Popen(
                leashed,
                env=dict(environment),
                stdin=None if screen else subprocess.DEVNULL,
                stdout=screen.stdout if screen else file,
                stderr=screen.stderr if screen else file,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def running(self) -> bool:
        """Whether it has not been reaped yet."""
        return self.exit_code is None

    def signal(self, number: signal.Signals) -> None:
        """Sends ``number``; a frozen worker is woken to see it.

        To the worker alone, not to what it started: one that finishes its step first still needs its DataLoader.
        """
        if not self.running:
            return
        self.stopped = True
        # The number cannot be another's by now: until reap() the worker, running or zombie, keeps it taken.
        os.kill(self.pid, number)
        os.kill(self.pid, signal.SIGCONT)

    def reap(self) -> None:
        """Takes the exit code of a worker that has ended."""
        self.ended_at = time.time()
        self.exit_code = self._process.wait(timeout=_REAP_SECONDS)
        os.close(self.pidfd)

    def abandon(self) -> None:
        """Counts a worker that cannot be killed as killed."""
        self.ended_at = time.time()
        self.exit_code = -signal.SIGKILL
        os.close(self.pidfd)
