"""Compiles the kernels before any request needs them.

Compiling holds Python's interpreter for seconds, in which a server with a request sends no beats: its clients consider
it lost. So a shard compiles the kernels for tables of float32 and for all dense parameters before it listens; Numba
keeps the result on disk, and the next process loads it in a fraction of a second.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext

import torch

from anabranch.tables.dense_parameter import DenseParameter
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.snapshot import RowSnapshot
from anabranch.tables.table import Table
from anabranch.tables.table_spec import Constant, TableSpec


@functools.cache
def compile_kernels(dtype: torch.dtype = torch.float32) -> None:
    """Compiles, or loads, the kernels of tables of ``dtype``; only the first call in a process does so.

    >>> compile_kernels()
    """
    ids, grads = torch.tensor([1, 2, 3], device="cpu"), torch.ones(3, 2, dtype=dtype, device="cpu")
    families = [Family.ADAGRAD]
    if dtype == torch.bfloat16:  # where row-wise Adagrad's state has another dtype
        families.append(Family.ROW_WISE_ADAGRAD)
    for family in families:
        rule = RowOptimizer(family, lr=0.1)
        for rows, capacity, moves in ((8, None, True), (None, 2, False)):
            table = Table(TableSpec("t", rows, 2, dtype, Constant(0.0), 0, moves, capacity), rule)
            for some in (ids, ids + 3, ids.flip(0)):
                some = some.clamp(max=7)
                table.push(some, grads)
                table.pull(some, training=True)
            table.pull_with_state(ids)
            list(RowSnapshot([table], nullcontext()))
    for kind in (torch.float32, torch.float64, torch.bfloat16):  # a dense parameter of float16 moves in float32
        DenseParameter("d", grads.to(kind), RowOptimizer(Family.SGD, lr=0.1)).push(grads.to(kind))
