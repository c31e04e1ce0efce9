"""A clock that stands still until a test moves it, for whatever takes ``clock=``."""

from __future__ import annotations

import threading

__all__ = ["FakeClock"]


class FakeClock:
    """Seconds that pass when they are told to.

    >>> from anabranch.transport import Deadline
    >>> clock = FakeClock()
    >>> deadline = Deadline.after(30.0, clock)
    >>> clock.advance(30.0)
    >>> deadline.expired()
    True

    Args:
        start: what it shows at first.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Lets time pass.

        Raises:
            ValueError: ``seconds`` is below 0; no clock here runs backwards.
        """
        if seconds < 0:
            raise ValueError(f"time only moves forward, got {seconds!r} seconds")
        with self._lock:
            self._now += seconds
