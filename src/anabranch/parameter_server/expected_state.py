"""``ExpectedState``, in every request: the shard that a client expects at an endpoint, and the pushes it expects there.

The shard compares. A server that is another shard refuses the request, so endpoints in the wrong order split no table.
One that holds fewer pushes was restarted without changes that it had acknowledged, and raises ``RolledBack``.
"""

from __future__ import annotations

import struct
from bisect import insort
from dataclasses import dataclass

__all__ = ["AcknowledgedPushes", "ExpectedState"]

_FORM = struct.Struct("<16sQQII")


@dataclass(frozen=True, slots=True)
class ExpectedState:
    """The facts about the client in one request.

    Attributes:
        epoch: the client's.
        pushes: the highest place in any answer.
        life: the shard's, for clients that must learn of any loss; else 0.
        shard, shards: the index of the server's endpoint in the client's list, and the length of the list; 0 shards if
            the client does not send them.
    """

    epoch: bytes
    pushes: int = 0
    life: int = 0
    shard: int = 0
    shards: int = 0

    def encode(self) -> bytes:
        """Return the state as 40 bytes."""
        return _FORM.pack(self.epoch, self.pushes, self.life, self.shard, self.shards)

    @classmethod
    def decode(cls, memory: bytes) -> ExpectedState | None:
        """Decode the bytes of ``encode``; ``None`` for a request without one."""
        return cls(*_FORM.unpack(memory)) if len(memory) == _FORM.size else None


class AcknowledgedPushes:
    """The places of one client's pushes that one shard has acknowledged.

    Attributes:
        newest: the highest place; 0 without any.
        life: the shard's, which the client expects; 0 for any.

    >>> pushes = AcknowledgedPushes()
    >>> for place in (1, 2, 4, 5):  # nobody ever heard of the third
    ...     pushes.add(place)
    >>> pushes.newest, pushes.cut(2), pushes.newest
    (5, 2, 2)
    """

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []  # first and last place, ascending
        self.newest = 0
        self.life = 0

    def add(self, place: int) -> None:
        """Record ``place``, from an answer."""
        self.newest = max(self.newest, place)
        if self._runs and self._runs[-1][1] == place - 1:
            self._runs[-1] = (self._runs[-1][0], place)
        elif place > 0 and not any(first <= place <= last for first, last in self._runs):
            insort(self._runs, (place, place))
            at = self._runs.index((place, place))
            for left in (at, at - 1):  # answers that arrived in another order than the pushes
                if 0 <= left < len(self._runs) - 1 and self._runs[left][1] + 1 == self._runs[left + 1][0]:
                    self._runs[left : left + 2] = [(self._runs[left][0], self._runs[left + 1][1])]

    def cut(self, holds: int) -> int:
        """Remove the places above ``holds``; returns their number."""
        lost = sum(last - max(first - 1, holds) for first, last in self._runs if last > holds)
        self._runs = [(first, min(last, holds)) for first, last in self._runs if first <= holds]
        self.newest = self._runs[-1][1] if self._runs else 0
        return lost
