"""One optimizer step on rows cached by a worker, so that it reads its own writes before they are pushed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tables.kernels import _plain
from anabranch.tables.kernels._updates import update_of
from anabranch.tables.kernels.selection import Kernels, as_array, kernels, working_dtype
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.optimizers.squares import correct_second_moments

__all__ = ["StepKernel", "move_rows", "step_kernel"]

Array = NDArray[Any]
StepKernel = Callable[[Array, Array, Array, int, int], None]
_NO_SUMS: Array = np.empty(0)


def move_rows(rows: Tensor, grads: Tensor, rule: RowOptimizer, step: int, squares: Tensor | None = None) -> Tensor:
    """``rows`` after step number ``step`` of ``rule`` with ``grads``, by the kernels that the servers run.

    >>> rows = torch.tensor([[1.0, 2.0, 0.0, 0.0]])  # two weights, and Adagrad's two sums
    >>> move_rows(rows, torch.ones(1, 2), RowOptimizer(Family.ADAGRAD, lr=0.5), 1)
    tensor([[0.5000, 1.5000, 1.0000, 1.0000]])

    Args:
        rows: ``[n, rule.row_width(width)]``, as ``RowTable.pull_with_state`` gives them; left unchanged.
        grads: ``[n, width]``.
        rule: the update rule.
        step: from 1.
        squares: ``[n]``, of gradients that are sums over several steps, as ``squares.py`` describes them.
    """
    count, width = grads.shape
    if not count:
        return rows.clone()
    stride = width * (1 + rule.states)
    storage = rows[:, :stride].contiguous().clone()
    everyone, constants = np.arange(count), rule.constants(step)
    given = as_array(grads.to(rows.dtype).to(working_dtype(rows.dtype)).contiguous())
    module = kernels()
    if rule.family is Family.ROW_WISE_ADAGRAD:
        sums = rows[:, stride].to(working_dtype(rows.dtype)).contiguous().clone()
        if squares is not None:
            correct_second_moments(storage, sums, grads, squares, rule, constants)
        run = step_kernel(rule, module, as_array(storage), stride, width, as_array(sums))
        run(everyone, given, constants, 0, count)
        return torch.cat([storage, sums[:, None].to(rows.dtype)], dim=1)
    if squares is not None:
        correct_second_moments(storage, None, grads, squares, rule, constants)
    run = step_kernel(rule, module, as_array(storage), stride, width, _NO_SUMS)
    run(everyone, given, constants, 0, count)
    return storage


def step_kernel(rule: RowOptimizer, run: Kernels, values: Array, stride: int, width: int, sums: Array) -> StepKernel:
    """Return the kernel of ``rule``'s step on ``values``, ``stride`` numbers per row; ``sums`` as row-wise Adagrad
    keeps.

    It takes rows, their gradients, the step's constants, and the first and last of the rows to update.
    """
    if rule.family is Family.ROW_WISE_ADAGRAD:
        return lambda *work: run.step_row_wise_adagrad(values, stride, width, sums, *work)
    if not rule.compiled:
        return lambda rows, grads, constants, first, last: _plain.on_rows(
            values, stride, width, rows, grads, slice(first, last), update_of(rule.family, constants)
        )
    kernel = {Family.SGD: run.step_sgd, Family.ADAGRAD: run.step_adagrad}.get(rule.family, run.step_adam)
    return lambda *work: kernel(values, stride, width, *work)
