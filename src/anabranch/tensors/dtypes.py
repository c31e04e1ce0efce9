"""The one table of dtypes: their numbers on the wire, and their names in messages and files.

A dtype crosses as a number or a name from here, so that a peer or a file can name no other.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

# Dtype, number on the wire, name in a safetensors file. A number is never given to another dtype.
_TABLE: tuple[tuple[torch.dtype, int | None, str | None], ...] = (
    (torch.bool, 1, "BOOL"),
    (torch.uint8, 2, "U8"),
    (torch.int8, 3, "I8"),
    (torch.int16, 4, "I16"),
    (torch.int32, 5, "I32"),
    (torch.int64, 6, "I64"),
    (torch.float16, 7, "F16"),
    (torch.bfloat16, 8, "BF16"),
    (torch.float32, 9, "F32"),
    (torch.float64, 10, "F64"),
    (torch.complex64, 11, "C64"),
    (torch.complex128, 12, None),
    (torch.uint16, None, "U16"),
    (torch.uint32, None, "U32"),
    (torch.uint64, None, "U64"),
    (torch.float8_e4m3fn, None, "F8_E4M3"),
    (torch.float8_e5m2, None, "F8_E5M2"),
    (torch.float8_e4m3fnuz, None, None),
    (torch.float8_e5m2fnuz, None, None),
    (torch.complex32, None, None),
)

DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code, _ in _TABLE if code is not None}
"""The dtypes that may cross, by their number on the wire."""

DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}
"""Their numbers."""

SAFETENSORS_NAMES: dict[torch.dtype, str] = {dtype: name for dtype, _, name in _TABLE if name is not None}
"""The names of those that a safetensors file may hold."""

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype, _, _ in _TABLE}


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor.

    One value, or none, counts as contiguous whatever its strides, 0 among them, which no view as bytes accepts.

    >>> as_bytes(torch.ones(()).expand(1)).tolist()
    [0, 0, 128, 63]
    """
    flat = tensor.reshape(-1) if tensor.numel() > 1 else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str, among: Collection[torch.dtype] | None = None) -> torch.dtype:
    """Return the dtype of that name.

    >>> dtype_named("float32")
    torch.float32

    Args:
        name: as ``dtype_name`` gives it.
        among: those to choose from; all of the table by default.

    Raises:
        ValueError: there is none of that name.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None or (among is not None and dtype not in among):
        known = _BY_NAME if among is None else map(dtype_name, among)
        raise ValueError(f"dtype {name!r} is not one of {', '.join(known)}")
    return dtype


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of arithmetic on rows of ``dtype``: float32 for the half types, else the same."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
