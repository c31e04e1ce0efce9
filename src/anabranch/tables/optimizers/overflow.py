"""Finite gradients whose update overflows: detecting such a push without a second look at every row.

Two gradients of 3e38 for one row are finite and their sum is not; three of -3e38 make a momentum of NaN. Such a push
is refused only after rows have moved, so their old values must have been kept. Almost no push needs it:

::

    a bound for the message's gradients, merged ──┐
    the rule and its numbers                    ──┼──> a bound for every number of the table after the step
    the table's bound before                    ──┘          │
                                          below 1e37: the kernels run without keeping or checking anything
                                          else: rows are copied, moved, checked, and put back if they overflow

The first bound comes from one dot product, which replaces the search for NaN; the others are a few
multiplications a table. With ordinary numbers it takes at least 10^5 steps to reach the limit, and mostly 10^30; then
the table's numbers are scanned once, and the bound starts again from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tensors.packing import largest_scale

__all__ = ["Bounds", "peak_of"]

_LIMIT = 1e37  # a tenth of what float32 and bfloat16 hold, for what is between two roundings
_MOST_SHRUNK = 256.0  # squares.py may take all but 2^-16 off a square that is added


class Bounds(NamedTuple):
    """Upper bounds on the magnitude of a table's or a parameter's numbers.

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
        """Return the bounds after one step of ``rule`` with merged gradients of at most ``peak``, on all rows or
        some.
        """
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
        """Return the larger bounds of both."""
        return Bounds(max(self.weights, other.weights), max(self.first, other.first), max(self.sums, other.sums))

    @classmethod
    def of(cls, rule: RowOptimizer, weights: Tensor, states: Sequence[Tensor]) -> Bounds:
        """Return the bounds of existing numbers; ``states`` in the order in which the rule keeps them."""
        found = [_largest(state) for state in states]
        if rule.beta2 and len(states) == 2 and not _is_of_one_history(rule, *states):
            return cls(math.inf)
        if rule.family is Family.SGD:
            return cls(_largest(weights), *found)
        first = found[0] if len(found) == 2 else 0.0
        return cls(_largest(weights), first, found[-1] if found else 0.0)


def peak_of(flat: Sequence[Tensor], squares: Tensor | None = None) -> float:
    """Return an upper bound for any sum of a row's gradients in a message; Inf or NaN if some number may not be finite.

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
    """Return the most that Adam's first moment can be in units of its second moment's root, by Cauchy and Schwarz."""
    shrinks = rule.beta1 * rule.beta1 / rule.beta2 if rule.beta2 else 1.0
    if shrinks >= 1:
        return math.inf
    return 2 * _MOST_SHRUNK * (1 - rule.beta1) / math.sqrt((1 - rule.beta2) * (1 - shrinks))


def _is_of_one_history(rule: RowOptimizer, first: Tensor, second: Tensor) -> bool:
    """Return True if ``_ratio`` holds for loaded moments; first moments below 1e-15 are too small to matter."""
    return bool((first.abs().float() <= _ratio(rule) * second.float().clamp(min=0).sqrt() + 1e-15).all())


def _largest(numbers: Tensor) -> float:
    """Return the largest magnitude; NaN if any is NaN. Minimum and maximum are found far quicker than a norm."""
    if not numbers.numel():
        return 0.0
    least, most = torch.aminmax(numbers)
    return max(abs(least.item()), abs(most.item()))
