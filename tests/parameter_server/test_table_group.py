"""Tables worked on together are the tables worked on one by one, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from saved_rows import owners_of
from test_row_table import DENSE

from anabranch.errors import NotFound
from anabranch.tables import Family, KernelThreads, Normal, RowOptimizer, RowWiseAdagrad, Table, TableGroup, TableSpec
from anabranch.tables.arena import Arena

ROWS = (50, 7, 300, None)
WIDTH = 5
MANY = 40  # lookups of each table
NAMES = ("sgd", "nesterov with decay", "adagrad", "adam", "adamw", "centered rmsprop with both")
RULES = {**{name: DENSE[name] for name in NAMES}, "row-wise": functools.partial(RowWiseAdagrad, lr=0.1)}


def make_tables(
    rule: RowOptimizer, shards: int = 1, *, together: bool = False, pool: KernelThreads | None = None, **spec: object
) -> list[Table]:
    """Each in an arena of its own, or all in one."""
    specs = [TableSpec(f"t{k}", rows, WIDTH, initial=Normal(0, 1), **spec) for k, rows in enumerate(ROWS)]  # type: ignore[arg-type]
    arenas = [Arena(specs[0], rule, shard=shards - 1, shards=shards, pool=pool) for _ in specs]
    return [Table(spec, rule, arenas[0 if together else k]) for k, spec in enumerate(specs)]


def here(table: Table) -> np.ndarray:
    """The ids that the table's shard holds."""
    everyone = np.arange(table.spec.rows or 60)
    return everyone[owners_of(table.placement, everyone) == table.arena.shard]


def draw(tables: Sequence[Table], number: int) -> torch.Tensor:
    """Ids with many duplicates that the tables' shard holds; ``[tables, MANY]``."""
    generator = np.random.default_rng(number)
    rows = []
    for table in tables:
        mine = here(table)
        rows.append(mine[(generator.zipf(1.3, MANY) - 1) % len(mine)])
    return torch.from_numpy(np.stack(rows))


def same_answers(group: TableGroup, alone: list[Table], seed: int) -> None:
    """Of a question in which some rows come with their state, and some only if they have changed."""
    chance = torch.Generator().manual_seed(seed)
    every = [torch.from_numpy(here(table)) for table in alone]
    ids = [mine[torch.randint(len(mine), (12,), generator=chance)] for mine in every]
    with_state, known = (torch.randint(7, (len(alone),), generator=chance).tolist() for _ in range(2))
    since = [
        torch.randint(-1, table.step + 1, (few,), generator=chance) for table, few in zip(alone, known, strict=True)
    ]
    states, rows, new, counts = group.answer(torch.cat(ids), [12] * len(alone), with_state, known, torch.cat(since))
    for table, some, first, few, then in zip(alone, ids, with_state, known, since, strict=True):
        changed = table.versions(some)[12 - few :] > then
        come = torch.cat([some[first : 12 - few], some[12 - few :][changed]])
        assert counts.pop(0) == len(come)
        assert torch.equal(new[:few], changed)
        assert torch.equal(states[:first], table.pull_with_state(some[:first]))
        assert torch.equal(rows[: len(come)], table.pull(come))
        new, states, rows = new[few:], states[first:], rows[len(come) :]
    assert len(new) == len(states) == len(rows) == 0


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("every_row_moves", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_a_group_of_tables_on_two_threads_moves_as_its_tables_do_alone(
    name: str, dtype: torch.dtype, every_row_moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.tables.kernels.rows._SMALL", 1)
    rule, shards = RowOptimizer.from_factory(RULES[name]), 3 if name == "adagrad" else 1
    make = functools.partial(make_tables, rule, shards, dtype=dtype, every_row_moves=every_row_moves)
    alone = make()
    with KernelThreads(2) as pool:
        together = make(together=True, pool=pool)
        group, counts = TableGroup(together), [MANY] * len(ROWS)
        for step in range(6):
            ids = draw(alone, step)
            chance = torch.Generator().manual_seed(step)
            grads = torch.randn(len(ROWS), MANY, WIDTH, generator=chance).to(dtype)
            versions = torch.empty(ids.numel(), dtype=torch.int64)
            found = group.pull(ids.reshape(-1), counts, versions=versions, training=step % 2 > 0)
            alike = [table.pull(ids[k], training=step % 2 > 0) for k, table in enumerate(alone)]
            assert torch.equal(found.view_as(grads), torch.stack(alike))
            assert torch.equal(versions, torch.cat([table.versions(ids[k]) for k, table in enumerate(alone)]))
            group.push(ids.reshape(-1), grads.reshape(-1, WIDTH), counts)
            for k, table in enumerate(alone):
                table.push(ids[k], grads[k])
            same_answers(group, alone, step)
    for mine, theirs in zip(together, alone, strict=True):
        everyone = torch.from_numpy(here(theirs))
        assert mine.step == theirs.step
        assert torch.equal(mine.pull_with_state(everyone), theirs.pull_with_state(everyone))
        assert torch.equal(mine.versions(everyone), theirs.versions(everyone))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_bad_id_in_one_table_is_named_and_no_table_changes(shards: int) -> None:
    tables = make_tables(RowOptimizer(Family.SGD, lr=1.0), shards=shards, together=True)
    group, counts = TableGroup(tables), [MANY] * len(ROWS)
    ids = draw(tables, 0)
    grads = torch.ones(ids.numel(), WIDTH)
    before = group.pull(ids.reshape(-1), counts)
    for outside in (7, -1, 2**53, -(2**63)):
        bad = ids.clone()
        bad[1, 2] = outside
        with pytest.raises(NotFound, match=rf"table t1 has ids 0 to 6; ids\[2\] is {outside}"):
            group.push(bad.reshape(-1), grads, counts)
        with pytest.raises(NotFound, match="t1"):
            group.pull(bad.reshape(-1), counts)
    for number in (2, 3) if shards == 2 else ():
        everyone = torch.arange(60)
        bad = ids.clone()
        bad[number, 3] = everyone[torch.from_numpy(owners_of(tables[number].placement, everyone.numpy())) == 0][0]
        with pytest.raises(NotFound, match="which shard 1 does not hold"):
            group.push(bad.reshape(-1), grads, counts)
    assert torch.equal(group.pull(ids.reshape(-1), counts), before)
    assert [table.step for table in tables] == [0] * len(ROWS)


def test_a_table_without_lookups_counts_its_step() -> None:
    tables = make_tables(RowOptimizer(Family.SGD, lr=1.0), together=True)
    TableGroup(tables).push(torch.tensor([1, 2, 1]), torch.ones(3, WIDTH), [3, 0, 0, 0])
    assert [table.step for table in tables] == [1] * len(ROWS)


def test_a_push_of_the_ids_just_pulled_does_not_look_them_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(TableSpec("t", None, 2), RowOptimizer(Family.SGD, lr=1.0))
    ids = torch.tensor([5, 3, 2**60])
    table.pull(ids, training=True)
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.tables.kernels.vocabulary.locate", None)
        table.push(ids, torch.ones(3, 2))
        with pytest.raises(TypeError):  # rows may have other ids after a step
            table.push(ids, torch.ones(3, 2))
    ids[1] = 4
    table.pull(ids, training=True)
    ids[1] = 3  # the caller's memory has changed meanwhile
    table.push(ids, torch.ones(3, 2))
    assert table.versions(torch.tensor([5, 3, 4])).tolist() == [2, 2, 0]


def test_a_dropped_table_leaves_zeros_for_the_next_and_others_as_they_are() -> None:
    rule = RowOptimizer.from_factory(RULES["adagrad"])
    tables = make_tables(rule, together=True)
    ids = torch.arange(7)
    for table in tables:
        table.push(ids, torch.ones(7, WIDTH))
    kept = tables[2].pull_with_state(ids)
    taken = tables[0].arena.taken
    tables[3].drop()
    tables[0].drop()
    again = Table(TableSpec("again", None, WIDTH, initial=Normal(0, 1)), rule, tables[0].arena)
    fresh = Table(TableSpec("again", None, WIDTH, initial=Normal(0, 1)), rule)
    for table in (again, fresh):
        assert table.pull(ids, training=True).shape == (7, WIDTH)
        table.push(ids, torch.ones(7, WIDTH))
    assert torch.equal(again.pull_with_state(ids), fresh.pull_with_state(ids))
    small = Table(TableSpec("small", 50, WIDTH, initial=Normal(0, 1)), rule, tables[0].arena)
    assert small.arena.taken == taken  # addresses are used again
    assert small.versions(ids).tolist() == [0] * 7
    assert torch.equal(tables[2].pull_with_state(ids), kept)


def test_a_table_does_not_touch_quiet_rows_that_never_moved() -> None:
    """Plain SGD leaves rows without a gradient alone, however the table was made, so their versions stay."""
    table = Table(TableSpec("t", 10, 2, every_row_moves=True), RowOptimizer(Family.SGD, lr=1.0))
    everyone = torch.arange(10)
    for _ in range(3):
        table.push(torch.tensor([1]), torch.ones(1, 2))
        table.pull(everyone)
    assert table.versions(everyone).tolist() == [0, 3, 0, 0, 0, 0, 0, 0, 0, 0]
    table.rule = RowOptimizer(Family.SGD, lr=1.0, weight_decay=0.5)
    before = table.pull(everyone)
    table.push(torch.tensor([1]), torch.ones(1, 2))
    assert torch.equal(table.pull(everyone)[2:], before[2:] * 0.5)
    assert table.versions(everyone).tolist() == [4] * 10
