"""The caches of a worker's tables: all tables of one kind in one call.

A step's ids of all tables are known together, and a model has dozens of tables: a kernel's fixed cost is the same for
ten rows and ten thousand, and a torch call's fixed cost is paid a dozen times per table. ``CacheGroup`` keeps the rows
of tables of one width, dtype and rule in its own arrays, and handles them in one compiled call. ``tables/cache.py``
says what a cache does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.parameter_server.client.remote_weight import distinct_ids
from anabranch.parameter_server.client.row_messages import Layout, Pull, Pulled, VersionClock
from anabranch.tables.cache import SETTLED, Cache, CacheStatistics, Due, spare_of
from anabranch.tables.kernels import caches
from anabranch.tables.kernels.caches import WITH_STATE
from anabranch.tables.optimizers.row_optimizers import CONSTANTS, RowOptimizer
from anabranch.tables.table import side_by_side
from anabranch.tables.table_spec import Placement
from anabranch.tensors.dtypes import working_dtype

Array = NDArray[Any]
Ids = Mapping[str, Tensor]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CacheQuery(Generic[_T]):
    """The request to the servers that a read, or the next step's, needs.

    Attributes:
        ids: by table, the ids to ask about; tables without any may be missing.
        known: by table, the cached version of each id.
        leaving: by table, gradients of evicted rows, to be sent to the servers.
        answer: called once with the rows that came; returns, by table, all rows that were to be read, or the gradients
            of those that left for prefetched ones.
    """

    ids: dict[str, Tensor]
    known: dict[str, Tensor]
    leaving: dict[str, Due]
    answer: Callable[[Mapping[str, Pulled]], dict[str, _T]]


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
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._cache, self._width, self._rules = cache, width, list(rules)
        self._read_as, self._dtype = dtype, working_dtype(dtype)
        rule = self._rules[0]()
        self._wide = rule.row_width(width) if cache.push_bound else width
        self._rule_number = rule.number
        self._counters = np.zeros((len(self.names), 5), np.int64)
        self.drop()

    def drop(self) -> None:
        """Forgets all rows."""
        cache, stateless = self._cache, self._wide == self._width
        tables, capacity, room = len(self.names), cache.capacity, 1 << (2 * cache.capacity).bit_length()
        whole, waiting = (tables, capacity), (tables, capacity if cache.push_bound else 0)
        numbers = torch.empty(0, dtype=self._dtype, device="cpu").numpy().dtype
        self._arrays = caches.CacheArrays(
            width=self._width, stateless=stateless, by_frequency=cache.policy != "LRU",
            settled=SETTLED if cache.policy == "LFUOpt" else 1 << 62, push_bound=cache.push_bound,
            spare=spare_of(cache), keys=np.zeros((tables, room), np.int64), slots=np.full((tables, room), -1),
            ids_of=np.zeros(whole, np.int64), uses=np.zeros(whole, np.int64), last_use=np.zeros(whole, np.int64),
            heap=np.zeros((*whole, 3), np.int64), sizes=np.zeros((tables, 2), np.int64), versions=np.full(whole, -1),
            checked=np.full(whole, caches.LONG_AGO), due_at=np.full(whole, caches.NEVER),
            with_state=np.full(whole, stateless), coming=np.zeros(whole, np.bool_),
            rows=np.zeros((*whole, self._wide), numbers), waiting=np.zeros((*waiting, self._width), numbers),
            energy=np.zeros(waiting, np.float32), pushed=np.zeros(whole, np.bool_), counters=self._counters,
        )  # fmt: skip
        self._sent: list[tuple[int, caches.Lookups]] = []  # steps, and what they have pushed recently
        self._constants: tuple[int, Array] = -1, np.empty((0, CONSTANTS))  # of the step, by table
        self._clock = 0  # of the last step that was asked about ahead, or written

    # --- reading ----------------------------------------------------------------------------------------------------

    def ask(self, wanted: Ids, step: int, *, training: bool) -> CacheQuery[Tensor]:
        """Begin to read distinct ids at ``step``; return the request to make, which is answered by all of their rows.

        No other call may come between it and the answer. Evaluation checks all rows, caches none and counts as no use;
        nor do its checks spare training one, whose request is what keeps a row that servers may evict.
        """
        names, lookups = self._lookups(wanted)
        count, bound = lookups.ids.size, self._cache.pull_bound if training else -1
        slots, known = np.empty((2, count), np.int64)
        room, leaving = _room_for_requests(lookups), self._room(count, len(names))
        rows = torch.empty(count, self._width, dtype=self._dtype, device="cpu")
        caches.ask(self._arrays, lookups, step, bound, training, slots, known, room, rows.numpy(), leaving)
        requests = _filled(room)

        def answer(pulled: Mapping[str, Pulled]) -> dict[str, Tensor]:
            if requests.at.size:
                received, constants = self._received(names, pulled), self._constants_of(step)
                caches.answer(
                    self._rule_number, self._arrays, lookups.members, step if training else step - 1, slots, known,
                    requests, received, constants, rows.numpy(),
                )  # fmt: skip
            return _parts(names, rows.to(self._read_as), lookups.starts, empty=True)

        left = self._left(names, lookups.members, leaving, step)
        ids, versions = _requested(names, lookups, requests)
        return CacheQuery(ids, versions, left, answer)

    def _constants_of(self, step: int) -> Array:
        """Return the constants of each table's step, where gradients wait to be applied."""
        if self._cache.push_bound and self._constants[0] != step:
            rules = [rule() for rule in self._rules]
            numbers = {rule: rule.constants(step + 1) for rule in dict.fromkeys(rules)}
            self._constants = step, np.stack([numbers[rule] for rule in rules])
        return self._constants[1]

    def _received(self, names: list[str], pulled: Mapping[str, Pulled]) -> caches.Received:
        """Return the received rows of all tables."""
        received = [pulled.get(name) for name in names]
        starts = np.append(0, np.cumsum([0 if one is None else len(one.positions) for one in received]))
        there = [one for one in received if one is not None]
        rows = side_by_side([one.rows.to(self._dtype) for one in there])
        positions = side_by_side([one.positions for one in there]).numpy()
        versions = side_by_side([one.versions for one in there]).numpy()
        assert len(positions) == len(versions) == starts[-1]
        assert not there or rows.shape == (starts[-1], self._wide)
        return caches.Received(positions, starts, versions, rows.numpy())

    # --- reading ahead ----------------------------------------------------------------------------------------------

    def prefetch(self, wanted: Ids, step: int, *, training: bool) -> CacheQuery[Due]:
        """Return the request to make during ``step`` so that the next one, which reads these ids, need not; its answer
        stores the rows.

        Rows that this step will push are left out: the answer would lack the push. Evaluation requests missing rows.
        """
        names, lookups = self._lookups(wanted)
        room, bound = _room_for_requests(lookups), self._cache.pull_bound if training else 0
        caches.start_prefetch(self._arrays, lookups, step, bound, room)
        self._clock, requests = step, _filled(room)
        requested = caches.Lookups(lookups.members, lookups.ids[requests.at], requests.starts)
        admitted = lookups if training else requested  # evaluation does not count as a use of cached rows

        def store(pulled: Mapping[str, Pulled]) -> dict[str, Due]:
            leaving = self._room(admitted.ids.size, len(names))
            caches.admit(self._arrays, admitted, step + 1, leaving)
            left = self._left(names, lookups.members, leaving, step + 1)
            if not requested.ids.size:
                return left
            self._arrays.pushed.fill(False)
            for at, pushed in self._sent:
                if at >= step:
                    caches.mark(self._arrays, pushed)
            received, constants = self._received(names, pulled), self._constants_of(step)
            caches.finish_prefetch(
                self._rule_number, self._arrays, requested, step, requests.versions, received, constants
            )  # fmt: skip
            return left

        ids, versions = _requested(names, lookups, requests)
        return CacheQuery(ids, versions, {}, store)

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, gradients: Mapping[str, tuple[Tensor, Tensor]], step: int) -> dict[str, Due]:
        """Take the gradients of distinct ids; returns those that are due at the servers."""
        self._clock = step
        self._sent = [sent for sent in self._sent if sent[0] >= step - 1]
        if self._cache.push_bound:
            self._constants = -1, self._constants[1]  # the rates may have been set anew since the step's reads
            return self._left(self.names, *self._write(gradients, step, self._constants_of(step)), step, empty=True)
        if gradients:
            _, lookups = self._lookups({name: ids for name, (ids, _) in gradients.items()})
            caches.pass_on(self._arrays, lookups)
            self._sent.append((step, lookups))
        return {name: (*some, None) for name, some in gradients.items()}

    def waiting(self) -> dict[str, Due]:
        """All gradients that wait, which then count as pushed."""
        if not self._cache.push_bound:
            return {}
        return self._left(self.names, *self._write({}, caches.NEVER - 1, self._constants[1]), self._clock)

    def _write(
        self, gradients: Mapping[str, tuple[Tensor, Tensor]], step: int, constants: Array
    ) -> tuple[Array, caches.Due]:
        """Let gradients wait; return all tables, and the gradients that are due by ``step``."""
        none = (
            torch.empty(0, dtype=torch.int64, device="cpu"),
            torch.empty(0, self._width, dtype=self._dtype, device="cpu"),
        )
        of_all = [gradients.get(name, none) for name in self.names]
        _, lookups = self._lookups({name: ids for name, (ids, _) in zip(self.names, of_all, strict=True)})
        grads = side_by_side([some.to(self._dtype) for _, some in of_all])
        room = self._room(lookups.ids.size + np.count_nonzero(self._arrays.due_at <= step), len(self.names))
        caches.write(self._rule_number, self._arrays, lookups, grads.numpy(), step, constants, room)
        return lookups.members, room

    def statistics(self) -> dict[str, CacheStatistics]:
        """Counters since it was made."""
        return {
            name: CacheStatistics(*counts) for name, counts in zip(self.names, self._counters.tolist(), strict=True)
        }

    # --- layout of tables in the arrays -----------------------------------------------------------------------------

    def _lookups(self, ids: Ids) -> tuple[list[str], caches.Lookups]:
        """Return the tables' names, and their ids."""
        starts = np.append(0, np.cumsum(list(map(len, ids.values()))))
        members = np.array([self._numbers[name] for name in ids])
        return list(ids), caches.Lookups(members, side_by_side(list(ids.values())).numpy(), starts)

    def _room(self, count: int, tables: int) -> caches.Due:
        """Room for ``count`` gradients that go to the servers."""
        grads = np.empty((count, self._width), self._arrays.rows.dtype)
        return caches.Due(np.empty(count, np.int64), grads, np.empty(count, np.float32), np.zeros(tables + 1, np.int64))

    def _left(
        self, names: list[str], members: Array, room: caches.Due, step: int, *, empty: bool = False
    ) -> dict[str, Due]:
        """Return the gradients that go to the servers with the push of ``step``, by table."""
        if room.starts[-1]:
            self._sent.append((step, caches.Lookups(members, room.ids[: room.starts[-1]], room.starts)))
        ids, grads, squares = (
            _parts(names, torch.from_numpy(some[: room.starts[-1]]), room.starts, empty=empty)
            for some in (room.ids, room.grads, room.squares)
        )
        return {name: (ids[name], grads[name], squares[name]) for name in ids}


_Requested = tuple[dict[str, Tensor], dict[str, Tensor]]


def _room_for_requests(lookups: caches.Lookups) -> caches.Requests:
    at, versions = np.empty((2, lookups.ids.size), np.int64)
    return caches.Requests(at, versions, np.zeros_like(lookups.starts))


def _requested(names: list[str], lookups: caches.Lookups, requests: caches.Requests) -> _Requested:
    """Return, by table, the ids that are asked about, and the version known of each."""
    ids = _parts(names, torch.from_numpy(lookups.ids[requests.at]), requests.starts)
    return ids, _parts(names, torch.from_numpy(requests.versions), requests.starts)


def _filled(requests: caches.Requests) -> caches.Requests:
    count = requests.starts[-1]
    return caches.Requests(requests.at[:count], requests.versions[:count], requests.starts)


def _parts(names: list[str], whole: Tensor, starts: Array, *, empty: bool = False) -> dict[str, Tensor]:
    """Split ``whole`` by table; tables without rows are left out unless ``empty``."""
    parts = zip(names, torch.split(whole, np.diff(starts).tolist()), strict=True)
    return {name: part for name, part in parts if empty or len(part)}


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
    layout = Layout(dict.fromkeys(names, (Placement(_ROWS, 2, 7), dtype, _WIDTH, wide)), [{}, {}])

    def received(query: CacheQuery[Any]) -> dict[str, Pulled]:
        came = {}
        for name, ids in query.ids.items():
            rows = torch.zeros(len(ids), wide, dtype=dtype, device="cpu")
            came[name] = Pulled(torch.arange(len(ids), device="cpu"), torch.ones_like(ids), rows)
        return came

    draw = torch.Generator().manual_seed(0)
    for step in range(6):
        batch = {name: torch.randint(_ROWS, (24,), generator=draw, device="cpu") for name in names}
        ids = {name: one.ids for name, one in distinct_ids(batch, dict.fromkeys(names, _ROWS)).items()}
        known = [torch.full((len(some),), WITH_STATE, device="cpu") for some in ids.values()]
        Pull(layout, list(ids.values()), known, [VersionClock()] * 2, None, with_state=True)
        query = group.ask(ids, step, training=step != 4)
        query.answer(received(query))
        ahead = group.prefetch({name: some[::2].contiguous() for name, some in ids.items()}, step, training=True)
        group.write({name: (some, torch.ones(len(some), _WIDTH, device="cpu")) for name, some in ids.items()}, step)
        ahead.answer(received(ahead))
    group.waiting()
    _done.add(kind)
