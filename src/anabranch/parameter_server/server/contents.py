"""``ShardContents``: the tables and parameters of one shard by name; ``Shard`` adds the lock and the order.

Behind it: the counters of each, and what is read of one moment (``ShardSnapshot``).
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabranch.errors import NotFound, SchemaError
from anabranch.parameter_server.messages import ExportMessage, InitMessage, RestoreMessage, SnapshotPart
from anabranch.tables.arena import Arena, kind_of
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.kernels.rows import KernelThreads
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.row_block import Group, RowBlock, files, parts_of, rows_of
from anabranch.tables.snapshot import RowSnapshot
from anabranch.tables.table import Table, TableGroup
from anabranch.tables.table_spec import TableSpec
from anabranch.tensors.dtypes import dtype_name

_REMEMBERED = 64  # messages of different tables


class Run(NamedTuple):
    """Tables side by side in a message whose rows are alike, or a parameter alone.

    Attributes:
        rows: true of tables.
        dtype, shape: of a row, or of the parameter.
        first, last: the position of the first, and that behind the last.
    """

    rows: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Parts:
    """The tables and parameters that a message names.

    Attributes:
        names, holders: in the message's order.
        groups: tables of one arena, their positions in that order, and whether reading may add rows to one of them, as
            its ids are not fixed.
        runs: those that are alike and side by side.
        version: of the contents that they are in.
    """

    names: tuple[str, ...] = ()
    holders: tuple[Table | DenseParameter, ...] = ()
    groups: tuple[tuple[TableGroup, list[int], bool], ...] = ()
    runs: tuple[Run, ...] = ()
    version: int = 0


class ShardContents:
    """The tables and parameters of one shard.

    Args:
        shard, shards: the shard's number, and the number of shards.
        pool: threads that share a table's work.
        scratch: the directory of memory-mapped tables' files.

    Attributes:
        tables, dense, counts: by name.
        version: the number of times that a table or parameter was made or dropped.
        generation: a random id, drawn again when rows change other than by steps, so that clients read them again.
    """

    def __init__(
        self, shard: int, shards: int, pool: KernelThreads, scratch: str | os.PathLike[str] | None = None
    ) -> None:
        self.shard, self.shards = shard, shards
        self.tables: dict[str, Table] = {}
        self.dense: dict[str, DenseParameter] = {}
        self.counts: dict[str, TableStatistics] = {}
        self.generation = _new_generation()
        self._pool, self._scratch = pool, scratch
        self._arenas: dict[tuple[object, ...], Arena] = {}
        self._parts: dict[tuple[str, ...], Parts] = {}
        self.version = 0

    def is_there(self, message: InitMessage, tensors: Sequence[Tensor]) -> bool:
        """Return True if it exists in that form; raise if it exists in another one."""
        name, holder = message.name, self.tables.get(message.name) or self.dense.get(message.name)
        if holder is None:
            return False
        here = holder.spec if isinstance(holder, Table) else _dense_form([holder.value])
        new = _dense_form(tensors) if message.table is None else TableSpec.from_dict(message.table)
        if new != here:
            raise SchemaError(f"{name} is {here} here, not {new}")
        if not holder.rule.same_layout(RowOptimizer.from_dict(message.rule)):
            raise SchemaError(f"{name} is kept for {holder.rule.family} here, not for {message.rule.get('family')}")
        return True

    def parse(self, message: InitMessage, tensors: Sequence[Tensor]) -> tuple[TableSpec | DenseParameter, RowOptimizer]:
        """Return what ``add`` takes; raise for a message that cannot be done."""
        rule = RowOptimizer.from_dict(message.rule)
        if message.table is None:
            if len(tensors) != 1:
                raise SchemaError(f"parameter {message.name} has one initial tensor, got {len(tensors)}")
            return DenseParameter(message.name, tensors[0], rule), rule
        spec = TableSpec.from_dict(message.table)
        if spec.name != message.name:
            raise SchemaError(f"a table {spec.name} under the name {message.name}")
        kind = kind_of(spec, rule)
        if kind not in self._arenas:  # an arena takes addresses, and memory only with its first row
            self._arenas[kind] = Arena(
                spec, rule, shard=self.shard, shards=self.shards, pool=self._pool, scratch=self._scratch
            )
        return spec, rule

    def add(self, made: TableSpec | DenseParameter, rule: RowOptimizer) -> None:
        """Add a table or a parameter."""
        if isinstance(made, DenseParameter):
            self.dense[made.name] = made
        else:
            self.tables[made.name] = Table(made, rule, self._arenas[kind_of(made, rule)])
        self.counts[made.name] = TableStatistics()
        self.version += 1

    def holder(self, name: str) -> Table | DenseParameter:
        """Return the table or the parameter of this name; raise ``NotFound`` for a name that is not here."""
        holder = self.tables.get(name) or self.dense.get(name)
        if holder is None:
            known = ", ".join([*self.tables, *self.dense]) or "none"
            raise NotFound(f"no table or parameter {name!r} on this shard; there are: {known}")
        return holder

    def parts(self, names: tuple[str, ...]) -> Parts:
        """Return those of ``names``, which must differ; also without the lock of the shard."""
        parts, version = self._parts.get(names), self.version
        if parts is not None and parts.version == version:
            return parts
        if len(set(names)) != len(names):
            raise SchemaError("the message names a table twice; merge its ids")
        holders = tuple(map(self.holder, names))
        alike, runs = dict[int, list[int]](), list[Run]()
        for k, holder in enumerate(holders):
            if not isinstance(holder, Table):
                runs.append(Run(False, holder.value.dtype, tuple(holder.value.shape), k, k + 1))
                continue
            alike.setdefault(id(holder.arena), []).append(k)
            run = Run(True, holder.spec.dtype, (holder.spec.width,), k, k + 1)
            if runs and runs[-1][:3] == run[:3]:
                run = run._replace(first=runs.pop().first)
            runs.append(run)
        groups = []
        for at in alike.values():
            tables = [holder for k in at if isinstance(holder := holders[k], Table)]
            groups.append((TableGroup(tables), at, any(table.spec.rows is None for table in tables)))
        if len(self._parts) >= _REMEMBERED:
            self._parts.clear()
        parts = self._parts[names] = Parts(names, holders, tuple(groups), tuple(runs), version)
        return parts

    def drop(self, name: str) -> None:
        """Drop a table or a parameter."""
        self.generation = _new_generation()
        table = self.tables.pop(name, None)
        if table is not None:
            table.drop()
            if not any(other.arena is table.arena for other in self.tables.values()):
                self._arenas = {kind: arena for kind, arena in self._arenas.items() if arena is not table.arena}
        self.dense.pop(name, None)
        self.counts.pop(name, None)
        self._parts.clear()
        self.version += 1

    def step(self) -> int:
        """Return the highest step of any table or parameter."""
        holders: list[Table | DenseParameter] = [*self.tables.values(), *self.dense.values()]
        return max((holder.step for holder in holders), default=0)

    # --- saving and loading -----------------------------------------------------------------------------------------

    def export(self, message: ExportMessage) -> tuple[int, list[Tensor]]:
        """Return a parameter's steps, and its value and states."""
        holder = self.holder(message.name)
        if not isinstance(holder, DenseParameter):
            raise SchemaError(f"{message.name} is a table of rows here, not a dense parameter")
        return holder.step, holder.share()

    def check_restored(self, message: RestoreMessage, tensors: Sequence[Tensor]) -> None:
        """Raise for tensors that do not fit their table or parameter."""
        holder = self.holder(message.name)
        if not isinstance(holder, Table):
            holder.check_restored(tensors)
        elif len(tensors) == 1:
            if message.step < holder.step:
                raise SchemaError(
                    f"table {message.name} is at step {holder.step}, and step {message.step} would take pushes back; "
                    "drop it first"
                )
            holder.missed.check(message.step, tensors[0])
        elif len(tensors) != len(fields(RowBlock)):
            raise SchemaError(f"table {message.name}: history, or ids, weights, states, stamps and usage expected")
        elif message.step != holder.step:
            raise SchemaError(f"table {message.name} is at step {holder.step}, and the rows are of {message.step}")
        else:
            holder.check_block(RowBlock(*tensors))

    def restore(self, message: RestoreMessage, tensors: Sequence[Tensor]) -> None:
        """Restore what was checked."""
        self.generation = _new_generation()
        holder = self.holder(message.name)
        if not isinstance(holder, Table):
            holder.restore(tensors, message.step)
        elif len(tensors) == 1:
            holder.resume(message.step, tensors[0])
        else:
            holder.restore(RowBlock(*tensors))

    def snapshot(
        self, lock: AbstractContextManager[object], names: Sequence[str] | None, seconds: float
    ) -> ShardSnapshot:
        """Return this moment of ``names``, or of everything; see ``RowSnapshot``."""
        tables = {name: table for name, table in self.tables.items() if names is None or name in names}
        dense = {name: one for name, one in self.dense.items() if names is None or name in names}
        groups = {f"history-{k}": {"0": table.history} for k, table in enumerate(tables.values()) if len(table.history)}
        for k, parameter in enumerate(dense.values()):
            groups[f"dense-{k}"] = {str(at): part for at, part in enumerate(parameter.share())}
        rows = RowSnapshot(list(tables.values()), lock, self._scratch, seconds=seconds)
        most = max(rows.piece_bytes, *(sum(part.nbytes for part in group.values()) for group in groups.values()), 0)
        return ShardSnapshot(_described(tables, dense), groups, rows, most)

    def load(self, state: Mapping[str, Any], groups: Mapping[str, Group]) -> None:
        """Create and fill what ``snapshot`` described."""
        tables = []
        for entry in state["tables"]:
            self.add(*self.parse(InitMessage(entry["spec"]["name"], entry["rule"], entry["spec"]), ()))
            tables.append(self.tables[entry["spec"]["name"]])
        for k, (table, entry) in enumerate(zip(tables, state["tables"], strict=True)):
            table.resume(entry["step"], *(parts_of(groups, f"history-{k}") or [table.history]))
        for k, block in rows_of(groups, range(len(tables))):
            tables[k].check_block(block)
            tables[k].restore(block)
        for k, entry in enumerate(state["dense"]):
            parts = parts_of(groups, f"dense-{k}")
            self.add(*self.parse(InitMessage(entry["name"], entry["rule"]), parts[:1]))
            self.dense[entry["name"]].restore(parts, entry["step"])

    # --- reports ----------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, TableStatistics]:
        """Return the counters of each table and parameter since the start."""
        tables = {}
        for name, counts in self.counts.items():
            holder = self.holder(name)
            tables[name] = facts = replace(counts, step=holder.step)
            if isinstance(holder, Table):
                facts.rows, facts.evictions, facts.unadmitted = holder.used, holder.evictions, holder.unadmitted
            facts.bytes = holder.bytes() if isinstance(holder, Table) else holder.value.nbytes
        return tables

    def describe(self) -> dict[str, object]:
        """Tables and parameters, their optimizers and steps, without the values."""
        return _described(self.tables, self.dense)


def _dense_form(tensors: Sequence[Tensor]) -> str:
    return " and ".join(f"a dense parameter {tuple(one.shape)} {one.dtype}" for one in tensors)


def _described(tables: Mapping[str, Table], dense: Mapping[str, DenseParameter]) -> dict[str, object]:
    return {
        "tables": [
            {"spec": table.spec.to_dict(), "rule": table.rule.to_dict(), "rows": table.used, "step": table.step}
            for table in tables.values()
        ],
        "dense": [
            {"name": name, "rule": one.rule.to_dict(), "step": one.step, "dtype": dtype_name(one.value.dtype),
             "shape": list(one.value.shape)}
            for name, one in dense.items()
        ],
    }  # fmt: skip


def _new_generation() -> int:
    """Return a random id, unlikely to repeat across restarts."""
    return 1 + secrets.randbelow((1 << 32) - 1)


# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TableStatistics:
    """Requests for one table or parameter, in messages and rows, and the number of rows it holds and has evicted.

    ``unadmitted`` ids of pushes found no room in its capacity.
    """

    pulls: int = 0
    pushes: int = 0
    rows_pulled: int = 0
    rows_pushed: int = 0
    rows: int = 0
    evictions: int = 0
    bytes: int = 0
    step: int = 0
    unadmitted: int = 0


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """Statistics of a shard since it started.

    Attributes:
        tables: by name.
        refused_values: pushes refused for NaN, Inf or numbers that are too large, by the peer that sent them.
        replayed: records replayed from the log.
        spills: changes that waited for a write, as the reader of a snapshot was slow.
    """

    tables: dict[str, TableStatistics]
    refused_values: dict[str, int]
    replayed: int
    spills: int = 0


# --- snapshots --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ShardSnapshot:
    """One moment of a shard; a client reads it in parts, of which the last can be had again.

    Attributes:
        state: the tables and parameters, and of a whole shard the order of the workers, as plain values.
        groups: tensors of parameters, of steps that rows have missed, and of pushes that wait; they stay as they are.
        rows: of the tables.
        part_bytes: the most of a part.
    """

    state: dict[str, object]
    groups: dict[str, dict[str, Tensor]]
    rows: RowSnapshot
    part_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _number: int = -1
    _last: tuple[SnapshotPart, list[Tensor]] | None = None

    def files(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield groups with the rows."""
        for number, tensors in enumerate(files(self.rows)):
            yield f"rows-{number}", tensors

    def _next(self) -> tuple[SnapshotPart, list[Tensor]] | None:
        # No generator, which would be at its end after an error: then the next part would be none, and a part asked for
        # again would pass for the last.
        if self.groups:
            self.rows.touch()
            name = next(iter(self.groups))
            return SnapshotPart(name), list(self.groups.pop(name).values())
        piece = next(self.rows, None)
        return None if piece is None else (SnapshotPart("", piece.tables, piece.counts), piece.rows.tensors())

    def part(self, number: int) -> tuple[SnapshotPart, list[Tensor]] | None:
        """Return part ``number``; ``None`` behind the last."""
        with self._lock:
            if number < self._number:
                raise SchemaError(f"part {number} of a snapshot was asked for behind part {self._number}")
            while self._number < number:
                self._last, self._number = self._next(), self._number + 1
            return self._last
