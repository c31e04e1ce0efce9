"""``Acknowledged``: the numbered requests that a shard has done, by client, and the number of pushes it holds of each.

The requests are remembered so that a retry after the process died with the acknowledgement is answered, not done
again. A push has its place among its client's pushes on this shard, from 1, which its answer carries; so a client
whose latest place is above the shard's count knows exactly which of its pushes are lost.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from anabranch.transport.once import Identity

__all__ = ["Acknowledged"]

_REMEMBERED = 1024  # requests a client; it has a handful outstanding at a time
_CLIENTS = 4096


@dataclass(slots=True)
class _Client:
    pushes: int = 0
    done: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # sequence, place


class Acknowledged:
    """The last requests done for each client, and the number of its pushes; the client silent longest is forgotten.

    >>> done = Acknowledged()
    >>> client = b"c" * 16
    >>> done.add((client, 7), push=True), done.add((client, 8), push=True)
    (1, 2)
    >>> done.take_back((client, 8))
    >>> done.pushes(client), done.place((client, 7))
    (1, 1)
    """

    def __init__(self) -> None:
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._forgotten = 0

    def add(self, identity: Identity, *, push: bool) -> int:
        """Count a request; returns a push's place among its client's, 0 for others."""
        epoch, sequence = identity
        client = self._clients.get(epoch)
        if client is None:
            client = self._clients[epoch] = _Client()
            if len(self._clients) > _CLIENTS:
                self._clients.popitem(last=False)
                self._forgotten += 1
        self._clients.move_to_end(epoch)
        client.pushes += push
        client.done.append((sequence, client.pushes if push else 0))
        return client.pushes if push else 0

    def take_back(self, identity: Identity) -> None:
        """Forgets the request that was counted last, which was refused after all."""
        client = self._clients[identity[0]]
        sequence, place = client.done.pop()
        assert sequence == identity[1]
        client.pushes -= place > 0

    def pushes(self, epoch: bytes) -> int | None:
        """Return the number of a client's pushes that the shard holds; ``None`` if it may have been forgotten."""
        client = self._clients.get(epoch)
        if client is None:
            return None if self._forgotten else 0
        return client.pushes

    def place(self, identity: Identity) -> int:
        """Return the place of a push that was done; 0 if it is not remembered."""
        client = self._clients.get(identity[0])
        done = [] if client is None else list(client.done)
        return next((place for sequence, place in reversed(done) if sequence == identity[1]), 0)

    def identities(self) -> Iterator[Identity]:
        """Yield the requests that are remembered."""
        for epoch, client in self._clients.items():
            for sequence, _ in client.done:
                yield epoch, sequence

    def state(self) -> dict[str, object]:
        """Plain values for a checkpoint."""
        return {
            "done": {epoch: [sequence for sequence, _ in client.done] for epoch, client in self._clients.items()},
            "places": {epoch: [place for _, place in client.done] for epoch, client in self._clients.items()},
            "pushes": {epoch: client.pushes for epoch, client in self._clients.items()},
            "forgotten": self._forgotten,
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Load what ``state`` gave; an old checkpoint has no places, and no counts of pushes."""
        done = cast(Mapping[bytes, Sequence[int]], state["done"])
        places = cast(Mapping[bytes, Sequence[int]], state.get("places", {}))
        pushes = cast(Mapping[bytes, int], state.get("pushes", {}))
        self._forgotten = cast(int, state.get("forgotten", 0))
        for epoch, sequences in done.items():
            pairs = zip(sequences, places.get(epoch, [0] * len(sequences)), strict=True)
            self._clients[epoch] = _Client(pushes.get(epoch, 0), deque(pairs, _REMEMBERED))
