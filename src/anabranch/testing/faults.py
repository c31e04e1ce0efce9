"""Faults at named places: the nth time the program passes a fault point, something goes wrong there.

The places are the calls of ``fault_point`` in the package, see ``record/spans.py``: between two writes of a
checkpoint, before an answer leaves. What goes wrong is an exception, the process's death, or anything that a test does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anabranch.record.spans import on_fault_point

__all__ = ["Fault", "FaultInjected", "at", "kill", "stop"]


class FaultInjected(Exception):
    """Raised by ``at`` unless another error is given."""


class Fault:
    """One fault, and how often its place was passed; made by ``at``."""

    def __init__(self, name: str, nth: int, action: Callable[[], None] | None) -> None:
        self.name = name
        self.nth = nth
        self.passed = 0
        self._action = action
        self._lock = threading.Lock()

    @property
    def struck(self) -> bool:
        """True if the fault has happened."""
        return self.passed >= self.nth

    def _pass(self, name: str) -> None:
        if name != self.name:
            return
        with self._lock:
            self.passed += 1
            strikes = self.passed == self.nth
        if strikes:
            if self._action is None:
                raise FaultInjected(f"fault injected at {name}, passage {self.nth}")
            self._action()


@contextmanager
def at(name: str, nth: int = 1, action: Callable[[], None] | None = None) -> Iterator[Fault]:
    """Make the ``nth`` passage of the fault point ``name`` go wrong, once, while the block runs.

    >>> from anabranch.record.spans import fault_point
    >>> with at("save.before_rename", nth=2) as fault:
    ...     fault_point("save.before_rename")
    ...     try:
    ...         fault_point("save.before_rename")
    ...     except FaultInjected as error:
    ...         print(error)
    fault injected at save.before_rename, passage 2
    >>> fault.struck
    True

    Args:
        name: the fault point.
        nth: which passage, from 1, counted over all threads.
        action: what happens there instead of ``FaultInjected``: ``kill``, ``stop``, or a test's own.

    Raises:
        ValueError: ``nth`` is below 1.
        RuntimeError: another fault is set; one at a time.
    """
    if nth < 1:
        raise ValueError(f"passages are counted from 1, got nth={nth!r}")
    fault = Fault(name, nth, action)
    with on_fault_point(fault._pass):
        yield fault


def kill() -> None:
    """End this process at once, as a power cut would: nothing is flushed, nothing is closed."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Freezes this process until it gets SIGCONT: alive for the kernel, dead for its peers."""
    os.kill(os.getpid(), signal.SIGSTOP)
