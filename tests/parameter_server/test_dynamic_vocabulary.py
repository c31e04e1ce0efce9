"""A dynamic table against a dictionary: who is admitted, who leaves, and what rows hold."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from saved_rows import blocks

from anabranch.errors import NotFound
from anabranch.parameter_server import ParameterClient, RemoteEmbedding, RemoteTables
from anabranch.tables import Cache, Constant, Family, KernelThreads, RowOptimizer, Table, TableSpec
from anabranch.tables.arena import Arena

IDS = st.lists(
    st.sampled_from([0, 1, 2, 3, 5, 8, -1, 2**53, 2**53 + 1, -(2**63) + 1, -(2**63), 2**63 - 1]), min_size=1, max_size=6
)


class _Oracle:
    """The same table as a dictionary of id -> [value, uses, last use], every rule spelled out."""

    def __init__(self, capacity: int | None, by_frequency: bool) -> None:
        self.rows: dict[int, list[float]] = {}
        self.capacity, self.by_frequency = capacity, by_frequency

    def use(self, ids: list[int], step: int) -> None:
        for wanted in ids:
            if wanted in self.rows and self.rows[wanted][2] != step:
                self.rows[wanted][1] += 1
                self.rows[wanted][2] = step
        for wanted in sorted(ids):
            if wanted in self.rows:
                continue
            if self.capacity is not None and len(self.rows) == self.capacity:
                free = [known for known in self.rows if self.rows[known][2] != step]
                if not free:
                    continue
                order = {known: (self.by_frequency * uses, last, known) for known, (_, uses, last) in self.rows.items()}
                del self.rows[min(free, key=order.__getitem__)]
            self.rows[wanted] = [1.0, 1, step]


class _Machine(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([None, 1, 3, 4, 7]), eviction=st.sampled_from(["age", "frequency"]))
    def start(self, capacity: int | None, eviction: str) -> None:
        spec = TableSpec("t", None, 2, initial=Constant(1.0), capacity=capacity, eviction=eviction)
        self.table = Table(spec, RowOptimizer(Family.SGD, lr=1.0))
        self.oracle = _Oracle(capacity, eviction == "frequency")

    @rule(ids=IDS)
    def pull_in_training(self, ids: list[int]) -> None:
        self.oracle.use(ids, self.table.step)
        self.check(ids, self.table.pull(torch.tensor(ids), training=True))

    @rule(ids=IDS)
    def pull_in_evaluation(self, ids: list[int]) -> None:
        self.check(ids, self.table.pull(torch.tensor(ids)))

    @rule(ids=IDS)
    def push(self, ids: list[int]) -> None:
        self.oracle.use(ids, self.table.step)
        self.table.push(torch.tensor(ids), torch.full((len(ids), 2), 0.5))
        for known in ids:
            if known in self.oracle.rows:
                self.oracle.rows[known][0] -= 0.5

    @rule()
    def save_and_load(self) -> None:
        again = Table(self.table.spec, self.table.rule)
        for block in blocks(self.table, 3):
            again.restore(block)
        again.resume(self.table.step, self.table.history)
        self.table = again

    def check(self, ids: list[int], found: torch.Tensor) -> None:
        for known, row in zip(ids, found, strict=True):
            wanted = self.oracle.rows[known][0] if known in self.oracle.rows else 1.0
            assert row.tolist() == [wanted, wanted]

    @invariant()
    def nothing_else_is_there(self) -> None:
        if hasattr(self, "table"):
            found = {int(known) for block in blocks(self.table) for known in block.ids}
            assert found <= set(self.oracle.rows)
            assert self.table.used == len(self.oracle.rows)


TestTableAgainstADictionary = _Machine.TestCase
TestTableAgainstADictionary.settings = settings(deadline=None, max_examples=20, stateful_step_count=25)


def make(**options: object) -> Table:
    spec = TableSpec("t", None, 4, **options)
    return Table(spec, RowOptimizer(Family.ADAGRAD, lr=0.1))


def test_admission_is_drawn_with_its_probability_and_the_same_for_the_pull_and_the_push_of_a_step() -> None:
    table = make(admission=0.25)
    ids = torch.arange(4000)
    table.pull(ids, training=True)
    admitted = table.used
    assert 800 < admitted < 1200
    table.push(ids, torch.ones(4000, 4))
    assert table.used == admitted
    table.pull(ids, training=True)
    assert table.used > admitted


def test_state_and_version_leave_with_the_row() -> None:
    table = make(capacity=1, initial=Constant(0.0))
    for known in (1, 1, 2, 1):
        table.push(torch.tensor([known]), torch.ones(1, 4))
    fresh = make(initial=Constant(0.0))
    fresh.push(torch.tensor([1]), torch.ones(1, 4))
    assert torch.equal(table.pull(torch.tensor([1])), fresh.pull(torch.tensor([1])))
    assert table.versions(torch.tensor([2])).tolist() == [0]
    assert table.evictions == 2


def test_many_ids_are_found_again() -> None:
    table = make()
    ids = torch.randint(-(2**62), 2**62, (100_000,))
    table.pull(ids, training=True)
    assert table.used == len(torch.unique(ids))
    table.push(ids[:5], torch.ones(5, 4))
    assert table.versions(ids[:5]).tolist() == [1] * 5


def test_rows_restored_beyond_the_capacity_all_stay_and_a_new_id_evicts_one() -> None:
    whole, table = make(capacity=9), make(capacity=3)
    for step in range(5):
        whole.push(torch.tensor([step]), torch.ones(1, 4))
    for block in blocks(whole, 2):
        table.restore(block)
    table.resume(whole.step, whole.history)
    everyone = torch.arange(5)
    assert torch.equal(table.pull(everyone), whole.pull(everyone))
    table.pull(torch.tensor([7]), training=True)
    assert (table.used, table.evictions) == (5, 1)
    assert torch.equal(table.pull(everyone[1:]), whole.pull(everyone[1:]))  # the one unused longest has left
    assert not torch.equal(table.pull(everyone[:1]), whole.pull(everyone[:1]))


def twin(table: Table, id_: int) -> int:
    """Return the id in whose place of the index ``id_`` is, with the same tag: bit 40 of the hash is in neither."""
    salt, every = int(table.arena.keys[table.number]) + 0x9E3779B97F4A7C15, (1 << 64) - 1
    steps = [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)]
    hash_ = (id_ ^ salt) & every
    for shift, factor in steps:
        hash_ = (hash_ ^ hash_ >> shift) * factor & every
    hash_ ^= 1 << 40
    for shift, factor in reversed(steps):
        hash_ = hash_ * pow(factor, -1, 1 << 64) & every
        hash_ ^= hash_ >> shift ^ hash_ >> 2 * shift
    back = (hash_ ^ salt) & every
    return back - (back >> 63 << 64)


def test_an_id_whose_tag_another_has_is_restored_and_one_that_is_there_is_not() -> None:
    whole, table = make(), make()
    ids = torch.tensor([5, twin(table, 5)])
    whole.push(ids[:1], torch.ones(1, 4))
    assert whole._alone.check(ids[1:], [1]).tolist() == [0]  # as located, by the tag alone
    whole.push(ids[1:], torch.ones(1, 4))
    table.resume(whole.step, whole.history)
    for block in blocks(whole, 1):
        table.check_block(block)
        table.restore(block)
    assert torch.equal(table.pull(ids), whole.pull(ids))
    assert table.versions(ids).tolist() == [1, 2]
    with pytest.raises(ValueError, match="an id already has a row"):
        table.check_block(block)


def test_ids_of_another_shard_are_not_restored() -> None:
    whole = make()
    whole.push(torch.arange(9), torch.ones(9, 4))
    part = Table(whole.spec, whole.rule, Arena(whole.spec, whole.rule, shards=2))
    part.resume(whole.step, whole.history)
    with pytest.raises(NotFound, match="which shard 0 does not hold"):
        part.check_block(blocks(whole)[0])


@pytest.mark.parametrize("eviction", ["age", "frequency"])
def test_rows_and_evictions_do_not_depend_on_threads(eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.tables.kernels.rows._SMALL", 1)
    spec = TableSpec("t", None, 3, capacity=30, eviction=eviction, admission=0.9)
    rule = RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
    with KernelThreads(3) as pool:
        several, one = Table(spec, rule, Arena(spec, rule, pool=pool)), Table(spec, rule)
        for step in range(40):
            chance = torch.Generator().manual_seed(step)
            ids = torch.randint(0, 60, (20,), generator=chance)
            grads, squares = torch.randn(20, 3, generator=chance), 1 + torch.rand(20, generator=chance)
            for table in (several, one):
                if step % 3:
                    table.pull(ids, training=True)
                table.push(ids, grads, squares if step % 2 else None)
        assert (several.evictions, several.unadmitted) == (one.evictions, one.unadmitted)
        for mine, theirs in zip(blocks(several, 1), blocks(one, 1), strict=True):
            assert all(map(torch.equal, mine.tensors(), theirs.tensors()))
    assert one.evictions > 20


@pytest.mark.parametrize("eviction", ["age", "frequency"])
def test_admission_and_eviction_do_not_depend_on_the_order_of_a_request(eviction: str) -> None:
    """A cache asks for what it misses first, and the table is that without one."""
    spec = TableSpec("t", None, 2, capacity=4, eviction=eviction, admission=0.9)
    there, back = (Table(spec, RowOptimizer(Family.SGD, lr=0.5)) for _ in range(2))
    for step in range(40):
        ids = torch.randint(0, 12, (5,), generator=torch.Generator().manual_seed(step)).unique()
        for table, asked in ((there, ids), (back, ids.flip(0))):
            table.pull(asked, training=True)
            table.push(asked, torch.ones(len(ids), 2))
        assert torch.equal(there.pull(torch.arange(12)), back.pull(torch.arange(12)))
    assert there.evictions > 20


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("eviction", ["age", "frequency"])
def test_a_row_that_evaluation_has_just_read_through_a_cache_is_in_use_when_training_reads_it(eviction: str) -> None:
    """Trained with a cache and an evaluation before each step, the table is that without either."""

    def trained(cache: Cache | None) -> torch.Tensor:
        sgd = functools.partial(torch.optim.SGD, lr=0.5)
        module = RemoteEmbedding("t", None, 2, capacity=4, eviction=eviction, init=1.0, optimizer=sgd)
        with ParameterClient() as client:
            tables = RemoteTables(client, cache=cache)
            tables.adopt_modules(module)
            for step in range(20):
                ids = torch.randint(0, 12, (4,), generator=torch.Generator().manual_seed(step))
                if cache is not None:
                    tables.begin(step, training=False)
                    module(ids)
                tables.begin(step)
                module(ids).sum().backward()
                tables.push()
            return client.sparse_pull("t", torch.arange(12))

    assert torch.equal(trained(Cache("LRU", capacity=6)), trained(None))
