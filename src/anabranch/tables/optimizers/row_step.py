"""One optimizer step on rows cached by a worker, so that it reads its own writes before they are pushed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anabranch.tables.kernels.memory import as_array
from anabranch.tables.kernels.rows import move_all
from anabranch.tables.optimizers.row_optimizers import RowOptimizer


def move_rows(rows: Tensor, grads: Tensor, rule: RowOptimizer, step: int, squares: Tensor | None = None) -> Tensor:
    """``rows`` after step number ``step`` of ``rule`` with ``grads``, by the kernels that the servers run.

    >>> from anabranch.tables import Family
    >>> rows = torch.tensor([[1.0, 2.0, 0.0, 0.0]])  # two weights, and Adagrad's two sums
    >>> move_rows(rows, torch.ones(1, 2), RowOptimizer(Family.ADAGRAD, lr=0.5), 1)
    tensor([[0.5000, 1.5000, 1.0000, 1.0000]])

    Args:
        rows: ``[n, rule.row_width(width)]``, as ``Table.pull_with_state`` gives them; left unchanged.
        grads: ``[n, width]``.
        rule: the update rule.
        step: from 1.
        squares: ``[n]``, of gradients that are sums over several steps.
    """
    moved = rows.contiguous().clone()
    memory, own = as_array(moved), np.empty(0, np.float32) if squares is None else squares.float().contiguous().numpy()
    move_all(
        rule.number, memory, memory, rows.shape[1], grads.shape[1], rule.constants(step),
        2.0**-7 if rows.dtype == torch.bfloat16 else 2.0**-16, own, as_array(grads.to(rows.dtype)),
    )  # fmt: skip
    return moved
