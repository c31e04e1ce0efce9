"""A heap of what to evict next: entries (uses or 0, last use, id or row), the least first.

Keys only grow, so an entry is brought up to date when it reaches the top, not when its row is used.
"""

from __future__ import annotations

from typing import Any

from anabranch.tables.kernels.numbers import inline


@inline
def _less(heap: Any, a: Any, b: Any) -> bool:
    for k in range(3):
        if heap[a, k] != heap[b, k]:
            return bool(heap[a, k] < heap[b, k])
    return False


@inline
def _swap(heap: Any, a: Any, b: Any) -> None:
    for k in range(3):
        heap[a, k], heap[b, k] = heap[b, k], heap[a, k]


@inline
def sink(heap: Any, size: int) -> None:
    """Sink the top to its place."""
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


@inline
def add(heap: Any, size: int, uses: int, last_use: int, last: int) -> int:
    """Add an entry; returns the new size."""
    heap[size, 0], heap[size, 1], heap[size, 2] = uses, last_use, last
    at = size
    while at and _less(heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2
    return size + 1


@inline
def drop_top(heap: Any, size: int) -> int:
    """Remove the top; returns the new size."""
    _swap(heap, 0, size - 1)
    sink(heap, size - 1)
    return size - 1
