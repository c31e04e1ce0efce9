"""Messages to and from other ranks, over ``torch.distributed`` point-to-point, in order between any two.

gloo never ends a waiting receive early, so no thread that must continue waits in one: each peer has a thread that
receives and one that sends. On one host the tensors are in shared memory; else gloo reads straight into theirs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from time import monotonic

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.pipeline.links.inbox import Inbox
from anabranch.pipeline.links.packet_codec import HEADER_BYTES, Header, bytes_of, decode_header, encode_header
from anabranch.pipeline.links.shared_memory import MessageMemory
from anabranch.tensors.dtypes import dtype_named

_FAREWELL_SECONDS = 0.5

_Outgoing = list[Tensor] | threading.Event | None
"""An item for a sending thread: a message's tensors, an event to set on reaching it, or ``None`` to end the thread."""


class Channel:
    """Two threads per peer.

    Args:
        group: the ranks; its backend must carry CPU tensors.
        tag: separates this pipe's messages from another's on the same group.
        inbox: receives the messages.
        memory: shared with all peers, if they are on this host.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int, inbox: Inbox, memory: MessageMemory | None) -> None:
        self._inbox = inbox
        self._memory = memory
        self._outgoing: dict[int, queue.SimpleQueue[_Outgoing]] = {peer: queue.SimpleQueue() for peer in inbox.owed}
        self._threads = []
        for peer, outgoing in self._outgoing.items():
            send = (group, peer, tag, inbox, outgoing)
            receive = (group, peer, tag, inbox, memory)
            self._threads += [
                threading.Thread(target=_send_all, args=send, name=f"anabranch-to-{peer}", daemon=True),
                threading.Thread(target=_receive_all, args=receive, name=f"anabranch-from-{peer}", daemon=True),
            ]
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        """Hand a message to the thread that sends to ``peer``."""
        if tensors and self._memory is not None:
            header, tensors = msgspec.structs.replace(header, slot=self._memory.put(peer, tensors)), ()
        self._outgoing[peer].put([*encode_header(header), *tensors])

    def flush(self, seconds: float) -> None:
        """Wait until the sending threads have sent all their messages."""
        until = monotonic() + seconds
        for peer, outgoing in self._outgoing.items():
            sent = threading.Event()
            outgoing.put(sent)
            while peer not in self._inbox.lost and monotonic() < until:
                if sent.wait(min(0.05, seconds)):
                    break

    def is_stuck(self) -> bool:
        """Return True if a thread waits for a peer, which cannot be interrupted in gloo."""
        return bool(self._inbox.lost) or any(self._inbox.owed.values())

    def settle(self, seconds: float) -> None:
        """Wait for the messages still due from a failed turn, so that no thread is left in gloo for them."""
        inbox = self._inbox
        with inbox.changed:
            inbox.changed.wait_for(lambda: bool(inbox.lost) or not any(inbox.owed.values()), seconds)

    def close(self) -> None:
        """End the threads, and wait for those not stuck on a peer: they must not outlive the process group."""
        self.settle(_FAREWELL_SECONDS)
        self._inbox.close()
        for outgoing in self._outgoing.values():
            outgoing.put(None)
        if not self.is_stuck():
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(timeout=_FAREWELL_SECONDS)
        if self._memory is not None:
            self._memory.close()


def _send_all(
    group: dist.ProcessGroup, peer: int, tag: int, inbox: Inbox, outgoing: queue.SimpleQueue[_Outgoing]
) -> None:
    while (tensors := outgoing.get(timeout=None)) is not None:  # idle until there is something to send
        if isinstance(tensors, threading.Event):
            tensors.set()
            continue
        try:
            for tensor in tensors:
                dist.send(tensor, group=group, group_dst=peer, tag=tag)
        except Exception as error:  # noqa: BLE001 - raised as PeerLost in the thread that waits for this peer
            inbox.lose(peer, f"sending to it failed: {error}")
            return
        del tensors


def _receive_all(group: dist.ProcessGroup, peer: int, tag: int, inbox: Inbox, memory: MessageMemory | None) -> None:
    def receive(into: Tensor) -> None:
        dist.recv(into, group=group, group_src=peer, tag=tag)

    while True:
        with inbox.changed:
            inbox.changed.wait_for(lambda: inbox.owed[peer] > 0 or inbox.closed)
            if inbox.closed:
                return
        try:
            first = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
            receive(first)
            header = decode_header(first, receive)
            if header.slot is None:
                tensors = [torch.empty(shape, dtype=dtype_named(name), device="cpu") for name, shape in header.tensors]
                for part in bytes_of(tensors):
                    receive(part)
                    del part
            else:
                assert memory is not None
                try:
                    tensors = memory.tensors(peer, header.slot, header.tensors)
                except FileNotFoundError:  # closed after a failure, of which the next message tells
                    continue
            inbox.deliver(peer, header, tensors)
            del tensors
        except Exception as error:  # noqa: BLE001 - as above
            inbox.lose(peer, f"receiving from it failed: {error}")
            return
