"""The table of requests already executed, so that a retry is not executed again.

A client numbers the requests that must happen exactly once (its epoch, and a sequence that never repeats) and sends
with each one the number below which it will never retry. The table keeps those above: requests being served, to which a
retry is joined, and past answers, which a retry gets again.

Answers are kept within a budget of bytes, and the newest however large it is; of others only the fact that the request
was executed is kept, and the verb's own ``again`` answers the retry.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from anabranch.errors import ProtocolError

RequestIdentity = tuple[bytes, int]
"""A request's name for ever: the epoch of its client, and its sequence."""


_Call = TypeVar("_Call")


@dataclass(slots=True)
class _Epoch(Generic[_Call]):
    """One client: requests below ``settled`` will never be retried."""

    settled: int = 0
    running: dict[int, _Call] = field(default_factory=dict)
    done: dict[int, Sequence[memoryview] | None] = field(default_factory=dict)


class OnceTable(Generic[_Call]):
    """The requests of all clients that were or are being executed.

    Args:
        budget_bytes: bytes of answers kept for retries; the newest is kept in any case.
        epochs: clients remembered; beyond it the client silent longest is forgotten.
    """

    def __init__(self, budget_bytes: int = 64 << 20, epochs: int = 4096) -> None:
        self.lock = threading.RLock()
        self._budget = budget_bytes
        self._most_epochs = epochs
        self._epochs: OrderedDict[bytes, _Epoch[_Call]] = OrderedDict()
        self._kept: OrderedDict[RequestIdentity, int] = OrderedDict()
        self._kept_bytes = 0

    def begin(self, identity: RequestIdentity, call: _Call, settled: int) -> _Call | Sequence[memoryview] | None:
        """Classify a request: return the call itself if it is new, the call it joins, or its old answer.

        ``None`` means that it was executed and its answer is not kept.

        Raises:
            ProtocolError: the client had declared that it would never retry this.
        """
        sequence = identity[1]
        with self.lock:
            epoch = self._epoch(identity[0])
            if settled > epoch.settled:
                self._settle_below(identity[0], epoch, settled)
            if sequence < epoch.settled:
                raise ProtocolError(f"request {sequence} is settled: this client promised not to send it again")
            if sequence in epoch.done:
                return epoch.done[sequence]
            if sequence in epoch.running:
                return epoch.running[sequence]
            epoch.running[sequence] = call
            return call

    def finish(self, identity: RequestIdentity, answer: Sequence[memoryview]) -> None:
        """Record that the request was executed and answered."""
        key, sequence = identity
        with self.lock:
            epoch = self._epochs.get(key)
            if epoch is None or epoch.running.pop(sequence, None) is None or sequence < epoch.settled:
                return
            epoch.done[sequence] = answer
            nbytes = sum(map(len, answer))
            self._kept[identity] = nbytes
            self._kept_bytes += nbytes
            while self._kept_bytes > self._budget and len(self._kept) > 1:
                oldest, freed = self._kept.popitem(last=False)
                self._kept_bytes -= freed
                self._epochs[oldest[0]].done[oldest[1]] = None

    def abandon(self, identity: RequestIdentity) -> None:
        """Record that the request was not executed: a retry will execute it."""
        with self.lock:
            epoch = self._epochs.get(identity[0])
            if epoch is not None:
                epoch.running.pop(identity[1], None)

    def restore(self, identities: Iterable[RequestIdentity]) -> None:
        """Record requests that were executed before this server started."""
        with self.lock:
            for key, sequence in identities:
                self._epoch(key).done.setdefault(sequence, None)

    def _epoch(self, key: bytes) -> _Epoch[_Call]:
        epoch = self._epochs.get(key)
        if epoch is None:
            epoch = self._epochs[key] = _Epoch()
            self._forget_silent()
        self._epochs.move_to_end(key)
        return epoch

    def _forget_silent(self) -> None:
        surplus = len(self._epochs) - self._most_epochs
        if surplus > 0:
            for key in [key for key, epoch in self._epochs.items() if not epoch.running][:surplus]:
                self._settle_below(key, self._epochs.pop(key), 1 << 63)

    def _settle_below(self, key: bytes, epoch: _Epoch[_Call], settled: int) -> None:
        gone: Iterable[int] = range(epoch.settled, settled)
        if settled - epoch.settled > len(epoch.done):
            gone = list(epoch.done)
        epoch.settled = settled
        for sequence in gone:
            if sequence < settled and sequence in epoch.done:
                del epoch.done[sequence]
                self._kept_bytes -= self._kept.pop((key, sequence), 0)
