"""One call of an expert, counters of calls, and how far a gradient is from the output that it is the gradient of.

A backward runs the forward again from the weights that the expert has by then. Where others train it too, it may have
changed since the forward, which is normal and counted. Where this process has changed it itself, the results are not
those of a local module, which is said once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from anabranch.experts.schema import Schema

__all__ = ["CallCounts", "CallStatistics", "ExpertCall", "changed_by_us"]

_log = logging.getLogger("anabranch")

_changes_by_us: dict[tuple[str, str], int] = {}
"""How often this process has changed the expert of an endpoint and a uid: several modules may call one expert."""
_warned: set[tuple[str, str]] = set()
_ours = threading.Lock()
"""Of both: several threads may call one expert, too."""
_OWN_CHANGE = (
    "%s: an output is that of the expert after %d changes, but its gradient that of the expert after %d: %s. Give its "
    "server keep_activations=, a number of rows, and backwards use the forward's own weights and buffers; "
    "statistics().stale_backwards counts those that did not"
)
_BACK = "its server has gone back to an earlier state"
_BY_US = (
    "this process has changed it in between, by the backward of another call or a forward that writes to the expert"
)


def changed_by_us(endpoint: str, uid: str, *, again: bool) -> int:
    """Return how often this process had changed an expert; it has now changed it ``again``."""
    with _ours:
        before = _changes_by_us.get((endpoint, uid), 0)
        _changes_by_us[endpoint, uid] = before + again
        return before


class ExpertCall(msgspec.Struct, eq=False):
    """One call of an expert: its inputs and its outcome.

    Attributes:
        uid: the expert.
        endpoint: its server.
        schema: the expert's schema.
        inputs: the inputs, flat, in the schema's order; freed once sent.
        evaluating: the caller is in eval mode, so the expert runs in eval mode too.
        outputs: the answer; freed once passed on, because the graph must not hold its own outputs.
        answered: true if there was an answer.
        error: the reason for a missing answer; ``None`` without an answer means that the call was cancelled.
        gradient_error: the reason for a missing gradient.
        ticket: names the activations that the server keeps for the backward; empty if it keeps none.
        changes: how often the expert had changed before its forward, and ``changed_by_us`` by this process.
        given: names and versions of the outputs, while others hold them: they explain why a gradient was refused.
    """

    uid: str
    endpoint: str
    schema: Schema
    inputs: Sequence[Tensor | None]
    evaluating: bool = False
    outputs: list[Tensor | None] | None = None
    answered: bool = False
    error: Exception | None = None
    gradient_error: Exception | None = None
    ticket: bytes = b""
    changes: int = 0
    changed_by_us: int = 0
    rows: int = 0
    given: Sequence[tuple[str, weakref.ref[Tensor], int]] = ()

    def __post_init__(self) -> None:
        for tensor in self.inputs:
            if tensor is not None:
                self.rows = tensor.shape[0]
                return


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
        self._failed, self._rows = Counter[str](), Counter[str]()

    def __reduce__(self) -> tuple[type[CallCounts], tuple[()]]:
        return CallCounts, ()

    def read(self, avoided: frozenset[str] = frozenset()) -> CallStatistics:
        """Return the counters so far."""
        with self._lock:
            failed, rows = dict(self._failed), dict(self._rows)
            return CallStatistics(self._calls, self._answered, failed, self._cancelled, rows, self._stale, avoided)

    def forward(self, call: ExpertCall) -> None:
        """Count a call whose forward has ended."""
        with self._lock:
            self._calls += 1
            self._rows[call.uid] += call.rows
            self._answered += call.answered
            self._cancelled += not call.answered and call.error is None
        if call.error is not None:
            self.failure(call.error)

    def failure(self, error: Exception) -> None:
        """Count a call, or a backward, that failed."""
        with self._lock:
            self._failed[type(error).__name__] += 1

    def backward(self, call: ExpertCall, changes: int, *, updates: bool) -> None:
        """Count a backward whose gradients are those of the expert as it was after so many changes, and which
        ``updates`` it.
        """
        expert = call.endpoint, call.uid
        ours = changed_by_us(*expert, again=updates)
        if changes == call.changes or not call.rows:
            return
        with self._lock:
            self._stale += 1
        back = changes < call.changes
        with _ours:
            warns = (back or ours > call.changed_by_us) and expert not in _warned
            if warns:
                _warned.add(expert)
        if warns:
            _log.warning(_OWN_CHANGE, call.uid, call.changes, changes, _BACK if back else _BY_US)
