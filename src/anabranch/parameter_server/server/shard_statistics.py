"""Statistics of a shard: requests and rows of each table."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts", "ShardStatistics", "TableStatistics"]


@dataclass(slots=True)
class Counts:
    """Requests for one table or parameter so far."""

    pulls: int = 0
    pushes: int = 0
    rows_pulled: int = 0
    rows_pushed: int = 0


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """Requests for one table or parameter, in messages and rows, and the number of rows it holds and has evicted.

    ``unadmitted`` ids of pushes found no room in its capacity.
    """

    pulls: int
    pushes: int
    rows_pulled: int
    rows_pushed: int
    rows: int
    evictions: int
    bytes: int
    step: int
    unadmitted: int = 0


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """Statistics of a shard since it started.

    Attributes:
        tables: by name.
        refused_values: pushes refused because they held NaN or Inf, by the peer that sent them.
        replayed: records replayed from the log.
        spills: changes that waited for a write, as the reader of a snapshot was slow.
    """

    tables: dict[str, TableStatistics]
    refused_values: dict[str, int]
    replayed: int
    spills: int = 0
