"""A table of rows against the plain PyTorch loop: same bits, whichever rows a step touches."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_rows import blocks, owners_of
from torch.nn import functional as F

from anabranch.tables import (
    FTRL,
    Constant,
    Family,
    KernelThreads,
    Normal,
    Placement,
    RowBlock,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    TableSpec,
    Uniform,
)
from anabranch.tables.arena import Arena
from anabranch.tables.table import TableGroup

ROWS, WIDTH = 24, 16  # a multiple of torch's vector registers, so that no element takes another path in its kernels
DENSE = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd with decay": functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.01, maximize=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov with decay": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "damped momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "adagrad with decay": functools.partial(torch.optim.Adagrad, lr=0.1, weight_decay=0.01, lr_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
    "adam with decay": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01, maximize=True),
    "adam with short memory": functools.partial(torch.optim.Adam, lr=0.01, betas=(0.3, 0.99)),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    "amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "amsgrad with decay": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.01, maximize=True),
    "adamw amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True, weight_decay=0.1),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01),
    "rmsprop with decay": functools.partial(torch.optim.RMSprop, lr=0.01, weight_decay=0.01, maximize=True),
    "rmsprop with momentum": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, alpha=0.9),
    "centered rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True, alpha=0.9),
    "centered rmsprop with both": functools.partial(
        torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9, weight_decay=0.01
    ),
    "adamax": functools.partial(torch.optim.Adamax, lr=0.01),
    "adamax with decay": functools.partial(torch.optim.Adamax, lr=0.01, weight_decay=0.01, maximize=True),
    "ftrl": functools.partial(FTRL, lr=0.1),
    "ftrl that leaves zeros": functools.partial(FTRL, lr=0.1, beta=0.5, l1=0.3, l2=0.1, maximize=True),
}
FUSED = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW)


def assert_same(name: str, rows: torch.Tensor, plain: torch.Tensor) -> None:
    """The same bits; within rounding where torch has no fused form and takes a root, which it rounds otherwise."""
    rounding = 1e-4 if name.startswith(("rmsprop", "centered", "ftrl")) else 0
    torch.testing.assert_close(rows, plain, rtol=rounding, atol=rounding)


def torch_reference(factory: functools.partial, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    """The optimizer in the form whose bits the servers give: fused if torch has it, else the plain one."""
    return factory([weight], fused=True) if factory.func in FUSED else factory([weight])


def begin_with(table: Table, weights: torch.Tensor) -> None:
    """Gives the table the weights of a plain one."""
    rule = table.rule
    count, kind = rule.state_form(weights.shape[1], weights.dtype)
    states = torch.full((len(weights), count), rule.initial_accumulator_value, dtype=kind)
    stamps = torch.ones(len(weights), dtype=torch.int64)
    usage = torch.empty(0, 2, dtype=torch.int64)
    table.restore(RowBlock(torch.arange(len(weights)), weights, states, stamps, usage))


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", DENSE)
def test_rows_without_a_gradient_move_as_in_the_plain_loop(name: str) -> None:
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(ROWS, WIDTH))
    optimizer = torch_reference(DENSE[name], weight)
    schedule = torch.optim.lr_scheduler.CyclicLR(
        optimizer, 0.001, 0.1, step_size_up=7, cycle_momentum=False
    )  # a rate that falls and rises again
    rule = RowOptimizer.from_torch(optimizer)
    table = Table(TableSpec("t", ROWS, WIDTH, every_row_moves=True), rule)
    begin_with(table, weight.detach())
    for step in range(60):
        ids = torch.randint(0, 8 if step < 50 else ROWS, (6,))
        target = torch.randn(6, WIDTH)
        assert_same(name, table.pull(ids, training=True), weight.detach()[ids])
        optimizer.zero_grad()
        F.embedding(ids, weight).mul(target).sum().backward()
        table.rule = RowOptimizer.from_torch(optimizer)
        table.push(ids, target)
        optimizer.step()
        schedule.step()
    assert_same(name, table.pull(torch.arange(ROWS)), weight.detach())


def missing(name: str, steps: int = 3000, *, slow: bool = True, **options: object) -> object:
    """A case of a row that misses so many steps, at a much larger rate from their middle on."""
    return pytest.param(functools.partial(DENSE[name], **options), steps, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        missing("adam"),
        missing("adam", 900, slow=False),
        *(missing(name, betas=betas) for name in ("adam", "adamw") for betas in [(0.5, 0.9), (0.95, 0.99)]),
        missing("adamw"),
        missing("rmsprop", 900, slow=False),
        missing("rmsprop with momentum", 900),
        missing("adamax", 900),
        missing("amsgrad", 900, slow=False),
        missing("adamw amsgrad", 900),
        missing("momentum", 40, slow=False),
    ],
)
def test_rows_that_missed_steps_have_the_bits_of_every_step_replayed(make: functools.partial, steps: int) -> None:
    weight = torch.nn.Parameter(torch.randn(ROWS, WIDTH))
    optimizer = make([weight], fused=True) if make.func in FUSED else make([weight])
    table = Table(TableSpec("t", ROWS, WIDTH, every_row_moves=True), RowOptimizer.from_torch(optimizer))
    begin_with(table, weight.detach())
    everyone = torch.arange(ROWS)
    for step in range(steps):
        if 5 <= step <= 20:  # momentum decays on though nothing moves
            optimizer.param_groups[0]["lr"] = 0.0 if step < 20 else make.keywords["lr"]
        elif step == steps // 2:
            optimizer.param_groups[0]["lr"] = 5.0 if steps > 1000 else 0.5
        ids = everyone[: ROWS // 2] if step < 5 else everyone[:1]
        grad = torch.randn(len(ids), WIDTH)
        weight.grad = torch.zeros(ROWS, WIDTH).index_copy(0, ids, grad)
        table.rule = RowOptimizer.from_torch(optimizer)
        table.push(ids, grad)
        optimizer.step()
    name = table.rule.family.value.lower()
    if not table.rule.weight_decay:
        fresh = everyone[ROWS // 2 :]  # never had a gradient
        assert torch.equal(table.pull(fresh), weight.detach()[fresh])
    assert_same(name, table.pull(everyone), weight.detach())
    found = table.pull_with_state(everyone)
    for number, label in enumerate(table.rule.state_names, 1):
        assert_same(name, found[:, number * WIDTH : (number + 1) * WIDTH], optimizer.state[weight][label])


def test_a_look_begins_no_rows_and_takes_none_from_a_push_that_was_checked() -> None:
    ids = torch.arange(0, 64, 2)
    table = Table(TableSpec("t", rows=64, width=4, initial=Normal()), RowOptimizer(Family.SGD, lr=1.0))
    group = TableGroup([table])
    first = table.pull(ids)
    assert not table.arena.words[: 64 * int(table.arena.pitch)].any()
    group.check(ids, [len(ids)])
    assert torch.equal(table.pull(ids), first)
    table.push(ids, torch.ones(len(ids), 4))
    assert torch.equal(table.pull(ids), first - 1)
    assert torch.equal(table.pull(torch.arange(64), training=True)[1::2], table.pull(ids + 1))


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(30_000, 8, torch.float32), (None, 8, torch.float32), (None, 5, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("name", ["adam", "row-wise adagrad", "momentum"])
def test_a_table_in_a_file_is_the_table_in_memory(
    name: str, rows: int | None, width: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    rule = RowOptimizer.from_factory(DENSE.get(name, RowWiseAdagrad))
    capacity = None if rows else 2000
    make = functools.partial(TableSpec, "t", rows, width, dtype, every_row_moves=rows is not None, capacity=capacity)
    memory = Table(make(), rule)
    file = Table(make(memory_map=True), rule, Arena(make(memory_map=True), rule, scratch=tmp_path))
    for _ in range(6):
        ids, grads = torch.randint(0, 30_000, (900,)), torch.randn(900, width).to(dtype)
        for table in (memory, file):
            table.push(ids, grads)
        assert torch.equal(file.pull(ids.flip(0), training=True), memory.pull(ids.flip(0), training=True))
        assert torch.equal(file.versions(ids), memory.versions(ids))
    for mine, theirs in zip(blocks(file, 5000), blocks(memory, 5000), strict=True):
        assert torch.equal(mine.ids, theirs.ids)
        assert torch.equal(mine.weights, theirs.weights)
        assert torch.equal(mine.states, theirs.states)
    assert list(tmp_path.iterdir()) == []  # the file has no name


@pytest.mark.parametrize("initial", [Constant(0.5), Uniform(-1, 1), Normal(0, 0.1)])
def test_a_row_s_first_values_depend_neither_on_its_place_nor_on_its_first_use(initial: object) -> None:
    spec = TableSpec("t", 100, 4, initial=initial, seed=3)
    rule = RowOptimizer(Family.SGD, lr=0.1)
    whole = Table(spec, rule)
    ids = torch.arange(100)
    parts = [Table(spec, rule, Arena(spec, rule, shard=shard, shards=3)) for shard in range(3)]
    owners = torch.from_numpy(owners_of(parts[0].placement, ids.numpy()))
    for shard, part in enumerate(parts):
        mine = ids[owners == shard]
        part.push(mine[:1], torch.zeros(1, 4))  # a step later
        assert torch.equal(part.pull(mine), whole.pull(mine))
    assert torch.equal(whole.pull(ids.flip(0)), whole.pull(ids).flip(0))
    other = Table(TableSpec("t", 100, 4, initial=initial, seed=4), rule)
    assert torch.equal(other.pull(ids), whole.pull(ids)) == isinstance(initial, Constant)


def test_the_same_bits_come_from_one_thread_and_from_three() -> None:
    rule = RowOptimizer.from_factory(DENSE["adam"])
    ids, grads = torch.randint(0, 4000, (16_000,)), torch.randn(16_000, WIDTH)
    found = []
    for threads in (1, 3):
        with KernelThreads(threads) as pool:
            spec = TableSpec("t", 4000, WIDTH)
            table = Table(spec, rule, Arena(spec, rule, pool=pool))
            table.push(ids, grads)
            found.append(table.pull(torch.arange(4000)))
    assert torch.equal(*found)


def test_a_rule_that_tables_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        RowOptimizer.from_factory(functools.partial(torch.optim.LBFGS, lr=0.1))
    with pytest.raises(ValueError, match="differentiable=True"):
        RowOptimizer.from_factory(functools.partial(torch.optim.RMSprop, lr=0.1, differentiable=True))
    for name in ("nesterov with decay", "centered rmsprop with both", "ftrl that leaves zeros"):
        rule = RowOptimizer.from_factory(DENSE[name])
        assert RowOptimizer.from_dict(rule.to_dict()) == rule


def test_state_of_other_meaning_is_another_layout() -> None:
    momentum, centered = (
        RowOptimizer.from_factory(DENSE[f"{name}"]) for name in ("rmsprop with momentum", "centered rmsprop")
    )
    assert len(momentum.state_names) == len(centered.state_names)
    assert not momentum.same_layout(centered)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"name": "../etc"}, "not a table name"),
        ({"rows": 0}, "rows=0"),
        ({"width": 0}, "width=0"),
        ({"dtype": torch.int64}, "int64"),
        ({"capacity": 0, "rows": None}, "capacity=0"),
        ({"capacity": 5}, "dynamic"),
        ({"eviction": "luck"}, "luck"),
        ({"admission": 0.0, "rows": None}, "admission"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(fault: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TableSpec(**{"name": "t", "rows": 3, "width": 2} | fault)


def test_a_spec_travels_as_plain_values() -> None:
    spec = TableSpec("t", None, 3, torch.bfloat16, Uniform(-1, 1), 5, capacity=7, eviction="frequency", admission=0.5)
    assert TableSpec.from_dict(spec.to_dict()) == spec
    with pytest.raises(ValueError, match="int64"):
        TableSpec.from_dict(spec.to_dict() | {"dtype": "int64"})


def test_hot_ids_spread_over_shards() -> None:
    spec = TableSpec("t", 100_000, 1)
    placement = Placement.of(spec, 4)
    ranks = np.arange(1, 100_001, dtype=np.float64)
    weights = ranks**-1.05
    generator = np.random.default_rng(0)
    asked = np.zeros(4)
    for _ in range(20):
        batch = np.unique(generator.choice(100_000, 2048, p=weights / weights.sum()))
        asked += np.bincount(owners_of(placement, batch), minlength=4)
    assert asked.max() <= 1.2 * asked.mean()
