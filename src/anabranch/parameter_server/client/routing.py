"""Routing of a message's ids to shards, and their order in it: for all tables at once.

::

    ids of all tables ──owners──> the shard of each ──arrange──> shard by shard, table by table, kind by kind

A message has dozens of tables, so costs that do not depend on the number of ids are paid once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.tables.kernels import routing
from anabranch.tables.shard_placement import Placement

__all__ = ["Placements", "arrange", "owners_of"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Placements:
    """Placements of the rows of several tables, as arrays.

    Attributes:
        each: the placement of each table.
        limits: its rows, -1 where any int64 is an id.
        halves, keys: as ``Placement`` has them.
    """

    each: Sequence[Placement]
    limits: Array
    halves: Array
    keys: Array

    @classmethod
    def of(cls, each: Sequence[Placement]) -> Placements:
        """Return the arrays of ``each``, placements over the same shards."""
        rows = [-1 if one.rows is None else one.rows for one in each]
        halves = [0 if one.rows is None else one.half for one in each]
        return cls(
            each, np.array(rows, np.int64), np.array(halves, np.int64), np.array([o.key for o in each], np.uint64)
        )


def owners_of(ids: Array, starts: Array, tables: Placements, shards: int) -> tuple[Array, int]:
    """Return the shard of each id, and the position of the first id outside its table, or -1.

    >>> tables = Placements.of([Placement(10, 1, 7), Placement(None, 1, 8)])
    >>> owners_of(np.array([3, 10, 10]), np.array([0, 2, 3]), tables, 1)[1]
    1
    """
    out = np.empty_like(ids)
    return out, routing.owners(ids, starts, tables.limits, tables.halves, tables.keys, shards, out)


def arrange(owners: Array, kinds: Array, starts: Array, shards: int, count: int) -> tuple[Array, Array]:
    """Return the order of ids by shard, table and kind, otherwise as given; and the number of each.

    >>> arrange(np.array([1, 0, 1]), np.array([1, 0, 0]), np.array([0, 1, 3]), 2, 2)[0]
    array([1, 0, 2])

    Args:
        owners: the shard of each id.
        kinds: the kind of each, below ``count``.
        starts: the start of each table's ids, and their end.
        shards: the number of shards.
        count: the number of kinds.

    Returns:
        Places of the ids, int64; and counts ``[shards, tables, count]``.
    """
    counts, order = np.zeros((shards, len(starts) - 1, count), np.int64), np.empty(owners.size, np.int64)
    routing.arrange(owners, kinds, starts, counts, np.empty_like(counts), order)
    return order, counts
