"""Tasks that wait for a batch, in groups of those that may share one, each group in the order in which it is to run.

Tasks may share a batch if they agree in mode and in the sizes that cannot be padded. The first task of a group is the
one of the highest priority, then the one whose caller's turn it is, then the oldest. Most pools have one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from heapq import heapify, heappop, heappush
from itertools import count

from anabranch.experts.server.batching.fair_order import FairOrder
from anabranch.experts.server.batching.task import Task

__all__ = ["Choice", "LEAST_URGENT", "Urgency", "WaitingTasks"]

Urgency = tuple[int, float, float, int]
"""Less is more urgent: the negated priority, the start in virtual time, the arrival, a running number."""

LEAST_URGENT: Urgency = (2**62, float("inf"), float("inf"), 0)


class Choice(Enum):
    """A decision about a waiting task while a batch is formed."""

    TAKE = auto()
    LEAVE = auto()
    STOP = auto()


class _Group:
    __slots__ = ("heap", "rows")

    def __init__(self) -> None:
        self.heap: list[tuple[Urgency, Task]] = []
        self.rows = 0

    def oldest(self) -> float:
        return min(task.arrived for _, task in self.heap)


class WaitingTasks:
    """The waiting tasks of one pool; its users hold the pool's lock."""

    def __init__(self) -> None:
        self.rows = 0
        self.nbytes = 0
        self._groups: dict[object, _Group] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return sum(len(group.heap) for group in self._groups.values())

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[Task]:
        for group in self._groups.values():
            for _, task in sorted(group.heap, key=lambda entry: entry[0]):
                yield task

    def add(self, task: Task, order: FairOrder) -> None:
        """Queue a task."""
        group = self._groups.get(task.group)
        if group is None:
            group = self._groups[task.group] = _Group()
        start = order.start(task.caller, task.rows)
        heappush(group.heap, ((-task.priority, start, task.arrived, next(self._numbers)), task))
        group.rows += task.rows
        self.rows += task.rows
        self.nbytes += task.nbytes

    def clear(self) -> list[Task]:
        """Take all tasks."""
        left = list(self)
        self._groups.clear()
        self.rows = self.nbytes = 0
        return left

    def due_at(self, least: int, timeout: float | None) -> float:
        """Return the ``time.monotonic`` moment at which a batch is due: of ``least`` rows, or of the oldest task once
        it has waited for ``timeout`` seconds.
        """
        if not self._groups:
            return float("inf")
        if least <= 1:
            return 0.0
        if self.rows >= least and any(group.rows >= least for group in self._groups.values()):
            return 0.0
        return float("inf") if timeout is None else self.oldest() + timeout

    def oldest(self) -> float:
        """Return the arrival of the oldest task; infinity if none waits."""
        return min((group.oldest() for group in self._groups.values()), default=float("inf"))

    def first(self, least: int = 0, late: float = float("inf")) -> tuple[object, Urgency, int]:
        """Return the group to run next, its first task's urgency, and its rows.

        Args:
            least: rows that a group needs to run.
            late: groups with a task that arrived before this moment run with fewer.
        """
        if len(self._groups) == 1:
            for key, group in self._groups.items():
                return key, group.heap[0][0], group.rows
        found: tuple[object, Urgency, int] = (None, LEAST_URGENT, 0)
        for key, group in self._groups.items():
            if group.heap[0][0] < found[1] and (group.rows >= least or group.oldest() <= late):
                found = key, group.heap[0][0], group.rows
        return found

    def take(self, key: object, choose: Callable[[Task], Choice]) -> None:
        """Take the tasks of a group that ``choose`` accepts; it is called in order."""
        group = self._groups[key]
        left: list[tuple[Urgency, Task]] = []
        while group.heap:
            choice = choose(group.heap[0][1])
            if choice is Choice.STOP:
                break
            urgency, task = heappop(group.heap)
            if choice is Choice.LEAVE:
                left.append((urgency, task))
                continue
            group.rows -= task.rows
            self.rows -= task.rows
            self.nbytes -= task.nbytes
        if left:
            group.heap += left
            heapify(group.heap)
        if not group.heap:
            del self._groups[key]
