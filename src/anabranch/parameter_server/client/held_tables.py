"""``HeldTables``: the tables and parameters on the shards as a client knows them, made and placed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.errors import NotFound, SchemaError
from anabranch.parameter_server.client.plain_tensors import check_plain
from anabranch.parameter_server.client.row_messages import Layout, Routed
from anabranch.parameter_server.client.shard_calls import ShardCalls
from anabranch.parameter_server.messages import DropMessage, ExportMessage, InitMessage, RestoreMessage
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.shard_placement import Placement
from anabranch.tables.table_spec import TableSpec
from anabranch.tables.warming import compile_kernels
from anabranch.transport import pack

__all__ = ["HeldTables", "Holding"]

_REMEMBERED = 64  # messages of different tables


@dataclass(frozen=True, slots=True)
class Holding:
    """One name as a client knows it: a table with its placement, or a dense parameter."""

    placement: Placement | None
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole; of a table (rows or -1, *shape of a row)

    @property
    def width(self) -> int:
        """Numbers a row."""
        return math.prod(self.shape[1:])


class HeldTables:
    """The client's tables and parameters.

    Args:
        calls: sends the requests.
        in_process: the one shard is in this process, which compiles its kernels.

    Attributes:
        holdings: by name.
        made: the tables that this client has created or found, and their optimizers.
    """

    def __init__(self, calls: ShardCalls, *, in_process: bool) -> None:
        self.calls, self.in_process = calls, in_process
        self.holdings: dict[str, Holding] = {}
        self.made: list[tuple[TableSpec, RowOptimizer]] = []
        self._expected: dict[str, TableSpec] = {}
        self._layouts: dict[tuple[str, ...], Layout] = {}

    def _holding_of(self, spec: TableSpec, row_shape: tuple[int, ...] | None = None) -> Holding:
        placement = Placement.of(spec, self.calls.shards)
        rows = -1 if spec.rows is None else spec.rows
        return Holding(placement, spec.dtype, (rows, *(row_shape or (spec.width,))))

    def holding(self, name: str, *, rows: bool = False) -> Holding:
        """Return the record of a name, requested from the shards if it is not known."""
        if name not in self.holdings:
            self._learn()
        holding = self.holdings.get(name)
        if holding is None:
            cure = "; a reader makes none: train it, or load a checkpoint, first" if name in self._expected else ""
            raise NotFound(f"no table or parameter {name!r}; there are: {', '.join(self.holdings) or 'none'}{cure}")
        if rows and holding.placement is None:
            raise SchemaError(f"{name} is a dense parameter; use pull and push")
        return holding

    def _hold(self, name: str, holding: Holding) -> None:
        self.holdings[name] = holding
        self._layouts.clear()

    def layout(self, names: Iterable[str]) -> Layout:
        """Return the layout of a message about ``names``."""
        key = tuple(names)
        found = self._layouts.get(key)
        if found is None:
            tables: dict[str, tuple[Placement, torch.dtype, int]] = {}
            for name in key:
                holding = self.holding(name)
                if holding.placement is not None:
                    tables[name] = (holding.placement, holding.dtype, holding.width)
            if len(self._layouts) >= _REMEMBERED:
                self._layouts.clear()
            found = self._layouts[key] = Layout.of(tables, [name for name in key if name not in tables])
        return found

    def _learn(self) -> None:
        for shard, described in enumerate(self.calls.describe()):
            for table in described["tables"]:
                spec = TableSpec.from_dict(table["spec"])
                if self._expected.get(spec.name, spec) != spec:
                    raise SchemaError(f"table {spec.name} is {spec} here, not {self._expected[spec.name]}")
                self.holdings.setdefault(spec.name, self._holding_of(spec))
            for name in (parameter["name"] for parameter in described["dense"]):
                if name in self._expected:
                    raise SchemaError(f"{name} is a dense parameter here; give the RemoteEmbedding another name")
                if name not in self.holdings:
                    _, parts = self.calls.export(shard, ExportMessage(name))
                    self.holdings[name] = Holding(None, parts[0].dtype, tuple(parts[0].shape))

    def home(self, name: str) -> int:
        """Return the shard of a dense parameter."""
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") % self.calls.shards

    def every_id(self, name: str, holding: Holding) -> Tensor:
        """Return the ids of a fixed table."""
        if holding.shape[0] < 0:
            raise SchemaError(f"table {name} has a dynamic vocabulary and cannot be pulled or pushed as a whole")
        return torch.arange(holding.shape[0], device="cpu")

    def init_table(self, spec: TableSpec, rule: RowOptimizer, *, row_shape: tuple[int, ...] | None = None) -> None:
        """Create the table that ``spec`` describes on every shard; an existing one stays unchanged."""
        if self.in_process:
            compile_kernels(spec.dtype)
        message = pack(InitMessage(spec.name, rule.to_dict(), spec.to_dict()))
        self.calls.all([self.calls.request(shard, "init", message) for shard in range(self.calls.shards)])
        self._hold(spec.name, self._holding_of(spec, row_shape))
        self._expected.pop(spec.name, None)
        self.made.append((spec, rule))

    def expect_table(self, spec: TableSpec) -> None:
        """Register a table that others create: it may be read once it is there, if it is as ``spec`` describes it."""
        self._expected[spec.name] = spec

    def init_dense(self, name: str, value: Tensor, rule: RowOptimizer) -> None:
        """Create the dense parameter ``name`` with ``value`` on its shard; an existing one stays unchanged."""
        check_plain(value, f"the first value of {name}")
        message = pack(InitMessage(name, rule.to_dict()))
        self.calls.all([self.calls.request(self.home(name), "init", message, [value.detach().cpu()])])
        self._hold(name, Holding(None, value.dtype, tuple(value.shape)))

    def expect_dense(self, name: str, like: Tensor) -> None:
        """Register a dense parameter with the shape and dtype of ``like`` that another client creates."""
        self._hold(name, Holding(None, like.dtype, tuple(like.shape)))

    def steps(self) -> list[dict[str, int]]:
        """Return for each shard the tables and parameters that it holds, and the optimizer steps of each."""
        return [
            {table["spec"]["name"]: table["step"] for table in described["tables"]}
            | {parameter["name"]: parameter["step"] for parameter in described["dense"]}
            for described in self.calls.describe()
        ]

    def drop(self, names: Iterable[str] | None) -> set[str]:
        """Drop those of ``names`` that the shards hold, and return them; ``None``: all."""
        wanted = None if names is None else set(names)
        dropped = set()
        for shard, steps in enumerate(self.steps()):
            for name in steps:
                if wanted is None or name in wanted:
                    self.calls.call(shard, "drop", pack(DropMessage(name)), once=True)
                    dropped.add(name)
        for name in dropped & self.holdings.keys():
            del self.holdings[name]
        self._layouts.clear()
        return dropped

    def restore_rows(self, name: str, parts: Sequence[Tensor], step: int, history: Tensor) -> None:
        """Set rows, their state and stamps, on the shards that hold them."""
        routed = Routed(self.layout([name]), parts[:1], self.calls.shards)
        routed.arrange(np.zeros(routed.flat.size, np.int64), 1)
        message = pack(RestoreMessage(name, step))
        requests = []
        for shard in range(self.calls.shards):
            where = torch.from_numpy(routed.order[routed.of(shard)])
            mine = [part[where] if len(part) == len(parts[0]) else part for part in parts]
            requests.append(self.calls.request(shard, "restore", message, [*mine, history]))
        self.calls.all(requests)
