"""Placement of rows on shards, so that the most requested rows are not all on one.

Ids are often ranked by frequency, or share a factor, so neither blocks of ids nor ``id % shards`` are safe. A keyed
permutation of the ids comes first, then ``% shards``. It is a bijection, so a fixed table needs no index: shard and
place in the shard are computed, and so is the id of a place. A dynamic table has no range to permute; there the mixed
bits of the id determine the shard. A single shard keeps its rows in the order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anabranch.tables.initial import table_key
from anabranch.tables.kernels import routing
from anabranch.tables.table_spec import TableSpec

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """The rows of one table over the shards.

    >>> placement = Placement(rows=10, shards=3, key=7)
    >>> sum(placement.count(shard) for shard in range(3))
    10
    >>> ids = np.arange(10)
    >>> owners, places = placement.owners(ids), placement.places(ids)
    >>> all((placement.ids(shard, places[owners == shard]) == ids[owners == shard]).all() for shard in range(3))
    True

    Attributes:
        rows: the number of rows of the table, ``None`` if any int64 is an id of it.
        shards: the number of shards that hold them.
        key: 64 bits that fix the permutation; every worker and shard must use the same.
    """

    rows: int | None
    shards: int
    key: int

    @classmethod
    def of(cls, spec: TableSpec, shards: int) -> Placement:
        """Return the placement of a table's rows over so many shards."""
        return cls(spec.rows, shards, table_key(spec.seed, spec.name))

    def owners(self, ids: Ids) -> Ids:
        """Return the shard of each id; ids of a fixed table must be in ``range(rows)``."""
        if self.shards == 1:
            return np.zeros_like(ids)
        if self.rows is None:
            return (mixed(ids, self.key) % np.uint64(self.shards)).astype(np.int64)
        return self._permuted(ids, forward=True) % self.shards

    def places(self, ids: Ids) -> Ids:
        """Return the place of each id of a fixed table in its shard."""
        return ids if self.shards == 1 else self._permuted(ids, forward=True) // self.shards

    def ids(self, shard: int, places: Ids) -> Ids:
        """Return the ids that are at ``places`` of ``shard``, for a fixed table."""
        return places if self.shards == 1 else self._permuted(places * self.shards + shard, forward=False)

    def count(self, shard: int) -> int:
        """Return the number of rows of a fixed table that ``shard`` holds."""
        assert self.rows is not None
        return (self.rows - shard + self.shards - 1) // self.shards

    @property
    def half(self) -> int:
        """Half the bits of the power of four in which a fixed table's ids are permuted."""
        assert self.rows is not None
        return max(1, (max(self.rows - 1, 1).bit_length() + 1) // 2)

    def _permuted(self, values: Ids, *, forward: bool) -> Ids:
        assert self.rows is not None
        out = np.empty_like(values)
        routing.place(values, self.rows, self.half, np.uint64(self.key), out, forward)
        return out


def mixed(ids: Ids, key: int) -> NDArray[np.uint64]:
    """64 bits of each id that depend on every bit of id and key."""
    x = ids.view(np.uint64) ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
