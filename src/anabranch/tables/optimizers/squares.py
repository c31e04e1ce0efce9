"""Gradients of several steps sent as one sum: their effect on an optimizer's second moments.

Adagrad and Adam scale a step by the squares of the gradients so far. Fifty equal gradients, added up, have 2,500 times
the square of one, not 50 times: as one gradient they would slow a row down for good, most of all the most used rows. So
a sum is sent with its *squares*, the sum of its gradients' squares divided by the square of their sum: 1 for a gradient
of one step, 1/50 for 50 equal ones, 1 again for 50 in random directions. The kernels do not handle it: they add the
square of the sum, and the excess is subtracted beforehand. Adamax, FTRL and centered RMSprop, whose state cannot be
corrected this way, treat a sum as one gradient.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer

__all__ = ["correct_second_moments", "merged_squares"]

_WITHOUT_SQUARES = (Family.SGD, Family.ADAMAX, Family.FTRL)
_ALPHA, _DECAY, _SIGN, _BETA2, _REST = 2, 4, 5, 3, 8  # where ``RowOptimizer.constants`` has them
_LEAST = 2.0**-16
_LEAST_OF_BFLOAT16 = 2.0**-7  # less would be lost in the rounding of the subtraction


def correct_second_moments(
    rows: Tensor,
    sums: Tensor | None,
    grads: Tensor,
    squares: Tensor,
    rule: RowOptimizer,
    constants: NDArray[np.float64],
) -> None:
    """Make second moments, in place, such that the step with ``grads`` adds ``squares`` times their square.

    Args:
        rows: ``[n, width * (1 + states)]``.
        sums: ``[n]`` of row-wise Adagrad, else ``None``.
        grads: ``[n, width]``, of the step that follows.
        squares: ``[n]``.
        rule: its optimizer.
        constants: of that step, as ``rule.constants`` gives them.
    """
    width = grads.shape[1]
    if not len(rows) or rule.family in _WITHOUT_SQUARES or rule.centered:
        return
    working = torch.float64 if rows.dtype == torch.float64 else torch.float32
    gradient = grads.to(working) * constants[_SIGN]
    if constants[_DECAY]:
        gradient += constants[_DECAY] * rows[:, :width].to(working)
    least = _LEAST_OF_BFLOAT16 if rows.dtype == torch.bfloat16 else _LEAST
    excess = gradient.square() * (squares.to(working).clamp(min=least) - 1)[:, None]
    if sums is not None:
        sums += excess.double().mean(1).to(sums.dtype)
    elif rule.family is Family.ADAGRAD:
        rows[:, width : 2 * width] += excess.to(rows.dtype)
    elif rule.family is Family.RMSPROP:
        if constants[_ALPHA]:
            rows[:, width : 2 * width] += (excess * ((1 - constants[_ALPHA]) / constants[_ALPHA])).to(rows.dtype)
    elif constants[_BETA2]:
        rows[:, 2 * width : 3 * width] += (excess * (constants[_REST] / constants[_BETA2])).to(rows.dtype)


def merged_squares(grads: Tensor, squares: Tensor, inverse: NDArray[np.int64], count: int) -> Tensor:
    """Return the squares of rows whose gradients are in several parts, each with its own squares.

    Args:
        grads: ``[n, width]``, of the parts.
        squares: ``[n]``.
        inverse: ``[n]``: the row of each part.
        count: the number of rows.
    """
    energies = grads.double().square().sum(1)
    total = np.bincount(inverse, weights=energies.numpy(), minlength=count)
    own = np.bincount(inverse, weights=(energies * squares.double()).numpy(), minlength=count)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.where(total > 0, own / total, 1.0))
