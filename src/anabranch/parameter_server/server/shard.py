"""``Shard``: the tables and parameters that one server holds, and the order in which workers change them.

::

    init, join, push, pull ──check──> log ──> do ──> (durable) ──> answer
                                       │       │
                                       │       └── bsp: kept until every worker's push of the step is there, then merged
                                       └── a shard that was killed does the log again, in the same order

Every change to a shard is a record of verb, message and tensors, done under one lock by ``_do``. Doing the same
records in the same order gives the same bits, which the log relies on. ``bsp`` applies a step once, to the mean
(or sum) of all workers' gradients, added up in the order of their ranks; ``ssp:K`` and ``asp`` apply each push as it
comes. A read that is too early waits: under ``bsp`` for the pushes of the steps before, under ``ssp:K`` for workers
that are more than K steps behind.

The file is long because it is one state machine under one lock: each verb's check, its record and what the record does.
"""

from __future__ import annotations

import functools
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from anabranch import spans
from anabranch.checkpoint import Group
from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, NonFinite, NotFound, SchemaError
from anabranch.parameter_server.messages import (
    BarrierMessage,
    DropMessage,
    ExportMessage,
    InitMessage,
    JoinMessage,
    NormMessage,
    PullMessage,
    PullPart,
    PullReply,
    PushMessage,
    PushPart,
    ReleaseMessage,
    RestoreMessage,
    check_kinds,
)
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.kernels.selection import KernelThreads
from anabranch.tables.optimizers.overflow import Bounds, peak_of
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.row_table import RowTable
from anabranch.tables.stored_rows import RowBlock
from anabranch.tables.table_group import Grouping, TableGroup, side_by_side
from anabranch.tables.table_spec import TableSpec, check_name
from anabranch.tensors.packing import Share, all_finite, expected, join, split
from anabranch.waits import LONG, begin, end

__all__ = ["Consistency", "Shard", "ShardStatistics", "TableStatistics"]

# Built at import: constructing a msgspec decoder is not thread-safe.
_MESSAGES: dict[str, msgspec.msgpack.Decoder[Any]] = {
    verb: msgspec.msgpack.Decoder(kind)
    for verb, kind in {
        "init": InitMessage, "join": JoinMessage, "pull": PullMessage, "push": PushMessage, "restore": RestoreMessage,
        "drop": DropMessage, "release": ReleaseMessage,
    }.items()
}  # fmt: skip
_Given = tuple[Tensor, Tensor, Tensor | None]  # ids, gradients and, of sums over several steps, their squares
_NORMS = 8
_BLOCK = ("ids", "values", "stamps", "sums", "usage", "history")


@dataclass(frozen=True, slots=True)
class Consistency:
    """The order of the steps of a job's workers.

    >>> Consistency.parse("ssp:3").lag, Consistency.parse("bsp").merges, Consistency.parse("asp").lag
    (3, True, None)

    Attributes:
        merges: the pushes of a step are merged over the workers and applied at once (bsp).
        lag: steps that a worker may be ahead of the slowest; ``None`` for any.
    """

    name: str
    merges: bool
    lag: int | None

    @classmethod
    def parse(cls, name: str) -> Consistency:
        """Return the consistency called ``"bsp"``, ``"ssp:K"`` or ``"asp"``; anything else is a ``ValueError``."""
        name = name.lower() if isinstance(name, str) else name
        if name == "bsp":
            return cls(name, True, 0)
        if name == "asp":
            return cls(name, False, None)
        kind, _, steps = str(name).partition(":")
        if kind == "ssp" and steps.isascii() and steps.isdigit():
            return cls(name, False, int(steps))
        raise ValueError(f"consistency is 'bsp', 'asp' or 'ssp:K' with K steps, such as 'ssp:4', got {name!r}")


@dataclass(slots=True)
class _Counts:
    pulls: int = 0
    pushes: int = 0
    rows_pulled: int = 0
    rows_pushed: int = 0


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """Requests for one table or parameter, in messages and rows, and the number of rows it holds and has evicted.

    Of a table in a file with ``hot_rows``, ``hot_hits`` of the rows read were in memory, and ``hot_misses`` came from
    the file.
    """

    pulls: int
    pushes: int
    rows_pulled: int
    rows_pushed: int
    rows: int
    evictions: int
    bytes: int
    step: int
    hot_hits: int = 0
    hot_misses: int = 0


@dataclass(frozen=True, slots=True)
class ShardStatistics:
    """Statistics of a shard since it started.

    Attributes:
        tables: by name.
        refused_values: pushes refused because they held NaN or Inf, by the peer that sent them.
        replayed: records replayed from the log.
    """

    tables: dict[str, TableStatistics]
    refused_values: dict[str, int]
    replayed: int


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory for the numbers of an answer: flat tensors as they are sent, and each part's share of them."""

    flat: list[Tensor]
    parts: list[Tensor]

    def __getitem__(self, part: int) -> Tensor:
        return self.parts[part]


class _Pushed(NamedTuple):
    """A push: its message, its tensors, and a bound for any sum of its gradients."""

    message: PushMessage
    tensors: Sequence[Tensor]
    peak: float


@dataclass(slots=True)
class _Job:
    """The workers of a job: steps pushed by each, pushes that wait for the others', and merged pushes to release."""

    world: int
    consistency: Consistency
    clocks: list[int]
    pending: dict[int, dict[int, _Pushed]] = field(default_factory=dict)
    held: dict[int, dict[int, _Pushed]] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)  # squared, of the last steps: some ask after the release
    total: float | None = None  # the sum of the weights of the workers' pushes in the last step


class Shard:
    """The part of all tables and parameters on one server. Safe to use from several threads.

    Args:
        shard, shards: the shard's number, and the number of shards.
        pool: threads that share a table's work; by default the caller's alone.
        journal: called with every change before it is done.
        take_back: called when the change that was journaled last was refused while it was done, and changed nothing.
        scratch: where memory-mapped tables have their files.
    """

    def __init__(
        self,
        shard: int = 0,
        shards: int = 1,
        *,
        pool: KernelThreads | None = None,
        journal: Callable[[str, bytes, Sequence[Tensor]], None] | None = None,
        take_back: Callable[[], None] | None = None,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0 <= shard < shards:
            raise ValueError(f"shard={shard} lies outside shards={shards}")
        self.shard, self.shards = shard, shards
        self._pool = pool or KernelThreads(1)
        self._grouping = Grouping(self._pool)
        self._scratch = scratch
        self._journal = journal or (lambda verb, payload, tensors: None)
        self._take_back = take_back or (lambda: None)
        self._state = threading.Condition(threading.RLock())
        self._tables: dict[str, RowTable] = {}
        self._dense: dict[str, DenseParameter] = {}
        self._counts: dict[str, _Counts] = {}
        self._rules: dict[RowOptimizer, RowOptimizer] = {}
        self._job: _Job | None = None
        self._barriers: dict[int, int] = {}
        self._refused_values: dict[str, int] = {}
        self._replayed = 0
        self._generation = _new_generation()

    # --- requests ---------------------------------------------------------------------------------------------------

    def init(self, message: InitMessage, tensors: Sequence[Tensor] = ()) -> None:
        """Make a table or a parameter; an existing one stays unchanged, if it is of the same shape.

        Raises:
            SchemaError: one of that name has another shape, dtype or optimizer.
            ValueError: an invalid table, or numbers that are not finite.
        """
        check_name(message.name)
        with self._state:
            if self._is_there(message, tensors):
                return
            self._build(message, tensors)  # a message that cannot be built must not come into the journal
            self._record("init", message, tensors)

    def join(self, message: JoinMessage) -> None:
        """Register a worker of a job, or a restarted one: its steps count from ``message.step``.

        Raises:
            SchemaError: another worker has given another world or consistency.
        """
        if not message.rank < message.world:
            raise SchemaError(f"rank {message.rank} lies outside a world of {message.world}")
        Consistency.parse(message.consistency)
        with self._state:
            self._barriers.pop(message.rank, None)  # a new client counts them from 1 again
            job = self._job
            fresh = job is None or message.step != job.clocks[message.rank] or job.world != message.world
            if job is not None and (job.world, job.consistency.name) != (message.world, message.consistency):
                moved = any(clock > message.step for clock in job.clocks) or job.pending
                if moved and message.step:
                    raise SchemaError(
                        f"this job has {job.world} workers under {job.consistency.name}; rank {message.rank} says "
                        f"{message.world} under {message.consistency}"
                    )
                fresh = True
            if fresh:
                self._record("join", message, ())

    def pull(
        self,
        message: PullMessage,
        tensors: Sequence[Tensor],
        deadline: Deadline | None = None,
        make_room: Callable[[int], None] = lambda nbytes: None,
    ) -> tuple[PullReply, list[Tensor]]:
        """Rows and parameters, once the job's consistency allows them to be read.

        ``make_room`` is called with the bytes of the answer before it is made, known rows not counted; what it raises
        leaves everything as it was.

        Returns:
            The reply and its tensors, as ``PullReply`` describes them.

        Raises:
            NotFound: a table, parameter or id that is not there.
            SchemaError: tensors that do not fit the message.
            DeadlineExceeded: other workers' pushes have not come; names them.
        """
        tensors = _with_long_ids(tensors)
        with self._state:
            ids, ages = self._check_pull(message, tensors)
            self._wait_for_turn(message, deadline)
            make_room(self._certain_bytes(message))
            if message.training and any(self._admits(part.name) for part in message.parts):
                self._journal("pull", _encode(_without_kinds(message)), tensors[:1])
            return self._read(message, ids, ages)

    def _certain_bytes(self, message: PullMessage) -> int:
        """Return the bytes of the parameters and of the rows that come whether or not they have changed."""
        total = 0
        for part in message.parts:
            holder = self._holder(part.name)
            if isinstance(holder, RowTable):
                rows = part.count - part.known - part.with_state
                numbers = part.with_state * holder.stride + rows * holder.spec.width
                total += numbers * holder.spec.dtype.itemsize
            else:
                total += holder.value.nbytes
        return total

    def push(
        self, message: PushMessage, tensors: Sequence[Tensor], *, peer: str = "", deadline: Deadline | None = None
    ) -> None:
        """Take gradients: applied at once, or under ``bsp`` when every worker's of that step are there.

        Raises:
            NotFound, SchemaError: as in ``pull``; nothing is changed.
            NonFinite: NaN or Inf among the gradients, or in a row that finite ones would move; counted by ``peer``,
                nothing is changed.
            DeadlineExceeded: a worker's push outside the steps counts by its share in its last one, and not
                all have pushed that; names them.
        """
        tensors = _with_long_ids(tensors)
        with self._state:
            if message.rank >= 0 and message.step < 0 and self._joined(message.rank).consistency.merges:
                self._wait_for_clocks(message.rank, self._joined(message.rank).clocks[message.rank], deadline, "push")
            peak = self._check_push(message, tensors, peer)
            try:
                self._record("push", message, tensors, functools.partial(self._do_push, peak=peak))
            except NonFinite:
                self._count_refused(peer)
                raise

    def _count_refused(self, peer: str) -> None:
        self._refused_values[peer] = self._refused_values.get(peer, 0) + 1

    def squared_norm(self, message: NormMessage, deadline: Deadline) -> float:
        """Return the sum of squares, in float64, of the merged gradients of held pushes, once all workers' are there.

        Raises:
            DeadlineExceeded: some are not; names them.
            SchemaError: nothing is held of that step.
        """
        with self._state:
            self._wait_for_clocks(message.rank, message.step + 1, deadline, "norm")
            job = self._joined(message.rank)
            if message.step not in job.norms and message.step not in job.held:
                raise SchemaError(f"no push of step {message.step} is held here; push it with hold=True")
            return self._keep_norm(job, message.step)

    def _keep_norm(self, job: _Job, step: int) -> float:
        """Return the squared norm of ``step``, which is held or was asked for; keep it for those who ask later."""
        norm = job.norms.get(step)
        if norm is None:
            held = job.held[step]
            shares, _ = self._shares([held[rank] for rank in range(job.world)])
            norm = job.norms[step] = sum(_squares(given) for given in shares.values())
            while len(job.norms) > _NORMS:
                del job.norms[min(job.norms)]
        return norm

    def release(self, message: ReleaseMessage) -> None:
        """Apply the held pushes of a step, times ``scale``, unless another worker's release has done so.

        Raises:
            NonFinite: a scale that is NaN or Inf.
            SchemaError: not all workers' pushes are held.
        """
        if not (math.isfinite(message.scale) and message.scale >= 0):
            raise NonFinite(f"a scale is a finite number >= 0, got {message.scale}")
        with self._state:
            job = self._joined(message.rank)
            if any(clock <= message.step for clock in job.clocks):
                raise SchemaError(f"step {message.step} is released before every worker has pushed it")
            self._record("release", message, ())

    def replay(self, verb: str, payload: bytes, tensors: Sequence[Tensor]) -> None:
        """Replays a journaled change."""
        with self._state:
            self._do(verb, _MESSAGES[verb].decode(payload), tensors)
            self._replayed += 1

    def statistics(self) -> ShardStatistics:
        """Counters since the start."""
        with self._state:
            tables = {}
            for name, counts in self._counts.items():
                table = self._tables.get(name)
                tables[name] = TableStatistics(
                    counts.pulls,
                    counts.pushes,
                    counts.rows_pulled,
                    counts.rows_pushed,
                    table.used if table else 0,
                    table.evictions if table else 0,
                    table.bytes() if table else self._dense[name].value.nbytes,
                    table.step if table else self._dense[name].step,
                    table.hot_hits if table else 0,
                    table.hot_misses if table else 0,
                )
            return ShardStatistics(tables, dict(self._refused_values), self._replayed)

    # --- checks, before anything changes ----------------------------------------------------------------------------

    def _is_there(self, message: InitMessage, tensors: Sequence[Tensor]) -> bool:
        if message.table is None:
            found = self._dense.get(message.name)
            if message.name in self._tables:
                raise SchemaError(f"{message.name} is a table of rows here, not a dense parameter")
            if found is None:
                return False
            shape, rule = tuple(found.value.shape), found.rule
            if len(tensors) != 1 or tensors[0].shape != found.value.shape or tensors[0].dtype != found.value.dtype:
                raise SchemaError(f"parameter {message.name} has shape {shape} {found.value.dtype} here")
        else:
            table = self._tables.get(message.name)
            if message.name in self._dense:
                raise SchemaError(f"{message.name} is a dense parameter here, not a table of rows")
            if table is None:
                return False
            spec, rule = TableSpec.from_dict(message.table), table.rule
            if spec != table.spec:
                raise SchemaError(f"table {message.name} is {table.spec} here, not {spec}")
        if not rule.same_layout(RowOptimizer.from_dict(message.rule)):
            raise SchemaError(f"{message.name} is kept for {rule.family} here, not for {message.rule.get('family')}")
        return True

    def _build(self, message: InitMessage, tensors: Sequence[Tensor]) -> RowTable | DenseParameter:
        rule = RowOptimizer.from_dict(message.rule)
        rule = self._rules.setdefault(rule, rule)  # one object, by which tables find what they may share
        if message.table is None:
            if len(tensors) != 1:
                raise SchemaError(f"parameter {message.name} begins with one tensor, got {len(tensors)}")
            if not torch.isfinite(tensors[0]).all():
                raise NonFinite(f"parameter {message.name} begins with NaN or Inf")
            return DenseParameter(message.name, tensors[0], rule)
        spec = TableSpec.from_dict(message.table)
        if spec.name != message.name:
            raise SchemaError(f"a table {spec.name} under the name {message.name}")
        return RowTable(
            spec, rule, shard=self.shard, shards=self.shards, pool=self._pool, scratch=self._scratch
        )  # fmt: skip

    def _make(self, message: InitMessage, tensors: Sequence[Tensor]) -> None:
        made = self._build(message, tensors)
        self._grouping.forget()
        if isinstance(made, RowTable):
            self._tables[message.name] = made
        else:
            self._dense[message.name] = made
        self._counts[message.name] = _Counts()

    def _check_parts(self, message: PullMessage | PushMessage, tensors: Sequence[Tensor]) -> list[Tensor]:
        parts: Sequence[PullPart | PushPart] = message.parts
        names = [part.name for part in parts]
        if len(set(names)) != len(names):
            raise SchemaError("a message names a table twice; merge its ids")
        for name in names:
            self._check_name(name)
        check_kinds(message)
        counts = [part.count for part in parts]
        if not tensors or tensors[0].dtype != torch.int64 or tensors[0].shape != (sum(counts),):
            raise SchemaError(f"{sum(counts)} int64 ids expected as the first tensor")
        ids = list(torch.split(tensors[0], counts))
        wanted: dict[str, Tensor] = {}
        for part, some in zip(parts, ids, strict=True):
            if part.name in self._tables:
                # A fixed table checks ids when it reads them, and reading has no effect that others see.
                if isinstance(message, PushMessage) or self._admits(part.name):
                    wanted[part.name] = some
            elif part.count:
                raise SchemaError(f"{part.name} is a dense parameter and has no ids")
        for group, together in self._groups(wanted):
            if group is None:
                for name in together:
                    self._tables[name].check(wanted[name])
            else:
                some_of = [wanted[name] for name in together]
                group.check(side_by_side(some_of), [len(some) for some in some_of])
        return ids

    def _groups(self, ids: Mapping[str, Tensor]) -> list[tuple[TableGroup | None, list[str]]]:
        return self._grouping.of(self._tables, {name: some.shape[0] for name, some in ids.items()})

    def _check_pull(self, message: PullMessage, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        ids = self._check_parts(message, tensors)
        known = message.knows()
        if len(tensors) != 1 + (known > 0):
            raise SchemaError(f"{1 + (known > 0)} tensors expected, got {len(tensors)}")
        if not known:
            return ids, None
        if tensors[1].dtype != torch.int16 or tensors[1].shape != (known,):
            raise SchemaError(f"int16 ages of {known} known rows expected, got {_told(tensors[1])}")
        return ids, tensors[1]

    def _check_push(self, message: PushMessage, tensors: Sequence[Tensor], peer: str) -> float:
        """Raise if a push is invalid; returns its peak."""
        self._check_parts(message, tensors)
        flat = self._check_numbers(message, tensors)
        if not (math.isfinite(message.weight) and message.weight >= 0):
            raise NonFinite(f"a weight is a finite number >= 0, got {message.weight}")
        rules = [_rule_of(rule) for rule in message.rules]
        peak = peak_of(flat, tensors[1] if message.sums() else None)
        if not math.isfinite(peak) and not all_finite(flat):
            self._count_refused(peer)
            for part, grad in zip(message.parts, self._gradients(message, tensors), strict=True):
                if not torch.isfinite(grad).all():
                    raise NonFinite(f"the gradients of {part.name} hold NaN or Inf; nothing was changed")
        for part in message.parts:
            if rules:
                if not 0 <= part.rule < len(rules):
                    raise SchemaError(f"{part.name} has rule {part.rule}; the message holds {len(rules)}")
                if not self._holder(part.name).rule.same_layout(rules[part.rule]):
                    raise SchemaError(f"{part.name} is kept for another optimizer than {rules[part.rule].family}")
        if message.rank >= 0 and message.step >= 0:
            self._check_turn(message)
        elif message.rank >= 0:
            self._joined(message.rank)
        return peak

    def _check_turn(self, message: PushMessage) -> None:
        job = self._joined(message.rank)
        expected = job.clocks[message.rank]
        if message.step != expected:
            raise SchemaError(f"worker {message.rank} pushes step {message.step}; its next is step {expected}")

    def _check_numbers(self, message: PushMessage, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors that hold the numbers, if they and the squares have the sizes that the message gives."""
        sums = message.sums()
        flat = tensors[1 + (sums > 0) :]
        came, wanted = [(one.dtype, one.numel()) for one in flat], self.numbers_of(message)
        if came != wanted or any(one.ndim != 1 for one in flat):
            raise SchemaError(f"numbers of {wanted} expected, got {came}")
        if sums:
            squares = tensors[1]
            if squares.dtype != torch.bfloat16 or squares.shape != (sums,):
                raise SchemaError(f"bfloat16 squares of {sums} sums expected, got {_told(squares)}")
            if not bool((squares >= 0).all()) or not all_finite([squares]):
                raise NonFinite("squares are finite numbers >= 0; nothing was changed")
        return flat

    def _gradients(self, message: PushMessage, tensors: Sequence[Tensor]) -> list[Tensor]:
        return split(tensors[1 + (message.sums() > 0) :], self._shares_of(message), message.compression)

    def _shares_of(self, message: PullMessage | PushMessage) -> list[Share]:
        """Dtype and shape of each part's numbers."""
        shares: list[Share] = []
        for part in message.parts:
            self._check_name(part.name)
            holder = self._holder(part.name)
            if isinstance(holder, RowTable):
                shares.append(Share(holder.spec.dtype, (part.count, holder.spec.width), "rows"))
            else:
                shares.append(Share(holder.value.dtype, tuple(holder.value.shape)))
        return shares

    def numbers_of(self, message: PushMessage) -> list[tuple[torch.dtype, int]]:
        """Dtypes and sizes of the tensors that hold the message's numbers, before any memory is taken for them."""
        with self._state:
            return expected(self._shares_of(message), message.compression)

    def _holder(self, name: str) -> RowTable | DenseParameter:
        table = self._tables.get(name)
        return table if table is not None else self._dense[name]

    def _admits(self, name: str) -> bool:
        return name in self._tables and self._tables[name].spec.rows is None

    # --- order of the workers' steps --------------------------------------------------------------------------------

    def _joined(self, rank: int) -> _Job:
        if self._job is None or rank >= self._job.world:
            raise SchemaError(f"worker {rank} has not joined this shard's job")
        return self._job

    def _wait_for_turn(self, message: PullMessage, deadline: Deadline | None) -> None:
        if message.rank < 0:
            return
        job = self._joined(message.rank)
        lag = job.consistency.lag
        if lag is None:
            return
        self._wait_for_clocks(message.rank, message.step - lag, deadline, "pull")
        patience = _patience(deadline)
        while any(step < message.step for step in self._joined(message.rank).held):
            if not self._wait_for_change(patience, [message.rank], "release"):
                raise _missing(
                    [message.rank], patience, "pull: the step's pushes are held until released", message.step
                )

    def _wait_for_clocks(self, rank: int, step: int, deadline: Deadline | None, operation: str) -> None:
        """Wait until every worker has pushed all steps before ``step``."""
        patience = _patience(deadline)
        while late := [other for other, clock in enumerate(self._joined(rank).clocks) if clock < step]:
            if not self._wait_for_change(patience, late, operation):
                raise _missing(late, patience, operation, step)

    def _wait_for_change(self, patience: Deadline, ranks: Sequence[int], operation: str) -> bool:
        """Wait until anything has changed, on behalf of a worker that needs ``ranks``; False at the deadline."""
        names = [f"rank {rank}" for rank in ranks]
        with spans.span("wait", "wait", peer=", ".join(names), operation=operation):
            if patience.elapsed() < LONG and self._state.wait(timeout=min(LONG, patience.remaining())):
                return True
            number = begin(names, operation, time.monotonic() - patience.elapsed())
            try:
                return self._state.wait(timeout=patience.remaining())
            finally:
                end(number)

    # --- changes ----------------------------------------------------------------------------------------------------

    def _record(
        self,
        verb: str,
        message: Any,
        tensors: Sequence[Tensor],
        do: Callable[[Any, Sequence[Tensor]], None] | None = None,
    ) -> None:
        self._journal(verb, _encode(message), tensors)
        try:
            if do is None:
                self._do(verb, message, tensors)
            else:
                do(message, tensors)
        except BaseException:
            self._take_back()
            raise

    def _do(self, verb: str, message: Any, tensors: Sequence[Tensor]) -> None:
        if verb == "init":
            self._make(message, tensors)
        elif verb == "join":
            self._do_join(message)
        elif verb == "pull":
            self._read(message, *self._check_pull(message, tensors))
        elif verb == "push":
            self._do_push(message, tensors)
        elif verb == "restore":
            self._do_restore(message, tensors)
        elif verb == "release":
            self._do_release(message)
        else:
            self._do_drop(message)

    def _do_join(self, message: JoinMessage) -> None:
        consistency = Consistency.parse(message.consistency)
        if self._job is None or self._job.world != message.world or self._job.consistency != consistency:
            self._job = _Job(message.world, consistency, [message.step] * message.world)
        self._job.clocks[message.rank] = message.step
        self._job.norms = {step: norm for step, norm in self._job.norms.items() if step < message.step}
        for step in list(self._job.held):
            if step >= message.step:  # the worker will push it anew
                self._job.pending[step] = self._job.held.pop(step)
        for step, pushes in self._job.pending.items():
            if step >= message.step:
                pushes.pop(message.rank, None)
        self._state.notify_all()

    def _do_push(self, message: PushMessage, tensors: Sequence[Tensor], peak: float | None = None) -> None:
        if peak is None:  # from the journal, which holds only checked messages
            sums = message.sums()
            peak = peak_of(tensors[1 + (sums > 0) :], tensors[1] if sums else None)
        push = _Pushed(message, tensors, peak)
        if message.rank < 0:
            self._apply([push])
            return
        job = self._joined(message.rank)
        if message.step < 0:
            self._apply([push], total=job.total if job.consistency.merges else None)
            return
        if job.consistency.merges:
            self._merge(job, push)
        else:
            self._apply([push])
        job.clocks[message.rank] = message.step + 1
        self._state.notify_all()

    def _merge(self, job: _Job, push: _Pushed) -> None:
        """Keep a worker's push until all of its step are there; one whose step cannot be done leaves nothing."""
        step = push.message.step
        # A copy: kept tensors must not change when the sender's buffers are used again.
        push = push._replace(tensors=[tensor.clone() for tensor in push.tensors])
        kept = {**job.pending.get(step, {}), push.message.rank: push}
        if len(kept) < job.world:
            job.pending[step] = kept
            return
        if any(one.message.hold for one in kept.values()):
            job.held[step] = kept
        else:
            self._apply([kept[rank] for rank in range(job.world)])
        job.pending.pop(step, None)
        job.total = sum(one.message.weight for one in kept.values()) or job.total

    def _do_release(self, message: ReleaseMessage) -> None:
        job = self._joined(message.rank)
        held = job.held.get(message.step)
        if held is not None:  # else another worker's release came first
            # Known already, unless the shard was killed since: the other workers ask for it still.
            self._keep_norm(job, message.step)
            self._apply([held[rank] for rank in range(job.world)], message.scale)
            del job.held[message.step]
            self._state.notify_all()

    def _shares(
        self, pushes: Sequence[_Pushed], scale: float = 1.0, total: float | None = None
    ) -> tuple[dict[str, list[_Given]], float]:
        """Of each table and parameter, every worker's ids and gradients by its share in the mean, times ``scale``.

        And a bound for any sum of them.
        """
        total = sum(push.message.weight for push in pushes) if total is None else total
        shares: dict[str, list[_Given]] = {}
        peak = 0.0
        for message, tensors, own_peak in pushes:
            share = scale * ((message.weight / total if total else 0.0) if message.mean else 1.0)
            peak += abs(share) * own_peak
            counts = [part.count for part in message.parts]
            ids = torch.split(tensors[0], counts)
            squares = _squares_of(message, tensors)
            for part, some, grad, own in zip(
                message.parts, ids, self._gradients(message, tensors), squares, strict=True
            ):
                shares.setdefault(part.name, []).append((some, grad if share == 1.0 else grad * share, own))
        return shares, peak

    def _apply(self, pushes: Sequence[_Pushed], scale: float = 1.0, total: float | None = None) -> None:
        """One optimizer step for each table and parameter that any of the pushes names, or none for any of them.

        ``total`` is the sum of weights of which the pushes' are shares, by default that of these pushes.

        Raises:
            NonFinite: a row would overflow; all are unchanged.
        """
        rules: dict[str, RowOptimizer] = {}
        for push in pushes:
            kinds = [RowOptimizer.from_dict(rule) for rule in push.message.rules]
            for part in push.message.parts:
                if kinds:
                    rules.setdefault(part.name, kinds[part.rule])
        shares, peak = self._shares(pushes, scale, total)
        holders = {name: self._holder(name) for name in shares}
        before = {name: holders[name].rule for name in rules}
        ids: dict[str, Tensor] = {}
        grads: dict[str, Tensor] = {}
        squares: dict[str, Tensor] = {}
        dense: dict[str, Tensor] = {}
        for name, given in shares.items():
            holder = holders[name]
            if name in rules:
                holder.rule = rules[name]
            if isinstance(holder, RowTable):
                ids[name] = side_by_side([some for some, _, _ in given])
                grads[name] = side_by_side([grad for _, grad, _ in given])
                if any(own is not None for _, _, own in given) and holder.rule.family is not Family.SGD:
                    squares[name] = torch.cat([torch.ones(len(some)) if own is None else own for some, _, own in given])
            else:
                dense[name] = given[0][1]
                for _, grad, _ in given[1:]:
                    dense[name] = dense[name] + grad
        bounds = _bounds_after(holders, peak)
        with spans.span("optimizer", "compute", pushes=len(pushes)):
            if bounds is not None:
                for name, bound in bounds.items():
                    holders[name].bounds = bound
                for name, grad in dense.items():
                    self._dense[name].push(grad)
                self._push_rows(ids, grads, squares)
            else:
                try:
                    self._push_guarded(ids, grads, squares, dense)
                except NonFinite:
                    for name, rule in before.items():
                        holders[name].rule = rule
                    raise
        for name, given in shares.items():
            counts = self._counts[name]
            counts.pushes += len(given)
            if name in ids:
                counts.rows_pushed += ids[name].shape[0]

    def _push_guarded(
        self,
        ids: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        squares: Mapping[str, Tensor],
        dense: Mapping[str, Tensor],
    ) -> None:
        """As ``_push_rows`` and each parameter's ``push``; if one would overflow, all of it is undone."""
        done: list[Callable[[], None]] = []
        try:
            for name, grad in dense.items():
                done.append(self._dense[name].push_guarded(grad))
            for name, some in ids.items():
                done.append(self._tables[name].push_guarded(some, grads[name], squares.get(name)))
        except NonFinite:
            for take_back in reversed(done):
                take_back()
            raise

    def _push_rows(self, ids: Mapping[str, Tensor], grads: Mapping[str, Tensor], squares: Mapping[str, Tensor]) -> None:
        for group, names in self._groups(ids):
            if group is None:
                for name in names:
                    self._tables[name].push(ids[name], grads[name], squares.get(name))
            else:
                everyone = side_by_side([ids[name] for name in names])
                own = None
                if any(name in squares for name in names):
                    own = torch.cat([squares.get(name, torch.ones(len(ids[name]))).float() for name in names])
                counts = [len(ids[name]) for name in names]
                group.push(everyone, side_by_side([grads[name] for name in names]), counts, own)

    def _read(self, message: PullMessage, ids: Sequence[Tensor], ages: Tensor | None) -> tuple[PullReply, list[Tensor]]:
        """Read the rows asked for, except known rows that have not changed."""
        for part in message.parts:
            self._counts[part.name].pulls += 1
        if ages is not None or any(part.with_state for part in message.parts):
            return self._choose(message, ids, ages)
        room = self._room(message)
        self._fill(room, message, ids)
        for part in message.parts:
            self._counts[part.name].rows_pulled += part.count
        numbers = room.flat
        if message.compression is not None:
            numbers = join(room.parts, self._shares_of(message), message.compression)
        return self._reply(message, [0] * len(message.parts)), numbers

    def _reply(self, message: PullMessage, changed: list[int]) -> PullReply:
        tables = [self._tables.get(part.name) for part in message.parts]
        return PullReply(self._generation, [table.step if table else 0 for table in tables], changed)

    def _choose(
        self, message: PullMessage, ids: Sequence[Tensor], ages: Tensor | None
    ) -> tuple[PullReply, list[Tensor]]:
        """Return the answer if some rows come with their state, or only if they have changed."""
        parts = {part.name: part for part in message.parts}
        wanted = {part.name: some for part, some in zip(message.parts, ids, strict=True) if part.name in self._tables}
        since = self._since(message, ages)
        states, rows, places = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for group, names in self._groups(wanted):
            if group is None:
                for name in names:
                    states[name], rows[name], places[name] = self._tables[name].answer(
                        wanted[name], parts[name].with_state, since[name], training=message.training
                    )
                continue
            with_state, known = [parts[name].with_state for name in names], [parts[name].known for name in names]
            counts = [parts[name].count for name in names]
            some_ids, some_since = (side_by_side([of[name] for name in names]) for of in (wanted, since))
            *came, found = group.answer(some_ids, counts, with_state, known, some_since)
            others = (np.array(counts) - with_state - known + found).tolist()
            for into, whole, sizes in zip((states, rows, places), came, (with_state, others, found), strict=True):
                into |= zip(names, torch.split(whole, sizes), strict=True)
        numbers, shares = list[Tensor](), list[Share]()
        for name in wanted:
            if parts[name].with_state:
                numbers.append(states[name])
                shares.append(Share(states[name].dtype, tuple(states[name].shape), "states"))
        for name in parts:
            if name in rows:
                numbers.append(rows[name])
                shares.append(Share(rows[name].dtype, tuple(rows[name].shape), "rows"))
                self._counts[name].rows_pulled += parts[name].with_state + len(rows[name])
            else:
                numbers.append(self._dense[name].value)
                shares.append(Share(numbers[-1].dtype, tuple(numbers[-1].shape)))
        said = join(numbers, shares, message.compression)
        if ages is not None:
            said.insert(0, side_by_side([places[name] for name in wanted]).to(torch.int32))
        return self._reply(message, [len(places[name]) if name in places else 0 for name in parts]), said

    def _since(self, message: PullMessage, ages: Tensor | None) -> dict[str, Tensor]:
        """For each part's known rows the step at which they were read; -1, so that all count as changed, if unknown."""
        known = [part.known for part in message.parts]
        if ages is None or message.generation != self._generation:
            steps = torch.full((sum(known),), -1)
        else:
            since = np.repeat([part.since for part in message.parts], known)
            steps = torch.from_numpy(since.astype(np.int64)) - ages
        return dict(zip((part.name for part in message.parts), torch.split(steps, known), strict=True))

    def _fill(self, room: _Room, message: PullMessage, ids: Sequence[Tensor]) -> None:
        """Read everything asked for, with as few copies as possible, into ``room``."""
        wanted: dict[str, Tensor] = {}
        places: dict[str, Tensor] = {}
        for part, some, place in zip(message.parts, ids, room.parts, strict=True):
            holder = self._holder(part.name)
            if isinstance(holder, DenseParameter):
                place.copy_(holder.value)
            else:
                wanted[part.name], places[part.name] = some, place
        for group, names in self._groups(wanted):
            flat = None if group is None else side_by_side([places[name] for name in names])
            if group is None or flat is None or flat.data_ptr() != places[names[0]].data_ptr():
                for name in names:
                    self._tables[name].pull(wanted[name], out=places[name], training=message.training)
            else:
                everyone = side_by_side([wanted[name] for name in names])
                group.pull(everyone, [len(wanted[name]) for name in names], out=flat)

    def _room(self, message: PullMessage) -> _Room:
        shares = self._shares_of(message)
        flat = [torch.empty(size, dtype=dtype) for dtype, size in expected(shares)]
        return _Room(flat, split(flat, shares))

    def _do_restore(self, message: RestoreMessage, tensors: Sequence[Tensor]) -> None:
        self._generation = _new_generation()
        holder = self._holder(message.name)
        if isinstance(holder, RowTable):
            *block, history = tensors
            if len(block[0]):
                holder.restore(RowBlock(*block))
            holder.resume(message.step, history)
        else:
            holder.restore(tensors, message.step)

    # --- saving and loading -----------------------------------------------------------------------------------------

    def export(
        self, message: ExportMessage, make_room: Callable[[int], None] = lambda nbytes: None
    ) -> tuple[int, list[Tensor]]:
        """Part of a table or a whole parameter with its state; and its steps. See ``ExportMessage``.

        ``make_room`` is called with the bytes of the rows before they are copied.
        """
        with self._state:
            self._check_name(message.name)
            holder = self._holder(message.name)
            if isinstance(holder, DenseParameter):
                make_room(holder.value.nbytes + sum(state.nbytes for state in holder.states))
                return holder.step, [holder.value, *(state.clone() for state in holder.states)]
            rows = max(0, min(message.rows, holder.used - message.first))
            make_room(rows * holder.stride * holder.spec.dtype.itemsize)
            block = holder.block(message.first, message.rows)
            return holder.step, [block.ids, block.values, block.stamps, block.sums, block.usage, holder.history]

    def restore(self, message: RestoreMessage, tensors: Sequence[Tensor]) -> None:
        """Restores what ``export`` gave, here or on another shard.

        Raises:
            NotFound, SchemaError, NonFinite: it does not fit this table or parameter; nothing is changed.
        """
        with self._state:
            self._check_name(message.name)
            holder = self._holder(message.name)
            if isinstance(holder, RowTable):
                if len(tensors) != 1 + len(fields(RowBlock)):
                    raise SchemaError(f"table {message.name}: ids, values, stamps, sums, usage and history expected")
                *block, history = tensors
                holder.check_block(RowBlock(*block), message.step, history)
            else:
                holder.check_restored(tensors)
            if not all_finite(tensors):
                raise NonFinite(f"the checkpoint of {message.name} holds NaN or Inf; nothing was changed")
            self._record("restore", message, tensors)

    def drop(self, message: DropMessage) -> None:
        """Drop a table or a parameter."""
        with self._state:
            if message.name:
                self._check_name(message.name)
            self._record("drop", message, ())

    def _do_drop(self, message: DropMessage) -> None:
        self._grouping.forget()
        self._generation = _new_generation()
        if message.name:
            self._tables.pop(message.name, None)
            self._dense.pop(message.name, None)
            self._counts.pop(message.name, None)
        else:
            self._job = None

    def _check_name(self, name: str) -> None:
        if name not in self._tables and name not in self._dense:
            known = ", ".join([*self._tables, *self._dense]) or "none"
            raise NotFound(f"no table or parameter {name!r} on this shard; there are: {known}")

    def barrier(self, message: BarrierMessage, deadline: Deadline) -> None:
        """Wait until all workers are at this barrier.

        Raises:
            DeadlineExceeded: some are not; names them.
        """
        with self._state:
            if not message.rank < message.world:
                raise SchemaError(f"rank {message.rank} lies outside a world of {message.world}")
            self._barriers[message.rank] = max(message.number, self._barriers.get(message.rank, 0))
            self._state.notify_all()
            patience = _patience(deadline)
            while late := [rank for rank in range(message.world) if self._barriers.get(rank, 0) < message.number]:
                if not self._state.wait(timeout=patience.remaining()):
                    raise _missing(late, patience, "barrier", message.number)

    def snapshot(self) -> tuple[dict[str, object], dict[str, Group]]:
        """Return the present state: plain values, and groups of tensors.

        Rows in a file, which may exceed memory, are groups that are read when they are
        called, a few rows each: the shard must not change until then. Pushes that wait for those of other
        workers are not included: the clocks are those before them, and ``journal_pending`` journals them again.
        """
        with self._state:
            groups: dict[str, Group] = {}
            tables: list[object] = []
            dense: list[object] = []
            for name, table in self._tables.items():
                used = max(table.used, 1)
                each = table.rows_at_once if table.in_file else used
                mine: dict[str, Group] = {
                    f"table-{len(tables)}.{number}": functools.partial(self._rows_of, ExportMessage(name, first, each))
                    for number, first in enumerate(range(0, used, each))
                }
                groups |= mine if table.in_file else {key: read() for key, read in mine.items() if callable(read)}
                tables.append(
                    {
                        "spec": table.spec.to_dict(), "rule": table.rule.to_dict(), "step": table.step,
                        "groups": list(mine),
                    }
                )  # fmt: skip
            for name, parameter in self._dense.items():
                parts = [parameter.value, *parameter.states]
                groups[f"dense-{len(dense)}"] = {str(k): tensor.clone() for k, tensor in enumerate(parts)}
                dense.append({"name": name, "rule": parameter.rule.to_dict(), "step": parameter.step})
            state: dict[str, object] = {"tables": tables, "dense": dense, "job": None}
            if self._job is not None:
                clocks = list(self._job.clocks)
                for step, pushes in [*self._job.pending.items(), *self._job.held.items()]:
                    for rank in pushes:
                        clocks[rank] = min(clocks[rank], step)
                state["job"] = {
                    "world": self._job.world, "consistency": self._job.consistency.name, "clocks": clocks,
                    "total": self._job.total, "norms": dict(self._job.norms),
                }  # fmt: skip
            return state, groups

    def _rows_of(self, message: ExportMessage) -> dict[str, Tensor]:
        return dict(zip(_BLOCK, self.export(message)[1], strict=True))

    def journal_pending(self) -> None:
        """Journals the pushes that wait for those of other workers, for a journal that has just begun."""
        with self._state:
            if self._job is None:
                return
            for _, pushes in sorted([*self._job.pending.items(), *self._job.held.items()]):
                for push in pushes.values():
                    self._journal("push", _encode(push.message), push.tensors)

    def load(self, state: Mapping[str, Any], groups: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Load what ``snapshot`` gave into a shard that holds nothing yet."""
        with self._state:
            for entry in state["tables"]:
                spec = entry["spec"]
                self._make(InitMessage(spec["name"], entry["rule"], spec), ())
                for group in entry["groups"]:
                    tensors = groups(group)
                    message = RestoreMessage(spec["name"], entry["step"])
                    self._do_restore(message, [tensors[name] for name in _BLOCK])
            for number, entry in enumerate(state["dense"]):
                parts = groups(f"dense-{number}")
                tensors_of = [parts[str(k)] for k in range(len(parts))]
                self._make(InitMessage(entry["name"], entry["rule"]), tensors_of[:1])
                self._do_restore(RestoreMessage(entry["name"], entry["step"]), tensors_of)
            job = state["job"]
            if job is not None:
                consistency = Consistency.parse(job["consistency"])
                # Checkpoints of older versions hold no norms.
                norms = dict(job.get("norms", {}))
                self._job = _Job(job["world"], consistency, list(job["clocks"]), norms=norms, total=job["total"])

    def clocks(self) -> dict[str, object]:
        """Return the steps that each worker has pushed, and the most that one may be behind; ``None`` for any."""
        with self._state:
            if self._job is None:
                return {"clocks": [], "lag": None}
            return {"clocks": list(self._job.clocks), "lag": self._job.consistency.lag}

    def describe(self) -> dict[str, object]:
        """Tables and parameters, their optimizers and steps, without the numbers."""
        with self._state:
            return {
                "tables": [
                    {"spec": table.spec.to_dict(), "rule": table.rule.to_dict(), "rows": table.used, "step": table.step}
                    for table in self._tables.values()
                ],
                "dense": [
                    {"name": name, "rule": dense.rule.to_dict(), "step": dense.step}
                    for name, dense in self._dense.items()
                ],
            }

    def stands_at(self) -> int:
        """Return the step that every worker of the job has pushed; without a job, the most steps of any table."""
        with self._state:
            if self._job is not None:
                return min(self._job.clocks)
            steps = [table.step for table in self._tables.values()]
            return max([*steps, *(dense.step for dense in self._dense.values())], default=0)

    def locked(self) -> threading.Condition:
        """Return the lock under which every change is made, for callers that must see none between two of their own
        steps.
        """
        return self._state


def _bounds_after(holders: Mapping[str, RowTable | DenseParameter], peak: float) -> dict[str, Bounds] | None:
    """Return the largest magnitude of each after a step; ``None`` if a row may overflow.

    Tables of one rule in the same state share the answer.
    """
    known: dict[tuple[Bounds, int, int], Bounds] = {}
    found: dict[str, Bounds] = {}
    for name, holder in holders.items():
        key = (holder.bounds, id(holder.rule), holder.width)
        bounds = known.get(key)
        if bounds is None:
            bounds = holder.bounds_after(peak)
            if not bounds.safe:
                holder.measure()
                bounds = holder.bounds_after(peak)
                if not bounds.safe:
                    return None
            known[key] = bounds
        found[name] = bounds
    return found


def _rule_of(values: Mapping[str, object]) -> RowOptimizer:
    try:
        return RowOptimizer.from_dict(values)
    except (ValueError, TypeError, KeyError) as error:
        raise SchemaError(f"{values!r} is not an optimizer: {error}") from None


def _squares(given: Sequence[_Given]) -> float:
    """Return the sum of squares of gradients that are added up by id first; those of a dense parameter have no ids."""
    ids = torch.cat([some for some, _, _ in given])
    if not len(ids):
        return float(torch.stack([grad.double() for _, grad, _ in given]).sum(0).square().sum())
    grads = torch.cat([grad for _, grad, _ in given]).double()
    distinct, inverse = torch.unique(ids, return_inverse=True)
    return float(grads.new_zeros(len(distinct), grads.shape[1]).index_add_(0, inverse, grads).square().sum())


def _squares_of(message: PushMessage, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Of each part the squares of its gradients, 1 for those of one step; ``None`` if all gradients are."""
    counts = [part.count for part in message.parts]
    if not message.sums():
        return [None] * len(counts)
    sums = np.array([part.sums for part in message.parts])
    everyone = torch.ones(sum(counts))
    kinds = np.repeat(np.tile([False, True], len(counts)), np.stack([np.array(counts) - sums, sums], 1).reshape(-1))
    everyone[torch.from_numpy(kinds)] = tensors[1].float()
    return torch.split(everyone, counts)


def _without_kinds(message: PullMessage) -> PullMessage:
    """Return the pull as journaled: ids only."""
    return PullMessage([PullPart(part.name, part.count) for part in message.parts], message.training)


def _new_generation() -> int:
    """Return a random id, unlikely to repeat across restarts."""
    return 1 + secrets.randbelow((1 << 32) - 1)


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _with_long_ids(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return a message's tensors with int32 ids widened to int64."""
    if not tensors or tensors[0].dtype != torch.int32:
        return tensors
    return [tensors[0].long(), *tensors[1:]]


def _patience(deadline: Deadline | None) -> Deadline:
    """Return a little less than the client's remaining time, so that the error naming the missing workers arrives
    first.
    """
    return Deadline.after(1e-3) if deadline is None else deadline.sooner(max(0.8 * deadline.remaining(), 1e-3))


def _missing(ranks: Sequence[int], patience: Deadline, operation: str, step: int) -> DeadlineExceeded:
    names = ", ".join(f"worker {rank}" for rank in ranks)
    return DeadlineExceeded(
        f"nothing came from {names} before the deadline", peer=names, operation=operation, step=step,
        elapsed=patience.elapsed(),
    )  # fmt: skip


def _encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)
