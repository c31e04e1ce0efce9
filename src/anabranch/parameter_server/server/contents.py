"""``ShardContents``: the tables and parameters of one shard by name; ``Shard`` adds the lock and the order."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

from torch import Tensor

from anabranch.errors import NotFound, SchemaError
from anabranch.parameter_server.messages import ExportMessage, InitMessage, RestoreMessage
from anabranch.parameter_server.server.shard_snapshot import ShardSnapshot
from anabranch.parameter_server.server.shard_statistics import Counts, TableStatistics
from anabranch.tables.arena import Arena, kind_of
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.kernels.memory import KernelThreads
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.row_block import RowBlock, pieces
from anabranch.tables.snapshot import RowSnapshot
from anabranch.tables.table import Table, TableGroup
from anabranch.tables.table_spec import TableSpec

__all__ = ["ShardContents"]

_REMEMBERED = 64  # messages of different tables


class ShardContents:
    """The tables and parameters of one shard.

    Args:
        shard, shards: the shard's number, and the number of shards.
        pool: threads that share a table's work.
        scratch: the directory of memory-mapped tables' files.

    Attributes:
        tables, dense, counts: by name.
        generation: a random id, drawn again when rows change other than by steps, so that clients read them again.
    """

    def __init__(
        self, shard: int, shards: int, pool: KernelThreads, scratch: str | os.PathLike[str] | None = None
    ) -> None:
        self.shard, self.shards = shard, shards
        self.tables: dict[str, Table] = {}
        self.dense: dict[str, DenseParameter] = {}
        self.counts: dict[str, Counts] = {}
        self.generation = _new_generation()
        self._pool, self._scratch = pool, scratch
        self._arenas: dict[tuple[object, ...], Arena] = {}
        self._groups: dict[tuple[str, ...], list[tuple[TableGroup, list[str]]]] = {}
        self._rules: dict[RowOptimizer, RowOptimizer] = {}

    def is_there(self, message: InitMessage, tensors: Sequence[Tensor]) -> bool:
        """Return True if it exists in that form; raise if it exists in another one."""
        if message.table is None:
            found = self.dense.get(message.name)
            if message.name in self.tables:
                raise SchemaError(f"{message.name} is a table of rows here, not a dense parameter")
            if found is None:
                return False
            shape, rule = tuple(found.value.shape), found.rule
            if len(tensors) != 1 or tensors[0].shape != found.value.shape or tensors[0].dtype != found.value.dtype:
                raise SchemaError(f"parameter {message.name} has shape {shape} {found.value.dtype} here")
        else:
            table = self.tables.get(message.name)
            if message.name in self.dense:
                raise SchemaError(f"{message.name} is a dense parameter here, not a table of rows")
            if table is None:
                return False
            spec, rule = TableSpec.from_dict(message.table), table.rule
            if spec != table.spec:
                raise SchemaError(f"table {message.name} is {table.spec} here, not {spec}")
        if not rule.same_layout(RowOptimizer.from_dict(message.rule)):
            raise SchemaError(f"{message.name} is kept for {rule.family} here, not for {message.rule.get('family')}")
        return True

    def check_made(self, message: InitMessage, tensors: Sequence[Tensor]) -> None:
        """Raise the errors of ``make``; changes nothing."""
        self._parsed(message, tensors)

    def _parsed(
        self, message: InitMessage, tensors: Sequence[Tensor]
    ) -> tuple[TableSpec | DenseParameter, RowOptimizer]:
        rule = RowOptimizer.from_dict(message.rule)
        rule = self._rules.setdefault(rule, rule)  # one object, by which tables find work that they may share
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

    def make(self, message: InitMessage, tensors: Sequence[Tensor]) -> None:
        """Add a table or a parameter."""
        made, rule = self._parsed(message, tensors)
        self._groups.clear()
        if isinstance(made, DenseParameter):
            self.dense[message.name] = made
        else:
            self.tables[message.name] = Table(made, rule, self._arenas[kind_of(made, rule)])
        self.counts[message.name] = Counts()

    def check_name(self, name: str) -> None:
        """Raise ``NotFound`` for a name that is not here."""
        self.holder(name)

    def holder(self, name: str) -> Table | DenseParameter:
        """Return the table or the parameter of this name; raise ``NotFound`` for a name that is not here."""
        found = self.tables.get(name) or self.dense.get(name)
        if found is None:
            known = ", ".join([*self.tables, *self.dense]) or "none"
            raise NotFound(f"no table or parameter {name!r} on this shard; there are: {known}")
        return found

    def admits(self, name: str) -> bool:
        """Return True for a table whose ids are not fixed: reading may add rows."""
        return name in self.tables and self.tables[name].spec.rows is None

    def groups(self, names: Sequence[str]) -> list[tuple[TableGroup, list[str]]]:
        """Those of ``names`` that are tables, by arena: each in one call."""
        key = tuple(names)
        groups = self._groups.get(key)
        if groups is None:
            alike: dict[int, list[str]] = {}
            for name in names:
                if name in self.tables:
                    alike.setdefault(id(self.tables[name].arena), []).append(name)
            groups = [(TableGroup([self.tables[name] for name in some]), some) for some in alike.values()]
            if len(self._groups) >= _REMEMBERED:
                self._groups.clear()
            self._groups[key] = groups
        return groups

    def drop(self, name: str) -> None:
        """Drop a table or a parameter."""
        self.forget_rows()
        table = self.tables.pop(name, None)
        if table is not None:
            table.drop()
            if not any(other.arena is table.arena for other in self.tables.values()):
                self._arenas = {kind: arena for kind, arena in self._arenas.items() if arena is not table.arena}
        self.dense.pop(name, None)
        self.counts.pop(name, None)

    def forget_rows(self) -> None:
        """Treat rows that clients know as unknown."""
        self._groups.clear()
        self.generation = _new_generation()

    def step(self) -> int:
        """Return the highest step of any table or parameter."""
        holders: list[Table | DenseParameter] = [*self.tables.values(), *self.dense.values()]
        return max((holder.step for holder in holders), default=0)

    # --- saving and loading -----------------------------------------------------------------------------------------

    def export(
        self, message: ExportMessage, make_room: Callable[[int], None] = lambda nbytes: None
    ) -> tuple[int, list[Tensor]]:
        """Return a parameter's steps, and its value and states."""
        holder = self.holder(message.name)
        if not isinstance(holder, DenseParameter):
            raise SchemaError(f"{message.name} is a table of rows here, not a dense parameter")
        make_room(sum(part.nbytes for part in [holder.value, *holder.states]))
        return holder.step, holder.share()

    def check_restored(self, message: RestoreMessage, tensors: Sequence[Tensor]) -> None:
        """Raise for tensors that do not fit their table or parameter."""
        holder = self.holder(message.name)
        if isinstance(holder, Table):
            if len(tensors) != 1 + len(fields(RowBlock)):
                raise SchemaError(f"table {message.name}: ids, values, stamps, sums, usage and history expected")
            *block, history = tensors
            if message.step < holder.step:
                raise SchemaError(
                    f"table {message.name} is at step {holder.step}, and rows of step {message.step} would take pushes "
                    "back; drop it first"
                )
            holder.check_block(RowBlock(*block), message.step, history)
        else:
            holder.check_restored(tensors)

    def restore(self, message: RestoreMessage, tensors: Sequence[Tensor]) -> None:
        """Restore the checked result of ``export``."""
        self.generation = _new_generation()
        holder = self.holder(message.name)
        if isinstance(holder, Table):
            *block, history = tensors
            if len(block[0]):
                holder.restore(RowBlock(*block))
            holder.resume(message.step, history)
        else:
            holder.restore(tensors, message.step)

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
        return ShardSnapshot(_described(tables, dense), groups, rows)

    def load(self, state: Mapping[str, Any], groups: Mapping[str, Callable[[], Mapping[str, Tensor]]]) -> None:
        """Create and fill what ``snapshot`` described."""
        tables = []
        for entry in state["tables"]:
            self.make(InitMessage(entry["spec"]["name"], entry["rule"], entry["spec"]), ())
            tables.append(self.tables[entry["spec"]["name"]])
        for name, group in groups.items():
            for piece in pieces(group()) if name.startswith("rows-") else ():
                for k, block in piece.split():
                    tables[k].restore(block)
        for k, (table, entry) in enumerate(zip(tables, state["tables"], strict=True)):
            history = groups[f"history-{k}"]()["0"] if f"history-{k}" in groups else table.history
            table.resume(entry["step"], history)
        for k, entry in enumerate(state["dense"]):
            parts = groups[f"dense-{k}"]()
            self.make(InitMessage(entry["name"], entry["rule"]), [parts["0"]])
            self.dense[entry["name"]].restore([parts[str(at)] for at in range(len(parts))], entry["step"])

    # --- reports ----------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, TableStatistics]:
        """Return the counters of each table and parameter since the start."""
        tables = {}
        for name, counts in self.counts.items():
            table = self.tables.get(name)
            tables[name] = TableStatistics(
                counts.pulls,
                counts.pushes,
                counts.rows_pulled,
                counts.rows_pushed,
                table.used if table else 0,
                table.evictions if table else 0,
                table.bytes() if table else self.dense[name].value.nbytes,
                table.step if table else self.dense[name].step,
                table.unadmitted if table else 0,
            )
        return tables

    def describe(self) -> dict[str, object]:
        """Tables and parameters, their optimizers and steps, without the values."""
        return _described(self.tables, self.dense)


def _described(tables: Mapping[str, Table], dense: Mapping[str, DenseParameter]) -> dict[str, object]:
    return {
        "tables": [
            {"spec": table.spec.to_dict(), "rule": table.rule.to_dict(), "rows": table.used, "step": table.step}
            for table in tables.values()
        ],
        "dense": [{"name": name, "rule": one.rule.to_dict(), "step": one.step} for name, one in dense.items()],
    }


def _new_generation() -> int:
    """Return a random id, unlikely to repeat across restarts."""
    return 1 + secrets.randbelow((1 << 32) - 1)
