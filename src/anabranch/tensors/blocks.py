"""Tensors that may be rounded on their way: to half types, or to 8-bit integers that share a scale a block."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def to_blocks(
    tensor: Tensor, block: int, scale: Callable[[Tensor], Tensor] = lambda scales: scales
) -> tuple[Tensor, Tensor]:
    """Codes of the tensor's shape, and the scale of each ``block`` of its numbers in order.

    >>> codes, scales = to_blocks(torch.tensor([1.0, -2.54, 0.0]), 2)
    >>> codes, scales
    (tensor([  50, -127,    0], dtype=torch.int8), tensor([0.0200, 0.0000]))

    Args:
        tensor: floats.
        block: numbers that share a scale.
        scale: chooses the scales, float32, given the least that will do; numbers beyond a smaller one are cut off.
    """
    flat = tensor.reshape(-1).float()
    blocks = -(-flat.numel() // block)
    padded = torch.nn.functional.pad(flat, (0, blocks * block - flat.numel())).view(blocks, block)
    scales = scale(padded.abs().amax(dim=1) / 127 if blocks else padded.new_zeros(0))
    codes = (padded / torch.where(scales == 0, 1.0, scales)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes.reshape(-1)[: flat.numel()].reshape(tensor.shape), scales


def from_blocks(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return the float32 numbers that ``to_blocks`` made ``codes`` and ``scales`` of, up to rounding."""
    if codes.numel() == len(scales) * block:
        return (codes.reshape(-1, block) * scales[:, None]).reshape(codes.shape)
    per_value = scales.repeat_interleave(block)[: codes.numel()]
    return codes.float() * per_value.reshape(codes.shape)


def in_half(tensor: Tensor, half: torch.dtype) -> Tensor:
    """Round to a half type: overflow to its largest number; NaN and Inf travel, and the other side refuses them."""
    limit = torch.finfo(half).max
    rounded = tensor.clamp(-limit, limit).to(half)
    # A finite sum proves it in one pass.
    finite = math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
    return rounded if finite else torch.where(torch.isfinite(tensor), rounded, tensor.to(half))
