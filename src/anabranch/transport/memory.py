"""Memory that processes of one host share, and the bodies of messages in it.

The memory is a memfd. It has no name, so the kernel frees it with the last process that maps it, however that ends.
Workers sum gradients in it (``collectives/shared_memory.py``), and bodies pass through it between the two sides of a
Unix socket, which carries the rest of each frame::

    client ──copy──> [ requests | answers ] ──copy──> server
           <──copy──                        <──copy──

A connection carries one request at a time, so each half holds one body: a client writes the next one when it has the
answer to the last, a server when the next request has come. The receiver copies a body out before anyone looks at it,
because its peer might write there meanwhile; its sizes are in the frame's header, which is checked as that of a body in
the socket. Pages are taken as bodies need them, and stay for the next.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    Memory: TypeAlias = ctypes.Array[ctypes.c_char]

HALF = 8 << 20
"""The bytes of the longest body."""
LEAST = 128 << 10
"""The bytes below which a body goes through the socket: at 64 KiB neither is faster."""
_POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # a mapped file that shrinks means SIGBUS


class BodyMemory:
    """The bodies of one connection, and of its two sides the one that is here.

    Args:
        descriptor: of memory that ``memory_to_pass`` has made; it may be closed afterwards.
        client: this side asks.

    Raises:
        OSError: it is something else.
    """

    def __init__(self, descriptor: int, *, client: bool) -> None:
        check_memory(descriptor, 2 * HALF)
        memory = map_memory(descriptor, 2 * HALF)
        whole = np.frombuffer(memoryview(memory), np.uint8)
        halves = whole[:HALF], whole[HALF:]
        self._out, self._in = halves if client else halves[::-1]
        self._address = ctypes.addressof(memory) + (0 if client else HALF)
        self.taken = 0
        """Bytes of this side's half that have pages."""

    def put(self, bodies: Sequence[memoryview], lend: Callable[[int], bool] | None = None) -> bool:
        """Copy a body to the peer; False if it is to go through the socket.

        Args:
            bodies: its parts.
            lend: called with the bytes of new pages; returns False if there may be no more.
        """
        size = sum(map(len, bodies))
        if not LEAST <= size <= HALF or (size > self.taken and not self._take(-(-size // _STEP) * _STEP, lend)):
            return False
        at = 0
        for body in bodies:
            self._out[at : at + len(body)] = np.frombuffer(body, np.uint8)
            at += len(body)
        return True

    def get(self, at: int, into: memoryview) -> None:
        """Copy a part of the peer's body."""
        np.frombuffer(into, np.uint8)[:] = self._in[at : at + len(into)]

    def _take(self, size: int, lend: Callable[[int], bool] | None) -> bool:
        """Take pages for ``size`` bytes: by a call that can fail, because without it a write to them is a SIGBUS."""
        more = size - self.taken
        if lend is not None and not lend(more):
            return False
        if _libc.madvise(self._address + self.taken, more, _POPULATE):
            if lend is not None:
                lend(-more)
            return False
        self.taken = size
        return True


_STEP = 256 << 10  # pages are taken so many bytes at a time


def memory_to_pass() -> tuple[BodyMemory, int]:
    """Return new memory for the bodies of a client's connection, without pages, and its descriptor for the server.

    Raises:
        OSError: the system has none.
    """
    descriptor = create_memory("anabranch-bodies", lambda made: os.ftruncate(made, 2 * HALF))
    try:
        return BodyMemory(descriptor, client=True), descriptor
    except OSError:
        os.close(descriptor)
        raise


def create_memory(name: str, size: Callable[[int], None]) -> int:
    """Return the descriptor of new memory, which ``size`` gives its size, for ever."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size(descriptor)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_memory(descriptor: int, size: int) -> None:
    """Raise ``OSError`` for a descriptor that another process has passed, if it is not memory of ``size`` bytes."""
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != _SEALS or os.fstat(descriptor).st_size != size:
        raise OSError(f"descriptor {descriptor} is not memory of {size} bytes")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_mapped: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


def map_memory(descriptor: int, size: int) -> Memory:
    """Map the memory until the last tensor or array in it is freed.

    Not by the module mmap, which has its own copy of the descriptor: forked children would keep the memory alive.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    _mapped[address] = memory
    return memory


def _shield_child() -> None:
    """Put private pages over the memory in a forked child, such as a loader's process, which must not write there.

    Nor keep it. With ``MADV_DONTFORK`` there would be a hole in its place, and freeing the tensors would unmap whatever
    the child has mapped there since.
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    for address, memory in _mapped.items():
        _libc.mmap(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)


os.register_at_fork(after_in_child=_shield_child)
