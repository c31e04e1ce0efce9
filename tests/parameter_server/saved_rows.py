"""Tables and shards in the form for a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from anabranch.parameter_server.server.contents import ShardSnapshot
from anabranch.tables import RowBlock, Table
from anabranch.tables.snapshot import RowSnapshot


def blocks(table: Table, rows: int = 1 << 16) -> list[RowBlock]:
    """Return all rows, at most ``rows`` at a time."""
    snapshot = RowSnapshot([table], nullcontext(), buffer=rows * (8 * 3 + table.arena.row_bytes))
    return [piece.rows for piece in snapshot]


def readers(snapshot: ShardSnapshot) -> dict[str, Callable[[], dict[str, Tensor]]]:
    """Return what reads each group of a snapshot."""
    groups = snapshot.groups | {name: dict(group) for name, group in snapshot.files()}
    return {name: functools.partial(dict, group) for name, group in groups.items()}
