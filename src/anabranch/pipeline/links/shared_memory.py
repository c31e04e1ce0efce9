"""Tensors of messages between ranks of one host, in memory that both have mapped.

::

    sender                                                     receiver
    tensor ──copy──> slot 3 ............ the same pages ............ slot 3 ──> tensor (a view, no copy)
    header, "in slot 3" ─────────────────── gloo ──────────────────> header         │ freed
              slot 3 is free again <──────── a byte in the slot <───────────────────┘

A slot is memory without a file, created by its sender; its receiver opens it once, by the sender's descriptor in
``/proc``, and then the sender closes that. The receiver's tensors are in the slot itself, and when the last of them is
freed, so is the slot: buffers of one step serve the next. gloo alone makes two copies through sockets; this makes one.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from anabranch.tensors.dtypes import dtype_named

Slot = tuple[int, int, int]
"""In a header: the slot's number, and if it is new the sender's descriptor and the size, else -1 and 0."""

_NAME = "anabranch-pipeline"
_ALIGNED = 64
_GRAIN = 1 << 16


class _Slot:
    """A piece of shared memory: a byte that is set while it is taken, one that is set once its receiver has opened it,
    then, aligned, the tensors' bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, _ALIGNED + size)
        with torch.inference_mode(False):  # it outlives the call: a training step writes into it, too
            self._whole = torch.frombuffer(self.memory, dtype=torch.uint8)

    def put(self, parts: Sequence[Tensor]) -> None:
        self.memory[0] = 1
        at = _ALIGNED
        for part in parts:
            self._whole[at : at + part.numel()].copy_(part)
            at += _aligned(part.numel())

    def tensors(self, described: Sequence[tuple[str, list[int]]]) -> list[Tensor]:
        """Return the tensors written there, as views; the slot is free once the last of them is."""
        views, left, at = [], list[int](), _ALIGNED
        for name, shape in described:
            dtype = dtype_named(name)
            size = prod(shape) * dtype.itemsize
            if size:
                # Not slices of one tensor: autograd would mistake an in-place change of one for one of its neighbours.
                mine = np.frombuffer(self.memory, dtype=np.uint8, count=size, offset=at)
                left.append(len(left))
                weakref.finalize(mine, _let_go, self.memory, left).atexit = False
                views.append(torch.from_numpy(mine).view(dtype).view(shape))
            else:
                views.append(torch.empty(shape, dtype=dtype, device="cpu"))
            at += _aligned(size)
        if not left:
            self.memory[0] = 0
        return views

    def close(self) -> None:
        """Close the descriptor; the memory lives as long as the tensors in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _let_go(memory: mmap.mmap, left: list[int]) -> None:
    """Record that a tensor is freed, and with the last one the slot; only one thread takes the last number."""
    if left.pop() == 0:
        memory[0] = 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class MessageMemory:
    """The slots of one rank for each peer, and those of its peers that it has opened.

    Args:
        processes: the id of each rank's process.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._mine: dict[int, list[_Slot]] = {}
        self._theirs: dict[tuple[int, int], _Slot] = {}

    def put(self, peer: int, parts: Sequence[Tensor]) -> Slot:
        """Write the bytes of a message's tensors for ``peer``; return where they are, for its header."""
        slots = self._mine.setdefault(peer, [])
        needed = sum(_aligned(part.numel()) for part in parts)
        for number, slot in enumerate(slots):
            if slot.memory[1]:
                slot.close()
            if needed <= slot.size <= 4 * max(needed, _GRAIN) and not slot.memory[0]:
                slot.put(parts)
                return number, -1, 0
        size = -(-needed // _GRAIN) * _GRAIN
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _ALIGNED + size)
        slots.append(_Slot(descriptor, size))
        slots[-1].put(parts)
        return len(slots) - 1, descriptor, size

    def tensors(self, peer: int, slot: Slot, described: Sequence[tuple[str, list[int]]]) -> list[Tensor]:
        """Return the tensors of a message of ``peer``.

        Raises:
            OSError: the peer has closed its pipe.
        """
        number, descriptor, size = slot
        if descriptor >= 0:
            self._theirs[peer, number] = opened = _Slot(_opened(self._processes[peer], descriptor), size)
            opened.close()
            opened.memory[1] = 1
        return self._theirs[peer, number].tensors(described)

    def close(self) -> None:
        """Drop the slots, which live as long as the tensors in them."""
        for slot in (slot for slots in self._mine.values() for slot in slots):
            slot.close()
        self._mine.clear()
        self._theirs.clear()


def _opened(process: int, descriptor: int) -> int:
    """Return a descriptor of the memory that another process has under ``descriptor``."""
    path = f"/proc/{process}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(f"{path} is no memory of a pipe")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
