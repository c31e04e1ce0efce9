"""A vocabulary in which any int64 is an id: rows are given to ids when training first uses them.

Evaluation never admits: an id that is not there reads as the values that it would begin with. Where the table is full,
a new id takes the row that was unused longest, or used in the fewest steps; a row that the running step has used is
never taken, and an id for which no row is left waits for another step. The same calls give the same rows on every
machine, so a log can be replayed: an admission that is left to chance is drawn from the id and the step.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import NotFound
from anabranch.parameter_server.placement import Placement, mixed
from anabranch.parameter_server.table_spec import TableSpec

__all__ = ["DynamicVocabulary"]

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
_NOTHING: Ids = np.empty(0, np.int64)
_FIRST_ROOM = 1024


class _Index(Protocol):
    """Ids and their rows, of either kind."""

    @property
    def rows(self) -> int: ...
    def find(self, ids: Ids) -> Ids: ...
    def use(self, ids: Ids, admitted: Flags, step: int) -> tuple[Ids, Ids]: ...
    def entries(self) -> tuple[Ids, Ids, Ids]: ...
    def restore(self, ids: Ids, uses: Ids, last_use: Ids) -> Ids: ...


class DynamicVocabulary:
    """The ids that one shard of a dynamic table has rows for.

    Attributes:
        evictions: ids that lost their row to another.
        refusals: times that a training use found no row to take.
    """

    def __init__(
        self, spec: TableSpec, placement: Placement, shard: int, key: int, kind: Literal["compiled", "plain"]
    ) -> None:
        self._spec, self._placement, self._shard, self._key = spec, placement, shard, key
        capacity = None if spec.capacity is None else -(-spec.capacity // placement.shards)
        by_frequency = spec.eviction == "frequency"
        if kind == "plain":
            self._index: _Index = _PlainIndex(capacity, by_frequency)
        else:
            self._index = _CompiledIndex(capacity, by_frequency)
        self.evictions = 0
        self.refusals = 0

    @property
    def rows(self) -> int:
        """How many rows have been handed out."""
        return self._index.rows

    def locate(self, ids: Ids, *, step: int, training: bool) -> tuple[Ids, Ids]:
        """The row of each id, -1 for one that has none; and the rows that other ids have just lost."""
        self._check_owner(ids)
        if not training:
            return self._index.find(ids), _NOTHING
        rows, reused = self._index.use(ids, self._draw(ids, step), step)
        self.evictions += reused.size
        self.refusals += int((rows < 0).sum())
        return rows, reused

    def _check_owner(self, ids: Ids) -> None:
        if self._placement.shards > 1:
            strangers = np.flatnonzero(self._placement.owners(ids) != self._shard)
            if strangers.size:
                at = strangers[0]
                raise NotFound(
                    f"table {self._spec.name}: ids[{at}] is {ids[at]}, which shard {self._shard} does not hold"
                )

    def _draw(self, ids: Ids, step: int) -> Flags:
        if self._spec.admission == 1:
            return np.ones(ids.size, np.bool_)
        chance = mixed(mixed(ids, self._key).view(np.int64) + np.int64(step), self._key) >> np.uint64(11)
        return chance.astype(np.float64) * 2.0**-53 < self._spec.admission

    def ids(self, rows: Ids) -> Ids:
        """The ids of ``rows``."""
        return self._index.entries()[0][rows]

    def in_use(self) -> Ids:
        """The rows that have an id, ascending."""
        return np.arange(self._index.rows)

    def usage(self, rows: Ids) -> Ids:
        """Of each row: in how many steps it was used, and in which last; ``[rows, 2]``."""
        _, uses, last_use = self._index.entries()
        return np.stack([uses[rows], last_use[rows]], axis=1)

    def restore(self, ids: Ids, usage: Ids) -> Ids:
        """Gives rows to ids that have none yet, with the usage they had; returns the rows.

        Raises:
            NotFound: another shard's id.
            ValueError: more ids than the capacity, or one that has a row already.
        """
        self._check_owner(ids)
        return self._index.restore(ids, usage[:, 0], usage[:, 1])


def _check_room(rows: int, more: int, capacity: int | None) -> None:
    if capacity is not None and rows + more > capacity:
        raise ValueError(
            f"{rows + more} rows do not fit the shard's capacity of {capacity}; give the table a larger one"
        )


class _CompiledIndex:
    def __init__(self, capacity: int | None, by_frequency: bool) -> None:
        from anabranch.parameter_server import _compiled_index

        self._kernels = _compiled_index
        self._capacity, self._by_frequency = capacity, by_frequency
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
            self._ids.size, self._by_frequency, ids, admitted, step, out, reused,
        )  # fmt: skip
        return out, reused[:taken]

    def entries(self) -> tuple[Ids, Ids, Ids]:
        return self._ids[: self.rows], self._uses[: self.rows], self._last_use[: self.rows]

    def restore(self, ids: Ids, uses: Ids, last_use: Ids) -> Ids:
        if (self.find(ids) >= 0).any() or np.unique(ids).size != ids.size:
            raise ValueError("an id has a row already; restore into an empty table")
        _check_room(self.rows, ids.size, self._capacity)
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
    def __init__(self, capacity: int | None, by_frequency: bool) -> None:
        self._capacity, self._by_frequency = capacity, by_frequency
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
            free = [row for row in range(self.rows) if self._last_use[row] != step]
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

    def restore(self, ids: Ids, uses: Ids, last_use: Ids) -> Ids:
        if any(known in self._row_of for known in ids.tolist()) or np.unique(ids).size != ids.size:
            raise ValueError("an id has a row already; restore into an empty table")
        _check_room(self.rows, ids.size, self._capacity)
        rows = np.arange(self.rows, self.rows + ids.size)
        self._row_of.update(zip(ids.tolist(), rows.tolist(), strict=True))
        self._ids += ids.tolist()
        self._uses += uses.tolist()
        self._last_use += last_use.tolist()
        return rows
