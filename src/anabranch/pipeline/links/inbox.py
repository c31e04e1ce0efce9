"""Messages that have arrived from the other ranks in the current turn, over any kind of link."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from torch import Tensor

from anabranch.pipeline.links.exchange import Message
from anabranch.pipeline.links.packet_codec import Facts, Header, PacketFault, unpack
from anabranch.pipeline.schedule.actions import Kind
from anabranch.pipeline.stage.packet import Gradients

__all__ = ["Channel", "Inbox"]


class Inbox:
    """Receives messages from any thread; those of an earlier turn are dropped, but its ends are counted.

    Attributes:
        faulted: the peers whose fault in some turn has arrived.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.changed = threading.Condition()
        self.owed = dict.fromkeys(peers, 0)
        self.closed = False
        self.lost: dict[int, str] = {}
        self.faulted: set[int] = set()
        self._turn = 0
        self.begin(0, "")

    def begin(self, turn: int, operation: str) -> None:
        """Discard the previous turn; one more end is due from each peer."""
        with self.changed:
            self._turn = turn
            self._operation = operation
            self.other_operation: tuple[int, str] | None = None
            self.data: dict[tuple[str, int, int, int], Message] = {}
            self.shares: dict[tuple[int, int], Tensor | None] = {}
            self.spread: dict[int, Message] = {}
            self.bodies: dict[int, object] = {}
            self.facts: Facts | None = None
            self.ended: set[int] = set()
            self.fault: PacketFault | None = None
            for peer in self.owed:
                self.owed[peer] += turn > 0
            self.changed.notify_all()

    def deliver(self, peer: int, header: Header, tensors: list[Tensor]) -> None:
        """Receive a message; of an earlier turn only an end counts."""
        with self.changed:
            if header.kind == "end":
                self.owed[peer] -= 1
                if header.fault is not None:
                    self.faulted.add(peer)
            if header.turn == self._turn:
                self._take(peer, header, tensors)
            self.changed.notify_all()

    def _take(self, peer: int, header: Header, tensors: list[Tensor]) -> None:
        if header.kind != "end" and header.operation != self._operation:
            self.other_operation = peer, header.operation
            return
        match header.kind:
            case "end":
                self.ended.add(peer)
                self.bodies[peer] = header.body
                self.fault = self.fault or header.fault
            case "facts":
                self.facts = header.facts
            case "share":
                self.shares[header.stage, peer] = cast("list[Gradients]", unpack(Kind.SEND_B, header.body, tensors))[0][
                    0
                ]
            case "spread":
                self.spread[peer] = unpack(Kind.SEND_F, header.body, tensors)
            case kind:
                key = (kind, header.stage, header.peer, header.microbatch)
                self.data[key] = unpack(Kind(kind), header.body, tensors)

    def lose(self, peer: int, why: str) -> None:
        """Record that nothing more will come from ``peer``."""
        with self.changed:
            self.lost[peer] = why
            self.changed.notify_all()

    def close(self) -> None:
        """End all waits on this inbox, because their results are no longer needed."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class Channel(Protocol):
    """Carries messages to and from the other ranks, in order between any two."""

    def send(self, peer: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message without waiting for its arrival. ``tensors`` are flat bytes, as ``pack`` gives them."""

    def wait_for(self, found: Callable[[], bool], seconds: float) -> None:
        """Return when ``found()``, which looks at the inbox, is true, or after this many seconds."""

    def look(self) -> None:
        """Process arrived messages without waiting."""

    def flush(self, seconds: float) -> None:
        """Wait until all messages have been handed over: the process may end after this."""

    def is_stuck(self) -> bool:
        """Return True if a wait for a peer is in progress that cannot be interrupted."""

    def settle(self, seconds: float) -> None:
        """Wait for peers that are about to end a failed turn, so that they are not considered stuck."""

    def close(self) -> None:
        """End threads and connections within a moment."""
