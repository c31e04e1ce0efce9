"""A vocabulary in which any int64 is an id: rows are given to ids when training first uses them.

Evaluation never admits: an unknown id reads as its initial values. If the table is full, a new id evicts the least
recently used row, or the one used in the fewest steps; a row that the running step has used is never evicted, and an id
without a row waits for another step. The same calls give the same rows on every machine, so a log can be replayed:
random admission is drawn from the id and the step.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import NotFound
from anabranch.tables.id_index import make_index
from anabranch.tables.shard_placement import Placement, mixed
from anabranch.tables.table_spec import TableSpec

__all__ = ["DynamicVocabulary"]

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]
_NOTHING: Ids = np.empty(0, np.int64)


class DynamicVocabulary:
    """The ids that one shard of a dynamic table has rows for.

    Attributes:
        evictions: ids that lost their row to another.
    """

    def __init__(
        self, spec: TableSpec, placement: Placement, shard: int, key: int, kind: Literal["compiled", "plain"]
    ) -> None:
        self._spec, self._placement, self._shard, self._key = spec, placement, shard, key
        self._capacity = None if spec.capacity is None else -(-spec.capacity // placement.shards)
        self._index = make_index(kind, self._capacity, by_frequency=spec.eviction == "frequency")
        self.evictions = 0

    @property
    def rows(self) -> int:
        """The number of rows returned."""
        return self._index.rows

    def locate(self, ids: Ids, *, step: int, training: bool) -> tuple[Ids, Ids]:
        """Return the row of each id, -1 for one without; and the rows just evicted from other ids."""
        self._check_owner(ids)
        if not training:
            return self._index.find(ids), _NOTHING
        rows, reused = self._use(ids, step)
        self.evictions += reused.size
        return rows, reused

    def admits(self, ids: Ids, *, step: int) -> Flags:
        """Return for each id whether it has no row, and training would give it one, if there is one to give."""
        return (self._index.find(ids) < 0) & self._draw(ids, step)

    def rows_with(self, ids: Ids, *, step: int, enough: int) -> int:
        """Return the number of rows once training has located ``ids``, or ``enough`` if it is certainly no more."""
        if self._limited(self.rows + ids.size) <= enough:
            return enough
        return self._limited(self.rows + np.unique(ids[self.admits(ids, step=step)]).size)

    def _limited(self, rows: int) -> int:
        return rows if self._capacity is None else min(rows, self._capacity)

    def _use(self, ids: Ids, step: int) -> tuple[Ids, Ids]:
        """``use`` of the index, in the order of the ids if rows can run out.

        A worker with a cache requests the ids that it misses first. The order must not decide which id gets a row, nor
        which of several equally old rows is evicted for it.
        """
        if self._capacity is None:
            return self._index.use(ids, self._draw(ids, step), step)
        order = np.argsort(ids, kind="stable")
        ordered, rows = ids[order], np.empty_like(ids)
        rows[order], reused = self._index.use(ordered, self._draw(ordered, step), step)
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
        """Return the ids of ``rows``."""
        return self._index.entries()[0][rows]

    def in_use(self, first: int, rows: int) -> Ids:
        """Those of the ``rows`` rows from ``first`` on that have an id, ascending."""
        return np.arange(first, max(first, min(first + rows, self._index.rows)))

    def usage(self, rows: Ids) -> Ids:
        """For each row the number of steps that used it, and the last of them; ``[rows, 2]``."""
        _, uses, last_use = self._index.entries()
        return np.stack([uses[rows], last_use[rows]], axis=1)

    def check_restored(self, ids: Ids) -> None:
        """Raise the errors that ``restore`` would raise."""
        self._check_owner(ids)
        self._index.check_new(ids)

    def restore(self, ids: Ids, usage: Ids) -> Ids:
        """Give rows to ids that have none yet, with their earlier usage; returns the rows.

        All get one, also beyond this shard's share of the capacity: a checkpoint's ids do not spread over the shards
        quite evenly. From then on a new id evicts another.

        Raises:
            NotFound: another shard's id.
            ValueError: an id that has a row already.
        """
        self._check_owner(ids)
        return self._index.restore(ids, usage[:, 0], usage[:, 1])
