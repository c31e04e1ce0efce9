"""Time as a value: a ``Deadline`` is made once, at the public call, and passed down to every wait under it."""

from __future__ import annotations

import time
from collections.abc import Callable
from numbers import Real
from threading import TIMEOUT_MAX

from anabranch.errors import DeadlineExceeded

LONGEST_SLEEP = 1.0
"""Seconds that a thread which may be the main one sleeps at a time: a signal that comes in the moment before it falls
asleep wakes nobody, so Ctrl-C would take effect only at the end of the sleep."""

_FOREVER = float("inf")
_LONGEST = 1e9  # seconds; threads can wait longer, peers are not asked to


def check_seconds(**given: float) -> None:
    """Raise for an argument that is not a length of time to wait for.

    >>> check_seconds(timeout=30.0, heartbeat=0)
    Traceback (most recent call last):
    ValueError: heartbeat is a finite number of seconds above 0, got 0

    >>> check_seconds(checkpoint_seconds=1e10)
    Traceback (most recent call last):
    ValueError: checkpoint_seconds is at most 1e+09 seconds, the longest possible wait, got 10000000000.0

    Raises:
        TypeError, ValueError: names the argument and its value.
    """
    for name, seconds in given.items():
        if isinstance(seconds, bool) or not isinstance(seconds, Real):
            raise TypeError(f"{name} is a number of seconds, got {seconds!r}")
        if not 0 < seconds < _FOREVER:
            raise ValueError(f"{name} is a finite number of seconds above 0, got {seconds!r}")
        if seconds > _LONGEST:
            raise ValueError(f"{name} is at most {_LONGEST:g} seconds, the longest possible wait, got {seconds!r}")


def minutes_and_seconds(seconds: float) -> str:
    """Return a length of time as people read it, with hours where there are any.

    >>> minutes_and_seconds(75), minutes_and_seconds(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Deadline:
    """The moment after which a wait ends with an error that names the missing peer.

    >>> deadline = Deadline.after(30.0)
    >>> deadline.remaining() <= 30.0
    True
    >>> deadline.check(peer="rank 1", operation="all_reduce")

    Args:
        seconds: how long from now; must be a finite number > 0.
        clock: seconds that never run backwards; a test passes a fake one.

    Raises:
        ValueError: ``seconds`` is not a finite number above 0, or longer than Python can wait.
    """

    __slots__ = ("_clock", "_expires", "_started")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < seconds <= TIMEOUT_MAX:
            raise ValueError(f"a deadline is above 0 and at most {TIMEOUT_MAX:.0f} seconds from now, got {seconds!r}")
        self._clock = clock
        self._started = clock()
        self._expires = self._started + seconds

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        return cls(seconds, clock)

    def remaining(self) -> float:
        """Seconds left, never below 0."""
        left = self._expires - self._clock()
        return max(0.0, left)

    def elapsed(self) -> float:
        """Seconds since the deadline was made."""
        return self._clock() - self._started

    def expired(self) -> bool:
        """Return True if the moment has passed."""
        return self._clock() >= self._expires

    def __lt__(self, other: Deadline) -> bool:
        """Return True if this moment comes first; of two deadlines by one clock."""
        return self._expires < other._expires

    def sooner(self, seconds: float) -> Deadline:
        """Return this deadline or ``seconds`` from now, whichever comes first; ``elapsed`` counts on from this one's
        start.
        """
        nearer = Deadline(seconds, self._clock)
        nearer._expires = min(nearer._expires, self._expires)
        nearer._started = self._started
        return nearer

    def check(self, *, peer: str, operation: str, step: int | None = None) -> None:
        """Raise ``DeadlineExceeded`` naming ``peer`` and ``operation`` if the moment has passed."""
        if self.expired():
            raise self.error(peer=peer, operation=operation, step=step)

    def error(self, *, peer: str, operation: str, step: int | None = None, why: str = "") -> DeadlineExceeded:
        """Return the error to raise when the wait for ``peer`` has ended without an answer, and why, where that is
        known.
        """
        message = f"no answer before the deadline: {why}" if why else "no answer before the deadline"
        return DeadlineExceeded(message, peer=peer, operation=operation, step=step, elapsed=self.elapsed())
