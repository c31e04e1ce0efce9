"""Messages between ranks of one host: headers on Unix sockets, tensors in shared memory.

::

    sender                                                     receiver
    tensor ──copy──> slot 3 ............ the same pages ............ slot 3 ──> tensor (a view, no copy)
    header, "in slot 3" ────────────── Unix socket ──────────────> header           │ freed
              slot 3 is free again <──────── a byte in the slot <───────────────────┘

A slot is memory created by its sender; its receiver gets the descriptor once. The receiver's tensors are in the slot
itself, and when the last of them is freed, so is the slot: buffers of one step serve the next. There is no thread: a
rank that waits polls the sockets, and one that computes polls them between two actions, so neither a dead
peer nor a failing one is overlooked. gloo makes two copies through sockets, on a thread that takes time from
the stages; this makes one copy.

No message of a peer is read before this rank enters the turn; an early one stays in the socket.
"""

from __future__ import annotations

import array
import logging
import mmap
import os
import select
import shutil
import socket
import struct
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from time import monotonic

import msgspec
import numpy as np
import torch
from torch import Tensor

from anabranch.pipeline.links.inbox import Inbox
from anabranch.pipeline.links.packet_codec import HEADERS, Header
from anabranch.tensors.dtypes import dtype_named

__all__ = ["Meeting", "SharedMemoryChannel", "meet"]

_log = logging.getLogger("anabranch.pipeline")

_FRAME = struct.Struct("<?xxxiQ")  # whether the header continues in another frame, the slot, its size if it is new
_CREDENTIALS = struct.Struct("3i")
_PART_BYTES = 1 << 15
_ALIGNED = 64
_SLOT_GRAIN = 1 << 16
_SOCKET_BYTES = 1 << 20


class _Slot:
    """A piece of shared memory: a byte that is set while it is taken, then, aligned, the tensors' bytes."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._memory = mmap.mmap(descriptor, _ALIGNED + size)
        with torch.inference_mode(False):  # it outlives the call: a training step writes into it, too
            self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)

    @property
    def taken(self) -> bool:
        return self._memory[0] != 0

    def put(self, parts: Sequence[Tensor]) -> None:
        self._memory[0] = 1
        at = _ALIGNED
        for part in parts:
            self._whole[at : at + part.numel()].copy_(part)
            at += _aligned(part.numel())

    def tensors(self, described: Sequence[tuple[str, list[int]]]) -> list[Tensor]:
        """Return the tensors written there, as views; the slot is free once the last of them is."""
        hold = _Hold()
        weakref.finalize(hold, _set_free, self._memory).atexit = False
        found, at = [], _ALIGNED
        for name, shape in described:
            dtype = dtype_named(name)
            size = prod(shape) * dtype.itemsize
            found.append(
                self._view(at, size, hold).view(dtype).view(shape)
                if size
                else torch.empty(shape, dtype=dtype, device="cpu")
            )
            at += _aligned(size)
        return found

    def _view(self, at: int, size: int, hold: _Hold) -> Tensor:
        # # Not slices of one tensor: autograd would mistake an in-place change of one for a change of its neighbours.
        mine = np.frombuffer(self._memory, dtype=np.uint8, count=size, offset=at)
        weakref.finalize(mine, _let_go, hold).atexit = False
        return torch.from_numpy(mine)


class _Hold:
    """An object that every tensor in a slot keeps alive; its end frees the slot."""

    __slots__ = ("__weakref__",)


def _let_go(hold: _Hold) -> None:
    """Record that a tensor is freed: the reference to ``hold`` ends with this call."""


def _set_free(memory: mmap.mmap) -> None:
    memory[0] = 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class _PeerConnection:
    """The connection to one peer."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self.socket = sock
        self._slots: list[_Slot] = []
        self._theirs: list[_Slot] = []
        self.unsent: deque[tuple[bytes, int | None]] = deque()
        self._began: list[bytes] = []

    def send(self, header: Header, parts: Sequence[Tensor]) -> None:
        """Write the parts into a slot and the header to the socket, or to ``unsent`` while that is full."""
        index, size, descriptor = -1, 0, None
        if parts:
            index, size, descriptor = self._free_slot(sum(_aligned(part.numel()) for part in parts))
            self._slots[index].put(parts)
        data = msgspec.msgpack.encode(header)
        for start in range(0, len(data), _PART_BYTES):
            more = start + _PART_BYTES < len(data)
            frame = _FRAME.pack(more, index, size) + data[start : start + _PART_BYTES]
            self.unsent.append((frame, None if more else descriptor))
        self.flush()

    def _free_slot(self, needed: int) -> tuple[int, int, int | None]:
        for index, slot in enumerate(self._slots):
            if needed <= slot.size <= 4 * max(needed, _SLOT_GRAIN) and not slot.taken:
                return index, 0, None
        size = -(-needed // _SLOT_GRAIN) * _SLOT_GRAIN
        descriptor = os.memfd_create("anabranch-pipeline", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _ALIGNED + size)
        self._slots.append(_Slot(descriptor, size))
        return len(self._slots) - 1, size, descriptor

    def flush(self) -> None:
        """Send as much as the socket takes now; drops frames for a lost peer, whose last messages are read later."""
        while self.unsent:
            frame, descriptor = self.unsent[0]
            rights = (
                [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
            )
            try:
                self.socket.sendmsg([frame], rights)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                pass
            self.unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def receive(self) -> tuple[Header, list[Tensor]] | None:
        """Return the next message, ``None`` if there is none yet.

        Raises:
            OSError: the peer is gone.
        """
        warned = False
        while True:
            try:
                data, rights, _, _ = self.socket.recvmsg(_FRAME.size + _PART_BYTES, socket.CMSG_SPACE(4))
            except BlockingIOError:
                return None
            except ConnectionResetError:  # said ahead of what can still be read
                if warned:
                    raise
                warned = True
                continue
            if not data:
                raise ConnectionResetError("its connection is closed")
            more, index, size = _FRAME.unpack_from(data)
            self._began.append(data[_FRAME.size :])
            if more:
                continue
            header = HEADERS.decode(b"".join(self._began))
            self._began.clear()
            if size:
                descriptor = int.from_bytes(rights[0][2][:4], "little")
                self._theirs.append(_Slot(descriptor, size))
                os.close(descriptor)
            if index >= 0:
                return header, self._theirs[index].tensors(header.tensors)
            return header, [torch.empty(shape, dtype=dtype_named(name), device="cpu") for name, shape in header.tensors]

    def close(self) -> None:
        """Close the socket, the slots, and the descriptors of slots that were never announced to the peer."""
        self.socket.close()
        for _, descriptor in self.unsent:
            if descriptor is not None:
                os.close(descriptor)
        for kept in (self.unsent, self._slots, self._theirs, self._began):
            kept.clear()


class SharedMemoryChannel:
    """A socket and some slots for each peer.

    Args:
        sockets: a connected one to each peer.
        inbox: receives the messages.
    """

    def __init__(self, sockets: dict[int, socket.socket], inbox: Inbox) -> None:
        self._inbox = inbox
        self._lines = {peer: _PeerConnection(sock) for peer, sock in sockets.items()}

    def send(self, peer: int, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message to ``peer``."""
        self._lines[peer].send(header, tensors)

    def wait_for(self, found: Callable[[], bool], seconds: float) -> None:
        """Receive messages as they arrive until ``found()``."""
        until = monotonic() + seconds
        self.look()
        while not found():
            left = until - monotonic()
            if left <= 0:
                return
            self._poll(left)

    def look(self) -> None:
        """Receive the messages that have arrived."""
        self._poll(0.0)

    def _poll(self, seconds: float) -> None:
        poll = select.poll()
        by_descriptor = {}
        for peer, line in self._lines.items():
            reads = select.POLLIN if self._inbox.owed[peer] > 0 and peer not in self._inbox.lost else 0
            writes = select.POLLOUT if line.unsent and peer not in self._inbox.lost else 0
            if reads or writes:
                poll.register(line.socket, reads | writes)
                by_descriptor[line.socket.fileno()] = peer
        for descriptor, _ in poll.poll(1000 * seconds):
            self._serve(by_descriptor[descriptor])

    def _serve(self, peer: int) -> None:
        line = self._lines[peer]
        try:
            line.flush()
            while self._inbox.owed[peer] > 0:
                message = line.receive()
                if message is None:
                    return
                self._inbox.deliver(peer, *message)
        except OSError as error:
            self._inbox.lose(peer, f"receiving from it failed: {error}")

    def flush(self, seconds: float) -> None:
        """Wait until the sockets have taken all messages."""
        lines, lost = self._lines, self._inbox.lost
        self.wait_for(lambda: not any(line.unsent for peer, line in lines.items() if peer not in lost), seconds)

    def is_stuck(self) -> bool:
        """Return True if a rank was lost that the process group would wait for at the end."""
        return bool(self._inbox.lost)

    def settle(self, seconds: float) -> None:
        """Do nothing: no thread waits for a peer."""

    def close(self) -> None:
        """Close the sockets and drop the slots, which live as long as the tensors in them."""
        for line in self._lines.values():
            line.close()


def meet(rank: int, gather: Callable[[str], list[str]], seconds: float) -> dict[int, socket.socket] | None:
    """Return a socket to every other rank; ``None`` on all of them if one could not be reached. A collective.

    Args:
        rank: this process's rank.
        gather: returns the strings of all ranks.
        seconds: that another rank may take.
    """
    sockets: dict[int, socket.socket] | None = None
    with ExitStack() as stack:
        path, problem = "", None
        try:
            meeting = stack.enter_context(Meeting(rank))
            path = meeting.path
        except OSError as error:
            problem = error
        paths = gather(path)  # even after a failure: the other ranks gather too
        try:
            if all(paths):
                sockets = meeting.connect(paths, seconds)
        except OSError as error:
            problem = error
    if problem is not None:
        _log.warning("rank %d of a pipe can reach another rank on its host only over gloo: %s", rank, problem)
    if all(answer == "yes" for answer in gather("no" if sockets is None else "yes")):
        return sockets
    for sock in (sockets or {}).values():
        sock.close()
    return None


class Meeting:
    """Connects the ranks of one host by sockets; a context manager.

    Args:
        rank: this process's rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._directory = Path(tempfile.mkdtemp(prefix="anabranch-pipeline-"))  # other users must not read it
        self.path = str(self._directory / "socket")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(self.path)
            self._listener.listen(512)
        except OSError:
            self.__exit__()
            raise

    def connect(self, paths: Sequence[str], seconds: float) -> dict[int, socket.socket]:
        """Return a socket to each other rank, by the paths of their listeners; connect to earlier ranks, accept later
        ones.

        Raises:
            OSError: some rank cannot be reached, or is another user's.
        """
        found: dict[int, socket.socket] = {}
        try:
            for peer in range(self._rank):
                found[peer] = sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sock.settimeout(seconds)
                sock.connect(paths[peer])
                _check_user(sock)
                sock.send(self._rank.to_bytes(4, "little"))
            self._listener.settimeout(seconds)
            while len(found) < len(paths) - 1:
                sock, _ = self._listener.accept()
                _check_user(sock)
                sock.settimeout(seconds)
                found[int.from_bytes(sock.recv(4), "little")] = sock
        except OSError:
            for sock in found.values():
                sock.close()
            raise
        return found

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _check_user(sock: socket.socket) -> None:
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        sock.close()
        raise PermissionError(f"a process of user {user} called")
