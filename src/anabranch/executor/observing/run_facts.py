"""``RunFacts``: a worker's facts about its run, for ``anabranch status`` and the screen of ``anabranch run``.

Once a second, on the training thread: counts that the executor keeps anyway, and their rates. Rank 0 also writes the
loss, read as for any other sink, at most a few times a second.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict

from anabranch.executor.statistics import TableLoads
from anabranch.status_file import STATUS_VARIABLE, StatusFile

__all__ = ["Curve", "RunFacts"]

_EVERY = 1.0  # seconds between two reads of the counts
_POINTS = 64
_STEPS_BYTES = 8


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
    """Writes a worker's facts: a sink of its losses and a counter of its steps.

    Args:
        file: where they go.
        count: returns the bytes that crossed each boundary so far, and the loads of each table, both by name.
        clock: seconds.
    """

    def __init__(
        self,
        file: StatusFile,
        count: Callable[[], tuple[Mapping[str, int], Mapping[str, TableLoads]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._count = count
        self._clock = clock
        self._next = clock() + _EVERY
        self._last: tuple[float, int, dict[str, int]] | None = None
        self._steps = _steps_file()
        self._curve, self._pace = Curve(), Curve()
        self._loss: float | None = None
        self._saved: str | None = None
        self._run: dict[str, object] = {}
        file.put(run=self._facts)
        file.changed()

    def counted(self, step: int) -> None:
        """Write the number of steps, and once a second everything else."""
        if self._steps is not None:
            self._steps[:] = step.to_bytes(_STEPS_BYTES, "little")
        now = self._clock()
        if now >= self._next:
            self._next = now + _EVERY
            self._look(now, step)

    def _look(self, now: float, step: int) -> None:
        crossed, tables = self._count()
        totals = dict(crossed)
        self._run = {"bytes": totals, "tables": {name: asdict(loads) for name, loads in tables.items()}}
        if self._last is not None:
            before, steps, bytes_before = self._last
            seconds = now - before
            self._run["steps_per_second"] = (step - steps) / seconds
            self._run["pace"] = self._add_pace((step - steps) / seconds, seconds)
            self._run["bytes_per_second"] = {
                name: (value - bytes_before.get(name, 0)) / seconds for name, value in totals.items()
            }
        self._last = now, step, totals
        self._file.changed()

    def _add_pace(self, steps_per_second: float, seconds: float) -> list[float]:
        """Add these steps to the curve of steps per second; a late sample covers all of its time."""
        for _ in range(min(_POINTS, max(1, round(seconds / _EVERY)))):
            self._pace.add(steps_per_second)
        return self._pace.points()

    def _facts(self) -> dict[str, object]:
        return {**self._run, "loss": self._loss, "saved": self._saved, "curve": self._curve.points()}

    # The sink.

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Take the loss of a step."""
        found = [value for name, value in values.items() if name.rpartition("/")[2] == "loss"]
        if found:
            self._loss = found[0]
            self._curve.add(found[0])

    def event(self, name: str, facts: dict[str, object]) -> None:
        """Record the path of a checkpoint."""
        if name == "save":
            self._saved = os.path.abspath(str(facts["path"]))
            self._file.changed()

    def close(self) -> None:
        """Write the last facts."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._file.changed()


def _steps_file() -> mmap.mmap | None:
    """Return the mapped file that the job's launcher has named, at 0 steps; None outside a job."""
    stem = os.environ.get(STATUS_VARIABLE)
    if stem is None:
        return None
    with suppress(OSError), open(f"{stem}.steps", "wb+") as file:  # the folder may be gone: nothing reads it then
        file.write(bytes(_STEPS_BYTES))
        file.flush()
        return mmap.mmap(file.fileno(), _STEPS_BYTES)
    return None
