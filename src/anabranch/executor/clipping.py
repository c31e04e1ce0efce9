"""Clipping by the norm of all gradients together, sparse ones included."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_gradients"]


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales every ``.grad`` in place so that their norm together is at most ``max_norm``; returns the norm before.

    Bit for bit what ``torch.nn.utils.clip_grad_norm_`` does, which refuses sparse gradients; a sparse one counts with
    its rows, duplicates merged.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not any(parameter.grad.is_sparse for parameter in parameters if parameter.grad is not None):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    values: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
            values.append(gradient._values())
        else:
            values.append(gradient)
    total = torch.nn.utils.get_total_norm(values)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for value in values:
        value.mul_(scale.to(value.device))
    return total
