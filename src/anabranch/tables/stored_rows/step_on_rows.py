"""``step_on_rows``: the kernel of an optimizer's step, ready to run on the rows of a storage."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.tables.kernels.selection import Kernels, as_array
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.optimizers.row_step import StepKernel, step_kernel
from anabranch.tables.row_storage import RowStorage
from anabranch.tables.stored_rows.layout import RowLayout

__all__ = ["step_on_rows"]

Array = NDArray[Any]


def step_on_rows(storage: RowStorage, layout: RowLayout, rule: RowOptimizer, run: Kernels) -> StepKernel:
    """Return the kernel of ``rule``'s step on rows of ``storage``."""
    if layout.halves:
        return functools.partial(_step_halves, storage, layout, rule, run)
    return step_kernel(rule, run, storage.values, layout.row, layout.width, storage.sums)


def _step_halves(
    storage: RowStorage, layout: RowLayout, rule: RowOptimizer, run: Kernels,
    rows: Array, grads: Array, constants: Array, first: int, last: int,
) -> None:  # fmt: skip
    """One step of float16 rows, computed in float32 and rounded."""
    mine, there = rows[first:last], torch.from_numpy(rows[first:last])
    wide, sums = layout.read(storage, there), storage.sums[mine] if storage.with_sums else storage.sums
    grads = grads[first * layout.width : last * layout.width]
    step_kernel(rule, run, as_array(wide), layout.row, layout.width, sums)(
        np.arange(mine.size), grads, constants, 0, mine.size
    )
    layout.write(storage, there, wide)
    if storage.with_sums:
        storage.sums[mine] = sums
