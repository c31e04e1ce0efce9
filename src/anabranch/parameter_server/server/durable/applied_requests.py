"""``AppliedRequests``: the numbered requests that a shard has applied, by client, and the number of each one's pushes.

The requests are remembered so that a retry, after the process died before acknowledging, is answered and not applied
again; those that their client has settled, which it will never send again, go. A push is numbered among its client's
pushes on this shard, from 1, and its answer has that place; so a client whose latest place is above the shard's count
knows exactly which of its pushes are lost.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from anabranch.transport.server.once import RequestIdentity

__all__ = ["AppliedRequests"]

_CLIENTS = 1 << 16
_COUNT = struct.Struct("<16sQ")
_REQUEST = struct.Struct("<16sQQ")


@dataclass(slots=True)
class _Client:
    pushes: int = 0
    places: dict[int, int] = field(default_factory=dict)  # of the applied requests, by sequence; 0 unless pushes


class AppliedRequests:
    """The unsettled requests of each client, and the number of its pushes; the client silent longest is forgotten.

    >>> applied = AppliedRequests()
    >>> client = b"c" * 16
    >>> applied.add((client, 7), push=True), applied.add((client, 8), push=True)
    (1, 2)
    >>> applied.take_back((client, 8))
    >>> applied.pushes(client), applied.place((client, 7))
    (1, 1)
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._forgotten = False

    def add(self, identity: RequestIdentity, settled: int = 0, *, push: bool) -> int:
        """Add a request of a client that has settled those below ``settled``; returns a push's place, else 0."""
        client = self._client(identity[0])
        if min(client.places, default=settled) < settled:
            client.places = {sequence: place for sequence, place in client.places.items() if sequence >= settled}
        client.pushes += push
        client.places[identity[1]] = place = client.pushes if push else 0
        return place

    def _client(self, epoch: bytes) -> _Client:
        client = self._clients.get(epoch)
        if client is None:
            client = self._clients[epoch] = _Client()
            if len(self._clients) > _CLIENTS:
                self._clients.popitem(last=False)
                self._forgotten = True
        self._clients.move_to_end(epoch)
        return client

    def take_back(self, identity: RequestIdentity) -> None:
        """Remove the request that was added last, which was refused after all."""
        client = self._clients[identity[0]]
        client.pushes -= client.places.pop(identity[1]) > 0

    def pushes(self, epoch: bytes) -> int | None:
        """Return the number of a client's pushes that the shard holds; ``None`` if it may be forgotten."""
        client = self._clients.get(epoch)
        return client.pushes if client is not None else None if self._forgotten else 0

    def place(self, identity: RequestIdentity) -> int:
        """Return the place of an applied push; 0 if it is not remembered."""
        client = self._clients.get(identity[0])
        return 0 if client is None else client.places.get(identity[1], 0)

    def identities(self) -> Iterator[RequestIdentity]:
        """Yield the requests that are remembered."""
        for epoch, client in self._clients.items():
            for sequence in client.places:
                yield epoch, sequence

    def state(self) -> dict[str, object]:
        """Plain values for a checkpoint."""
        clients = self._clients.items()
        return {
            "pushes": b"".join(_COUNT.pack(epoch, client.pushes) for epoch, client in clients),
            "applied": b"".join(
                _REQUEST.pack(epoch, *one) for epoch, client in clients for one in client.places.items()
            ),
            "forgotten": self._forgotten,
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Load the result of ``state``."""
        self._forgotten = cast(bool, state["forgotten"])
        for epoch, pushes in _COUNT.iter_unpack(cast(bytes, state["pushes"])):
            self._client(epoch).pushes = pushes
        for epoch, sequence, place in _REQUEST.iter_unpack(cast(bytes, state["applied"])):
            self._client(epoch).places[sequence] = place
