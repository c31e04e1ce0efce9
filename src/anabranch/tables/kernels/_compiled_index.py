"""The index of a dynamic vocabulary, compiled: open addressing, and a heap of the rows to evict next.

``keys`` and ``slots`` are one hash table of a power of two: an id is at the first free place from its mixed bits on;
``slots`` holds its row, or -1 in a free place. Any int64 is an id. Rows are allocated from 0 up; once they are all in
use, a new id evicts another.

``heap`` orders the rows by (uses or 0, last use, row), the least first. Keys only grow, so an entry is brought up to
date when it reaches the top, not when its row is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.tables.kernels._compiled import U, _inline, _kernel, _mix, _prefetch

_AHEAD = 12  # ids


@_inline
def _place(keys: Any, slots: Any, wanted: Any) -> Any:
    """Return the place of ``wanted`` in the hash table, or the free place where it would go."""
    mask = U(keys.size - 1)
    at = _mix(U(wanted)) & mask
    while slots[at] >= 0 and keys[at] != wanted:
        at = (at + U(1)) & mask
    return at


@_inline
def _look_ahead(keys: Any, slots: Any, ids: Any, i: int) -> None:
    """Prefetches the place of the id that is looked up a little later."""
    if i + _AHEAD < ids.size:
        at = _mix(U(ids[i + _AHEAD])) & U(keys.size - 1)
        _prefetch(keys, at)
        _prefetch(slots, at)


@_kernel
def find(keys: Any, slots: Any, ids: Any, out: Any) -> None:
    """Find the row of each id, -1 for one without a row."""
    for i in range(ids.size):
        _look_ahead(keys, slots, ids, i)
        out[i] = slots[_place(keys, slots, ids[i])]


@_kernel
def put(keys: Any, slots: Any, ids: Any, first: int) -> None:
    """Enters distinct new ids under the rows ``first``, ``first + 1``, ..."""
    for i in range(ids.size):
        at = _place(keys, slots, ids[i])
        keys[at] = ids[i]
        slots[at] = first + i


@_inline
def _remove(keys: Any, slots: Any, leaving: Any) -> None:
    """Remove an id and move back those that it had pushed on, so that no search ends too early."""
    mask = U(keys.size - 1)
    hole = _place(keys, slots, leaving)
    at = hole
    while True:
        at = (at + U(1)) & mask
        if slots[at] < 0:
            break
        home = _mix(U(keys[at])) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            keys[hole], slots[hole] = keys[at], slots[at]
            hole = at
    slots[hole] = -1


@_inline
def _less(heap: Any, a: Any, b: Any) -> bool:
    for k in range(3):
        if heap[a, k] != heap[b, k]:
            return bool(heap[a, k] < heap[b, k])
    return False


@_inline
def _swap(heap: Any, a: Any, b: Any) -> None:
    for k in range(3):
        heap[a, k], heap[b, k] = heap[b, k], heap[a, k]


@_inline
def _sink(heap: Any, size: int) -> None:
    """Sinks the top to its place."""
    first, second, third = heap[0, 0], heap[0, 1], heap[0, 2]
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _less(heap, child + 1, child):
            child += 1
        if not (
            heap[child, 0] < first
            or (
                heap[child, 0] == first
                and (heap[child, 1] < second or (heap[child, 1] == second and heap[child, 2] < third))
            )
        ):
            break
        heap[at, 0], heap[at, 1], heap[at, 2] = heap[child, 0], heap[child, 1], heap[child, 2]
        at = child
    heap[at, 0], heap[at, 1], heap[at, 2] = first, second, third


@_inline
def _add(heap: Any, size: int, uses: int, last_use: int, row: int) -> int:
    heap[size, 0], heap[size, 1], heap[size, 2] = uses, last_use, row
    at = size
    while at and _less(heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2
    return size + 1


@_inline
def _drop_top(heap: Any, size: int) -> int:
    _swap(heap, 0, size - 1)
    _sink(heap, size - 1)
    return size - 1


@_kernel
def rank(heap: Any, uses: Any, last_use: Any, rows: int, by_frequency: bool) -> int:
    """Fill the heap with ``rows`` rows; returns its size."""
    size = 0
    for row in range(rows):
        size = _add(heap, size, uses[row] if by_frequency else 0, last_use[row], row)
    return size


@_kernel
def use(
    keys: Any,
    slots: Any,
    ids_of: Any,
    uses: Any,
    last_use: Any,
    heap: Any,
    heap_size: int,
    filled: int,
    capacity: int,
    by_frequency: bool,
    settled: int,
    ids: Any,
    admitted: Any,
    step: int,
    out: Any,
    reused: Any,
    left: Any,
) -> tuple[int, int, int]:
    """Return the row of each id in a training step; admits the ids marked in ``admitted``. A row is used at most once
    per step.

    Returns the number of filled rows, the size of the heap, and the number of rows taken from other ids: ``reused``
    lists them, ``left`` their former ids. No row that this step has used is taken, nor one used in ``settled`` steps;
    without another, a new id is not admitted: its row is -1.
    """
    taken = 0
    for i in range(ids.size):
        _look_ahead(keys, slots, ids, i)
        row = slots[_place(keys, slots, ids[i])]
        out[i] = row
        if row >= 0 and last_use[row] != step:
            last_use[row] = step
            uses[row] += 1
    aside = 0
    waiting = np.empty(ids.size + 1, np.int64)
    for i in range(ids.size):
        if out[i] >= 0 or not admitted[i]:
            continue
        at = _place(keys, slots, ids[i])
        if slots[at] >= 0:  # just admitted, earlier in this batch
            out[i] = slots[at]
            continue
        row = -1
        on_top = False
        if filled < capacity:
            row = filled
            filled += 1
        else:
            while heap_size:
                top = heap[0, 2]
                now = uses[top] if by_frequency else 0
                if heap[0, 0] != now or heap[0, 1] != last_use[top]:
                    heap[0, 0], heap[0, 1] = now, last_use[top]
                    _sink(heap, heap_size)
                elif uses[top] >= settled:  # stays for good, so it need not be checked again
                    heap_size = _drop_top(heap, heap_size)
                elif last_use[top] == step:
                    if not by_frequency:  # the least recently used row is in use, so all are
                        break
                    heap_size = _drop_top(heap, heap_size)
                    if aside == waiting.size:
                        waiting = np.concatenate((waiting, waiting))
                    waiting[aside] = top
                    aside += 1
                else:
                    row = top
                    on_top = True
                    _remove(keys, slots, ids_of[row])
                    reused[taken], left[taken] = row, ids_of[row]
                    taken += 1
                    break
        if row < 0:
            continue
        at = _place(keys, slots, ids[i])
        keys[at], slots[at] = ids[i], row
        ids_of[row], uses[row], last_use[row] = ids[i], 1, step
        out[i] = row
        if on_top:
            heap[0, 0], heap[0, 1] = 1 if by_frequency else 0, step
            _sink(heap, heap_size)
        elif heap.shape[0]:
            heap_size = _add(heap, heap_size, 1 if by_frequency else 0, step, row)
    for k in range(aside):
        row = waiting[k]
        heap_size = _add(heap, heap_size, uses[row] if by_frequency else 0, last_use[row], row)
    return filled, heap_size, taken
