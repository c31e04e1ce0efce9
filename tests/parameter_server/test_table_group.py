"""Tables worked on together are the tables worked on one by one, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from anabranch.errors import NotFound, SchemaError
from anabranch.tables import (
    Family,
    KernelThreads,
    Normal,
    RowOptimizer,
    RowTable,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
)
from anabranch.tables.table_group import balanced

ROWS = (50, 7, 300)
WIDTH = 5
RULES = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01),
    "row-wise": functools.partial(RowWiseAdagrad, lr=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
}


def make_tables(rule: RowOptimizer, shards: int = 1, **spec: object) -> list[RowTable]:
    return [
        RowTable(TableSpec(f"t{k}", rows, WIDTH, initial=Normal(0, 1), **spec), rule, shard=shards - 1, shards=shards)  # type: ignore[arg-type]
        for k, rows in enumerate(ROWS)
    ]


def draw(tables: Sequence[RowTable], number: int, many: int = 40) -> torch.Tensor:
    """Ids with many duplicates that the tables' shard holds; ``[tables, many]``."""
    generator = np.random.default_rng(number)
    rows = []
    for table in tables:
        everyone = np.arange(table.spec.rows)
        mine = everyone[table.placement.owners(everyone) == table.shard]
        rows.append(mine[(generator.zipf(1.3, many) - 1) % len(mine)])
    return torch.from_numpy(np.stack(rows))


def same_answers(group: TableGroup, alone: list[RowTable], seed: int) -> None:
    """Of a question in which some rows come with their state, and some only if they have changed."""
    chance = torch.Generator().manual_seed(seed)
    ids = [torch.randint(table.spec.rows or 1, (12,), generator=chance) for table in alone]
    with_state, known = (torch.randint(7, (len(alone),), generator=chance).tolist() for _ in range(2))
    since = [
        torch.randint(-1, table.step + 1, (few,), generator=chance) for table, few in zip(alone, known, strict=True)
    ]
    *found, counts = group.answer(torch.cat(ids), [12] * len(alone), with_state, known, torch.cat(since))
    wanted = [table.answer(*asked) for table, *asked in zip(alone, ids, with_state, since, strict=True)]
    assert counts == [len(places) for _, _, places in wanted]
    for one, others in zip(found, zip(*wanted, strict=True), strict=True):
        assert torch.equal(one, torch.cat(others))


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("every_row_moves", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_a_group_of_tables_moves_as_its_tables_do_alone(name: str, dtype: torch.dtype, every_row_moves: bool) -> None:
    rule = RowOptimizer.from_factory(RULES[name])
    alone = make_tables(rule, dtype=dtype, every_row_moves=every_row_moves)
    together = make_tables(rule, dtype=dtype, every_row_moves=every_row_moves)
    with KernelThreads(2) as pool:
        group = TableGroup(together, pool)
        for step in range(6):
            ids = draw(alone, step)
            grads = torch.randn(ids.shape[1], len(ROWS), WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
            if step % 2:  # both layouts
                counts = [ids.shape[1]] * len(ROWS)
                versions = torch.empty(ids.numel(), dtype=torch.int64)
                found = group.pull(ids.reshape(-1), counts, versions=versions).view(len(ROWS), -1, WIDTH)
                group.push(ids.reshape(-1), grads.transpose(0, 1).reshape(-1, WIDTH), counts)
                expected = torch.cat([table.versions(ids[k]) for k, table in enumerate(alone)])
                assert torch.equal(versions, expected)
            else:
                found = group.pull(ids).transpose(0, 1)
                group.push(ids, grads)
            for k, table in enumerate(alone):
                assert torch.equal(found[k], table.pull(ids[k]))
                table.push(ids[k], grads[:, k])
            same_answers(group, alone, step)
    for mine, theirs in zip(together, alone, strict=True):
        everyone = torch.arange(theirs.spec.rows or 0)
        assert mine.step == theirs.step
        assert torch.equal(mine.pull_with_state(everyone), theirs.pull_with_state(everyone))
        assert torch.equal(mine.versions(everyone), theirs.versions(everyone))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_sums_over_several_steps_move_a_group_as_its_tables_alone(name: str, dtype: torch.dtype) -> None:
    rule = RowOptimizer.from_factory(RULES[name])
    alone, together = (make_tables(rule, dtype=dtype) for _ in range(2))
    group = TableGroup(together)
    chance = torch.Generator().manual_seed(0)
    for step in range(6):
        ids = draw(alone, step)
        grads = torch.randn(*ids.shape, WIDTH, generator=chance).to(dtype)
        grads[0, :4] = 0
        squares = torch.where(torch.rand(ids.shape, generator=chance) < 0.5, 1.0, torch.rand(ids.shape) * 1.5)
        squares = squares.bfloat16()
        group.push(ids.reshape(-1), grads.reshape(-1, WIDTH), [ids.shape[1]] * len(ROWS), squares.reshape(-1))
        for k, table in enumerate(alone):
            table.push(ids[k], grads[k], squares[k])
    for k, (one, other) in enumerate(zip(alone, together, strict=True)):
        everyone = torch.arange(ROWS[k])
        rounding = 1e-13 if dtype == torch.float64 else 0  # the squares of a float64 row are summed in another order
        found, wanted = other.pull_with_state(everyone), one.pull_with_state(everyone)
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding)
        assert torch.equal(one.versions(everyone), other.versions(everyone))


def test_a_group_on_one_of_several_shards_finds_its_rows() -> None:
    rule = RowOptimizer.from_factory(RULES["adagrad"])
    alone, together = make_tables(rule, shards=3), make_tables(rule, shards=3)
    group = TableGroup(together)
    for step in range(3):
        ids = draw(alone, step)
        grads = torch.randn(ids.shape[1], len(ROWS), WIDTH)
        group.push(ids, grads)
        for k, table in enumerate(alone):
            table.push(ids[k], grads[:, k])
        assert torch.equal(group.pull(ids), torch.stack([table.pull(ids[k]) for k, table in enumerate(alone)], 1))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_bad_id_in_one_table_is_named_and_no_table_changes(shards: int) -> None:
    tables = make_tables(RowOptimizer(Family.SGD, lr=1.0), shards=shards)
    group = TableGroup(tables)
    ids = draw(tables, 0, 4)
    before = group.pull(ids)
    bad = ids.clone()
    bad[1, 2] = ROWS[1]
    with pytest.raises(NotFound, match=r"table t1 has ids 0 to 6; ids\[2\] is 7"):
        group.push(bad, torch.ones(4, len(ROWS), WIDTH))
    with pytest.raises(NotFound, match="t1"):
        group.pull(bad)
    if shards == 2:
        everyone = torch.arange(ROWS[2])
        stranger = everyone[torch.from_numpy(tables[2].placement.owners(everyone.numpy())) == 0][0]
        bad = ids.clone()
        bad[2, 3] = stranger
        with pytest.raises(NotFound, match="which shard 1 does not hold"):
            group.push(bad, torch.ones(4, len(ROWS), WIDTH))
    with pytest.raises(SchemaError, match="gradients"):
        group.push(ids, torch.ones(4, len(ROWS), WIDTH + 1))
    with pytest.raises(SchemaError, match="ids"):
        group.pull(ids[:2])
    with pytest.raises(SchemaError, match="not those of"):
        group.pull(ids.reshape(-1), [1, 2, 3])
    assert torch.equal(group.pull(ids), before)
    assert [table.step for table in tables] == [0, 0, 0]


def test_a_table_without_lookups_counts_its_step() -> None:
    tables = make_tables(RowOptimizer(Family.SGD, lr=1.0))
    TableGroup(tables).push(torch.tensor([1, 2, 1]), torch.ones(3, WIDTH), [3, 0, 0])
    assert [table.step for table in tables] == [1, 1, 1]


def test_only_tables_that_are_alike_make_a_group() -> None:
    rule = RowOptimizer(Family.SGD, lr=1.0)
    fixed = RowTable(TableSpec("a", 10, 4), rule)
    for other in (
        RowTable(TableSpec("b", 10, 3), rule),
        RowTable(TableSpec("b", 10, 4, torch.float64), rule),
        RowTable(TableSpec("b", 10, 4), RowOptimizer(Family.ADAM, lr=1.0)),
        RowTable(TableSpec("b", None, 4), rule),
        RowTable(TableSpec("b", 10, 4), rule, kernels_kind="plain"),
    ):
        with pytest.raises(ValueError, match="one width, dtype and optimizer rule"):
            TableGroup([fixed, other])


def test_whole_tables_are_shared_out_only_where_that_keeps_threads_busy() -> None:
    assert balanced([100], 1)
    assert balanced([50, 60, 40], 2)
    assert not balanced([1000, 10, 10], 2)


def test_a_table_does_not_touch_quiet_rows_that_never_moved() -> None:
    """Plain SGD leaves rows without a gradient alone, however the table was made, so their versions stay."""
    table = RowTable(TableSpec("t", 10, 2, every_row_moves=True), RowOptimizer(Family.SGD, lr=1.0))
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
