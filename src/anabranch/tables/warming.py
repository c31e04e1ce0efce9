"""Compiles the kernels before any request needs them.

Compiling holds Python's interpreter for seconds, in which a server with a request sends no beats: its clients consider
it lost. So a shard compiles the kernels for tables of float32 before it listens; Numba keeps the result on disk, and
the next process loads it in a fraction of a second.
"""

from __future__ import annotations

import functools

import torch

from anabranch.tables.initial import Constant
from anabranch.tables.kernels.selection import kernels
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.row_table import RowTable
from anabranch.tables.table_group import TableGroup
from anabranch.tables.table_spec import TableSpec

__all__ = ["compile_kernels"]

_RULES = (
    RowOptimizer(Family.SGD, lr=0.1),
    RowOptimizer(Family.SGD, lr=0.1, momentum=0.9),
    RowOptimizer(Family.ADAGRAD, lr=0.1),
    RowOptimizer(Family.ROW_WISE_ADAGRAD, lr=0.1),
    RowOptimizer(Family.ADAM, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8),
)


@functools.cache
def compile_kernels(dtype: torch.dtype = torch.float32) -> None:
    """Compiles, or loads, the kernels of tables of ``dtype``; only the first call in a process does so.

    >>> compile_kernels()
    """
    if kernels() is kernels("plain"):
        return
    if dtype == torch.float16:  # rows move by the kernels of float32
        compile_kernels(torch.float32)
        return
    ids, grads = torch.tensor([[1, 2], [3, 3]], device="cpu"), torch.ones(2, 2, 2, dtype=dtype, device="cpu")
    for rule in _RULES:
        every_row_moves = rule.moves_quiet_rows
        made = [
            RowTable(TableSpec(name, 8, 2, dtype, Constant(0.0), every_row_moves=every_row_moves), rule)
            for name in ("first", "second")
        ]
        group = TableGroup(made)
        for _ in range(2):
            group.push(ids, grads)
            group.pull(ids)
        for _ in range(2):
            made[0].push(ids[0], grads[0])
            made[0].pull_with_state(torch.arange(8, device="cpu"))
    anybody = RowTable(TableSpec("any", None, 2, dtype, Constant(0.0), capacity=2), _RULES[0])
    for some in ids:
        anybody.push(some, grads[0])
        anybody.pull(some)
