"""Counters of a module's calls, and gradients that belong to other weights than the output whose gradient they are.

A backward runs the forward again from the weights that the expert has by then. Where others train it too, it may have
changed since the forward, which is normal and counted. Where this process has changed it itself, the results are not
those of a local module, which is said once.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.experts.client.calls import ExpertCall

__all__ = ["CallCounts", "CallStatistics", "changes_by_us"]

_log = logging.getLogger("anabranch")


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """Counters of the calls of a ``RemoteExpert`` or a mixture since it was made.

    Attributes:
        calls: calls of experts.
        answered: those that were answered.
        failed: those that failed, by the name of the error.
        cancelled: calls cancelled as stragglers.
        rows: rows sent to each expert, by uid: how evenly the experts are used.
        stale_backwards: backwards of an expert that had changed since their forward.
        avoided: experts that a mixture avoids at the moment.
    """

    calls: int
    answered: int
    failed: dict[str, int]
    cancelled: int
    rows: dict[str, int]
    stale_backwards: int
    avoided: frozenset[str] = frozenset()


class CallCounts:
    """The counters behind ``CallStatistics``; a copy of their module begins its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = self._answered = self._cancelled = self._stale = 0
        self._failed: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()

    def __reduce__(self) -> tuple[type[CallCounts], tuple[()]]:
        return CallCounts, ()

    def read(self, avoided: frozenset[str] = frozenset()) -> CallStatistics:
        """Return the counters so far."""
        with self._lock:
            return CallStatistics(
                self._calls,
                self._answered,
                dict(self._failed),
                self._cancelled,
                dict(self._rows),
                self._stale,
                avoided,
            )

    def forward(self, call: ExpertCall) -> None:
        """Count a call whose forward has ended."""
        with self._lock:
            self._calls += 1
            self._rows[call.uid] += call.rows
            if call.answered:
                self._answered += 1
            elif call.error is None:
                self._cancelled += 1
        if call.error is not None:
            self.failure(call.error)

    def failure(self, error: Exception) -> None:
        """Count a call, or a backward, that failed."""
        with self._lock:
            self._failed[type(error).__name__] += 1

    def backward(self, call: ExpertCall, changes: int) -> None:
        """Count a backward whose gradients are those of the expert as it was after so many changes."""
        ours = changes_by_us(call)
        back, by_us = changes < call.changes, ours.count > call.changed_by_us
        ours.count += 1
        if changes == call.changes or not call.rows:
            return
        with self._lock:
            self._stale += 1
        if (back or by_us) and not ours.warned:
            ours.warned = True
            _log.warning(
                "%s: an output is that of the expert after %d changes, but its gradient that of the expert after %d: "
                "%s. Give its server keep_activations=, a number of rows, and backwards use the forward's own weights "
                "and buffers; statistics().stale_backwards counts those that did not",
                call.uid,
                call.changes,
                changes,
                "its server has gone back to an earlier state"
                if back
                else "this process has changed it in between, by the backward of another call or by a forward that "
                "writes to the expert",
            )


@dataclass(slots=True)
class _ChangesByUs:
    """How often this process has changed an expert, and whether it has been warned of that."""

    count: int = 0
    warned: bool = False


# Of the process: several modules may call one expert.
_changes_by_us: dict[tuple[str, str], _ChangesByUs] = {}


def changes_by_us(call: ExpertCall) -> _ChangesByUs:
    """Return how often this process has changed the expert of ``call``."""
    return _changes_by_us.setdefault((call.endpoint, call.uid), _ChangesByUs())
