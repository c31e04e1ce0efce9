"""``HotRows``: the most used rows of a table in a file, kept in memory.

The system keeps pages of a file in memory, and a page of 4 KiB holds thirty rows of 128 bytes. Ids are spread over the
file, so hot rows have cold neighbours, and the page cache holds thirty rows to keep one. Here rows are kept one by
one::

    rows of a request ──> all fit ──> those not hot are read from the file, in the place of the coldest ──> worked on
                    └──> more than fit, or only read for a checkpoint ──> copied out, worked on, copied back

An evicted row is written to the file if it was changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.tables.id_index import make_index
from anabranch.tables.row_storage import FileStorage, RowStorage

__all__ = ["HotRows"]

Array = NDArray[Any]


class HotRows:
    """A ``FileStorage`` with a bounded number of its rows in memory; see ``RowStorage``.

    Args:
        file: all rows.
        capacity: rows in memory.
        dtype: of the values.
        by_frequency: evict the row used in the fewest requests first; else the least recently used one.
        kind: of the index, compiled or plain.

    Attributes:
        hits, misses: distinct rows of counted requests that were in memory, and that were not.
    """

    whole: RowStorage | None = None

    def __init__(
        self,
        file: FileStorage,
        capacity: int,
        dtype: torch.dtype,
        *,
        by_frequency: bool,
        kind: Literal["compiled", "plain"],
    ) -> None:
        self.hits = self.misses = 0
        self._file = file
        self._dtype = dtype
        self._hot = RowStorage(capacity, file.stride, dtype, with_sums=file.with_sums)
        self._index = make_index(kind, capacity, by_frequency=by_frequency)
        self._row_in = np.full(capacity, -1)
        self._changed = np.zeros(capacity, np.bool_)
        self._requests = 0

    @property
    def rows(self) -> int:
        """The number of rows that there is room for."""
        return self._file.rows

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows; existing ones keep their places."""
        self._file.grow(rows)

    def forget(self, rows: Array) -> None:
        """Reset these rows when they are next used."""
        if rows.size:
            slots = self._index.find(np.ascontiguousarray(rows))
            self._hot.stamps[slots[slots >= 0]] = 0
            self._changed[slots[slots >= 0]] = True
            self._file.forget(rows[slots < 0])

    @contextmanager
    def resident(
        self, rows: Array, *, changing: bool = True, counted: bool = False
    ) -> Iterator[tuple[RowStorage, Array]]:
        """Arrays that hold ``rows``, and the place of each of ``rows`` in them; -1 for a row of -1.

        Unless ``changing``, writes to them may be lost. What is ``counted`` counts as hits and misses.
        """
        distinct, inverse = np.unique(rows, return_inverse=True)
        unknown = int(distinct.size > 0 and distinct[0] < 0)
        distinct, places = distinct[unknown:], inverse - unknown
        if counted:
            there = int((self._index.find(distinct) >= 0).sum())
            self.hits += there
            self.misses += distinct.size - there
        if not changing or distinct.size > self._hot.rows:
            with self._copied(distinct, changing=changing) as staged:
                yield staged, places
            return
        slots = self._bring(distinct)
        before = self._hot.stamps[slots]
        try:
            yield self._hot, np.append(slots, -1)[places]  # a place of -1 is the last
        finally:
            # No row changes without its stamp: it begins, is brought up to date, moves, or was forgotten before.
            self._changed[slots] |= self._hot.stamps[slots] != before

    def bytes(self) -> int:
        """Bytes of all rows; the disk holds only those that were used."""
        return self._file.bytes()

    def _bring(self, distinct: Array) -> Array:
        """Return the slots of these rows, which must fit, once they are in memory."""
        self._requests += 1
        slots, _ = self._index.use(distinct, np.ones(distinct.size, np.bool_), self._requests)
        missing = slots[self._row_in[slots] != distinct]
        leaving = missing[(self._row_in[missing] >= 0) & self._changed[missing]]
        self._write_back(leaving)
        self._row_in[slots] = distinct
        self._changed[missing] = False
        with self._file.resident(self._row_in[missing], changing=False) as (file, where):
            _copy(file, where, self._hot, missing)
        return slots

    def _write_back(self, slots: Array) -> None:
        if slots.size:
            with self._file.resident(self._row_in[slots]) as (file, where):
                _copy(self._hot, slots, file, where)

    @contextmanager
    def _copied(self, distinct: Array, *, changing: bool) -> Iterator[RowStorage]:
        """Copy these rows out of memory and the file; changed ones are written back."""
        staged = RowStorage(distinct.size, self._hot.stride, self._dtype, with_sums=self._hot.with_sums)
        slots = self._index.find(distinct)
        hot, cold = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        with self._file.resident(distinct[cold], changing=changing) as (file, where):
            _copy(file, where, staged, cold)
            _copy(self._hot, slots[hot], staged, hot)
            yield staged
            if changing:
                _copy(staged, cold, file, where)
                _copy(staged, hot, self._hot, slots[hot])
                self._changed[slots[hot]] = True


def _copy(source: RowStorage, rows: Array, target: RowStorage, places: Array) -> None:
    width = source.stride
    target.values.reshape(-1, width)[places] = source.values.reshape(-1, width)[rows]
    target.stamps[places] = source.stamps[rows]
    if source.with_sums:
        target.sums[places] = source.sums[rows]
