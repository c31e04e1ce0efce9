"""Each compiled kernel against its plain form, and the update rules against torch's fused optimizers, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.tables import RowOptimizer, RowWiseAdagrad
from anabranch.tables.kernels._quantile import QUANTILE
from anabranch.tables.kernels.selection import KernelThreads, as_array, as_rows, as_tensor, kernels, working_dtype

COMPILED, PLAIN = kernels("compiled"), kernels("plain")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.03),
    "sgd with decay, maximizing": functools.partial(torch.optim.SGD, lr=0.03, weight_decay=0.01, maximize=True),
    "momentum": functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9),
    "momentum, damped": functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.03, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.03, initial_accumulator_value=0.1),
    "adagrad with decays": functools.partial(torch.optim.Adagrad, lr=0.03, weight_decay=0.01, lr_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.003),
    "adam with decay": functools.partial(torch.optim.Adam, lr=0.003, weight_decay=0.02, maximize=True),
    "adam with short memory": functools.partial(torch.optim.Adam, lr=0.003, betas=(0.3, 0.99)),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.003, weight_decay=0.02),
}


def step_kernel(module: object, rule: RowOptimizer) -> Callable[..., None]:
    name = {"SGD": "step_sgd", "Adagrad": "step_adagrad"}.get(rule.family.value, "step_adam")
    return getattr(module, name)


def make_rows(rows: int, width: int, rule: RowOptimizer, dtype: torch.dtype) -> torch.Tensor:
    storage = torch.full((rows, width * (1 + rule.states)), rule.initial_state, dtype=dtype)
    storage[:, :width] = torch.randn(rows, width)
    return storage


# torch 2.13's fused SGD leaves bfloat16 parameters on the CPU where they are, so it is not a reference there.
REFERENCES = [
    (name, dtype)
    for name, factory in OPTIMIZERS.items()
    for dtype in DTYPES
    if dtype != torch.bfloat16 or factory.func is not torch.optim.SGD
]


@pytest.mark.parametrize(("name", "dtype"), REFERENCES, ids=str)
@pytest.mark.parametrize("module", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_a_rule_moves_rows_as_torch_fused_does_to_the_bit(module: object, name: str, dtype: torch.dtype) -> None:
    rule = RowOptimizer.from_factory(OPTIMIZERS[name])
    rows, width = 16, 12
    storage = make_rows(rows, width, rule, dtype)
    parameter = torch.nn.Parameter(storage[:, :width].clone())
    optimizer = OPTIMIZERS[name]([parameter], fused=True)
    for step in range(1, 5):
        grad = torch.randn(rows, width).to(dtype)
        parameter.grad = grad
        optimizer.step()
        flat = as_array(grad.to(working_dtype(dtype)))
        step_kernel(module, rule)(
            as_array(storage), storage.shape[1], width, np.arange(rows), flat, rule.constants(step), 0, rows
        )
        assert torch.equal(storage[:, :width], parameter.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_rule_moves_chosen_rows_as_the_plain_one_and_no_others(name: str, dtype: torch.dtype) -> None:
    rule = RowOptimizer.from_factory(OPTIMIZERS[name])
    width, chosen = 5, np.array([7, 2, 30])
    mine = make_rows(32, width, rule, dtype)
    theirs, before = mine.clone(), mine.clone()
    for step in range(1, 4):
        grad = as_array(torch.randn(3, width).to(dtype).to(working_dtype(dtype)))
        for module, storage in ((COMPILED, mine), (PLAIN, theirs)):
            step_kernel(module, rule)(
                as_array(storage), storage.shape[1], width, chosen, grad, rule.constants(step), 0, 3
            )
    assert torch.equal(mine, theirs)
    others = [row for row in range(32) if row not in chosen]
    assert torch.equal(mine[others], before[others])
    assert not torch.equal(mine[chosen], before[chosen])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("module", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_row_wise_adagrad_on_servers_is_the_local_one(module: object, decay: float, dtype: torch.dtype) -> None:
    rule = RowOptimizer.from_factory(functools.partial(RowWiseAdagrad, lr=0.1, weight_decay=decay, lr_decay=0.01))
    storage = torch.randn(8, 6).to(dtype)
    parameter = torch.nn.Parameter(storage.clone())
    optimizer = RowWiseAdagrad([parameter], lr=0.1, weight_decay=decay, lr_decay=0.01)
    sums = np.zeros(8, np.float64 if dtype == torch.float64 else np.float32)
    for step in range(1, 5):
        parameter.grad = torch.randn(8, 6).to(dtype)
        optimizer.step()
        grad = as_array(parameter.grad.to(working_dtype(dtype)))
        module.step_row_wise_adagrad(as_array(storage), 6, 6, sums, np.arange(8), grad, rule.constants(step), 0, 8)
        rounding = 1e-14 if dtype == torch.float64 else 0  # float64 squares are summed in another order
        torch.testing.assert_close(storage, parameter.detach(), rtol=rounding, atol=rounding)


def test_sparse_adam_on_servers_is_torch_s_within_rounding() -> None:
    rule = RowOptimizer.from_factory(functools.partial(torch.optim.SparseAdam, lr=0.1))
    table = torch.nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    storage = make_rows(8, 4, rule, torch.float32)
    storage[:, :4] = table.weight.detach()
    plain = storage.clone()
    for step in range(1, 6):
        rows = torch.randperm(8)[:3]
        grad = torch.randn(3, 4)
        optimizer.zero_grad()
        (table(rows) * grad).sum().backward()
        optimizer.step()
        for module, mine in ((COMPILED, storage), (PLAIN, plain)):
            module.step_adam(as_array(mine), 12, 4, rows.numpy(), as_array(grad), rule.constants(step), 0, 3)
    torch.testing.assert_close(storage[:, :4], table.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(storage, plain, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=40))
def test_merge_numbers_rows_in_the_order_they_come(rows: list[int]) -> None:
    wanted = list(dict.fromkeys(rows))
    for module in (COMPILED, PLAIN):
        array = np.array(rows, np.int64)
        unique, inverse = np.empty_like(array), np.empty_like(array)
        buckets = np.empty(1 << (2 * array.size + 1).bit_length(), np.int64)
        count = module.merge(array, buckets, unique, inverse)
        assert unique[:count].tolist() == wanted
        assert unique[inverse].tolist() == rows


@pytest.mark.parametrize("sourced", [False, True])
def test_merged_gradients_are_summed_in_the_order_of_the_lookups(sourced: bool) -> None:
    generator = np.random.default_rng(0)
    inverse = generator.integers(0, 5, 30)
    grads = generator.standard_normal((8 if sourced else 30, 3)).astype(np.float32)
    source = generator.integers(0, 8, 30) if sourced else np.empty(0, np.int64)
    wanted = np.zeros((5, 3), np.float32)
    for i in range(30):
        wanted[inverse[i]] += grads[source[i] if sourced else i]
    for module in (COMPILED, PLAIN):
        merged = np.full(15, np.nan, np.float32)
        for first, last in ((0, 2), (2, 5)):
            module.merge_sums(grads.reshape(-1), 3, 3, source, inverse, merged, first, last)
        assert (merged.reshape(5, 3) == wanted).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("module", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_gather_skips_unknown_rows_and_the_gaps_between_rows(module: object, dtype: torch.dtype) -> None:
    storage = torch.randn(6, 4).to(dtype)
    out = torch.zeros(3, 5, dtype=dtype)
    memory, apart = as_rows(out[:, 1:4], 3)
    module.gather(as_array(storage), 4, 3, np.array([5, -1, 0]), memory, apart, 0, 3)
    assert torch.equal(out[[0, 2], 1:4], storage[[5, 0], :3])
    assert not out[1].any()
    assert not out[:, [0, 4]].any()


@pytest.mark.parametrize("module", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_the_first_row_behind_is_found(module: object) -> None:
    stamps = np.array([3, 0, 2])
    assert module.first_behind(stamps, np.array([-1, 0, 2]), 2) == -1
    assert module.first_behind(stamps, np.array([0, -1, 2, 1]), 3) == 2
    assert module.first_behind(stamps, np.empty(0, np.int64), 9) == -1


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_first_values_are_the_same_bits_from_both_kernels(kind: int, dtype: torch.dtype) -> None:
    ids = np.concatenate([[0, -1, 2**53, 2**53 + 1, -(2**63) + 1], np.arange(1, 400)])
    tables = []
    for module in (COMPILED, PLAIN):
        storage = torch.zeros(ids.size, 7, dtype=dtype)
        rows, key = np.arange(ids.size), np.uint64(99)
        module.initialise(as_array(storage), 7, 5, rows, ids, key, kind, -0.5, 2.0, 0.25, QUANTILE, 0, ids.size)
        tables.append(storage)
    assert torch.equal(*tables)
    assert (tables[0][:, 5:] == 0.25).all()
    if kind:
        assert len(torch.unique(tables[0][:, 0].double())) > (300 if dtype != torch.bfloat16 else 100)


def test_normal_first_values_are_normal() -> None:
    rows = 20000
    storage = torch.zeros(rows, 10, dtype=torch.float64)
    COMPILED.initialise(
        as_array(storage), 10, 10, np.arange(rows), np.arange(rows), np.uint64(1), 2, 0.0, 1.0, 0.0, QUANTILE, 0, rows
    )
    levels = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)
    found = torch.special.ndtr(storage).flatten().sort().values[(levels * storage.numel()).long()]
    assert (found - levels).abs().max() < 0.004
    assert torch.corrcoef(storage.T).fill_diagonal_(0).abs().max() < 0.03


def test_the_quantile_function_is_torch_s() -> None:
    from anabranch.tables.kernels import _compiled, _plain

    p = np.concatenate([np.logspace(-15, -1, 200), np.linspace(0.1, 0.9, 100)])
    mine = np.array([_compiled._quantile(x, QUANTILE) for x in p])
    assert (mine == _plain._quantile(p, QUANTILE)).all()
    torch.testing.assert_close(torch.from_numpy(mine), torch.special.ndtri(torch.from_numpy(p)), rtol=1e-13, atol=1e-14)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_the_permutation_of_ids_is_one_and_has_an_inverse(rows: int, key: int) -> None:
    half = max(1, (max(rows - 1, 1).bit_length() + 1) // 2)
    ids, found = np.arange(rows), []
    for module in (COMPILED, PLAIN):
        out, back = np.empty_like(ids), np.empty_like(ids)
        module.place(ids, rows, half, np.uint64(key), out, True)
        module.place(out, rows, half, np.uint64(key), back, False)
        assert (np.sort(out) == ids).all()
        assert (back == ids).all()
        found.append(out)
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("module", [COMPILED, PLAIN], ids=["compiled", "plain"])
def test_an_out_of_range_id_is_found_at_its_position(module: object) -> None:
    assert module.first_outside(np.array([0, 9]), 10) == -1
    assert module.first_outside(np.array([0, 10, -1]), 10) == 1
    assert module.first_outside(np.array([0, -(2**63)]), 10) == 1
    assert module.first_outside(np.empty(0, np.int64), 10) == -1


def test_two_kernel_threads_give_the_same_bits_as_one() -> None:
    rule = RowOptimizer.from_factory(OPTIMIZERS["adam"])
    start = make_rows(4096, 16, rule, torch.float32)
    grad = as_array(torch.randn(4096, 16))
    results = []
    for threads in (1, 2, 3):
        storage = start.clone()
        flat = as_array(storage)
        with KernelThreads(threads) as pool:
            pool.run(
                lambda first, last, flat=flat: COMPILED.step_adam(
                    flat, 48, 16, np.arange(4096), grad, rule.constants(1), first, last
                ),
                4096,
                grad.size,
            )
        results.append(storage)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_a_thread_pool_raises_the_error_of_a_part_and_stays_usable() -> None:
    def fail(first: int, last: int) -> None:
        if first:
            raise KeyError("second part")

    with KernelThreads(2) as pool:
        with pytest.raises(KeyError, match="second part"):
            pool.run(fail, 10, 1 << 20)
        done: list[int] = []
        pool.run(lambda first, last: done.append(last - first), 10, 1 << 20)
        assert sum(done) == 10


def test_bfloat16_travels_as_uint16_and_back() -> None:
    values = torch.randn(4).bfloat16()
    assert as_array(values).dtype == np.uint16
    assert torch.equal(as_tensor(as_array(values)), values)
