"""Finding gradients that are not finite, at little cost where all of them are."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from anabranch.choices import listed
from anabranch.errors import NonFinite

__all__ = ["all_finite", "nonfinite_error", "nonfinite_names"]

_LARGE = 1 << 15  # elements of a tensor on the CPU that a sum, which only reads, checks faster


def all_finite(gradients: list[Tensor], *, own: bool = True) -> bool:
    """Return True if all are finite; False may also mean that finite numbers overflowed in their sum.

    Args:
        gradients: of sparse ones, the rows count.
        own: their memory is not shared, like that of ``.grad``; small ones are then checked by an operation that writes
            back the values it reads, in a third of the time.
    """
    if not gradients:
        return True
    first = gradients[0]
    device, dtype = first.device, first.dtype
    for gradient in gradients:
        if gradient.is_sparse or gradient.requires_grad:
            return all_finite([*map(_values, gradients)], own=own)
        if gradient.device != device or gradient.dtype is not dtype:
            kind = device, dtype
            alike = [gradient for gradient in gradients if (gradient.device, gradient.dtype) == kind]
            others = [gradient for gradient in gradients if (gradient.device, gradient.dtype) != kind]
            return all_finite(alike, own=own) and all_finite(others, own=own)
    if not own or not first.is_floating_point():
        return _sums_finite(gradients)
    if first.is_cpu and max(map(Tensor.numel, gradients)) > _LARGE:
        if not _sums_finite(gradient for gradient in gradients if gradient.numel() > _LARGE):
            return False
        gradients = [gradient for gradient in gradients if gradient.numel() <= _LARGE]
        if not gradients:
            return True
    found, one = _scratch.on(first.device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, one)
    except RuntimeError:  # memory that overlaps itself, assigned to .grad by hand
        return False
    if found.item():
        found.zero_()
        return False
    return True


def _sums_finite(gradients: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(gradient.sum())) for gradient in gradients)


def nonfinite_names(gradients: Iterable[tuple[str, Tensor]], *, own: bool = True) -> list[str]:
    """Return the names of the gradients that hold NaN or an infinity; of sparse ones, the rows count.

    >>> nonfinite_names([("weight", torch.ones(2)), ("bias", torch.tensor([1.0, float("nan")]))])
    ['bias']

    Args:
        gradients: with their names; a name may come several times.
        own: as for ``all_finite``.
    """
    named = list(gradients)
    if all_finite([gradient for _, gradient in named], own=own):
        return []
    return list(dict.fromkeys(name for name, gradient in named if not bool(torch.isfinite(_values(gradient)).all())))


def nonfinite_error(names: Iterable[str], step: int) -> NonFinite:
    """Return the error of a step whose gradients are not finite."""
    return NonFinite(
        f"the gradients of {listed(list(names))} hold NaN or an infinity after {step} optimizer "
        "steps; nothing was updated. Look at the batch and the loss (torch.autograd.set_detect_anomaly(True) names the "
        "operation), lower the learning rate, or give the TrainStep skip_nonfinite=True to skip such steps"
    )


def _values(gradient: Tensor) -> Tensor:
    # Not coalesced: a sum of finite rows that overflows is the optimizer's own.
    values = gradient._values() if gradient.is_sparse else gradient
    return values.detach() if values.requires_grad else values


class _Scratch(threading.local):
    """For each device a flag that a check sets to 1 and its reader resets, and the factor 1."""

    def __init__(self) -> None:
        self.numbers: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self.numbers:
            self.numbers[device] = torch.zeros((), device=device), torch.ones((), device=device)
        return self.numbers[device]


_scratch = _Scratch()
