"""Messages that have arrived at a rank in the current turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from anabranch.pipeline.links.packet_codec import Header, PacketFault, unpack, unpack_message
from anabranch.pipeline.schedule.schedule import Kind
from anabranch.pipeline.stage.packet import Message
from anabranch.tensors import Structure

Key = tuple[Kind, int, int, int]
"""Of a message: the kind of the action that sends it, the stages from which and to which, and the microbatch."""


class Inbox:
    """Receives messages from any thread; those of an earlier turn are dropped, but its ends are counted.

    Stages of one process are joined here alone: one puts the message, as it is, into the inbox of the other's rank.

    Attributes:
        data: messages of actions.
        values: those that ranks give to all, by name and rank.
        bodies: of the ends that have arrived, by rank.
        fault: the reason why the turn has failed, of another rank; ``True`` if it failed in this process.
    """

    def __init__(self, peers: Sequence[int] = ()) -> None:
        self.changed = threading.Condition()
        self.owed = dict.fromkeys(peers, 0)
        self.closed = False
        self.lost: dict[int, str] = {}
        self._turn = 0
        self.begin(0, "")

    def begin(self, turn: int, operation: str) -> None:
        """Discard the previous turn; one more end is due from each peer."""
        with self.changed:
            self._turn = turn
            self._operation = operation
            self.other_operation: tuple[int, str] | None = None
            self.data: dict[Key, Message] = {}
            self.values: dict[tuple[int | str, int], Structure] = {}
            self.bodies: dict[int, object] = {}
            self.fault: PacketFault | bool = False
            for peer in self.owed:
                self.owed[peer] += turn > 0
            self.changed.notify_all()

    def put(self, key: Key, message: Message) -> None:
        """Receive a message from a stage of this process."""
        with self.changed:
            self.data[key] = message
            self.changed.notify_all()

    def fail(self) -> None:
        """End all waits: the turn has failed in this process."""
        with self.changed:
            self.fault = self.fault or True
            self.changed.notify_all()

    def deliver(self, peer: int, header: Header, tensors: list[Tensor]) -> None:
        """Receive a message of another process; of an earlier turn only an end counts."""
        with self.changed:
            if header.kind == "end":
                self.owed[peer] -= 1
            if header.turn == self._turn:
                self._take(peer, header, tensors)
            self.changed.notify_all()

    def _take(self, peer: int, header: Header, tensors: list[Tensor]) -> None:
        if header.kind != "end" and header.operation != self._operation:
            self.other_operation = peer, header.operation
            return
        match header.kind:
            case "end":
                self.bodies[peer] = header.body
                self.fault = self.fault or header.fault or False
            case "value":
                name, value = unpack(header.body, tensors)
                self.values[name, peer] = value
            case name:
                kind = Kind(name)
                key = kind, header.stage, header.peer, header.microbatch
                self.data[key] = unpack_message(kind, header.body, tensors)

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
