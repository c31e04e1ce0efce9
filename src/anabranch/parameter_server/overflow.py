"""Finite gradients whose update is not: how a push that would do it is found without a second look at every row.

Two gradients of 3e38 for one row are finite and their sum is not; three of -3e38 make a momentum of NaN. A push is
refused for that only after rows have moved, so somebody must have kept what they were. Almost no push needs it:

::

    a bound for the message's gradients, merged ──┐
    the rule and its numbers                    ──┼──> a bound for every number of the table after the step
    the table's bound before                    ──┘          │
                                          below 1e37: the kernels run as they are, nothing is kept or looked at
                                          else: rows are copied, moved, looked at, and put back if they overflow

The first bound comes from one dot product, which takes the place of the search for NaN; the others are a few
multiplications a table. With ordinary numbers it takes at least 10^5 steps to reach the limit, and mostly 10^30; then
the table's numbers are looked at once, and the bound begins again from what they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.parameter_server.packing import largest_scale
from anabranch.parameter_server.row_optimizers import Family, RowOptimizer

__all__ = ["Bounds", "peak_of"]

_LIMIT = 1e37  # a tenth of what float32 and bfloat16 hold, for what is between two roundings
_MOST_SHRUNK = 256.0  # squares.py may take all but 2^-16 off a square that is added


class Bounds(NamedTuple):
    """The largest that the numbers of a table or a parameter can be.

    >>> rule = RowOptimizer(Family.SGD, lr=0.5)
    >>> Bounds(1.0).after(rule, peak=4.0, width=2)
    Bounds(weights=3.0, first=0.0, sums=0.0)

    Attributes:
        weights: of the weights.
        first: of momentum, or Adam's first moments.
        sums: of second moments and sums of squares.
    """

    weights: float = 0.0
    first: float = 0.0
    sums: float = 0.0

    @property
    def safe(self) -> bool:
        """Tell whether all of them are finite in every dtype."""
        return self.weights <= _LIMIT and self.first <= _LIMIT and self.sums <= _LIMIT

    def after(self, rule: RowOptimizer, peak: float, width: int) -> Bounds:
        """Those after one step of ``rule`` with gradients, merged, of at most ``peak``, on all rows or any."""
        decay, lr = abs(rule.weight_decay), abs(rule.lr)
        grad = peak if rule.family is Family.ADAMW else peak + decay * self.weights
        if rule.family is Family.SGD and not rule.momentum:
            return Bounds(self.weights * max(1.0, abs(1 - rule.lr * rule.weight_decay)) + lr * peak)
        if rule.family is Family.SGD:
            momentum = abs(rule.momentum)
            first = max(grad, abs(1 - rule.dampening) * grad + momentum * self.first)
            return Bounds(self.weights + lr * (grad + momentum * first if rule.nesterov else first), first)
        if not rule.eps:
            return Bounds(math.inf)  # 0 / 0 is NaN
        if rule.family in (Family.ADAGRAD, Family.ROW_WISE_ADAGRAD):
            ratio = min(_MOST_SHRUNK * math.sqrt(width), grad / rule.eps)
            return Bounds(self.weights + lr * ratio, 0.0, self.sums + grad * grad)
        first = max(self.first, grad)
        shrunk = max(1.0, abs(1 - lr * decay)) if rule.family is Family.ADAMW else 1.0
        move = lr / (1 - rule.beta1) * min(_ratio(rule), first / rule.eps)
        return Bounds(self.weights * shrunk + move, first, max(self.sums, grad * grad))

    def joined(self, other: Bounds) -> Bounds:
        """Those of numbers that are under one of both."""
        return Bounds(max(self.weights, other.weights), max(self.first, other.first), max(self.sums, other.sums))

    @classmethod
    def of(cls, rule: RowOptimizer, weights: Tensor, states: Sequence[Tensor]) -> Bounds:
        """Those of numbers that are there; ``states`` in the order in which the rule keeps them."""
        found = [_largest(state) for state in states]
        if rule.beta2 and len(states) == 2 and not _is_of_one_history(rule, *states):
            return cls(math.inf)
        if rule.family is Family.SGD:
            return cls(_largest(weights), *found)
        first = found[0] if len(found) == 2 else 0.0
        return cls(_largest(weights), first, found[-1] if found else 0.0)


def peak_of(flat: Sequence[Tensor], squares: Tensor | None = None) -> float:
    """A bound for any sum of a row's gradients in a message; Inf or NaN if the numbers are not known to be finite.

    >>> round(peak_of([torch.tensor([3.0, -4.0])]), 6)
    7.071068
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
    # Numbers that underflow when they are squared are below 1e-19.
    return peak + 1e-9


def _ratio(rule: RowOptimizer) -> float:
    """The most that Adam's first moment can be of the root of its second, by the inequality of Cauchy and Schwarz."""
    shrinks = rule.beta1 * rule.beta1 / rule.beta2 if rule.beta2 else 1.0
    if shrinks >= 1:
        return math.inf
    return 2 * _MOST_SHRUNK * (1 - rule.beta1) / math.sqrt((1 - rule.beta2) * (1 - shrinks))


def _is_of_one_history(rule: RowOptimizer, first: Tensor, second: Tensor) -> bool:
    """True if ``_ratio`` holds for loaded moments; first moments below 1e-15 are too small to matter."""
    return bool((first.abs().float() <= _ratio(rule) * second.float().clamp(min=0).sqrt() + 1e-15).all())


def _largest(numbers: Tensor) -> float:
    """The largest magnitude; NaN if any is. The least and the most are found far quicker than a norm."""
    if not numbers.numel():
        return 0.0
    least, most = torch.aminmax(numbers)
    return max(abs(least.item()), abs(most.item()))
