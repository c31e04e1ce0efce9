"""The row of each id in a table: computed by a fixed vocabulary, looked up by a dynamic one, which admits new ids."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import NotFound
from anabranch.tables.kernels.selection import Kernels
from anabranch.tables.shard_placement import Placement

__all__ = ["FixedVocabulary", "Vocabulary"]

Ids = NDArray[np.int64]
_NOTHING: Ids = np.empty(0, np.int64)


class Vocabulary(Protocol):
    """From ids to rows of one shard's part of a table."""

    evictions: int

    @property
    def rows(self) -> int:
        """The number of rows on this shard; of a dynamic vocabulary, those returned."""

    def locate(self, ids: Ids, *, step: int, training: bool) -> tuple[Ids, Ids]:
        """Return the row of each id, -1 for one without; and the rows evicted for ids admitted in ``training``."""

    def admits(self, ids: Ids, *, step: int) -> NDArray[np.bool_]:
        """Return for each id whether it has no row, and training would give it one, if there is one to give."""

    def rows_with(self, ids: Ids, *, step: int, enough: int) -> int:
        """Return the number of rows once training has located ``ids``, or ``enough`` if it is certainly no more."""

    def ids(self, rows: Ids) -> Ids:
        """Return the ids of rows that are in use."""

    def in_use(self, first: int, rows: int) -> Ids:
        """Those of the ``rows`` rows from ``first`` on that have an id, ascending."""

    def usage(self, rows: Ids) -> Ids:
        """For each row the number of steps that used it, and the last: ``[rows, 2]``; ``[0, 2]`` without eviction."""

    def check_restored(self, ids: Ids) -> None:
        """Raise the errors that ``restore`` would raise."""

    def restore(self, ids: Ids, usage: Ids) -> Ids:
        """Restores ids with their usage; returns their rows."""


class FixedVocabulary:
    """The ids ``range(rows)``, or this shard's part of them."""

    def __init__(self, name: str, placement: Placement, shard: int, kernels: Kernels) -> None:
        assert placement.rows is not None
        self._name, self._placement, self._shard, self._kernels = name, placement, shard, kernels
        self._rows = placement.count(shard)
        self.evictions = 0

    @property
    def rows(self) -> int:
        """The number of rows on this shard."""
        return self._rows

    def locate(self, ids: Ids, *, step: int, training: bool) -> tuple[Ids, Ids]:
        """Return the row of each id; none is ever evicted.

        Raises:
            NotFound: an id outside the table, or one that another shard holds; says which, and where in ``ids``.
        """
        rows = self._placement.rows
        assert rows is not None
        bad = self._kernels.first_outside(ids, rows)
        if bad >= 0:
            raise NotFound(f"table {self._name} has ids 0 to {rows - 1}; ids[{bad}] is {ids[bad]}")
        if self._placement.shards > 1:
            strangers = np.flatnonzero(self._placement.owners(ids) != self._shard)
            if strangers.size:
                at = strangers[0]
                raise NotFound(f"table {self._name}: ids[{at}] is {ids[at]}, which shard {self._shard} does not hold")
        return self._placement.places(ids), _NOTHING

    def admits(self, ids: Ids, *, step: int) -> NDArray[np.bool_]:
        """Return False for each id: all have a row."""
        return np.zeros(ids.size, np.bool_)

    def rows_with(self, ids: Ids, *, step: int, enough: int) -> int:
        """Return the number of rows on this shard, which never changes."""
        return self._rows

    def ids(self, rows: Ids) -> Ids:
        """Return the ids of ``rows``."""
        return self._placement.ids(self._shard, rows)

    def in_use(self, first: int, rows: int) -> Ids:
        """Every row."""
        return np.arange(first, max(first, min(first + rows, self.rows)))

    def usage(self, rows: Ids) -> Ids:
        """No usage: no row is ever evicted."""
        return _NOTHING.reshape(0, 2)

    def check_restored(self, ids: Ids) -> None:
        """Raise the errors of ``locate``."""
        self.locate(ids, step=0, training=False)

    def restore(self, ids: Ids, usage: Ids) -> Ids:
        """Return the rows of ``ids``."""
        return self.locate(ids, step=0, training=False)[0]
