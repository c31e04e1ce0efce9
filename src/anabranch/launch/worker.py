"""One process of a job, a worker or a service: how it is started, signalled and reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from anabranch.launch import leash
from anabranch.launch.outcome import Exit, Role
from anabranch.launch.screen import Screen

__all__ = ["Recipe", "Worker"]

_REAP_SECONDS = 5.0


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a process of the job is started, the first time and again.

    Attributes:
        role: what it does.
        rank: which of its role it is.
        command: its command line.
        environment: the whole of it.
        log: the file for its output.
        screen: shows the output, too.
        restarts: how often it is started again when it dies.
        has_served: whether it has been of use once: a service that never was is not started again.
    """

    role: Role
    rank: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    screen: Screen | None = None
    restarts: int = 0
    has_served: Callable[[], bool] = _never


class Worker:
    """A running process of the job, the leader of a session and process group of its own.

    Own sessions keep the terminal's Ctrl-C to the launcher, which passes it on and then sees to it that all end.

    Args:
        recipe: what to start.
        restarted: how often that was started before; its output follows what they wrote.

    Attributes:
        role: what it does.
        rank: which of its role it is.
        log: the file that holds its output.
        exit_code: ``None`` while it runs, then its exit code, or minus the signal that killed it.
        ended_at: when it ended, in seconds since the epoch; 0.0 while it runs.
        stopped: whether the launcher had asked it to stop before it ended.
        forgiven: whether the job goes on without it.
        early: whether it ended although there was still something to do for it.
    """

    def __init__(self, recipe: Recipe, restarted: int = 0) -> None:
        self.recipe = recipe
        self.restarted = restarted
        self.role = recipe.role
        self.rank = recipe.rank
        self.log = recipe.log
        self.exit_code: int | None = None
        self.ended_at = 0.0
        self.stopped = False
        self.forgiven = False
        self.early = False
        leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *recipe.command]
        screen = recipe.screen
        with self.log.open("ab" if screen or restarted else "wb") as file:
            self._process = subprocess.Popen(
                leashed,
                env=dict(recipe.environment),
                stdin=None if screen else subprocess.DEVNULL,
                stdout=screen.stdout if screen else file,
                stderr=screen.stderr if screen else file,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def exit(self) -> Exit:
        """How it ended."""
        return Exit(
            self.rank,
            self.pid,
            self.exit_code or 0,
            self.ended_at,
            self.stopped,
            self.log,
            role=self.role,
            forgiven=self.forgiven,
            early=self.early,
        )

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
