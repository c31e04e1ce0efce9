"""The rules against torch's fused optimizers, bit for bit, and the other kernels against what torch computes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_row_table import DENSE, FUSED, begin_with

from anabranch.tables import (
    Constant,
    Family,
    KernelThreads,
    Normal,
    RowOptimizer,
    RowWiseAdagrad,
    Table,
    TableSpec,
    Uniform,
)
from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.kernels.numbers import load, rounded
from anabranch.tables.kernels.rows import as_array, quantile

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
REFERENCES = [(name, dtype) for name, factory in DENSE.items() for dtype in DTYPES if factory.func in FUSED]


@pytest.mark.parametrize(("name", "dtype"), REFERENCES, ids=str)
def test_a_rule_moves_rows_as_torch_fused_does_to_the_bit(name: str, dtype: torch.dtype) -> None:
    rule, everyone = RowOptimizer.from_factory(DENSE[name]), torch.arange(16)
    parameter = torch.nn.Parameter(torch.randn(16, 16).to(dtype))
    table = Table(TableSpec("t", 16, 16, dtype), rule)
    begin_with(table, parameter.detach())
    dense = DenseParameter("d", parameter.detach(), rule)
    # torch 2.13's fused SGD leaves bfloat16 parameters on the CPU where they are: its plain form is the reference.
    fused = dtype != torch.bfloat16 or DENSE[name].func is not torch.optim.SGD
    optimizer = DENSE[name]([parameter], fused=fused)
    for _ in range(4):
        parameter.grad = torch.randn(16, 16).to(dtype)
        optimizer.step()
        table.push(everyone, parameter.grad)
        dense.push(parameter.grad)
        assert torch.equal(table.pull(everyone), parameter.detach())
        assert torch.equal(dense.value, parameter.detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_row_wise_adagrad_on_servers_is_the_local_one(decay: float, dtype: torch.dtype) -> None:
    make = functools.partial(RowWiseAdagrad, lr=0.1, weight_decay=decay, lr_decay=0.01)
    table = Table(TableSpec("t", 8, 6, dtype, Normal()), RowOptimizer.from_factory(make))
    everyone = torch.arange(8)
    parameter = torch.nn.Parameter(table.pull(everyone))
    optimizer = make([parameter])
    for _ in range(4):
        parameter.grad = torch.randn(8, 6).to(dtype)
        optimizer.step()
        table.push(everyone, parameter.grad)
        rounding = 1e-14 if dtype == torch.float64 else 0  # float64 squares are summed in another order
        torch.testing.assert_close(table.pull(everyone), parameter.detach(), rtol=rounding, atol=rounding)


def test_sparse_adam_on_servers_is_torch_s_within_rounding() -> None:
    module = torch.nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
    table = Table(TableSpec("t", 8, 4), RowOptimizer.from_torch(optimizer))
    begin_with(table, module.weight.detach())
    for _ in range(5):
        ids, grad = torch.randperm(8)[:3], torch.randn(3, 4)
        optimizer.zero_grad()
        (module(ids) * grad).sum().backward()
        optimizer.step()
        table.push(ids, grad)
    torch.testing.assert_close(table.pull(torch.arange(8)), module.weight.detach(), rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.sampled_from([*DTYPES, torch.float16]))
def test_gradients_of_a_row_are_summed_in_the_order_of_the_lookups(ids: list[int], dtype: torch.dtype) -> None:
    table = Table(TableSpec("t", 13, 3, dtype, Constant(0.0)), RowOptimizer(Family.SGD, lr=-1.0))
    grads = torch.randn(len(ids), 3).to(dtype)
    table.push(torch.tensor(ids), grads)
    sums = torch.zeros(13, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for known, grad in zip(ids, grads, strict=True):
        sums[known] += grad
    assert torch.equal(table.pull(torch.arange(13)), sums.to(dtype))


def test_a_sum_of_half_gradients_stays_a_number() -> None:
    table = Table(TableSpec("t", 2, 2, torch.float16, Constant(0.0)), RowOptimizer(Family.SGD, lr=-1.0))
    table.push(torch.tensor([1, 1]), torch.full((2, 2), 6e4).half())
    assert table.pull(torch.tensor([1])).tolist() == [[65504.0, 65504.0]]


FIRST_VALUES = [
    (Constant(-0.5), [-0.5] * 6),
    (
        Uniform(-0.5, 2.0),
        [1.5004431556542044, 1.2349238732797776, 0.7826380541338136, 0.9985036910245495, 1.3831951811323853,
         1.189498700399321],
    ),
    (
        Normal(-0.5, 2.0),
        [1.1845091359865034, 0.5142677116449634, -0.43453913859076104, 0.00359640392231686, 0.8696832832054067,
         0.41196923522147466],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("initial", "values"), FIRST_VALUES, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_first_values_are_the_same_on_every_machine(initial: Normal, values: list[float], dtype: torch.dtype) -> None:
    ids = torch.tensor([0, -1, 2**53 + 1])
    table = Table(TableSpec("t", None, 2, dtype, initial), RowOptimizer(Family.ADAGRAD, lr=1.0))
    rows, exact = table.pull(ids), torch.tensor(values, dtype=torch.float64).view(3, 2)
    assert torch.equal(rows, (exact if dtype == torch.float64 else exact.float()).to(dtype))
    assert torch.equal(table.pull(ids, training=True), rows)


def test_normal_first_values_are_normal() -> None:
    table = Table(TableSpec("t", 20000, 10, torch.float64), RowOptimizer(Family.SGD, lr=1.0))
    rows = table.pull(torch.arange(20000))
    levels = torch.tensor([0.001, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)
    found = torch.special.ndtr(rows).flatten().sort().values[(levels * rows.numel()).long()]
    assert (found - levels).abs().max() < 0.004
    assert torch.corrcoef(rows.T).fill_diagonal_(0).abs().max() < 0.03


def test_the_quantile_function_is_torch_s() -> None:
    p = np.concatenate([np.logspace(-15, -1, 200), np.linspace(0.1, 0.9, 100)])
    mine = np.array([quantile(x) for x in p])
    torch.testing.assert_close(torch.from_numpy(mine), torch.special.ndtri(torch.from_numpy(p)), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_numbers_are_widened_and_rounded_as_torch_does(dtype: torch.dtype) -> None:
    @numba.njit
    def convert(halves: object, wide: object, back: object) -> None:
        for i in range(halves.size):
            wide[i], back[i] = load(halves, i), rounded(halves, load(halves, i))

    @numba.njit
    def narrow(values: object, halves: object) -> None:
        for i in range(values.size):
            halves[i] = rounded(halves, values[i])

    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = every[~every.isnan()]
    wide, back = torch.empty(len(numbers)), torch.empty_like(numbers)
    convert(as_array(numbers), wide.numpy(), as_array(back))
    assert torch.equal(wide, numbers.float())
    assert torch.equal(back.view(torch.int16), numbers.view(torch.int16))
    values = torch.cat([torch.randn(10000) * 10.0 ** torch.randint(-9, 6, (10000,)), torch.tensor([7e4, -1e30, 1e-8])])
    halves = torch.empty(len(values), dtype=dtype)
    narrow(values.numpy(), as_array(halves))
    assert torch.equal(halves, values.to(dtype))


def test_a_thread_pool_raises_the_error_of_a_part_and_stays_usable() -> None:
    def fail(thread: int, threads: int) -> None:
        if thread:
            raise KeyError("second part")

    with KernelThreads(2) as pool:
        with pytest.raises(KeyError, match="second part"):
            pool.run(fail, 16_000)
        done: list[tuple[int, int]] = []
        for rows in (16_000, 15_999):  # few rows stay on the caller's thread
            pool.run(lambda thread, threads: done.append((thread, threads)), rows)
        assert sorted(done) == [(0, 1), (0, 2), (1, 2)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kernel_reads_or_writes_outside_of_its_arrays(tmp_path: Path) -> None:
    """The tests of tables once more, in kernels that check each index."""
    if os.environ.get("NUMBA_BOUNDSCHECK"):
        return
    files = ["test_kernels.py", "test_row_table.py", "test_table_group.py", "test_dynamic_vocabulary.py"]
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
        + [str(Path(__file__).with_name(file)) for file in files],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-5000:]
