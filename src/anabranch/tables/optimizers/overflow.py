"""Finite gradients whose update overflows: detecting such a push without checking every row again.

Two gradients of 3e38 for one row are finite and their sum is not; three of -3e38 make a momentum of NaN. Such a push is
refused only after rows have been updated, so their old values must have been kept. Almost no push needs it:

::

    a bound for the message's gradients, merged ──┐
    the rule and its numbers                    ──┼──> a bound for every number of the table after the step
    the table's bound before                    ──┘          │
                                          below 1e37: the kernels run without keeping or checking anything
                                          else: rows are copied, moved, checked, and put back if they overflow

The first bound comes from one dot product, which replaces the search for NaN; the others are a few multiplications per
table. With ordinary values it takes at least 10^5 steps to reach the limit, and mostly 10^30; then the table's values
are scanned once, and the bound is reset from them.
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

_MOST_OF_HALF = 65000.0  # a little less than float16 holds
_LIMIT = 1e37  # a tenth of the range of float32 and bfloat16, as a margin for values between two roundings
_LEAST_RATE = 1e-12  # of FTRL, which divides by it
_SUMS = ("sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "n")
_MOST_SHRUNK = 256.0  # squares.py may take all but 2^-16 off a square that is added


class Bounds(NamedTuple):
    """Upper bounds on the magnitude of a table's or a parameter's values.

    >>> rule = RowOptimizer(Family.SGD, lr=0.5)
    >>> Bounds(1.0).after(rule, peak=4.0, width=2)
    Bounds(weights=3.0, first=0.0, sums=0.0)

    Attributes:
        weights: of the weights.
        first: of momentum, Adam's first moments, or FTRL's ``z``.
        sums: of second moments and sums of squares.
    """

    weights: float = 0.0
    first: float = 0.0
    sums: float = 0.0

    @property
    def safe(self) -> bool:
        """Return True if all of them are finite in every dtype."""
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
        if rule.family is Family.FTRL:
            return self._after_ftrl(rule, grad)
        if not rule.eps or rule.centered:
            return Bounds(math.inf)  # 0 / 0 is NaN, and so is the root of a variance that rounding makes negative
        if rule.family is Family.RMSPROP:
            move = min(_MOST_SHRUNK / math.sqrt(max(1 - rule.alpha, 1e-30)), grad / rule.eps)
            first = move + abs(rule.momentum) * self.first
            return Bounds(self.weights + lr * first, first, max(self.sums, grad * grad))
        if rule.family is Family.ADAMAX:
            first = max(self.first, grad + rule.eps)
            return Bounds(self.weights + lr / (1 - rule.beta1) * min(_ratio(rule), first / rule.eps), first)
        if rule.family in (Family.ADAGRAD, Family.ROW_WISE_ADAGRAD):
            ratio = min(_MOST_SHRUNK * math.sqrt(width), grad / rule.eps)
            return Bounds(self.weights + lr * ratio, 0.0, self.sums + grad * grad)
        first = max(self.first, grad)
        shrunk = max(1.0, abs(1 - lr * decay)) if rule.family is Family.ADAMW else 1.0
        move = lr / (1 - rule.beta1) * min(_ratio(rule), first / rule.eps)
        return Bounds(self.weights * shrunk + move, first, max(self.sums, grad * grad))

    def within(self, dtype: torch.dtype, peak: float) -> Bounds:
        """Return these bounds after a step with gradients of at most ``peak``; infinite ones if they may overflow
        float16.
        """
        if dtype == torch.float16 and max(self.weights, peak) > _MOST_OF_HALF:
            return Bounds(math.inf)
        return self

    def _after_ftrl(self, rule: RowOptimizer, grad: float) -> Bounds:
        """Return the bounds after a step of FTRL: a weight changes by ``grad / Q``, and ``z`` follows from it."""
        if rule.lr < _LEAST_RATE:
            return self if not rule.lr else Bounds(math.inf)
        sums = self.sums + grad * grad
        weights = self.weights + rule.lr * min(_MOST_SHRUNK, grad / rule.beta)
        led = weights * ((rule.beta + math.sqrt(sums)) / rule.lr + rule.l2) + rule.l1 + grad
        return Bounds(weights, max(self.first, led), sums)

    def joined(self, other: Bounds) -> Bounds:
        """Return the larger bounds of both."""
        return Bounds(max(self.weights, other.weights), max(self.first, other.first), max(self.sums, other.sums))

    @classmethod
    def of(cls, rule: RowOptimizer, weights: Tensor, states: Sequence[Tensor]) -> Bounds:
        """Return the bounds of existing values; ``states`` in the order of the rule."""
        if "exp_avg" in rule.state_names and not _is_of_one_history(rule, *states[:2]):
            return cls(math.inf)
        first = sums = 0.0
        for name, state in zip(rule.state_names, states, strict=False):
            if name in _SUMS:
                sums = max(sums, _largest(state))
            else:
                first = max(first, _largest(state))
        return cls(_largest(weights), first, sums)


def peak_of(flat: Sequence[Tensor], squares: Tensor | None = None) -> float:
    """Return an upper bound for any sum of a row's gradients in a message; Inf or NaN if some value may not be finite.

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
            wide = tensor.float() if tensor.dtype == torch.float16 else tensor
            peak += math.sqrt(wide.numel() * torch.dot(wide, wide).item())
    if squares is not None and squares.numel():
        peak *= math.sqrt(max(1.0, squares.max().item()))
    # Values that underflow when squared are below 1e-19.
    return peak + 1e-9


def _ratio(rule: RowOptimizer) -> float:
    """Return the largest first moment in units of its divisor.

    That is the second moment's root in Adam, by Cauchy and Schwarz, and a geometric series in Adamax.
    """
    if rule.family is Family.ADAMAX:
        return 2 * (1 - rule.beta1) / (1 - rule.beta1 / rule.beta2) if rule.beta1 < rule.beta2 else math.inf
    shrinks = rule.beta1 * rule.beta1 / rule.beta2 if rule.beta2 else 1.0
    if shrinks >= 1:
        return math.inf
    return 2 * _MOST_SHRUNK * (1 - rule.beta1) / math.sqrt((1 - rule.beta2) * (1 - shrinks))


def _is_of_one_history(rule: RowOptimizer, first: Tensor, second: Tensor) -> bool:
    """Return True if ``_ratio`` holds for loaded moments; first moments below 1e-15 are too small to matter."""
    scale = second.float().clamp(min=0)
    scale = scale if rule.family is Family.ADAMAX else scale.sqrt()
    return bool((first.abs().float() <= _ratio(rule) * scale + 1e-15).all())


def _largest(numbers: Tensor) -> float:
    """Return the largest magnitude; NaN if any is NaN. Minimum and maximum are far faster than a norm."""
    if not numbers.numel():
        return 0.0
    least, most = torch.aminmax(numbers)
    return max(abs(least.item()), abs(most.item()))
