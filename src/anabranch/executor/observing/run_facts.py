"""``RunFacts``: a worker's facts about its run, for ``anabranch status`` and the screen of ``anabranch run``.

Once a second, on the training thread, it reads counts that the executor keeps anyway. On rank 0 it is also a sink, for
the loss and the checkpoints. The process's record writes all of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict

from anabranch.executor.statistics import TableLoads
from anabranch.record.process import ProcessRecord

_EVERY = 1.0  # seconds between two reads of the counts
_POINTS = 64


class Curve:
    """A curve over a whole run in few points, each the mean of equally many values; fewer the longer it gets.

    >>> curve = Curve(points=4)
    >>> for value in [1.0, 3.0, 5.0, 7.0, 9.0]:
    ...     curve.add(value)
    >>> curve.points()
    [2.0, 6.0, 9.0]
    """

    def __init__(self, points: int = _POINTS) -> None:
        self._most = points
        self._each = 1
        self._done: list[float] = []
        self._open: list[float] = []

    def add(self, value: float) -> None:
        """Take the next value."""
        self._open.append(value)
        if len(self._open) < self._each:
            return
        if len(self._done) == self._most:
            self._done = [(a + b) / 2 for a, b in zip(self._done[::2], self._done[1::2], strict=True)]
            self._each *= 2
            return
        self._done.append(sum(self._open) / len(self._open))
        self._open = []

    def points(self) -> list[float]:
        """Return the means, with the mean of the last few values at the end."""
        rest = [sum(self._open) / len(self._open)] if self._open else []
        return self._done + rest


class RunFacts:
    """A worker's facts in its process's record: its losses, counts and steps.

    Args:
        record: writes them.
        count: returns the bytes that crossed each boundary so far, and the loads of each table, both by name.
        progress: returns its loops in progress; called on any thread.
        losses: names of losses among the metrics.
        clock: seconds.

    Attributes:
        rank: this worker's, as of the last membership.
    """

    rank = 0

    def __init__(
        self,
        record: ProcessRecord,
        count: Callable[[], tuple[Mapping[str, int], Mapping[str, TableLoads]]],
        progress: Callable[[], list[dict[str, object]]] = list,
        losses: Set[str] = frozenset({"loss"}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._count = count
        self._progress = progress
        self._losses = losses
        self._clock = clock
        self._next = clock() + _EVERY
        self._last: tuple[float, int, dict[str, int]] | None = None
        self._step = 0
        self._curve, self._pace = Curve(), Curve()
        # Replaced whole: the record reads it on its thread.
        self._run: dict[str, object] = {}
        record.put(run=self._facts)

    def counted(self, step: int) -> None:
        """Take the number of steps, and once a second read everything else."""
        self._step = step
        now = self._clock()
        if now >= self._next:
            self._next = now + _EVERY
            self._look(now, step)

    def _look(self, now: float, step: int) -> None:
        crossed, tables = self._count()
        totals = dict(crossed)
        run = {**self._run, "bytes": totals, "tables": {name: asdict(loads) for name, loads in tables.items()}}
        if self._last is not None:
            before, steps, bytes_before = self._last
            seconds = now - before
            run["steps_per_second"] = (step - steps) / seconds
            run["pace"] = self._add_pace((step - steps) / seconds, seconds)
            run["bytes_per_second"] = {
                name: (value - bytes_before.get(name, 0)) / seconds for name, value in totals.items()
            }
        self._last = now, step, totals
        self._run = run

    def _add_pace(self, steps_per_second: float, seconds: float) -> list[float]:
        """Add these steps to the curve of steps per second; a late sample covers all of its time."""
        for _ in range(min(_POINTS, max(1, round(seconds / _EVERY)))):
            self._pace.add(steps_per_second)
        return self._pace.points()

    def _facts(self) -> dict[str, object]:
        return {**self._run, "rank": self.rank, "steps": self._step, "progress": self._progress()}

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the loss of a step."""
        for name in self._losses & values.keys():
            self._curve.add(values[name])
            self._run = {**self._run, "loss": values[name], "curve": self._curve.points()}

    def event(self, name: str, facts: Mapping[str, object]) -> None:
        """Record the path of a checkpoint."""
        if name == "save":
            self._run = {**self._run, "saved": os.path.abspath(str(facts["path"]))}
            self._record.write()

    def close(self) -> None:
        """Leave the last facts."""
        self._record.settle(run=self._facts)
