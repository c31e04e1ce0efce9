"""One optimizer step on rows that a worker holds, with their state, so that it reads its own writes meanwhile."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anabranch.tables.kernels import _plain
from anabranch.tables.kernels._updates import update_of
from anabranch.tables.kernels.selection import as_array, kernels, working_dtype
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.optimizers.squares import correct_second_moments

__all__ = ["move_rows"]


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
        module.step_row_wise_adagrad(
            as_array(storage), stride, width, as_array(sums), everyone, given, constants, 0, count
        )
        return torch.cat([storage, sums[:, None].to(rows.dtype)], dim=1)
    if squares is not None:
        correct_second_moments(storage, None, grads, squares, rule, constants)
    if not rule.compiled:
        update = update_of(rule.family, constants)
        _plain.on_rows(as_array(storage), stride, width, everyone, given, slice(None), update)
        return storage
    run = {Family.SGD: module.step_sgd, Family.ADAGRAD: module.step_adagrad}.get(rule.family, module.step_adam)
    run(as_array(storage), stride, width, everyone, given, constants, 0, count)
    return storage
