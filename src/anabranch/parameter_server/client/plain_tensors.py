"""The kinds of tensors that tables and parameters accept, and one error message for every other kind."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.errors import SchemaError

__all__ = ["check_plain"]


def check_plain(tensor: Tensor, what: str) -> None:
    """Raise for a tensor that is not dense, real and in memory: converting it would lose something or fail.

    >>> check_plain(torch.ones(2), "the gradient of w")
    >>> check_plain(torch.ones(2, dtype=torch.complex64), "the gradient of w")
    Traceback (most recent call last):
    ...
    anabranch.errors.SchemaError: the gradient of w is torch.complex64; servers keep real numbers; give \
torch.view_as_real(tensor)

    Raises:
        TypeError: no tensor.
        SchemaError: a complex, sparse, quantised, nested or meta tensor; the message names a replacement.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(tensor).__name__}; use torch.as_tensor")
    if tensor.is_nested:
        raise SchemaError(f"{what} is a nested tensor; give torch.nested.to_padded_tensor(tensor, 0.0)")
    if tensor.layout is not torch.strided:
        raise SchemaError(f"{what} is {tensor.layout}; give its ids and rows to sparse_push, or tensor.to_dense()")
    if tensor.is_quantized:
        raise SchemaError(f"{what} is quantised ({tensor.dtype}); give tensor.dequantize()")
    if tensor.is_complex():
        raise SchemaError(f"{what} is {tensor.dtype}; servers keep real numbers; give torch.view_as_real(tensor)")
    if tensor.is_meta:
        raise SchemaError(f"{what} is on the meta device and has no values; give a tensor that has values")
