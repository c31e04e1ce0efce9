"""``Members``: the workers of a job that may lose some, as the launcher decides."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from anabranch.held_error import HELD_ERROR_VARIABLE
from anabranch.job import JOINED_VARIABLE
from anabranch.launch.supervision.worker import ProcessSpec, RoleProcess
from anabranch.liveness.membership import (
    APART,
    Membership,
    Word,
    call_newcomers,
    heartbeat,
    invited,
    progress,
    rank_variables,
    says,
)

LOOK_SECONDS = 1.0
CALL_SECONDS = 0.05  # between two looks for newcomers that wait and members that invite them
# A program's own error, which would come again; so it lets a worker leave once in a step.
_CRASHES = {-one for one in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)}


class Members:
    """Decides which workers of those that end may leave, and publishes each membership.

    The replacement of a lost one is a newcomer until the members, between two of their steps, invite it.

    Args:
        workers: those that were started, by the rank that they were started with.
        count: how many that will be.
        least: with fewer left, the others wait for replacements, and the job ends if there will be none.
        meeting: the file through which they meet.
        tell: called with each line that a user should see at once.
        more: workers that join the others where there is room for them.
    """

    def __init__(
        self,
        workers: Sequence[RoleProcess],
        count: int,
        least: int,
        meeting: Path,
        tell: Callable[[str], None],
        more: Sequence[ProcessSpec] = (),
    ) -> None:
        self._workers, self._least, self._meeting, self._tell = workers, least, meeting, tell
        self._now = Membership(0, {rank: rank for rank in range(count)}, least=least)
        self._awaited = set[int]()  # processes that are to be started
        self._more = list(more)
        self._crashed = set[int]()  # steps
        self._closed = set[int]()  # processes that have left so, and may still work
        self._last: RoleProcess | None = None
        self._stopped, self._looked = dict[RoleProcess, float](), time.monotonic()  # since which look
        self._now.publish(meeting)

    def _members(self) -> list[RoleProcess]:
        return [one for one in self._workers if one.running and one.rank in self._now.ranks]

    def _progress(self) -> tuple[int, int] | None:
        """Return how far the members are; ``None`` if the job ends with any of them, or before their first step."""
        ends = any(self._says(one, "ends") for one in self._workers if not self.awaits(one))
        return None if ends else progress(self._meeting)

    def newcomers(self) -> list[RoleProcess]:
        """Return those that have not joined yet."""
        others = [one for one in self._workers if one.running and one.rank not in self._now.ranks]
        return [one for one in others if one.rank not in self._closed]

    def awaits(self, process: RoleProcess) -> bool:
        """Return True of a newcomer that had not joined before its end: nothing is lost with it."""
        return process.rank not in self._now.ranks

    def may_leave(self, process: RoleProcess) -> bool:
        """Return True if the job goes on without a worker that has failed, or with another in its place."""
        done = self._progress()
        if done is None or not self._members() or self._says(process, "closes"):
            return False
        if process.code in _CRASHES:
            if done[0] in self._crashed:
                self._tell(f"{process.who} is the second that has crashed in step {done[0] + 1}")
                return False
            self._crashed.add(done[0])
        elif process.code != -signal.SIGKILL:
            return False
        ended = [one for one in self._workers if not one.running and one.code == 0]
        there = len(self._members()) + len(self.newcomers()) + len(self._awaited) + len(ended)
        restarts = process.spec.restarts
        left = 0 if restarts is None or self._takes_nobody() else restarts.times - restarts.used
        if there + (left > 0) < self._least and restarts is not None and restarts.used:
            self._tell(f"{process.who} is not replaced again: --worker-restarts {restarts}")
        return there + (left > 0) >= self._least

    def leave(self, process: RoleProcess) -> str:
        """Publish the membership without a worker that has ended; return what users should know of it."""
        self._last = process if process.forgiven else self._last
        ended = process.code == 0
        closed = ended and not self._says(process, "leaves")
        if process.rank not in self._closed:
            self._now = self._now.without(process.rank, ended=ended, closed=closed)
            self._publish()
        now = self._now
        count = len(now.ranks)
        text = "the job goes on with" if count >= now.least else "the job waits, with"
        text = f"{text} {count} worker{'s' * (count != 1)}"
        first = [self._workers[one].log.name for one, rank in now.ranks.items() if rank == 0 and one != 0]
        return f"{text}, whose rank 0 writes to {first[0]}" if first else text

    def leave_closed(self) -> None:
        """Publish the membership without those that have closed, if others meet, who would wait for them."""
        members = self._members()
        meet = [one for one in members if self._says(one, "meets")]
        closed = [one for one in members if self._says(one, "closes") and one not in meet] if meet else []
        for one in closed:
            self._closed.add(one.rank)
            self._now = self._now.without(one.rank, ended=True, closed=True)
        if closed:
            self._publish()

    def heir(self, process: RoleProcess) -> RoleProcess | None:
        """Return the worker that is rank 0 once ``process`` has left; ``None`` if that changes nothing."""
        ranks = self._now.without(process.rank).ranks
        first = [one for one in self._members() if ranks.get(one.rank) == 0 and self._now.ranks[one.rank] != 0]
        return first[0] if first else None

    def replaces(self, process: RoleProcess) -> float | None:
        """Return in how many seconds another is to be started in place of a lost worker; ``None`` if none is."""
        restarts = process.spec.restarts
        pause = None if restarts is None or self._takes_nobody() else restarts.take()
        if pause is not None:
            self._awaited.add(process.rank)
        return pause

    def _takes_nobody(self) -> bool:
        done = self._progress()
        return bool(self._now.closed) or (done is not None and done[1] == APART)

    def newcomer(self, spec: ProcessSpec) -> ProcessSpec | None:
        """Return how to start one that joins the others; ``None`` if nobody is left to take the state from."""
        self._awaited.discard(spec.rank)
        if not self._members():
            return None
        rank = len(self._members()) + len(self.newcomers())
        size = rank + len(self._awaited) + 1
        environment = {name: value for name, value in spec.environment.items() if name != HELD_ERROR_VARIABLE}
        environment |= {JOINED_VARIABLE: "1"} | rank_variables(environment, rank, size)
        return replace(spec, environment=environment, screen=None)

    def one_more(self) -> ProcessSpec | None:
        """Return what to start beside the first workers, once these have done a step that others may join."""
        goes = self._more and self._progress() is not None and not self._takes_nobody()
        return self.newcomer(self._more.pop(0)) if goes else None

    def admit(self) -> None:
        """Call the members if newcomers wait; publish the membership with these once a member has invited them."""
        for one in self.newcomers() if not self._members() else ():
            if not one.pid:  # it waits for room, and would have nobody to join
                one.signal(signal.SIGTERM)
        wait = self._waiting()
        if wait and invited(self._meeting, self._now.number):
            for process in wait:
                self._now = self._now.joined_by(process)
            self._publish()
        else:
            call_newcomers(self._meeting, some=bool(wait))

    def _waiting(self) -> list[int]:
        return [one.rank for one in self.newcomers() if self._says(one, "waits")]

    def _says(self, process: RoleProcess, what: Word) -> bool:
        return says(self._meeting, process.rank, process.pid, what)

    def _publish(self) -> None:
        # First: those who have met invite nobody who is there, or gone.
        call_newcomers(self._meeting, some=bool(self._waiting()))
        self._now.publish(self._meeting)

    def frozen(self, services: Sequence[RoleProcess]) -> list[RoleProcess]:
        """Return the processes that were stopped at each look of the members' heartbeat, while a member was not.

        None of those without which the job does not go on: they may be woken.
        """
        running = [one for one in self._workers if one.running]
        restarted = [one for one in services if one.running and one.spec.restarts is not None]
        now = time.monotonic()
        awake, self._looked = now - self._looked < 2 * LOOK_SECONDS, now
        before = self._stopped if awake else {}
        self._stopped = {one: before.get(one, now) for one in (*running, *restarted) if one.frozen}
        if self._stopped.keys() >= {*self._members()}:  # newcomers have nothing to go on with
            self._stopped = {}  # those that are woken later than the first have a heartbeat from then on
        if not self._stopped or self._progress() is None:
            return []
        least = heartbeat(self._meeting)
        again = [one for one, since in self._stopped.items() if one in before and now - since >= least]
        return [one for one in again if one.role != "worker" or not self._says(one, "closes")]

    def wait_no_longer(self) -> None:
        """Let the members go on without newcomers: the job is to end soon."""
        waits, self._least = len(self._now.ranks) < self._now.least, 1
        self._now = msgspec.structs.replace(self._now, number=self._now.number + waits, least=1)
        self._publish()

    def end(self, process: RoleProcess) -> None:
        """Let nobody meet any more, because ``process`` has failed."""
        if self._last is not None and process.is_consequence:  # of a loss that was to be forgiven
            self._last.forgiven = False
        now = self._now.without(process.rank) if process.role == "worker" else self._now
        self._now = msgspec.structs.replace(now, over=True)
        self._publish()
