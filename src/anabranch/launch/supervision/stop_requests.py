"""Distinguishes a second request to stop from an echo of the first.

One request can arrive twice: ``timeout`` and wrappers that pass signals on send one to the launcher and one to its
process group, or one beside the terminal's own. A terminal itself sends exactly one SIGINT per key press, with the
kernel as the sender: each of those is a separate request, however fast they follow. Only signals from processes are
distinguished by time.
"""

from __future__ import annotations

import signal

__all__ = ["BURST_SECONDS", "ECHO_SECONDS", "StopRequests", "TERMINAL", "UNKNOWN"]

ECHO_SECONDS = 0.5
"""A signal that another process sends within this time of the first is its echo."""

BURST_SECONDS = 0.05
"""The same for SIGINT by one process, which passes key presses on: nobody presses twice in this time."""

TERMINAL = 0
"""The sender of what the kernel sent on its own account."""

UNKNOWN = -1


class StopRequests:
    """The signals received so far.

    >>> requests = StopRequests()
    >>> requests.is_another(signal.SIGINT, TERMINAL, 0.0), requests.is_another(signal.SIGINT, 4711, 0.1)
    (False, False)
    >>> requests.is_another(signal.SIGINT, TERMINAL, 0.1)
    True
    """

    def __init__(self) -> None:
        self._first: float | None = None
        self._last: dict[tuple[int, signal.Signals], float] = {}

    def is_another(self, number: signal.Signals, sender: int, now: float) -> bool:
        """Return True if this stopping signal is a new request, not the first one or an echo of it."""
        before = self._last.get((sender, number))
        self._last[sender, number] = now
        if self._first is None:
            self._first = now
            return False
        if number == signal.SIGINT and sender == TERMINAL:
            return True
        if number == signal.SIGINT and sender != UNKNOWN and before is not None:
            return now - before >= BURST_SECONDS
        return now - self._first >= ECHO_SECONDS
