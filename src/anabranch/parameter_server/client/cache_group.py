"""The caches of a worker's tables: all tables of one kind in one call.

A step's ids of all tables are known together, and a model has dozens of tables: a kernel's fixed cost is the same for
ten rows and ten thousand, and a torch call's fixed cost is paid a dozen times per table. ``CacheGroup`` keeps the rows
of tables of one width, dtype and rule in its own arrays, and handles them in one compiled call. ``tables/cache.py``
says what a cache does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.parameter_server.client.remote_weight import distinct_ids
from anabranch.parameter_server.client.row_messages import Layout, Pull, Pulled
from anabranch.tables.cache import SETTLED, Cache, CacheStatistics, Due, spare_of
from anabranch.tables.kernels import caches
from anabranch.tables.kernels.memory import working_dtype
from anabranch.tables.kernels.row_versions import WITH_STATE
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.optimizers.row_step import move_rows
from anabranch.tables.shard_placement import Placement
from anabranch.tables.table import side_by_side

Array = NDArray[Any]
Ids = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """The request to the servers that a read needs before it can be answered.

    Attributes:
        ids: by table, the ids to ask about; tables without any may be missing.
        known: by table, the cached version of each id.
        leaving: by table, gradients of evicted rows, to be sent to the servers.
        state: private data for ``answer``.
    """

    ids: dict[str, Tensor]
    known: dict[str, Tensor]
    leaving: dict[str, Due]
    state: object = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The state that ``CacheGroup.ask`` hands to ``answer``."""

    names: list[str]
    members: Array
    starts: Array
    step: int
    slots: Array
    known: Array
    asks: Array
    asked: Array
    ask_starts: Array
    rows: Tensor


@dataclass(frozen=True, slots=True)
class _Prefetch:
    """The state that ``CacheGroup.start_prefetch`` hands to ``finish_prefetch``."""

    names: list[str]
    members: Array
    wanted: Tensor
    starts: Array
    step: int
    ids: Tensor
    asked: Array
    ask_starts: Array


class CacheGroup:
    """Caches of tables of one width and dtype and, if own writes wait, one kind of optimizer.

    Args:
        names: of the tables.
        cache: policy, capacity and bounds of each.
        width, dtype: of their rows; those of a half type are float32 in the cache.
        rules: each table's optimizer, with the numbers of this step.
    """

    def __init__(
        self,
        names: Sequence[str],
        cache: Cache,
        width: int,
        dtype: torch.dtype,
        rules: Sequence[Callable[[], RowOptimizer]],
    ) -> None:
        self._kernels = caches
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._cache, self._width, self._rules = cache, width, list(rules)
        self._read_as, self._dtype = dtype, working_dtype(dtype)
        self._spare = spare_of(cache)
        rule = self._rules[0]()
        self._wide = rule.row_width(width) if cache.push_bound else width
        self._rule_number = rule.number
        self._stateless = self._wide == width
        self._policy = (cache.policy != "LRU", SETTLED if cache.policy == "LFUOpt" else 1 << 62)
        self._counters = np.zeros((len(self.names), 5), np.int64)
        self.drop()

    def drop(self) -> None:
        """Forgets all rows."""
        tables, capacity = len(self.names), self._cache.capacity
        room = 1 << (2 * capacity).bit_length()
        none = self._kernels.NEVER
        whole = (tables, capacity)
        numbers = torch.empty(0, dtype=self._dtype, device="cpu").numpy().dtype
        waiting = capacity if self._cache.push_bound else 0
        self._arrays = self._kernels.CacheArrays(
            keys=np.zeros((tables, room), np.int64),
            slots=np.full((tables, room), -1, np.int64),
            ids_of=np.zeros(whole, np.int64),
            uses=np.zeros(whole, np.int64),
            last_use=np.zeros(whole, np.int64),
            heap=np.zeros((*whole, 3), np.int64),
            sizes=np.zeros((tables, 2), np.int64),
            versions=np.full(whole, -1, np.int64),
            checked=np.full(whole, self._kernels.LONG_AGO, np.int64),
            due_at=np.full(whole, none, np.int64),
            with_state=np.full(whole, self._stateless),
            coming=np.zeros(whole, np.bool_),
            rows=np.zeros((*whole, self._wide), numbers),
            waiting=np.zeros((tables, waiting, self._width), numbers),
            energy=np.zeros((tables, waiting), np.float32),
            pushed=np.zeros(whole, np.bool_),
            counters=self._counters,
        )
        self._sent: list[tuple[int, Array, Array, Array]] = []  # step, members, ids, starts: pushed recently
        self._clock = 0  # of the last step that was asked about ahead, or written

    def check_again(self, names: Iterable[str], step: int) -> None:
        """Allow another check of these tables' rows that were checked in ``step``."""
        for name in names:
            checked = self._arrays.checked[self._numbers[name]]
            checked[checked == step] = step - 1

    # --- reading ----------------------------------------------------------------------------------------------------

    def ask(self, wanted: Ids, step: int, *, training: bool) -> CacheQuery:
        """Begin to read distinct ids at ``step``; return the request to make.

        No other call may come between it and ``answer``. Evaluation checks all rows, caches none and counts as no use.
        """
        names, members, starts = self._lookups(wanted)
        ids = side_by_side([wanted[name] for name in names])
        count = len(ids)
        slots, known, asks, asked = (np.empty(count, np.int64) for _ in range(4))
        ask_starts = np.zeros(len(names) + 1, np.int64)
        rows, leaving = torch.empty(count, self._width, dtype=self._dtype, device="cpu"), self._room(count, len(names))
        self._kernels.ask(
            self._arrays, *self._policy, self._width, members, ids.numpy(), starts, step,
            self._cache.pull_bound if training else -1, training, slots, known, asks, asked, ask_starts, rows.numpy(),
            leaving,
        )  # fmt: skip
        total = ask_starts[-1]
        state = _Asked(names, members, starts, step, slots, known, asks[:total], asked[:total], ask_starts, rows)
        questions = ids.index_select(0, torch.from_numpy(state.asks))
        return CacheQuery(
            _parts(names, questions, ask_starts),
            _parts(names, torch.from_numpy(state.asked), ask_starts),
            self._left(names, members, leaving, step),
            state,
        )

    def answer(self, query: CacheQuery, pulled: Mapping[str, Pulled]) -> dict[str, Tensor]:
        """Return the rows of all ids of ``ask``."""
        asked = query.state
        assert isinstance(asked, _Asked)
        names = asked.names
        if len(asked.asks):
            came = self._side_by_side(names, pulled)
            dirty = np.empty((len(came[-1]), 3), np.int64)
            again = self._kernels.answer(
                self._arrays, self._width, self._stateless, asked.members, asked.step, asked.slots, asked.known,
                asked.asks, asked.asked, asked.ask_starts, *came, asked.rows.numpy(), dirty,
            )  # fmt: skip
            if again:
                positions, moved = self._apply_again(dirty[:again], asked.step)
                asked.rows[positions] = moved[:, : self._width]
        return _parts(names, asked.rows.to(self._read_as), asked.starts, empty=True)

    def _side_by_side(self, names: list[str], pulled: Mapping[str, Pulled]) -> tuple[Array, Array, Array, Array]:
        """Return the received rows of all tables: their positions, where each table's begin, the versions and the
        rows.
        """
        came = [pulled.get(name) for name in names]
        starts = np.zeros(len(names) + 1, np.int64)
        np.cumsum([0 if one is None else len(one.positions) for one in came], out=starts[1:])
        there = [one for one in came if one is not None]
        rows = side_by_side([_wide(one.rows.to(self._dtype), self._wide) for one in there])
        positions, versions = (
            side_by_side([getattr(one, of) for one in there]).numpy() for of in ("positions", "versions")
        )
        assert len(positions) == len(versions) == len(rows) == starts[-1]
        return positions, starts, versions, rows.numpy()

    def _apply_again(self, dirty: Array, step: int) -> tuple[Tensor, Tensor]:
        """Apply the gradients that still wait to received rows; returns their positions and new values."""
        tables, slots, positions = (torch.from_numpy(column.copy()) for column in dirty.T)
        at = tables * self._cache.capacity + slots
        rows = torch.from_numpy(self._arrays.rows).view(-1, self._wide)
        grads = torch.from_numpy(self._arrays.waiting).view(-1, self._width)[at]
        energy = torch.from_numpy(self._arrays.energy).view(-1)[at]
        squares = (energy / grads.float().square().sum(1)).nan_to_num(nan=1.0, posinf=1.0)
        alike: dict[RowOptimizer, list[int]] = {}
        for table in np.unique(dirty[:, 0]).tolist():
            alike.setdefault(self._rules[table](), []).append(table)
        moved = rows[at]
        for rule, some in alike.items():
            mine = torch.nonzero(torch.isin(tables, torch.tensor(some, device="cpu")))[:, 0]
            moved[mine] = move_rows(moved[mine], grads[mine], rule, step + 1, squares[mine])
        rows[at] = moved
        return positions, moved

    # --- reading ahead ----------------------------------------------------------------------------------------------

    def start_prefetch(self, wanted: Ids, step: int, *, training: bool) -> CacheQuery:
        """Return the request to make during ``step`` so that the next one, which reads these ids, need not.

        Rows that this step will push are left out: the answer would lack the push. Evaluation requests missing rows.
        """
        names, members, starts = self._lookups(wanted)
        ids = side_by_side([wanted[name] for name in names])
        asks, asked = (np.empty(len(ids), np.int64) for _ in range(2))
        ask_starts = np.zeros(len(names) + 1, np.int64)
        self._kernels.start_prefetch(
            self._arrays, members, ids.numpy(), starts, step, self._cache.pull_bound if training else 0,
            self._cache.push_bound > 0, self._spare, asks, asked, ask_starts,
        )  # fmt: skip
        self._clock = step
        total = ask_starts[-1]
        some, known = ids.index_select(0, torch.from_numpy(asks[:total])), asked[:total]
        if not training:  # evaluation does not count as a use of cached rows
            ids, starts = some, ask_starts
        state = _Prefetch(names, members, ids, starts, step, some, known, ask_starts)
        return CacheQuery(
            _parts(names, some, ask_starts), _parts(names, torch.from_numpy(known), ask_starts), {}, state
        )

    def finish_prefetch(self, query: CacheQuery, pulled: Mapping[str, Pulled]) -> dict[str, Due]:
        """Store the rows that ``start_prefetch`` requested; return the gradients of the rows that left for them."""
        asked = query.state
        assert isinstance(asked, _Prefetch)
        leaving = self._room(len(asked.wanted), len(asked.names))
        self._kernels.admit(
            self._arrays, *self._policy, self._width, asked.members, asked.wanted.numpy(), asked.starts, asked.step + 1,
            leaving,
        )  # fmt: skip
        left = self._left(asked.names, asked.members, leaving, asked.step + 1)
        if not len(asked.ids):
            return left
        self._arrays.pushed.fill(False)
        for at, *pushed in self._sent:
            if at >= asked.step:
                self._kernels.mark(self._arrays, *pushed)
        came = self._side_by_side(asked.names, pulled)
        dirty = np.empty((len(came[-1]), 3), np.int64)
        again = self._kernels.finish_prefetch(
            self._arrays, self._width, self._stateless, asked.members, asked.step, asked.ids.numpy(), asked.asked,
            asked.ask_starts, *came, dirty,
        )  # fmt: skip
        if again:
            self._apply_again(dirty[:again], asked.step)
        return left

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, gradients: Mapping[str, tuple[Tensor, Tensor]], step: int) -> dict[str, Due]:
        """Take the gradients of distinct ids; returns those that are due at the servers."""
        none = (
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, self._width, dtype=self._dtype, device="cpu"),
        )
        if self._cache.push_bound:
            gradients = {name: gradients.get(name, none) for name in self.names}
        if not gradients:
            return {}
        names, members, starts = self._lookups({name: ids for name, (ids, _) in gradients.items()})
        ids = side_by_side([gradients[name][0] for name in names]).numpy()
        self._clock = step
        self._sent = [sent for sent in self._sent if sent[0] >= step - 1]
        if not self._cache.push_bound:
            self._kernels.pass_on(self._arrays, members, ids, starts)
            self._sent.append((step, members, ids, starts))
            return {name: (*gradients[name], None) for name in names}
        grads = side_by_side([gradients[name][1].to(self._dtype) for name in names])
        room = self._room(ids.size + self._kernels.count_due(self._arrays.due_at, members, step), len(names))
        rules = [self._rules[k]() for k in members.tolist()]
        numbers = {rule: rule.constants(step + 1) for rule in dict.fromkeys(rules)}
        constants = np.stack([numbers[rule] for rule in rules])
        self._kernels.write(
            self._rule_number, self._arrays, self._width, members, ids, starts, grads.numpy(), step,
            self._cache.push_bound, self._spare, constants, room,
        )  # fmt: skip
        return self._left(names, members, room, step, empty=True)

    def waiting(self) -> dict[str, Due]:
        """All gradients that wait, which then count as pushed."""
        if not self._cache.push_bound:
            return {}
        members = np.arange(len(self.names))
        limit = self._kernels.NEVER - 1
        room = self._room(self._kernels.count_due(self._arrays.due_at, members, limit), len(members))
        self._kernels.take_due(self._arrays, self._width, members, limit, room)
        return self._left(self.names, members, room, self._clock)

    def statistics(self) -> dict[str, CacheStatistics]:
        """Counters since it was made."""
        return {
            name: CacheStatistics(*counts) for name, counts in zip(self.names, self._counters.tolist(), strict=True)
        }

    # --- layout of tables in the arrays -----------------------------------------------------------------------------

    def _lookups(self, ids: Ids) -> tuple[list[str], Array, Array]:
        """Return the tables' names and numbers, and where the ids of each begin."""
        names = list(ids)
        starts = np.zeros(len(names) + 1, np.int64)
        np.cumsum([len(ids[name]) for name in names], out=starts[1:])
        return names, np.array([self._numbers[name] for name in names]), starts

    def _room(self, count: int, tables: int) -> Any:
        """Room for ``count`` gradients that go to the servers."""
        numbers = self._arrays.rows.dtype
        return self._kernels.Due(
            np.empty(count, np.int64),
            np.empty((count, self._width), numbers),
            np.empty(count, np.float32),
            np.zeros(tables + 1, np.int64),
        )

    def _left(self, names: list[str], members: Array, room: Any, step: int, *, empty: bool = False) -> dict[str, Due]:
        """Return the gradients that go to the servers with the push of ``step``, by table."""
        if room.starts[-1]:
            self._sent.append((step, members, room.ids[: room.starts[-1]], room.starts))
        ids, grads, squares = (
            _parts(names, torch.from_numpy(some[: room.starts[-1]]), room.starts, empty=empty)
            for some in (room.ids, room.grads, room.squares)
        )
        return {name: (ids[name], grads[name], squares[name]) for name in ids}


def _parts(names: list[str], whole: Tensor, starts: Array, *, empty: bool = False) -> dict[str, Tensor]:
    """Split ``whole`` by table; tables without rows are left out unless ``empty``."""
    parts = zip(names, torch.split(whole, np.diff(starts).tolist()), strict=True)
    return {name: part for name, part in parts if empty or len(part)}


def _wide(rows: Tensor, width: int) -> Tensor:
    if rows.shape[1] != width:
        raise ValueError(f"rows of {width} numbers expected, got {tuple(rows.shape)}")
    return rows


# --- compiling ahead --------------------------------------------------------------------------------------------------


_ROWS, _WIDTH = 64, 2
_done: set[tuple[object, ...]] = set()


def compile_cache_kernels(cache: Cache, rule: RowOptimizer, dtype: torch.dtype) -> None:
    """Compiles, or loads, the kernels of tables of ``dtype`` under ``rule`` with such a cache.

    Only the first call in a process for a kind of rule and cache does so. It takes a few steps of two small tables, of
    which every row has changed and is zeros.

    >>> from anabranch.tables import Family
    >>> compile_cache_kernels(Cache(), RowOptimizer(Family.SGD, lr=0.1), torch.float32)
    """
    kind = (rule.number, dtype, bool(cache.push_bound))
    if kind in _done:
        return
    names, wide = ["first", "second"], rule.row_width(_WIDTH) if cache.push_bound else _WIDTH
    small = Cache(cache.policy, 8, min(cache.pull_bound, 1), min(cache.push_bound, 1))
    group = CacheGroup(names, small, _WIDTH, dtype, [lambda: rule] * 2)
    layout = Layout.of(dict.fromkeys(names, (Placement(_ROWS, 2, 7), dtype, _WIDTH)), [{}, {}])

    def came(query: CacheQuery) -> dict[str, Pulled]:
        counts = {name: len(ids) for name, ids in query.ids.items()}
        return {
            name: Pulled(
                torch.arange(count, device="cpu"),
                torch.ones(count, dtype=torch.int64, device="cpu"),
                torch.zeros(count, wide, dtype=dtype, device="cpu"),
            )
            for name, count in counts.items()
        }

    draw = torch.Generator().manual_seed(0)
    for step in range(6):
        batch = {name: torch.randint(_ROWS, (24,), generator=draw, device="cpu") for name in names}
        ids = {name: one.ids for name, one in distinct_ids(batch, dict.fromkeys(names, _ROWS)).items()}
        known = [torch.full((len(some),), WITH_STATE, device="cpu") for some in ids.values()]
        Pull(layout, list(ids.values()), known, [wide] * 2, [(0, 0)] * 2, None)
        query = group.ask(ids, step, training=step != 4)
        group.answer(query, came(query))
        ahead = group.start_prefetch({name: some[::2].contiguous() for name, some in ids.items()}, step, training=True)
        group.write({name: (some, torch.ones(len(some), _WIDTH, device="cpu")) for name, some in ids.items()}, step)
        group.finish_prefetch(ahead, came(ahead))
    group.waiting()
    _done.add(kind)
