"""The order in which the tasks of several callers run: by priority, then each caller in turn, row by row.

A task gets a start in a virtual time: the current one, or the end of its caller's earlier tasks if that is later. The
time advances to the start of the running task. So a caller with a thousand waiting rows and one with a single row are
served alternately, and callers that never wait for their own earlier tasks are served in the order of arrival. A task
without a caller starts at the current time.

Source: start-time fair queueing (Goyal, Vin and Cheng, 1996).
"""

from __future__ import annotations

__all__ = ["FairOrder"]

# Number of callers above which those without waiting tasks are forgotten.
_MANY = 1024


class FairOrder:
    """The virtual time of one device, and how far ahead of it each caller's tasks reach.

    >>> order = FairOrder()
    >>> order.start("many", 5), order.start("many", 5), order.start("one", 1)
    (0.0, 5.0, 0.0)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: dict[str, float] = {}

    def start(self, caller: str, rows: int) -> float:
        """Return the start of a new task of ``caller``, whose length is its number of rows."""
        if not caller:
            return self.now
        start = max(self.now, self._ends.get(caller, 0.0))
        self._ends[caller] = start + rows
        if len(self._ends) > _MANY:
            self._ends = {name: end for name, end in self._ends.items() if end > self.now}
        return start

    def serve(self, start: float) -> None:
        """Advance to the start of a task that runs now."""
        self.now = max(self.now, start)

    def forget(self) -> None:
        """Forget the rows served to each caller: nothing waits, so no caller has been skipped."""
        self.now = 0.0
        self._ends.clear()
