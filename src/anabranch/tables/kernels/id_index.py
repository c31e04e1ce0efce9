"""The index of a cached table, compiled: open addressing, and a heap of the rows to evict next.

``keys`` and ``slots`` are one hash table of a power of two: an id is at the first free place from its mixed bits on;
``slots`` holds its row, or -1 in a free place. Any int64 is an id. Rows are allocated from 0 up; once they are all in
use, a new id evicts another.

``heap`` orders the rows by (uses or 0, last use, row), the least first. Keys only grow, so an entry is brought up to
date when it reaches the top, not when its row is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from anabranch.tables.kernels.heap import add, drop_top, sink
from anabranch.tables.kernels.numbers import U, inline, kernel, mix, prefetch

_AHEAD = 12  # ids


@inline
def _place(keys: Any, slots: Any, wanted: Any) -> Any:
    """Return the place of ``wanted`` in the hash table, or the free place where it would go."""
    mask = U(keys.size - 1)
    at = mix(U(wanted)) & mask
    while slots[at] >= 0 and keys[at] != wanted:
        at = (at + U(1)) & mask
    return at


@inline
def _look_ahead(keys: Any, slots: Any, ids: Any, i: int) -> None:
    """Prefetches the place of the id that is looked up a little later."""
    if i + _AHEAD < ids.size:
        at = mix(U(ids[i + _AHEAD])) & U(keys.size - 1)
        prefetch(keys, at)
        prefetch(slots, at)


@inline
def _remove(keys: Any, slots: Any, leaving: Any) -> None:
    """Remove an id and move back those that it had pushed on, so that no search ends too early."""
    mask = U(keys.size - 1)
    hole = _place(keys, slots, leaving)
    at = hole
    while True:
        at = (at + U(1)) & mask
        if slots[at] < 0:
            break
        home = mix(U(keys[at])) & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            keys[hole], slots[hole] = keys[at], slots[at]
            hole = at
    slots[hole] = -1


@kernel
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
    step: int,
    out: Any,
    reused: Any,
    left: Any,
) -> tuple[int, int, int]:
    """Return the row of each id in a training step, new ones too. A row is used at most once per step.

    Returns the number of filled rows, the size of the heap, and the number of rows taken from other ids: ``reused``
    lists them, ``left`` their former ids. No row that this step has used is taken, nor one used in ``settled`` steps;
    without another, a new id has no row, -1.
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
        if out[i] >= 0:
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
                    sink(heap, heap_size)
                elif uses[top] >= settled:  # stays for good, so it need not be checked again
                    heap_size = drop_top(heap, heap_size)
                elif last_use[top] == step:
                    if not by_frequency:  # the least recently used row is in use, so all are
                        break
                    heap_size = drop_top(heap, heap_size)
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
            sink(heap, heap_size)
        else:
            heap_size = add(heap, heap_size, 1 if by_frequency else 0, step, row)
    for k in range(aside):
        row = waiting[k]
        heap_size = add(heap, heap_size, uses[row] if by_frequency else 0, last_use[row], row)
    return filled, heap_size, taken
