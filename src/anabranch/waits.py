"""Waits of this process for others that last longer than half a second: for whom, for what, and since when.

Loops that wait ``begin`` a record once they have waited so long, and ``end`` it when the wait is over, however it ends.
A wait that is shorter costs them a look at a clock at most. ``anabranch status`` and ``/metrics`` read the records.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from anabranch.status_file import status_file

__all__ = ["LONG", "Wait", "begin", "current", "end"]

LONG = 0.5
"""Seconds after which a wait is recorded."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that still lasts.

    Attributes:
        peers: what it waits for: ``"rank 1"``, or the endpoint of a service.
        operation: what it does meanwhile: ``"all_reduce"``, ``"pull"``.
        since: ``time.monotonic()`` when it began, which is the same clock in every process of this machine.
        limit: seconds after its beginning at which it is given up; ``None`` if that is not known.
    """

    peers: tuple[str, ...]
    operation: str
    since: float
    limit: float | None = None

    def seconds(self) -> float:
        """Return how long it has lasted."""
        return time.monotonic() - self.since


# Each change is one operation on a dict, which needs no lock.
_waits: dict[int, Wait] = {}
_numbers = itertools.count()


def begin(peers: Sequence[str], operation: str, since: float, limit: float | None = None) -> int:
    """Record a wait, and return its number for ``end``.

    >>> number = begin(["rank 1"], "all_reduce", since=time.monotonic() - 2)
    >>> [(wait.peers, wait.operation, round(wait.seconds())) for wait in current()]
    [(('rank 1',), 'all_reduce', 2)]
    >>> end(number)
    >>> current()
    ()
    """
    number = next(_numbers)
    _waits[number] = Wait(tuple(peers), operation, since, limit)
    _changed()
    return number


def end(number: int | None) -> None:
    """Forget a wait that is over; ``None`` is one that was too short to be recorded."""
    if number is not None:
        _waits.pop(number, None)
        _changed()


def current() -> tuple[Wait, ...]:
    """Return the waits of all threads of this process, the longest first."""
    return tuple(sorted(_waits.copy().values(), key=lambda wait: wait.since))


def _changed() -> None:
    file = status_file()
    if file is not None:
        file.put(waits=lambda: [asdict(wait) for wait in current()])
        file.changed()
