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
from anabranch.tensors.dtypes import DTYPES, dtype_name
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


def check_parts(headers: Sequence[TensorHeader], layout: Sequence[tuple[str, TensorSpec]]) -> int:
    """Check the headers of a message's tensors against names and specs; returns the number of rows.

    Raises:
        SchemaError: the tensors are not rows of the specs; the message shows the expected and the given.
    """
    rows = headers[0].shape[0] if headers and headers[0].shape else 0
    if len(headers) == len(layout):
        for header, (_, spec) in zip(headers, layout, strict=True):
            if (
                spec.compression is not None
                or DTYPES[header.code] is not spec.dtype
                or (header.shape != (rows, *spec.shape) if not spec.varying else not _fits(spec, rows, header.shape))
            ):
                break
        else:
            return rows
    came = [(header.dtype, tuple(header.shape)) for header in headers]
    return _check(came, [spec for _, spec in layout], [name for name, _ in layout])


def _fits(spec: TensorSpec, rows: int, shape: tuple[int, ...]) -> bool:
    return shape[:1] == (rows,) and spec.fits(shape[1:])


def _check(
    came: Sequence[tuple[torch.dtype, tuple[int, ...]]], specs: Sequence[TensorSpec], names: Sequence[str]
) -> int:
    rows = came[0][1][0] if came and came[0][1] else 0
    count = sum(map(count_parts, specs))
    if len(came) != count:
        raise SchemaError(f"expected {count} tensors ({', '.join(names)}), got {len(came)}")
    position = 0
    for spec, name in zip(specs, names, strict=True):
        its_shape = came[position][1]
        if spec.varying and not spec.fits(its_shape[1:]):
            raise SchemaError(f"{name}: expected {spec.describe()}, got {its_shape} {dtype_name(came[position][0])}")
        for dtype, shape in wire_parts(spec, rows, spec.sizes_of(its_shape)):
            its_dtype, its_shape = came[position]
            position += 1
            if its_dtype != dtype or its_shape != shape:
                raise SchemaError(
                    f"{name}: expected {shape} {dtype_name(dtype)}, for {rows} rows, "
                    f"got {its_shape} {dtype_name(its_dtype)}"
                )
    return rows
