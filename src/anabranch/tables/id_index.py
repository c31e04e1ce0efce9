"""From ids to rows, in a bounded number of rows: lookup, allocation and eviction.

Shared by dynamic vocabularies and caches. The compiled index is checked against the plain one, a dictionary.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
_FIRST_ROOM = 1024
_NEVER = 1 << 62


class IdIndex(Protocol):
    """Ids and their rows, of either kind."""

    @property
    def rows(self) -> int:
        """The number of rows returned."""

    def find(self, ids: Ids) -> Ids:
        """Return the row of each id, -1 for one without."""

    def use(self, ids: Ids, admitted: Flags, step: int) -> tuple[Ids, Ids]:
        """Return the row of each id that ``step`` uses, allocated for ids without one; and the rows evicted from other
        ids.
        """

    def entries(self) -> tuple[Ids, Ids, Ids]:
        """For each row its id, the number of steps that used it, and the last of them."""

    def check_new(self, ids: Ids) -> None:
        """Raise ``ValueError`` for ids that ``restore`` cannot give rows to."""

    def restore(self, ids: Ids, uses: Ids, last_use: Ids) -> Ids:
        """Give rows to new ids, with their earlier usage, also beyond the capacity; returns the rows."""


def make_index(
    kind: Literal["compiled", "plain"], capacity: int | None, *, by_frequency: bool, settled: int = _NEVER
) -> IdIndex:
    """Return an empty index.

    >>> index = make_index("plain", 2, by_frequency=False)
    >>> index.use(np.array([7, 8]), np.array([True, True]), 0)[0].tolist()
    [0, 1]
    >>> [found.tolist() for found in index.use(np.array([9]), np.array([True]), 1)]
    [[0], [0]]

    Args:
        kind: compiled, or plain.
        capacity: the most rows, ``None`` for any number.
        by_frequency: the row used in the fewest steps is taken first; else the one unused longest.
        settled: a row used in this many steps is never taken.
    """
    if kind == "plain":
        return _PlainIndex(capacity, by_frequency, settled)
    return _CompiledIndex(capacity, by_frequency, settled)


def _check_new(index: IdIndex, ids: Ids) -> None:
    if (index.find(ids) >= 0).any() or np.unique(ids).size != ids.size:
        raise ValueError("an id already has a row; restore into an empty table")


class _CompiledIndex:
    def __init__(self, capacity: int | None, by_frequency: bool, settled: int) -> None:
        from anabranch.tables.kernels import id_index

        self._kernels = id_index
        self._capacity, self._by_frequency, self._settled = capacity, by_frequency, settled
        self._rows = 0
        self._heap_size = 0
        room = _FIRST_ROOM if capacity is None else min(capacity, _FIRST_ROOM)
        self._ids, self._uses, self._last_use = (np.zeros(room, np.int64) for _ in range(3))
        self._heap = np.zeros((0 if capacity is None else room, 3), np.int64)
        self._rehash()

    @property
    def rows(self) -> int:
        return self._rows

    def find(self, ids: Ids) -> Ids:
        out = np.empty_like(ids)
        self._kernels.find(self._keys, self._slots, ids, out)
        return out

    def use(self, ids: Ids, admitted: Flags, step: int) -> tuple[Ids, Ids]:
        self._make_room(ids.size)
        out, reused = np.empty_like(ids), np.empty_like(ids)
        self._rows, self._heap_size, taken = self._kernels.use(
            self._keys, self._slots, self._ids, self._uses, self._last_use, self._heap, self._heap_size, self.rows,
            self._ids.size, self._by_frequency, self._settled, ids, admitted, step, out, reused, np.empty_like(ids),
        )  # fmt: skip
        return out, reused[:taken]

    def entries(self) -> tuple[Ids, Ids, Ids]:
        return self._ids[: self.rows], self._uses[: self.rows], self._last_use[: self.rows]

    def check_new(self, ids: Ids) -> None:
        _check_new(self, ids)

    def restore(self, ids: Ids, uses: Ids, last_use: Ids) -> Ids:
        self.check_new(ids)
        if self._capacity is not None:
            self._capacity = max(self._capacity, self.rows + ids.size)
        self._make_room(ids.size)
        rows = np.arange(self.rows, self.rows + ids.size)
        self._kernels.put(self._keys, self._slots, ids, self.rows)
        self._ids[rows], self._uses[rows], self._last_use[rows] = ids, uses, last_use
        self._rows += ids.size
        if self._capacity is not None:
            self._heap_size = self._kernels.rank(self._heap, self._uses, self._last_use, self.rows, self._by_frequency)
        return rows

    def _make_room(self, more: int) -> None:
        needed = self.rows + more
        if self._capacity is not None:
            needed = min(needed, self._capacity)
        if needed <= self._ids.size:
            return
        room = max(needed, 2 * self._ids.size)
        if self._capacity is not None:
            room = min(room, self._capacity)
        self._ids, self._uses, self._last_use = (
            np.concatenate([old, np.zeros(room - old.size, np.int64)])
            for old in (self._ids, self._uses, self._last_use)
        )
        if self._capacity is not None:
            self._heap = np.concatenate([self._heap, np.zeros((room - len(self._heap), 3), np.int64)])
        self._rehash()

    def _rehash(self) -> None:
        size = 1 << (2 * self._ids.size).bit_length()
        self._keys, self._slots = np.zeros(size, np.int64), np.full(size, -1)
        self._kernels.put(self._keys, self._slots, self._ids[: self.rows], 0)


class _PlainIndex:
    def __init__(self, capacity: int | None, by_frequency: bool, settled: int) -> None:
        self._capacity, self._by_frequency, self._settled = capacity, by_frequency, settled
        self._row_of: dict[int, int] = {}
        self._ids: list[int] = []
        self._uses: list[int] = []
        self._last_use: list[int] = []

    @property
    def rows(self) -> int:
        return len(self._ids)

    def find(self, ids: Ids) -> Ids:
        return np.array([self._row_of.get(wanted, -1) for wanted in ids.tolist()], np.int64)

    def use(self, ids: Ids, admitted: Flags, step: int) -> tuple[Ids, Ids]:
        for row in self.find(ids).tolist():
            if row >= 0 and self._last_use[row] != step:
                self._last_use[row] = step
                self._uses[row] += 1
        reused: list[int] = []
        for wanted, welcome in zip(ids.tolist(), admitted.tolist(), strict=True):
            if welcome and wanted not in self._row_of:
                self._admit(wanted, step, reused)
        return self.find(ids), np.array(reused, np.int64)

    def _admit(self, wanted: int, step: int, reused: list[int]) -> None:
        if self._capacity is None or self.rows < self._capacity:
            row = self.rows
            for column in (self._ids, self._uses, self._last_use):
                column.append(0)
        else:
            taken = zip(range(self.rows), self._last_use, self._uses, strict=True)
            free = [row for row, last, uses in taken if last != step and uses < self._settled]
            if not free:
                return
            row = min(free, key=lambda row: (self._by_frequency * self._uses[row], self._last_use[row], row))
            del self._row_of[self._ids[row]]
            reused.append(row)
        self._row_of[wanted] = row
        self._ids[row], self._uses[row], self._last_use[row] = wanted, 1, step

    def entries(self) -> tuple[Ids, Ids, Ids]:
        columns = (self._ids, self._uses, self._last_use)
        ids, uses, last_use = (np.array(column, np.int64) for column in columns)
        return ids, uses, last_use

    def check_new(self, ids: Ids) -> None:
        _check_new(self, ids)

    def restore(self, ids: Ids, uses: Ids, last_use: Ids) -> Ids:
        self.check_new(ids)
        rows = np.arange(self.rows, self.rows + ids.size)
        self._row_of.update(zip(ids.tolist(), rows.tolist(), strict=True))
        self._ids += ids.tolist()
        self._uses += uses.tolist()
        self._last_use += last_use.tolist()
        return rows
