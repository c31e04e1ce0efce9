"""Clipping by the norm of all gradients together, or by each element's value, sparse ones included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_gradients", "clip_scale", "clip_values", "norm_of"]


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients of this ``norm``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, *, elsewhere: float | None = None) -> Tensor:
    """Scales every ``.grad`` in place so that their norm together is at most ``max_norm``; returns the norm before.

    Bitwise equal to ``torch.nn.utils.clip_grad_norm_``, which refuses sparse gradients; a sparse one counts with
    its rows, duplicates merged.

    Args:
        parameters: those with a gradient count.
        max_norm: the largest norm that all gradients may have together.
        elsewhere: the sum of squares of gradients that are not here, and count too.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    sparse = any(parameter.grad.is_sparse for parameter in parameters if parameter.grad is not None)
    if elsewhere is None and not sparse:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    values = _merged(parameters)
    total = _norm(values, elsewhere)
    scale = clip_scale(total, max_norm)
    for value in values:
        value.mul_(scale.to(value.device))
    return total


def clip_values(parameters: Iterable[Tensor], bound: float) -> None:
    """Clamp every element of every ``.grad`` to at most ``bound`` in size, as ``torch.nn.utils.clip_grad_value_``."""
    for value in _merged(parameters):
        value.clamp_(-bound, bound)


def norm_of(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of every ``.grad`` together."""
    return _norm(_merged(parameters))


def _norm(values: list[Tensor], elsewhere: float | None = None) -> Tensor:
    """Return the norm of all ``values`` together with the sum of squares ``elsewhere``."""
    total = torch.nn.utils.get_total_norm(values) if values else torch.zeros((), device="cpu")
    return total if elsewhere is None else (total.double().square() + elsewhere).sqrt()


def _merged(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the elements of every ``.grad``, in its own memory; a sparse one has its duplicates merged."""
    values: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
        values.append(gradient._values() if gradient.is_sparse else gradient)
    return values
