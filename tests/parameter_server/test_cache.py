"""The worker's cache against a server that remembers every update: what a read may miss, and what it may not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import Tensor

from anabranch.parameter_server.client.cache_group import CacheGroup, CacheQuery
from anabranch.parameter_server.client.row_messages import Pulled
from anabranch.tables import Cache, CacheStatistics, Family, RowOptimizer
from anabranch.tables.cache import SPARE
from anabranch.tables.kernels.caches import WITH_STATE

UPDATES = 400  # columns: update k adds 1 to column k of its row, so a row shows which updates it holds, and how often


class Server:
    """One table: rows of counters, and the number of changes of each as its version."""

    def __init__(self, width: int = UPDATES) -> None:
        self.rows: dict[int, Tensor] = {}
        self.versions: dict[int, int] = {}
        self.width = width
        self.changes = 0
        self.sent = 0

    def pull(self, ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        current = torch.tensor([self.versions.get(known_id, 0) for known_id in ids.tolist()], dtype=torch.int64)
        positions = torch.nonzero(current != known)[:, 0]
        rows = [self.rows.get(int(ids[at]), torch.zeros(self.width)) for at in positions]
        self.sent += len(rows)
        return positions, current[positions], torch.stack(rows) if rows else torch.zeros(0, self.width)

    def push(self, ids: Tensor, grads: Tensor, squares: Tensor | None = None) -> None:
        for known_id, grad in zip(ids.tolist(), grads, strict=True):
            self.rows[known_id] = self.rows.get(known_id, torch.zeros(self.width)) + grad
            self.changes += 1
            self.versions[known_id] = self.changes


class Later:
    """A worker's way to the server, by which what leaves the cache goes with the rest of the step's pushes."""

    def __init__(self, server: Server, *, states: bool = False) -> None:
        self.server = server
        self.states = states  # rows have momentum, which is zero
        self.leaving: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def pull(self, ids: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        positions, versions, rows = self.server.pull(ids, known)
        if self.states:
            rows = torch.cat([rows, torch.zeros_like(rows)], 1)
        return positions, versions, rows

    def push(self, ids: Tensor, grads: Tensor, squares: Tensor | None = None) -> None:
        self.leaving.append((ids, grads, squares))

    def deliver(self) -> None:
        for ids, grads, _ in self.leaving:
            self.server.push(ids, grads)
        self.leaving.clear()


class Cached:
    """The caches of some tables, which share their ids, as a worker uses them; a step adds the gradient to the row."""

    def __init__(
        self, cache: Cache, peer: Server | Later, width: int = UPDATES, *, states: bool = False, tables: int = 1
    ) -> None:
        # So little momentum is a state, and moves nothing by more than rounding.
        rule = RowOptimizer(Family.SGD, lr=1.0, maximize=True, momentum=1e-30 if states else 0.0)
        self.names = ["t", "u", "v"][:tables]
        self.group, self.peer = CacheGroup(self.names, cache, width, torch.float32, [lambda: rule] * tables), peer

    def split(self, ids: list[int]) -> dict[str, Tensor]:
        parts = {name: [i for i in ids if i % len(self.names) == k] for k, name in enumerate(self.names)}
        return {name: torch.tensor(part) for name, part in parts.items() if part}

    def came(self, query: CacheQuery[Any]) -> dict[str, Pulled]:
        return {name: Pulled(*self.peer.pull(ids, query.known[name])) for name, ids in query.ids.items()}

    def read(self, ids: list[int], step: int, *, training: bool = True) -> Tensor:
        parts = self.split(ids)
        query = self.group.ask(parts, step, training=training)
        self.leave(query.leaving)
        rows = query.answer(self.came(query))
        of = {int(i): row for name, part in parts.items() for i, row in zip(part, rows[name], strict=True)}
        return torch.stack([of[i] for i in ids])

    def leave(self, leaving: Mapping[str, tuple[Tensor, Tensor, Tensor | None]]) -> None:
        for due in leaving.values():
            self.peer.push(*due)

    def write(self, ids: list[int], grads: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        parts = {name: (part, grads[[ids.index(i) for i in part.tolist()]]) for name, part in self.split(ids).items()}
        due = [(*one[:2], None) for one in self.group.write(parts, step).values()]
        nothing = torch.empty(0, dtype=torch.int64), grads[:0], None
        return torch.cat([one[0] for one in (nothing, *due)]), torch.cat([one[1] for one in (nothing, *due)]), None

    def start_prefetch(self, ids: list[int], step: int, *, training: bool = True) -> CacheQuery[Any]:
        return self.group.prefetch(self.split(ids), step, training=training)

    def finish_prefetch(self, query: CacheQuery[Any], came: Mapping[str, Pulled]) -> None:
        self.leave(query.answer(came))

    def flush(self, server: Server) -> None:
        for due in self.group.waiting().values():
            server.push(*due)

    def statistics(self) -> CacheStatistics:
        return self.group.statistics()["t"]


IDS = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)


class Workers(RuleBasedStateMachine):
    """Two or three workers in step: all read, then all write; each write is an update of its own."""

    @initialize(
        policy=st.sampled_from(["LRU", "LFU", "LFUOpt"]),
        capacity=st.integers(1, 6),
        pull_bound=st.integers(0, 4),
        push_bound=st.integers(0, 4),
        workers=st.integers(2, 3),
        states=st.booleans(),
        spare=st.booleans(),
        tables=st.integers(1, 3),
    )
    def start(
        self, policy: str, capacity: int, pull_bound: int, push_bound: int, workers: int, states: bool, spare: bool,
        tables: int,
    ) -> None:  # fmt: skip
        # As if bounds of 2 steps had one to spare, which takes too many steps to get to otherwise.
        self.patch = mock.patch("anabranch.tables.cache.SPARE", 2 if spare else SPARE)
        self.patch.start()
        self.cache = Cache(policy, capacity, pull_bound, push_bound)
        self.server = Server()
        states = states and push_bound > 0
        self.peers = [Later(self.server, states=states) for _ in range(workers)]
        self.caches = [Cached(self.cache, peer, states=states, tables=tables) for peer in self.peers]
        self.step = 0
        self.updates: list[tuple[int, int, int]] = []  # (step, worker, id); the column is the place in this list

    @rule(batches=st.lists(IDS, min_size=3, max_size=3), quiet=st.booleans())
    def one_step(self, batches: list[list[int]], quiet: bool) -> None:
        self.run_step(batches, quiet=quiet)

    def run_step(
        self, batches: list[list[int]], *, quiet: bool = False, between: Callable[[], None] = lambda: None
    ) -> None:
        read = list(zip(range(len(self.caches)), self.caches, batches, strict=False))
        for worker, cache, ids in read:
            self.check(worker, ids, cache.read(ids, self.step))
        between()
        due = []
        for worker, cache, ids in read:
            mine = [] if quiet or len(self.updates) + len(ids) > UPDATES else ids
            grads = torch.zeros(len(mine), UPDATES)
            for at, known_id in enumerate(mine):
                grads[at, len(self.updates)] = 1
                self.updates.append((self.step, worker, known_id))
            due.append(cache.write(mine, grads, self.step))
        for ids, grads, _ in due:
            self.server.push(ids, grads)
        self.deliver()
        self.step += 1

    def deliver(self) -> None:
        for peer in self.peers:
            peer.deliver()

    @rule(
        batches=st.lists(IDS, min_size=3, max_size=3),
        ahead=st.lists(IDS, min_size=3, max_size=3),
        flushed=st.booleans(),
        training=st.booleans(),
    )
    def one_step_with_prefetching(
        self, batches: list[list[int]], ahead: list[list[int]], flushed: bool, training: bool
    ) -> None:
        """What the next step will ask about is asked before this step's pushes, and taken in after them."""
        coming = []

        def ask() -> None:
            for cache, ids in zip(self.caches, ahead, strict=False):
                query = cache.start_prefetch(ids, self.step, training=training)
                coming.append((cache, query, cache.came(query)))

        self.run_step(batches, between=ask)
        if flushed:
            self.flush(0, forget=False)
        for cache, query, came in coming:
            cache.finish_prefetch(query, came)
        self.deliver()  # who left for them may be read in the next step

    @rule(worker=st.integers(0, 2), ids=IDS)
    def evaluate(self, worker: int, ids: list[int]) -> None:
        cache = self.caches[worker % len(self.caches)]
        found = cache.read(ids, self.step, training=False)
        self.check(worker % len(self.caches), ids, found)

    @rule(worker=st.integers(0, 2), forget=st.booleans())
    def flush(self, worker: int, forget: bool) -> None:
        cache = self.caches[worker % len(self.caches)]
        self.deliver()
        cache.flush(self.server)
        if forget:
            cache.group.drop()

    def check(self, reader: int, ids: list[int], rows: Tensor) -> None:
        for known_id, row in zip(ids, rows, strict=True):
            for column, (step, writer, written) in enumerate(self.updates):
                count = round(row[column].item(), 6)
                if written != known_id:
                    assert count == 0
                    continue
                too_old_to_miss = self.step - step > self.cache.pull_bound + self.cache.push_bound
                assert count in ((1,) if writer == reader or too_old_to_miss else (0, 1))

    def teardown(self) -> None:
        if hasattr(self, "caches"):
            self.patch.stop()
            self.deliver()
            for cache in self.caches:
                cache.flush(self.server)
            for column, (_, _, known_id) in enumerate(self.updates):
                assert self.server.rows[known_id][column] == 1


TestWorkersMissNothingOlderThanTheBounds = Workers.TestCase
TestWorkersMissNothingOlderThanTheBounds.settings = settings(deadline=None, max_examples=20, stateful_step_count=25)


def make(server: Server, **options: Any) -> Cached:
    return Cached(Cache(**options), server, server.width)


def test_a_row_within_its_bound_costs_no_message() -> None:
    server = Server(2)
    cache = make(server, pull_bound=3)
    cache.read([1, 2], 0)
    server.pull = None  # type: ignore[assignment]
    for step in (1, 2, 3):
        cache.read([1, 2], step)
    found = cache.statistics()
    assert (found.hits, found.misses) == (6, 2)


def test_an_unchanged_row_is_not_sent_again() -> None:
    server = Server(2)
    cache = make(server)
    for step in range(4):
        cache.read([1, 2], step)
    assert server.sent == 2
    server.push(torch.tensor([2]), torch.ones(1, 2))
    assert cache.read([1, 2], 4).tolist() == [[0, 0], [1, 1]]
    assert server.sent == 3
    assert cache.statistics().refreshed == 1


def test_hot_rows_age_in_steps_and_not_in_lookups() -> None:
    server = Server(2)
    cache = make(server, pull_bound=5)
    for _ in range(100):
        cache.read([1], 0)
    cache.read([1], 5)
    assert server.sent == 1


@pytest.mark.parametrize(("policy", "stays"), [("LRU", 2), ("LFU", 1), ("LFUOpt", 1)])
def test_the_policy_decides_which_row_is_evicted(policy: str, stays: int) -> None:
    server = Server(2)
    cache = make(server, policy=policy, capacity=2, pull_bound=100)
    for step, known_id in enumerate([1, 1, 1, 2, 3]):
        cache.read([known_id], step)
    sent = server.sent
    cache.read([stays], 5)
    assert server.sent == sent


def test_under_lfuopt_a_row_of_ten_uses_stays_for_good_and_the_rest_go_uncached() -> None:
    server = Server(2)
    cache = make(server, policy="LFUOpt", capacity=2, pull_bound=10**6)
    for step in range(10):
        cache.read([1, 2], step)
    for step in range(10, 60):
        cache.read([3], step)
    assert server.sent == 2 + 50
    assert cache.statistics().evictions == 0
    cache.read([1, 2], 60)
    assert server.sent == 52
    plain = make(server, policy="LFU", capacity=2, pull_bound=10**6)
    for step in range(10):
        plain.read([1, 2], step)
    plain.read([3], 10)
    assert plain.statistics().evictions == 1


def test_a_row_is_sent_without_its_state_until_it_is_used_again() -> None:
    """Most rows are used once and leave; what they came with would have come for nothing."""
    server = Server(2)
    peer = Later(server, states=True)
    cache = Cached(Cache(capacity=4, pull_bound=2, push_bound=100), peer, 2, states=True)
    asked: list[list[int]] = []
    pull = peer.pull
    peer.pull = lambda ids, known: asked.append(known.tolist()) or pull(ids, known)
    for step in range(6):
        assert cache.read([1], step).tolist() == [[step, step]], "own writes are read"
        due_ids, due, _ = cache.write([1], torch.ones(1, 2), step)
        assert due_ids.tolist() == ([1] if step == 0 else []), "the first is pushed at once, the others wait"
        server.push(due_ids, due)
    assert asked == [[-1], [WITH_STATE], [server.versions[1]]]


@pytest.mark.parametrize(
    "fault", [{"policy": "FIFO"}, {"capacity": 0}, {"pull_bound": -1}, {"push_bound": -1}, {"capacity": 1.5}]
)
def test_a_cache_that_cannot_be_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fault))):
        Cache(**fault)


def test_rows_of_the_next_step_are_not_evicted_for_prefetched_ones() -> None:
    server = Server(1)
    cache = make(server, capacity=4, pull_bound=50)
    cache.read([1, 2], 0)
    cache.read([3, 4], 1)
    query = cache.start_prefetch([1, 5, 6], 1)
    assert query.ids["t"].tolist() == [5, 6]
    cache.finish_prefetch(query, cache.came(query))
    cache.read([1, 5, 6], 2)
    assert server.sent == 4 + 2


@pytest.mark.parametrize("flushed", [True, False])
def test_own_gradients_that_were_flushed_meanwhile_stay_in_the_row(flushed: bool) -> None:
    """The answer that is on its way lacks them, and they wait no more to be added to it."""
    server = Server(3)
    cache = make(server, capacity=4, pull_bound=1, push_bound=9)
    cache.read([1], 0)
    cache.write([1], torch.tensor([[1.0, 0.0, 0.0]]), 0)
    server.push(torch.tensor([1]), torch.tensor([[0.0, 1.0, 0.0]]))  # another worker's
    cache.read([2], 1)
    query = cache.start_prefetch([1], 1)
    came = cache.came(query)
    if flushed:
        cache.flush(server)
    cache.finish_prefetch(query, came)
    assert cache.read([1], 2).tolist() == [[1.0, 1.0, 0.0]]


def test_a_row_in_the_place_of_a_requested_one_waits_for_nothing() -> None:
    peer = Later(Server(2), states=True)
    cache = Cached(Cache(capacity=1, pull_bound=9, push_bound=9), peer, 2, states=True)
    cache.read([1], 0)
    assert cache.start_prefetch([1], 0).known["t"].tolist() == [WITH_STATE]
    cache.read([2], 1)
    ids, _, _ = cache.write([2], torch.ones(1, 2), 1)
    assert ids.tolist() == [2]
