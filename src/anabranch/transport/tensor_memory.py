"""A tensor's memory as bytes: sent without a copy, and received in its final memory."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.tensors.dtypes import DTYPE_CODES

__all__ = ["bytes_of", "check_bools", "dense_on_cpu", "plain_bytes"]

# Dtypes that Python's memoryview knows: their bytes are read without another tensor.
_PLAIN = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8})


def dense_on_cpu(tensor: Tensor) -> Tensor:
    """``tensor``, or where it is sparse, strided, conjugated or on a device, a plain copy of it in main memory.

    Raises:
        TypeError: its layout or dtype cannot be sent.
    """
    if (
        tensor.dtype in DTYPE_CODES
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        return tensor
    if tensor.is_nested:
        raise TypeError("a nested tensor cannot cross a boundary; send torch.nested.to_padded_tensor(tensor, 0.0)")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no values that could cross a boundary")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"only strided tensors cross a boundary, got {tensor.layout}; send indices and values separately"
        )
    if tensor.dtype not in DTYPE_CODES:
        raise TypeError(f"{tensor.dtype} cannot cross a boundary; allowed are {', '.join(map(str, DTYPE_CODES))}")
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def plain_bytes(tensor: Tensor) -> memoryview | None:
    """``bytes_of(dense_on_cpu(tensor))`` of a tensor that numpy takes as it is; ``None`` if it does not.

    numpy refuses tensors on a device, conjugated or negated, so these need not be tested one by one.
    """
    if (
        tensor.dtype not in _PLAIN
        or tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or not tensor.is_contiguous()
    ):
        return None
    try:
        return tensor.numpy().data.cast("B")
    except (RuntimeError, TypeError):
        return None


def bytes_of(tensor: Tensor) -> memoryview:
    r"""Return the memory of a contiguous tensor on the CPU, writable, without a copy.

    >>> memory = bytes_of(torch.tensor([1, 2], dtype=torch.int16))
    >>> bytes(memory)
    b'\x01\x00\x02\x00'
    """
    if tensor.dtype in _PLAIN and tensor.numel() > 1:
        return tensor.numpy().data.cast("B")
    # A tensor of one value or none counts as contiguous whatever its strides, even 0, which no view as bytes accepts.
    flat = tensor.reshape(-1) if tensor.numel() > 1 else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def check_bools(tensor: Tensor) -> bool:
    """Return True if a bool tensor from outside holds only the bytes 0 and 1; other bytes break torch's kernels."""
    return tensor.numel() == 0 or bool(tensor.reshape(-1).view(torch.uint8).max() <= 1)
