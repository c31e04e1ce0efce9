"""Links between the ranks of a pipe: an inbox for each, and a connection to those of other processes.

A message is a small header of fixed size, then the tensors' bytes. The header describes the rest, so shapes and dtypes
may change from message to message and step to step. Containers and plain values are in it, as the tree codec writes
them. Received data is never evaluated.

Messages between processes go over the group's gloo, in order between any two; their tensors are in shared memory if all
ranks are on one host, else gloo reads straight into theirs. Tensors of GPUs go over the host. gloo never ends a waiting
receive early, so no thread that must continue waits in one: each peer has a thread that receives and one that sends. A
wait for messages has a deadline, and checks the peers' heartbeats meanwhile.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.liveness.group import Group
from anabranch.liveness.meeting import interruptible
from anabranch.liveness.peers import Identity, end_without_waiting, peers_of_job
from anabranch.pipeline.links.shared_memory import MessageMemory, Slot
from anabranch.pipeline.parts.part_program import TensorForm
from anabranch.pipeline.schedule import Kind
from anabranch.pipeline.stage.packet import Gradients, Message, Packet
from anabranch.tensors import Structure, flatten
from anabranch.tensors.dtypes import as_bytes, dtype_name, dtype_named
from anabranch.tensors.tree_codec import Path, decode, encode

HEADER_BYTES = 1024
"""Size of every header; a longer one continues in a second message, whose size it gives."""

_LENGTH_BYTES = 8


class Facts(NamedTuple):
    """Facts about a call that all ranks must know before they start, sent by the first stage's rank.

    ``kinds`` are those of the microbatches of a split model: a digest of the program and the form of the inputs.
    """

    step: int
    seed: int
    sizes: list[int]
    records: bool
    output: str
    keywords: list[str]
    kinds: Sequence[tuple[str, Structure]] = ()


class PacketFault(msgspec.Struct, array_like=True, frozen=True):
    """The error that ended a call, on the sending rank or on the first one reported to it: of a ``PipelineError``."""

    message: str
    stage: int | None
    microbatch: int | None
    phase: str | None
    remote_type: str
    remote_traceback: str


class Header(msgspec.Struct, array_like=True, frozen=True):
    """A message's header: what comes of an action, a value that all ranks are given, or a turn's end.

    The bytes of ``tensors`` follow it, or are in ``slot`` of shared memory.
    """

    turn: int
    operation: str
    kind: str
    stage: int = -1
    peer: int = -1
    microbatch: int = -1
    body: object = None
    tensors: list[tuple[str, list[int]]] = []
    fault: PacketFault | None = None
    slot: Slot | None = None


def encode_header(header: Header) -> list[Tensor]:
    """Return the header as one message, or two if it is long."""
    data = msgspec.msgpack.encode(header)
    first = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
    framed = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: HEADER_BYTES - _LENGTH_BYTES]
    first[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    rest = data[HEADER_BYTES - _LENGTH_BYTES :]
    return [first, torch.frombuffer(bytearray(rest), dtype=torch.uint8)] if rest else [first]


# Built at import: constructing a msgspec decoder is not thread-safe.
HEADERS = msgspec.msgpack.Decoder(Header)


def decode_header(first: Tensor, receive: Callable[[Tensor], None]) -> Header:
    """Return the header that starts with ``first``; ``receive`` fills a tensor with the rest, if there is any."""
    data = bytes(first.numpy())
    length, body = int.from_bytes(data[:_LENGTH_BYTES], "little"), data[_LENGTH_BYTES:]
    if length > len(body):
        rest = torch.empty(length - len(body), dtype=torch.uint8, device="cpu")
        receive(rest)
        body += bytes(rest.numpy())
    return HEADERS.decode(body[:length])


def pack(value: Structure, leaves: Iterable[object] = ()) -> tuple[object, list[tuple[str, list[int]]], list[Tensor]]:
    """Pack a value: plain ones for the header, its tensors' dtypes and shapes, and their bytes, where they are.

    Tags number the tensors; a sparse one is two.

    Raises:
        TypeError: a value, or one of these ``leaves`` of it, that is meaningless outside this process; names its type.
    """
    tensors: list[Tensor] = []

    def own(leaf: object, path: Path) -> object:
        if isinstance(leaf, TensorForm):
            return {"$form": [list(leaf.shape), dtype_name(leaf.dtype), leaf.requires_grad]}
        if not isinstance(leaf, Tensor):
            raise _refusal(leaf)
        if leaf.layout is torch.sparse_coo and not leaf.requires_grad:
            leaf = leaf.coalesce()
            tensors.extend((leaf.indices(), leaf.values()))
            return {"$sparse": [len(tensors) - 2, list(leaf.shape)]}
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            kind_of = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else leaf.layout
            raise TypeError(f"a {kind_of} tensor cannot cross ranks; make it dense, or keep it within a stage")
        # Kernels and as_strided read the order of its dimensions in memory; those of size 1 count, too.
        order = sorted(range(leaf.ndim), key=lambda d: (leaf.stride(d), leaf.shape[d] > 1), reverse=True)
        if order != [*range(leaf.ndim)]:
            tensors.append(leaf.detach().permute(order))
            return {"$order": [len(tensors) - 1, order]}
        tensors.append(leaf)
        return {"$tensor": len(tensors) - 1}

    if sets := [leaf for leaf in leaves if isinstance(leaf, set | frozenset)]:  # a pipe sees no tensors in them
        raise _refusal(sets[0])
    tree = encode(value, own)
    return tree, [(dtype_name(tensor.dtype), list(tensor.shape)) for tensor in tensors], bytes_of(tensors)


def unpack(tree: object, tensors: Sequence[Tensor]) -> Structure:
    """Return the value from what ``pack`` has made of it."""
    sparse, in_order = partial(_sparse, tensors), partial(_in_order, tensors)
    return decode(tree, {"$sparse": sparse, "$order": in_order, "$form": _form}, tensors=tensors)


def pack_message(message: Message) -> tuple[object, list[tuple[str, list[int]]], list[Tensor]]:
    """Pack what comes of an action, like ``pack``."""
    parts = [
        [part.structure(), list(part.needs_grad), list(part.doubled)] if isinstance(part, Packet) else part
        for part in message
    ]
    return pack(parts, [leaf for part in message if isinstance(part, Packet) for leaf in part.leaves])


def unpack_message(kind: Kind, tree: object, tensors: list[Tensor]) -> Message:
    """Return the message that came of an action of ``kind``."""
    parts = unpack(tree, tensors)
    if kind is Kind.B:
        return cast("list[Gradients]", parts)
    packets: list[Packet] = []
    for structure, needs_grad, doubled in parts:
        leaves, treedef = flatten(structure)
        packets.append(Packet(treedef, leaves, tuple(needs_grad), tuple(doubled)))
    return packets


def bytes_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the buffers to receive into, for those ``tensors`` that have bytes."""
    buffers = []
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        buffers.append(as_bytes(torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat))
    return buffers


def class_name(kind: type) -> str:
    """Return its qualified name."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _refusal(value: object) -> TypeError:
    what = f"a {class_name(type(value))} cannot cross ranks"
    return TypeError(f"{what}; send tensors, numbers, strings and None, in dict, list and tuple, of these exact types")


def _sparse(tensors: Sequence[Tensor], content: tuple[int, list[int]]) -> Tensor:
    first, shape = content
    indices, values = tensors[first : first + 2]
    device = values.device
    return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False, device=device)


def _in_order(tensors: Sequence[Tensor], content: tuple[int, list[int]]) -> Tensor:
    index, order = content
    return tensors[index].permute(sorted(range(len(order)), key=order.__getitem__))


def _form(content: tuple[list[int], str, bool]) -> TensorForm:
    shape, dtype, requires_grad = content
    return TensorForm(tuple(shape), dtype_named(dtype), requires_grad)


# Inboxes, threads and the connection.

Key = tuple[Kind, int, int, int]
"""Of a message: the kind of the action that it comes of, the stages from which and to which, and the microbatch."""


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


_TEXT_BYTES = 256
_LAST_SECONDS = 2.0
_FIRST_TAG = 0x70697065
# Pipes on one group are separated by their tags; ranks make them in the same order.
_tags: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


class RankConnection:
    """This rank's connection to the others of ``group``. Making one is a collective.

    Args:
        group: the ranks, in the order of the schedule's; its backend must carry CPU tensors, as gloo does.
        heartbeat: seconds between the two checks after which a stopped rank is lost.
        likeness: a string that must be equal on all ranks; of long ones the beginning is shown.

    Attributes:
        rank: this process's number in the group.
        peers: the other ranks.
        names: of all ranks, their numbers in the job.
        inbox: the messages that have arrived.

    Raises:
        ValueError: the group's backend does not support CPU tensors, or the ranks' pipes differ.
    """

    def __init__(self, group: dist.ProcessGroup, heartbeat: float, likeness: str) -> None:
        if "gloo" not in str(dist.get_backend_config(group)):
            cure = 'give it process_group=dist.new_group(backend="gloo")'
            raise ValueError(f"a pipeline's group must carry CPU tensors, {dist.get_backend(group)} does not; {cure}")
        self.group = group
        peers = peers_of_job()
        self._members = Group(peers, dist.get_process_group_ranks(group), heartbeat, recovers=True)
        self.rank, self.names = self._members.rank, self._members.ranks
        self.peers = [peer for peer in range(self._members.size) if peer != self.rank]
        self.inbox = Inbox(self.peers)
        self._check_alike(likeness)
        identities = [Identity.decode(text) for text in self._gather(peers.identity.encode())]
        peers.know(dict(zip(self.names, identities, strict=True)), heartbeat)
        tag = next(_tags.setdefault(group, itertools.count(_FIRST_TAG)))
        self.name = f"pipe {','.join(map(str, self.names))}/{tag}"
        on_one_host = len({identity.host for identity in identities}) == 1
        memory = MessageMemory([identity.pid for identity in identities]) if on_one_host else None
        self.channel = Channel(group, tag, self.inbox, memory)
        # Nothing that holds this object: the channel's threads end when the last reference to it goes.
        self._noticed = partial(_noticed, self.names, self.inbox)
        leave = partial(_exit_without_lost_ranks, self.channel)
        self.close = weakref.finalize(self, _end, self.channel, leave)
        atexit.register(leave)  # after the finalizer's own, so called before it

    def _check_alike(self, likeness: str) -> None:
        digest = hashlib.blake2b(likeness.encode(), digest_size=8).hexdigest()
        texts = self._gather(f"{digest} {likeness}".encode()[:_TEXT_BYTES].decode(errors="ignore"))
        if len({text.split(" ")[0] for text in texts}) > 1:
            each = "; ".join(f"rank {r}: {text.split(' ', 1)[1]}" for r, text in zip(self.names, texts, strict=True))
            raise ValueError(f"the ranks make different pipes; use the same layers, balance, schedule on all. {each}")

    def _gather(self, text: str) -> list[str]:
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8, device="cpu")
        mine[: len(text.encode())] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else 0
        everyone = [torch.empty_like(mine) for _ in range(self._members.size)]
        interruptible(partial(dist.all_gather, everyone, mine, group=self.group))
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in everyone]

    def wait(
        self, done: Callable[[float], bool], operation: str, deadline: Deadline, ranks: Sequence[int], step: int
    ) -> None:
        """Return when ``done(seconds)``, which waits at most that long, returns true; ``ranks`` are waited for.

        Raises:
            PeerLost: another rank is gone or stopped.
            DeadlineExceeded: names those waited for.
        """
        names = [self.names[rank] for rank in ranks]
        self._members.wait(done, operation, deadline, awaited=names, step=step, noticed=self._noticed)


def _noticed(names: Sequence[int], inbox: Inbox) -> dict[int, str]:
    """Return the ranks, by their numbers in the job, that are lost by what connections to them say."""
    with inbox.changed:
        return {names[rank]: why for rank, why in inbox.lost.items()}


def _exit_without_lost_ranks(channel: Channel) -> None:
    """End the process without gloo, which would wait for a lost rank, or abort because a thread still waits."""
    channel.settle(_LAST_SECONDS)
    if channel.is_stuck():
        end_without_waiting()


def _end(channel: Channel, leave: Callable[[], None]) -> None:
    channel.close()
    if not channel.is_stuck():
        atexit.unregister(leave)
