"""``Acknowledged``: the numbered requests that a shard has applied, by client, and the number of each one's pushes.

The requests are remembered so that a retry, after the process died before acknowledging, is answered and not applied
again. A push is numbered among its client's pushes on this shard, from 1, and its answer has that place; so a client
whose latest place is above the shard's count knows exactly which of its pushes are lost.

Requests are remembered of the last 4,096 clients, counts of the last 262,144 that have pushed. A client beyond that
sends the number of its acknowledged pushes with its next request. As long as the shard has lost nothing since it first
forgot a client, it holds all of them, and continues from that number (``adopt``). Afterwards the number is unknown, and
the shard reports that.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from anabranch.transport.server.once import RequestIdentity

__all__ = ["Acknowledged"]

_REMEMBERED = 1024  # requests a client; it has a handful outstanding at a time
_CLIENTS = 4096
_COUNTED = 1 << 18
_COUNT = struct.Struct("<16sQ")
_MOST = (1 << 62) - 1

_Done = deque[tuple[int, int]]  # sequence, place


class Acknowledged:
    """The last requests of each client, and the number of its pushes; the client silent longest is forgotten.

    >>> done = Acknowledged()
    >>> client = b"c" * 16
    >>> done.add((client, 7), push=True), done.add((client, 8), push=True)
    (1, 2)
    >>> done.take_back((client, 8))
    >>> done.pushes(client), done.place((client, 7))
    (1, 1)
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[bytes, _Done] = OrderedDict()
        self._pushes: OrderedDict[bytes, int] = OrderedDict()
        self._forgotten = 0
        self._uncounted = 0
        self._doubtful = False

    @property
    def doubtful(self) -> bool:
        """True if pushes of clients whose counts are forgotten may be lost."""
        return self._doubtful

    def add(self, identity: RequestIdentity, *, push: bool) -> int:
        """Count a request; returns a push's place among its client's, 0 for others."""
        epoch, sequence = identity
        done = self._clients.get(epoch)
        if done is None:
            done = self._clients[epoch] = deque(maxlen=_REMEMBERED)
            if len(self._clients) > _CLIENTS:
                self._clients.popitem(last=False)
                self._forgotten += 1
        self._clients.move_to_end(epoch)
        place = 0
        if push:
            place = self._pushes.get(epoch, 0) + 1
            self._count(epoch, place)
        done.append((sequence, place))
        return place

    def take_back(self, identity: RequestIdentity) -> None:
        """Forget the request that was counted last, which was refused after all."""
        sequence, place = self._clients[identity[0]].pop()
        assert sequence == identity[1]
        if place:
            self._pushes[identity[0]] = place - 1

    def adopt(self, epoch: bytes, pushes: int) -> None:
        """Adopt a client's own count of pushes that the shard holds but whose number it has forgotten."""
        self._count(epoch, max(min(pushes, _MOST), self._pushes.get(epoch, 0)))

    def note_loss(self) -> None:
        """Record that the shard was restored with less than it had acknowledged."""
        self._doubtful = self._uncounted > 0

    def _count(self, epoch: bytes, pushes: int) -> None:
        self._pushes[epoch] = pushes
        self._pushes.move_to_end(epoch)
        if len(self._pushes) > _COUNTED:
            self._pushes.popitem(last=False)
            self._uncounted += 1

    def pushes(self, epoch: bytes) -> int | None:
        """Return the number of a client's pushes that the shard holds; ``None`` if it may have been forgotten."""
        known = self._pushes.get(epoch)
        return (None if self._uncounted else 0) if known is None else known

    def place(self, identity: RequestIdentity) -> int:
        """Return the place of an applied push; 0 if it is not remembered."""
        done = list(self._clients.get(identity[0], ()))
        return next((place for sequence, place in reversed(done) if sequence == identity[1]), 0)

    def identities(self) -> Iterator[RequestIdentity]:
        """Yield the requests that are remembered."""
        for epoch, done in self._clients.items():
            for sequence, _ in done:
                yield epoch, sequence

    def state(self) -> dict[str, object]:
        """Plain values for a checkpoint."""
        return {
            "done": {epoch: [sequence for sequence, _ in done] for epoch, done in self._clients.items()},
            "places": {epoch: [place for _, place in done] for epoch, done in self._clients.items()},
            "forgotten": self._forgotten,
            "counts": b"".join(_COUNT.pack(epoch, pushes) for epoch, pushes in self._pushes.items()),
            "uncounted": self._uncounted,
            "doubtful": self._doubtful,
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Load the result of ``state``."""
        places = cast(Mapping[bytes, Sequence[int]], state["places"])
        self._forgotten = cast(int, state["forgotten"])
        for epoch, sequences in cast(Mapping[bytes, Sequence[int]], state["done"]).items():
            self._clients[epoch] = deque(zip(sequences, places[epoch], strict=True), _REMEMBERED)
        self._pushes.update(_COUNT.iter_unpack(cast(bytes, state["counts"])))
        self._uncounted = cast(int, state["uncounted"])
        self._doubtful = cast(bool, state["doubtful"])
