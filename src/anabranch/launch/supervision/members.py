"""``Members``: the workers of a job that may lose some, as the launcher decides."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from anabranch.launch.supervision.worker import RoleProcess
from anabranch.liveness.membership import Membership
from anabranch.record.process import process_stat

LOOK_SECONDS = 1.0
# A program's own error, which would come again; so it lets a worker leave once.
_CRASHES = {-one for one in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)}


class Members:
    """Decides which workers of those that end may leave, and publishes each membership.

    Args:
        workers: those that were started, by the rank that they were started with.
        count: how many that will be.
        least: the job ends if fewer are left.
        meeting: the file through which they meet.
    """

    def __init__(self, workers: Sequence[RoleProcess], count: int, least: int, meeting: Path) -> None:
        self._workers, self._least, self._meeting = workers, least, meeting
        self._now = Membership(0, {rank: rank for rank in range(count)})
        self._crashed = False
        self._last: RoleProcess | None = None
        self._stopped, self._looked = set[int](), time.monotonic()
        self._now.publish(meeting)

    def may_leave(self, process: RoleProcess) -> bool:
        """Return True if the job goes on without a worker that has failed."""
        if process.exit_code in _CRASHES and not self._crashed:
            self._crashed = True
        elif process.exit_code != -signal.SIGKILL:
            return False
        running = [one for one in self._workers if one.running]
        closed = [one for one in self._workers if one.exit_code == 0]
        return bool(running) and len(running) + len(closed) >= self._least

    def leave(self, process: RoleProcess) -> str:
        """Publish the membership without a worker that has ended; return what users should know of it."""
        self._last = process if process.forgiven else self._last
        self._now = now = self._now.without(process.rank)
        now.publish(self._meeting)
        text = f"the job goes on with {len(now.ranks)} worker{'s' * (len(now.ranks) != 1)}"
        first = [self._workers[one].log.name for one, rank in now.ranks.items() if rank == 0 and one != 0]
        return f"{text}, whose rank 0 writes to {first[0]}" if first else text

    def frozen(self) -> list[RoleProcess]:
        """Return the workers that were stopped at the last look, ``LOOK_SECONDS`` ago, too, while others were not."""
        running = [one for one in self._workers if one.running]
        stopped = {one.pid for one in running if process_stat(one.pid)[0] == "T"}
        before, self._stopped = self._stopped, stopped
        awake, self._looked = time.monotonic() - self._looked < 2 * LOOK_SECONDS, time.monotonic()
        return [one for one in running if one.pid in stopped & before] if awake and len(stopped) < len(running) else []

    def end(self, process: RoleProcess) -> None:
        """Let nobody meet any more, because ``process`` has failed."""
        if self._last is not None and process.exit.is_consequence:  # of a loss that was to be forgiven
            self._last.forgiven = False
        self._now = msgspec.structs.replace(self._now, over=True)
        self._now.publish(self._meeting)
