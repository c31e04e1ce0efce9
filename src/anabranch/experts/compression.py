"""Tensors on the wire: unchanged, rounded to half precision, or as 8-bit integers with a scale for each block.

Rounding is set in the ``TensorSpec``, which both sides know, so a message does not describe it. Ids are integers and
cannot be rounded. A gradient is sent in the format of its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tensors import TensorSpec, from_blocks, to_blocks
from anabranch.tensors.dtypes import dtype_name
from anabranch.tensors.packing import all_finite
from anabranch.transport import TensorHeader

__all__ = ["BLOCK", "check_parts", "compress", "count_parts", "decompress", "wire_parts"]

BLOCK = 256
"""Values that share a scale under ``int8``: 1.6 % more bytes, and an outlier spoils only its own block."""

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def count_parts(spec: TensorSpec) -> int:
    """Return the number of tensors that carry one of ``spec``."""
    return 2 if spec.compression == "int8" else 1


def wire_parts(spec: TensorSpec, rows: int, sizes: Sequence[int] = ()) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor that carries ``rows`` rows of ``spec``, ``sizes`` where it varies.

    >>> wire_parts(TensorSpec(512, compression="int8"), 3)
    [(torch.int8, (3, 512)), (torch.float32, (6,))]
    """
    shape = (rows, *spec.with_sizes(sizes))
    if spec.compression is None:
        return [(spec.dtype, shape)]
    if spec.compression == "int8":
        count = torch.Size(shape).numel()
        return [(torch.int8, shape), (torch.float32, (-(-count // BLOCK),))]
    return [(_HALVES[spec.compression], shape)]


def compress(tensor: Tensor, spec: TensorSpec) -> list[Tensor]:
    """Return the tensors to send for rows of ``spec``."""
    if spec.compression is None:
        return [tensor]
    tensor = tensor.detach()
    if spec.compression == "int8":
        return list(to_blocks(tensor, BLOCK))
    half = _HALVES[spec.compression]
    # Rounded to the largest number rather than to infinity; NaN and Inf travel, and the other side refuses them.
    limit = torch.finfo(half).max
    rounded = tensor.clamp(-limit, limit).to(half)
    return [rounded if all_finite([tensor]) else torch.where(torch.isfinite(tensor), rounded, tensor.to(half))]


def decompress(parts: Sequence[Tensor], spec: TensorSpec) -> Tensor:
    """Return the rows of ``spec`` that ``compress`` turned into ``parts``, up to rounding."""
    if spec.compression is None:
        return parts[0]
    if spec.compression == "int8":
        return from_blocks(parts[0], parts[1], BLOCK).to(spec.dtype)
    return parts[0].to(spec.dtype)


def check_parts(parts: Sequence[TensorHeader | Tensor], layout: Sequence[tuple[str, TensorSpec]]) -> int:
    """Check a message's tensors, or their headers, against names and specs; returns the number of rows.

    Raises:
        SchemaError: the tensors are not rows of the specs; the message shows the expected and the given.
    """
    rows = parts[0].shape[0] if parts and parts[0].shape else 0
    if len(parts) == len(layout):
        for part, (_, spec) in zip(parts, layout, strict=True):
            shape = part.shape
            if spec.compression is not None or part.dtype is not spec.dtype or not shape or shape[0] != rows:
                break
            if shape[1:] != spec.shape and not spec.fits(shape[1:]):
                break
        else:
            return rows
    count = sum(count_parts(spec) for _, spec in layout)
    if len(parts) != count:
        raise SchemaError(f"expected {count} tensors ({', '.join(name for name, _ in layout)}), got {len(parts)}")
    position = 0
    for name, spec in layout:
        its_shape = tuple(parts[position].shape)
        if spec.varying and not spec.fits(its_shape[1:]):
            raise SchemaError(
                f"{name}: expected {spec.describe()}, got {its_shape} {dtype_name(parts[position].dtype)}"
            )
        for dtype, shape in wire_parts(spec, rows, spec.sizes_of(its_shape)):
            its_dtype, its_shape = parts[position].dtype, tuple(parts[position].shape)
            position += 1
            if its_dtype != dtype or its_shape != shape:
                raise SchemaError(
                    f"{name}: expected {shape} {dtype_name(dtype)}, for {rows} rows, "
                    f"got {its_shape} {dtype_name(its_dtype)}"
                )
    return rows
