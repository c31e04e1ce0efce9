"""Counters of an executor, as a frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True, slots=True)
class TableLoads:
    """Counts of this worker's requests about one table or parameter.

    Attributes:
        pulls: messages that read it.
        pushes: messages that moved it.
        bytes: of ids, versions, rows and gradients, both ways.
        hits: rows that were read without coming over: cached, and checked recently or unchanged; 0 without a cache.
        misses: rows that came over for the cache; 0 without one.
        evictions: rows that left the cache for others.
        wait_seconds: seconds spent waiting for the servers, those of a message about several shared between them.
        unadmitted: of a table with ``capacity``, ids of all workers' pushes that found no room, counted in each step:
            their gradients were dropped.
        evicted: of such a table, rows that the servers dropped for others, for all workers.
    """

    pulls: int = 0
    pushes: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    wait_seconds: float = 0.0
    unadmitted: int = 0
    evicted: int = 0

    def since(self, earlier: TableLoads) -> TableLoads:
        """Return the difference between this record and ``earlier``."""
        return TableLoads(*(getattr(self, one.name) - getattr(earlier, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since an executor was made, or since its last report.

    Attributes:
        steps: optimizer steps.
        skipped_steps: optimizer steps that were skipped, since a gradient was not finite.
        runs: runs of any step, by the step's name.
        rows: rows that this worker's training runs were given.
        bytes: bytes that this worker handed to collectives, and exchanged with the servers.
        run_seconds: seconds inside ``run``.
        wait_seconds: of these, seconds spent waiting for other workers in collectives.
        load_seconds: of these, seconds spent waiting for batches.
        memberships: how many there were of the job; 1 until a worker has left.
        repeated_steps: optimizer steps that were interrupted by the loss of a worker, and done again.
        dropped_rows: rows of lost workers that nobody has trained on, where workers run apart (``ssp``, ``asp``) or
            have batches of their own: as many in each run as this worker has had, or where all wait for each other as
            those that are left had on average, which is the same on all.
        tables: the tables and parameters on the servers, by name.
    """

    steps: int = 0
    skipped_steps: int = 0
    runs: Mapping[str, int] = field(default_factory=dict)
    rows: float = 0
    bytes: int = 0
    run_seconds: float = 0.0
    wait_seconds: float = 0.0
    load_seconds: float = 0.0
    memberships: int = 1
    repeated_steps: int = 0
    dropped_rows: float = 0
    tables: Mapping[str, TableLoads] = field(default_factory=dict)

    def since(self, earlier: Statistics) -> Statistics:
        """Return the difference between this record and ``earlier``."""
        names = {one.name for one in fields(self)} - {"runs", "tables", "memberships"}
        numbers = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        runs = {name: count - earlier.runs.get(name, 0) for name, count in self.runs.items()}
        tables = {name: loads.since(earlier.tables.get(name, TableLoads())) for name, loads in self.tables.items()}
        return Statistics(**numbers, memberships=self.memberships, runs=runs, tables=tables)

    def as_dict(self) -> dict[str, object]:
        """Return the same as plain values, for JSON."""
        return asdict(self)
