"""``bounded``: a call into third-party code that may hang, abandoned after a time without progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from anabranch.deadline import LONGEST_SLEEP

__all__ = ["NoProgress", "StoragePatience", "bounded"]

_T = TypeVar("_T")
# Bytes a second below which a connection counts as dead, and the most bytes between two reports of progress.
_SLOWEST = 1 << 20
_LONGEST_STRIDE = 1 << 30


class NoProgress(Exception):
    """A call was abandoned; it may still be running, on a thread that is no longer waited for."""


class StoragePatience:
    """The time of a call: some seconds, and those of ``size`` bytes on a slow connection; again at each progress.

    Args:
        seconds: for a call that moves nothing.
        size: bytes that it moves.
        clock: seconds.
    """

    def __init__(self, seconds: float, size: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._size = size
        self._clock = clock
        self._since = clock()

    @property
    def seconds(self) -> float:
        """Seconds without progress that are allowed."""
        return self._seconds + self._size / _SLOWEST

    def moved(self) -> None:
        """Record progress; it must be reported regularly."""
        self._since = self._clock()
        self._size = min(self._size, _LONGEST_STRIDE)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._since + self.seconds - self._clock()


class _Outcome(Generic[_T]):
    value: _T
    error: BaseException | None = None


def bounded(call: Callable[[], _T], patience: StoragePatience) -> _T:
    """Return the result of ``call``, or raise its exception.

    >>> bounded(lambda: 3, StoragePatience(60.0))
    3

    Raises:
        NoProgress: it took longer than ``patience`` allows.
    """
    outcome: _Outcome[_T] = _Outcome()
    ended = threading.Event()

    def run() -> None:
        try:
            outcome.value = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.error = error
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="anabranch-storage", daemon=True)
    thread.start()
    while not ended.wait(min(LONGEST_SLEEP, max(patience.left(), 0.0))):
        if patience.left() <= 0:
            raise NoProgress(f"no answer for {patience.seconds:.0f} s")
    thread.join(LONGEST_SLEEP)
    if outcome.error is not None:
        try:
            raise outcome.error
        finally:
            outcome.error = None  # its traceback holds this frame
    return outcome.value
