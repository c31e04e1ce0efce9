"""Waits of this process that last longer than half a second: the peer, the operation, and since when.

Waiting loops ``begin`` a record after that time, and ``end`` it when the wait ends, in whatever way. A shorter wait
costs at most one read of the clock. ``anabranch status`` and ``/metrics`` read the records.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from anabranch.status_file import status_file

__all__ = ["LONG", "Wait", "begin", "current", "end", "in_words"]

LONG = 0.5
"""Seconds after which a wait is recorded."""

_RECEIVING = re.compile(r"R([FB])\d+\.(\d+)<\d+$")
_WORDS = {"life": "its first answer", "norm": "norm of the gradients", "release": "update"}


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait that still lasts.

    Attributes:
        peers: the processes it waits for: ``"rank 1"``, or the endpoint of a service.
        operation: the waiting operation: ``"all_reduce"``, ``"pull"``.
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

    >>> number = begin(["rank 1"], "all_reduce", since=time.monotonic() - 200)
    >>> [(wait.peers, wait.operation, round(wait.seconds(), -2)) for wait in current()]
    [(('rank 1',), 'all_reduce', 200.0)]
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


def in_words(operation: str) -> str:
    """Return an operation as people say it: those of stages and servers are short for messages.

    >>> in_words("pipeline step RB0.3<1"), in_words("life"), in_words("pull")
    ('pipeline step: gradients of microbatch 3', 'its first answer', 'pull')
    """
    what = _RECEIVING.search(operation)
    if what is None:
        return _WORDS.get(operation, operation)
    words = f"{'gradients' if what[1] == 'B' else 'activations'} of microbatch {what[2]}"
    before = operation[: what.start()].strip()
    return f"{before}: {words}" if before else words


def _changed() -> None:
    file = status_file()
    if file is not None:
        file.put(waits=lambda: [asdict(wait) for wait in current()])
        file.changed()
