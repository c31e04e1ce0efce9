"""Tables and shards in the form for a checkpoint, and the shards of ids."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anabranch.parameter_server.server.contents import ShardSnapshot
from anabranch.tables import Placement, RowBlock, Table
from anabranch.tables.kernels import vocabulary
from anabranch.tables.snapshot import RowSnapshot


def blocks(table: Table, rows: int = 1 << 16) -> list[RowBlock]:
    """Return all rows, at most ``rows`` at a time."""
    snapshot = RowSnapshot([table], nullcontext(), buffer=rows * (8 * 3 + table.arena.row_bytes))
    return [piece.rows for piece in snapshot]


def readers(snapshot: ShardSnapshot) -> dict[str, Callable[[], dict[str, Tensor]]]:
    """Return what reads each group of a snapshot."""
    groups = snapshot.groups | {name: dict(group) for name, group in snapshot.files()}
    return {name: functools.partial(dict, group) for name, group in groups.items()}


def owners_of(placement: Placement, ids: NDArray[Any]) -> NDArray[Any]:
    """Return the shard of each id."""
    out, fixed, key = np.empty_like(ids), placement.rows is not None, np.array([placement.key], np.uint64)
    limits, halves = (np.array([number]) for number in ((placement.rows, placement.half) if fixed else (-1, 0)))
    assert vocabulary.owners(ids, np.array([0, ids.size]), limits, halves, key, placement.shards, out) < 0
    return out
