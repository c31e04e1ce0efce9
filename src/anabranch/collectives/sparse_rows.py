"""Sparse gradients summed over workers: they travel as ``(ids, rows)`` and are not made dense.

::

    this worker                        every worker
    gradients of the window            counts      all_gather, started as soon as the gradient is final
      -> weighted, merged   ────────>  ids + rows  all_gather of one buffer a worker, padded to the longest
                                       -> merged again, in rank order, so that all workers hold the same bits

On one host both are gathered in shared memory, which grows with the longest buffer.

Only where autograd itself made the gradient dense on some worker, as it does for a table that is also a head's weight,
is the result dense on all of them, as in the plain loop.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from anabranch.collectives.shared_memory import FlatForm, SharedSum, shared_sums
from anabranch.collectives.workers import Pending, Workers

COUNT = torch.float64  # of which there are sums in shared memory
_MOST_SHARED = 8 << 20  # bytes of a worker; a table that is dense on one may be gigabytes
_NO_GRADIENT = -1
_ALIGNMENT = 16  # complex128
_COUNTS_BYTES = 16  # the number of rows and whether they are dense, int64


def summing_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype that gradients times their rows are summed in.

    float32 for float16, which ends at 65504: a gradient of 20 on 4096 rows is beyond. The mean is float16 again.
    """
    return torch.float32 if parameter.dtype is torch.float16 else parameter.dtype


def sparse_bytes(longest: int, row: int, dtype: torch.dtype) -> int:
    """Return the bytes that each worker passes on: the counts, then ids and rows of ``row`` numbers, padded.

    >>> sparse_bytes(3, 4, torch.float32)
    96
    """
    return _COUNTS_BYTES + sum(_packed(longest, row, dtype))


def _packed(longest: int, row: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of ids and of rows in a worker's buffer."""
    return _aligned(longest * 8), _aligned(longest * row * dtype.itemsize)


class SparseGradient:
    """One parameter's sparse gradient: gathers what backward yields, then merges it with the other workers'."""

    def __init__(self, name: str, parameter: Tensor, workers: Workers | None) -> None:
        self.name = name
        self.parameter = parameter
        self._workers = workers
        self._parts: list[Tensor] = []
        self._counts: Tensor | None = None
        self._pending: Pending | None = None
        self._merged: Tensor | None = None
        self.shared: SharedSum | None = None
        self._room: SharedSum | None = None
        self.has_dense = False
        self.complete = False  # the run's gradient has arrived

    def start_run(self) -> None:
        """Wait for the gradient of another run."""
        self.complete = False

    def add(self, gradient: Tensor, weight: float) -> None:
        """Take one run's gradient times ``weight``, also one that autograd made dense."""
        self.complete = True
        if gradient.layout is torch.strided:
            self.has_dense, gradient = True, gradient.to_sparse(1)
        if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
            raise TypeError(
                f"the gradient of {self.name!r} has layout {gradient.layout}; sparse gradients are COO, of whole rows"
            )
        gradient = gradient.to(summing_dtype(self.parameter))
        self._parts.append(gradient if weight == 1.0 else gradient * weight)

    def launch(self, step: int | None) -> None:
        """Start telling the other workers how many rows this one has."""
        self._merged = reduce(torch.add, self._parts).coalesce() if self._parts else None
        if self._workers is None:
            return
        mine = _NO_GRADIENT if self._merged is None else self._merged._nnz()
        count = torch.tensor([mine, int(self.has_dense)], device=self.parameter.device)
        operation = f"all_gather rows of {self.name}"
        if self.shared is not None:
            self.shared.place(2).copy_(count)
            self._pending = self.shared.start(operation=operation, step=step)
            self._counts = self.shared.gathered()[:, :2]
            return
        self._counts = count.new_empty(self._workers.size, 2)
        self._pending = self._workers.start_all_gather(count, self._counts, operation=operation, step=step)

    def finish(self, divisor: float, step: int | None) -> Tensor | None:
        """Return the gradient over all workers divided by ``divisor``; ``None`` when no worker has one."""
        merged, self._merged, self._parts = self._merged, None, []
        dense = self.has_dense
        if self._workers is not None:
            assert self._pending is not None
            assert self._counts is not None
            self._pending.finish()
            counts, dense_flags = self._counts.t().tolist()
            dense = any(dense_flags)
            self._pending = self._counts = None
            if max(counts) == _NO_GRADIENT:
                return None
            merged = self._exchange(merged, [max(0, int(count)) for count in counts], step)
        if merged is None:
            return None
        if divisor != 1.0:
            merged._values().div_(divisor)
        self.has_dense = False
        return (merged.to_dense() if dense else merged).to(self.parameter.dtype)

    def _exchange(self, mine: Tensor | None, counts: list[int], step: int | None) -> Tensor:
        assert self._workers is not None
        parameter = self.parameter
        dense_shape = parameter.shape[1:]
        dtype = summing_dtype(parameter)
        longest = max(1, *counts)
        id_bytes, row_bytes = _packed(longest, dense_shape.numel(), dtype)
        operation = f"all_gather rows of {self.name}"
        size = id_bytes + row_bytes
        room = self._room_for(size)
        if room is None:
            packed = torch.zeros(size, dtype=torch.uint8, device=parameter.device)
        else:
            packed = room.place(size // COUNT.itemsize).view(torch.uint8)

        def unpacked(buffer: Tensor, count: int) -> tuple[Tensor, Tensor]:
            ids = buffer[:id_bytes].view(torch.int64)[:count]
            rows = buffer[id_bytes:].view(dtype)[: count * dense_shape.numel()].view(count, *dense_shape)
            return ids, rows

        if mine is not None and mine._nnz():
            ids, rows = unpacked(packed, mine._nnz())
            ids.copy_(mine._indices()[0])
            rows.copy_(mine._values())
        if room is None:
            everyone = self._workers.all_gather(packed, operation=operation, step=step).unbind(0)
        else:
            room.start(operation=operation, step=step).finish()
            everyone = tuple(row.view(torch.uint8) for row in room.gathered().unbind(0))
        all_ids, all_rows = zip(*map(unpacked, everyone, counts), strict=True)
        return torch.sparse_coo_tensor(
            torch.cat(all_ids)[None],
            torch.cat(all_rows),
            parameter.shape,
            check_invariants=False,
            device=parameter.device,
        ).coalesce()

    def _room_for(self, size: int) -> SharedSum | None:
        """Return shared memory for so many bytes of each worker; all of them make it larger at the same time."""
        assert self._workers is not None
        if self.shared is None or size > _MOST_SHARED:
            return None
        numbers = size // COUNT.itemsize
        if self._room is None or numbers > self._room.room:
            form = FlatForm(2 * numbers, COUNT, self.parameter.device, gathers=True)
            (self._room,) = shared_sums(self._workers, [form])
        return self._room

    def clear(self) -> None:
        """Discard the collected rows."""
        self._parts.clear()
        self.has_dense = False
        self._merged = self._counts = self._pending = None


def _aligned(count: int) -> int:
    """``count`` bytes, rounded up so that what follows may be seen as numbers of any dtype."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT
