"""Tensors between ranks from GPU to GPU, by the point-to-point operations of NCCL; headers stay on the channel.

::

    sender's host     ── header ── isend ─────────────    the header goes over the channel, as ever
    sender's stream   ── F0.0 ───────┬─ F0.1 ─────────
    communicator                     └─ tensors ─┐        beside the computing
    receiver's stream ── B1.2 ─────────┬─────────┴─ F1.0  waits for the tensors, and nothing else does
    receiver's host   ──────────── header, irecv ── wait

Order. NCCL pairs the operations of two ranks by their order alone, and runs those of one communicator one after the
other, so an activation one way would queue behind a gradient the other way that waits for it. So each direction of each
pair of ranks has its own communicator, a group of two. It carries tensors in the order of their headers, which one
thread sends; one thread reads them in that order and posts a receive for each, whether its stage needs it next or
later. Communicators are made with the pipe: see ``communicators.py``.

Waits. The host posts, and the stream waits; a wait for a header checks its peers as on any channel. A rank reports its
part of a turn as done only after all its tensors have arrived, so no turn succeeds without one. A host can still block
on a tensor in flight, where a stage reads a number; meanwhile a thread watches the peers, and aborts the communicators
when one is lost or the turn's deadline has passed.

Failures. A turn that fails leaves operations that were never matched, on which a stream would wait for ever. So a rank
that tells a peer that a turn failed, or hears it from that peer, aborts the two communicators between them; from then
on their tensors go over the channel. Both know, because a sender uses a communicator only after it has read the ends of
all earlier turns from the other side. A communicator's own errors are left to this: NCCL's watchdog in PyTorch would
end the process instead of naming the rank that is lost.

Memory. Tensors that are sent are kept until their operation is done, or aborted; those received likewise.

Values reduced or broadcast over all ranks (tied gradients, norms, an output for everyone) go over the channel, as does
a message with a tensor that is not on its rank's device.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

import msgspec
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.pipeline.links.communicators import Backend, Ends, Work, abort, other, reached
from anabranch.pipeline.links.inbox import Inbox
from anabranch.pipeline.links.packet_codec import Header, bytes_of
from anabranch.pipeline.schedule.actions import Kind
from anabranch.tensors.dtypes import dtype_named

__all__ = ["DirectLinks", "Receipt", "announce", "guard"]

_log = logging.getLogger("anabranch.pipeline")

_CLOSED = "the link between them is closed"

_CARRIED = frozenset({Kind.SEND_F.value, Kind.SEND_B.value})


def announce(header: Header) -> Header:
    """Return the header of a message whose tensors do not follow it on the channel."""
    return msgspec.structs.replace(header, tensors=[], carried=header.tensors)


@dataclass(eq=False, slots=True)
class Receipt:
    """Tensors in flight from ``peer``, and the header that announced them."""

    peer: int
    header: Header
    tensors: list[Tensor]
    works: list[Work]
    has_arrived: Callable[[], bool] = lambda: False

    def block(self) -> None:
        """Let the current stream wait for the tensors."""
        for work in self.works:
            work.block_current_stream()
        self.has_arrived = reached(self.tensors[0])


class DirectLinks:
    """The communicators of this rank, two for each peer that it exchanges tensors with; there may be none.

    Used by one thread; ``close`` and ``all_arrived`` by any.

    Args:
        rank: this process's rank.
        device: of the tensors.
        ends: for each peer the backends to send to it and to receive from it.
        inbox: of the headers.
        patience: seconds to look for the reason of a failed link: the other end may have had to abort it.

    Attributes:
        bytes_sent: of all tensors sent.
        deadline: of the turn.
    """

    def __init__(self, rank: int, device: torch.device, ends: Ends, inbox: Inbox, patience: float) -> None:
        self._rank = rank
        self._patience = patience
        self._device = device
        self._ends = dict(ends)
        self._inbox = inbox
        self._lock = threading.Lock()
        self._sent: dict[int, list[tuple[Work, Tensor]]] = {peer: [] for peer in ends}
        self._received: list[Receipt] = []
        self._awaited: list[Receipt] = []
        self.bytes_sent = 0
        self.deadline: Deadline | None = None
        self._failed: dict[int, tuple[float, str]] = {}

    def begin(self, deadline: Deadline) -> None:
        """Begin a turn."""
        self.deadline = deadline
        self._received, self._awaited, self._failed = [], [], {}

    def peers(self) -> list[int]:
        """Return the ranks that tensors can go to and come from."""
        return list(self._ends)

    def carry(self, peer: int, header: Header, parts: Sequence[Tensor]) -> bool:
        """Return True if a message's tensors can go to ``peer``: all are on this rank's device, and the link is open.

        It may be closed at the other end until the ends of all earlier turns have come from there.
        """
        inbox = self._inbox
        if header.kind not in _CARRIED or peer not in self._ends or not parts:
            return False
        with inbox.changed:
            is_sure = inbox.owed[peer] == 1 and peer not in inbox.faulted
        return is_sure and all(part.device == self._device for part in parts)

    def send(self, peer: int, parts: Sequence[Tensor]) -> None:
        """Start sending flat bytes, whose header has just been sent."""
        self.bytes_sent += sum(part.numel() for part in parts)
        with self._naming(peer):
            out, _ = self._ends_of(peer)
            pending = [(work, part) for work, part in self._sent[peer] if not work.is_completed()]
            self._sent[peer] = pending
            pending += [(out.send([part], other(self._rank, peer), 0), part) for part in parts]

    def receive(self) -> list[Receipt]:
        """Start receiving the tensors whose headers have arrived, in the order of the headers."""
        receipts = []
        with self._inbox.changed:
            while self._inbox.carried:
                receipts.append(self._receive(*self._inbox.carried.popleft()))
        self._received += receipts
        return receipts

    def _receive(self, peer: int, header: Header) -> Receipt:
        tensors = [torch.empty(shape, dtype=dtype_named(name), device=self._device) for name, shape in header.carried]
        receipt = Receipt(peer, header, tensors, [])
        with self._naming(peer):
            _, into = self._ends_of(peer)
            receipt.works += [into.recv([part], other(self._rank, peer), 0) for part in bytes_of(tensors)]
        return receipt

    def _ends_of(self, peer: int) -> tuple[Backend, Backend]:
        ends = self._ends.get(peer)
        if ends is None:
            raise RuntimeError(_CLOSED)
        return ends

    def take_up(self, receipt: Receipt) -> None:
        """Make the current stream wait for the received tensors; see ``gave_up``."""
        self._awaited.append(receipt)
        with self._naming(receipt.peer):
            receipt.block()

    @contextmanager
    def _naming(self, peer: int) -> Iterator[None]:
        """Abandon the link to ``peer`` after a backend's error: the turn fails where it next waits."""
        try:
            yield
        except RuntimeError as error:
            self.close([peer])
            self._failed.setdefault(peer, (monotonic(), f"sending tensors between it and this rank failed: {error}"))

    def lost(self) -> dict[int, str]:
        """Return the peers whose links failed in this turn without another reason found for a while."""
        return {peer: why for peer, (since, why) in list(self._failed.items()) if monotonic() - since > self._patience}

    def gave_up(self) -> bool:
        """Return True if a link closed while tensors were awaited from it: their contents are undefined."""
        return bool(self._cut_off())

    def _cut_off(self) -> set[int]:
        return {receipt.peer for receipt in list(self._awaited) if receipt.peer not in self._ends}

    def note_cut_off(self) -> None:
        """Count closed links as failed: the other end, which may have sent all it had to, need not know of it."""
        for peer in self._cut_off():
            self._failed.setdefault(peer, (monotonic(), f"sending tensors between it and this rank failed: {_CLOSED}"))

    def all_arrived(self) -> bool:
        """Return True if all awaited tensors have arrived."""
        return all(receipt.has_arrived() for receipt in list(self._awaited)) and not self.gave_up()

    def finish(self) -> None:
        """Release the sent tensors, once a turn has succeeded on all ranks."""
        for peer, pending in self._sent.items():
            with self._naming(peer):
                for work, _ in pending:
                    work.block_current_stream()
            pending.clear()
        self._received, self._awaited = [], []

    def fail(self, peers: Iterable[int]) -> None:
        """Close the links to ``peers``, because a turn has failed between them."""
        if self.close(peers):
            _log.warning(
                "a turn of the pipe failed: tensors in transit between devices were abandoned, and rank %d "
                "of the pipe sends tensors over the host from now on; make a new pipe to send them directly again",
                self._rank,
            )

    def give_up(self, lost: Mapping[int, str]) -> None:
        """Close all links, because ranks are lost or the deadline has passed, which waiting ranks may not know."""
        self._failed.update((peer, (-math.inf, why)) for peer, why in lost.items())
        self.close()

    def close(self, peers: Iterable[int] | None = None) -> bool:
        """Abort the links to ``peers``, to all if not given; their tensors never arrive. True if any was open."""
        with self._lock:
            chosen = list(self._ends) if peers is None else [peer for peer in peers if peer in self._ends]
            taken = {peer: self._ends.pop(peer) for peer in chosen}
            abort([end for ends in taken.values() for end in ends])
            self._sent.update({peer: [] for peer in taken})
        return bool(taken)


def guard(links: DirectLinks, lost: Callable[[], Mapping[int, str]], every: float) -> Callable[[], None]:
    """Watch waits that block the host, in a thread, and abort the links when they cannot succeed.

    Args:
        links: to abort.
        lost: returns the ranks that are lost, with the reason.
        every: seconds between two checks.

    Returns:
        A function that ends the thread.
    """
    closing = threading.Event()

    def run() -> None:
        while not closing.wait(every):
            if links.all_arrived():
                continue
            late = links.deadline is not None and links.deadline.expired()
            found = lost()
            if found or late:
                links.give_up(found)

    thread = threading.Thread(target=run, name="anabranch-direct", daemon=True)
    thread.start()

    def end() -> None:
        closing.set()
        if thread is not threading.current_thread():
            thread.join(timeout=every + 1.0)

    return end
