"""Finite gradients whose update is not: how a push that would do it is found without a second look at every row.

Two gradients of 3e38 for one row are finite and their sum is not; three of -3e38 make a momentum of NaN. A push is
refused for that only after rows have moved, so somebody must have kept what they were. Almost no push needs it:

::

    gradients, merged, <= 1e15 ──┐
    numbers of the rule mild   ──┼──> no number can pass 3e38 ──> fast path: nothing is kept, the kernels look at what
    weights before   <= 1e15   ──┘                                they write and say where a weight has passed 1e15
                                └ else ──> guarded path: rows are copied, moved, looked at, and put back if need be

The first is known from one dot product, which takes the place of the search for NaN; the third from what the kernels
said of earlier steps. With weights w and gradients g up to 1e15, |g + decay w| is at most 2e15: its square, 4e30,
leaves room for 10^6 such in Adagrad's sum, which the kernels look at as well; Adam's moments are means and stay below;
and a step moves a weight by no more than 1e33.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.parameter_server.packing import largest_scale
from anabranch.parameter_server.row_optimizers import Family, RowOptimizer

__all__ = ["LARGEST_GRADIENT", "SUM_LIMIT", "WEIGHT_LIMIT", "all_within", "is_mild", "peak_of"]

LARGEST_GRADIENT = 1e15
WEIGHT_LIMIT = 1e15
SUM_LIMIT = 1e37  # of second moments
_MOST_MOVE = 1e6
_LEAST_EPS = 1e-12
_LEAST_ROOT = 1e-6


def peak_of(flat: Sequence[Tensor], squares: Tensor | None = None) -> float:
    """A bound for any sum of a row's gradients in a message; Inf or NaN if the numbers are not known to be finite.

    >>> peak_of([torch.tensor([3.0, -4.0])])
    7.0710678118654755
    >>> peak_of([torch.tensor([3e38, 1.0])])
    inf

    Args:
        flat: the numbers as they travel.
        squares: of those that are sums over several steps, as ``squares.py`` has them.
    """
    peak = 0.0
    for tensor in flat:
        if tensor.dtype == torch.uint8:
            peak += largest_scale(tensor) * 128 * 16 * tensor.numel()
        elif tensor.is_floating_point():
            # |sum of k numbers| <= sqrt(k) * the root of the sum of their squares
            peak += math.sqrt(tensor.numel() * torch.dot(tensor, tensor).item())
    if squares is not None and squares.numel():
        peak *= math.sqrt(max(1.0, squares.max().item()))
    return peak


def is_mild(rule: RowOptimizer, constants: NDArray[np.float64]) -> bool:
    """Whether a step with these constants moves no weight far whose gradient is of ordinary size."""
    c = [abs(float(number)) for number in constants]
    if rule.family is Family.SGD:
        return c[0] <= _MOST_MOVE and c[1] <= 1 and c[2] <= 2 and c[4] <= 1
    if rule.family in (Family.ADAGRAD, Family.ROW_WISE_ADAGRAD):
        return c[0] <= _MOST_MOVE and c[1] >= _LEAST_EPS and c[4] <= 1
    return c[0] <= _MOST_MOVE and c[1] >= _LEAST_ROOT and c[4] <= 1 and c[6] >= _LEAST_EPS and c[7] <= 2


def all_within(rows: Tensor, width: int, rule: RowOptimizer, sums: Tensor | None = None) -> bool:
    """Whether weights and states are of ordinary size: ``rows`` is ``[n, width * (1 + states)]``."""
    if not _within(rows[:, :width], WEIGHT_LIMIT) or (sums is not None and not _within(sums, SUM_LIMIT)):
        return False
    states = rows[:, width:]
    if rule.family is Family.SGD:
        return _within(states, WEIGHT_LIMIT)
    if rule.family in (Family.ADAM, Family.ADAMW, Family.SPARSE_ADAM):
        return _within(states[:, :width], WEIGHT_LIMIT) and _within(states[:, width:], SUM_LIMIT)
    return _within(states, SUM_LIMIT)


def _within(numbers: Tensor, limit: float) -> bool:
    return not numbers.numel() or bool(torch.linalg.vector_norm(numbers.float(), ord=math.inf) <= limit)
