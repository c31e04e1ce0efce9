"""A clock that only a test advances, for objects that accept ``clock=``."""

from __future__ import annotations

import threading


class FakeClock:
    """A clock that is advanced by hand.

    >>> from anabranch.transport import Deadline
    >>> clock = FakeClock()
    >>> deadline = Deadline.after(30.0, clock)
    >>> clock.advance(30.0)
    >>> deadline.expired()
    True

    Args:
        start: its first value.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: ``seconds`` is below 0; no clock here runs backwards.
        """
        if seconds < 0:
            raise ValueError(f"time only moves forward, got {seconds!r} seconds")
        with self._lock:
            self._now += seconds
