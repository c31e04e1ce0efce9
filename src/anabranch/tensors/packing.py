"""Packing of a message's numbers: one flat tensor for each dtype, rows rounded if the sender requests it.

Each table's and parameter's share follows the previous one. Under ``"bfloat16"`` rows and their gradients are rounded
to half their bytes, under ``"int8"`` to 8 bits with a scale of 8 bits for 16 numbers: a row of 16 is 17 bytes instead
of 64. Numbers above 4.5e18 have no such scale and are refused under ``"int8"``; those below 1.5e-22, or some 200 times
smaller than the largest of their 16, come to 0. An optimizer's state of a row has too wide a range for 8 bits: it
travels as bfloat16 under either. Dense parameters, ids and versions are never rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, cast

import torch
from torch import Tensor

from anabranch.errors import NonFinite, SchemaError
from anabranch.tensors.blocks import from_blocks, to_blocks

Compression = Literal["bfloat16", "int8"]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ORDER = (*FLOATS, torch.int8, torch.uint8)
_DTYPE = attrgetter("dtype")
_BLOCK = 16
_UNIT = 144
_NO_NUMBER = 255
_SCALES = torch.cat(
    [
        torch.zeros(1, device="cpu"),
        torch.exp2((torch.arange(1, 255, device="cpu") - _UNIT) / 2),
        torch.tensor([torch.nan], device="cpu"),
    ]
)
"""Value of a scale's byte: powers of the root of 2, from 3e-22 to 4e16; 0; and NaN for a block with NaN or Inf."""
_LARGEST_SCALE = _SCALES[_NO_NUMBER - 1].item()
_LARGEST_CODE = 127
_MOST = torch.finfo(torch.bfloat16).max
_MOST_OF_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Share:
    """One table's or parameter's share of the numbers.

    Attributes:
        dtype, shape: of the tensor.
        kind: rows that may be rounded, rows with their optimizer's state, or numbers that are exact.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: Literal["exact", "rows", "states"] = "exact"

    def travels_as(self, compression: Compression | None) -> torch.dtype:
        """Return the dtype of its numbers on the wire."""
        if compression is None or self.kind == "exact":
            return self.dtype
        if compression == "int8" and self.kind == "rows":
            return torch.int8
        return self.dtype if self.dtype == torch.float16 else torch.bfloat16

    def bytes(self, compression: Compression | None) -> int:
        """Return the number of bytes of its numbers in the message."""
        kind = self.dtype if compression is None else self.travels_as(compression)
        count = math.prod(self.shape)
        return count * kind.itemsize + (-(-count // _BLOCK) if kind == torch.int8 else 0)


def check_compression(given: str | None) -> Compression | None:
    """Return ``given`` if it is a compression; else raise ``ValueError``."""
    if given not in (None, "bfloat16", "int8"):
        raise ValueError(f"rows are sent uncompressed (None), as 'bfloat16' or as 'int8', not as {given!r}")
    return cast("Compression | None", given)


def expected(
    shares: Iterable[Share], compression: Compression | None = None
) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor that carries these shares.

    >>> expected([Share(torch.float32, (10, 16), "rows"), Share(torch.float64, (3,))], "int8")
    [(torch.float64, (3,)), (torch.int8, (160,)), (torch.uint8, (10,))]
    """
    sizes: dict[torch.dtype, int] = {}
    for share in shares:
        kind = share.dtype if compression is None else share.travels_as(compression)
        sizes[kind] = sizes.get(kind, 0) + math.prod(share.shape)
    if torch.int8 in sizes:
        sizes[torch.uint8] = -(-sizes[torch.int8] // _BLOCK)
    return [(dtype, (sizes[dtype],)) for dtype in _ORDER if dtype in sizes]


def join(tensors: Iterable[Tensor], shares: Sequence[Share], compression: Compression | None = None) -> list[Tensor]:
    """Join ``tensors``, with these shares, into the tensors to send.

    Raises:
        NonFinite: a number is too large for ``"int8"``.
    """
    alike: dict[torch.dtype, list[Tensor]] = {}
    for tensor, share in zip(tensors, shares, strict=True):
        kind = share.dtype if compression is None else share.travels_as(compression)
        flat = tensor.detach().reshape(-1)
        if kind == torch.bfloat16 and flat.dtype != kind:
            flat = _in_bfloat16(flat)
        alike.setdefault(kind, []).append(_in_float32(flat) if kind == torch.int8 else flat)
    whole = {kind: parts[0].contiguous() if len(parts) == 1 else torch.cat(parts) for kind, parts in alike.items()}
    found = [whole[dtype] for dtype in FLOATS if dtype in whole]
    if torch.int8 in whole:
        found += _in_blocks(whole[torch.int8])
    return found


def split(flat: Sequence[Tensor], shares: Sequence[Share], compression: Compression | None = None) -> list[Tensor]:
    """Split ``flat`` into the tensors that ``join`` got, up to rounding; views of its memory where nothing was rounded.

    Raises:
        SchemaError: the numbers are not as many, or not of the dtypes, that the shares need.
    """
    needed = expected(shares, compression)
    came = [(tensor.dtype, tuple(tensor.shape)) for tensor in flat]
    if came != needed:
        raise SchemaError(f"numbers of {needed} expected, got {came}")
    return views(flat, shares, compression)


def views(flat: Sequence[Tensor], shares: Sequence[Share], compression: Compression | None = None) -> list[Tensor]:
    """``split`` of tensors that are known to be as ``expected``."""
    whole = dict(zip(map(_DTYPE, flat), flat, strict=True))
    if torch.int8 in whole:
        whole[torch.int8] = from_blocks(whole[torch.int8], _SCALES[whole[torch.uint8].long()], _BLOCK)
    places = dict.fromkeys(whole, 0)
    found = []
    for share in shares:
        kind = share.dtype if compression is None else share.travels_as(compression)
        first, places[kind] = places[kind], places[kind] + math.prod(share.shape)
        mine = whole[kind][first : places[kind]]
        if kind != share.dtype == torch.float16:  # which the rounding may have passed
            mine = mine.clamp(-_MOST_OF_HALF, _MOST_OF_HALF)
        found.append(mine.to(share.dtype).view(share.shape))
    return found


def all_finite(flat: Sequence[Tensor]) -> bool:
    """Return True if the numbers that travel as ``flat`` are finite."""
    for tensor in flat:
        if tensor.dtype == torch.uint8 and bool((tensor == _NO_NUMBER).any()):
            return False
        # A finite sum proves it at once.
        if tensor.is_floating_point() and not math.isfinite(tensor.sum().item()) and not torch.isfinite(tensor).all():
            return False
    return True


def largest_gradient(dtype: torch.dtype) -> float:
    """Return the magnitude above which servers refuse a gradient: the square of a sum of some would not be finite."""
    return {torch.float16: 6e4, torch.float64: 1e150}.get(dtype, 1e18)


def acceptable(flat: Sequence[Tensor], compression: Compression | None = None) -> bool:
    """Return True if gradients that travel, or are to travel, as ``flat`` are finite and none is too large."""
    for tensor in flat:
        if tensor.dtype == torch.uint8 and bool((tensor == _NO_NUMBER).any()):
            return False
        if tensor.is_floating_point() and tensor.numel():
            limit = largest_gradient(torch.bfloat16 if compression == "bfloat16" else tensor.dtype)
            limit = _LARGEST_SCALE * _LARGEST_CODE if compression == "int8" else limit
            # One vectorised pass; PyTorch takes fifty times as long for the infinity norm. NaN is passed on.
            least, most = torch.aminmax(tensor.detach())
            if not (-limit <= least.item() and most.item() <= limit):
                return False
    return True


def _in_bfloat16(flat: Tensor) -> Tensor:
    """Round to bfloat16; saturate overflow; keep NaN and Inf."""
    rounded = flat.clamp(-_MOST, _MOST).to(torch.bfloat16)
    return rounded if all_finite([flat]) else torch.where(torch.isfinite(flat), rounded, flat.to(torch.bfloat16))


def _in_float32(flat: Tensor) -> Tensor:
    """Round to float32; saturate overflow, which is too large for 8 bits in any case; keep NaN and Inf."""
    if flat.dtype != torch.float64:
        return flat.float()
    most = torch.finfo(torch.float32).max
    return torch.where(torch.isfinite(flat), flat.clamp(-most, most), flat).float()


def _in_blocks(flat: Tensor) -> list[Tensor]:
    said: list[Tensor] = []

    def representable(scales: Tensor) -> Tensor:
        if scales.numel() and scales.max().item() > _LARGEST_SCALE:
            _refuse_large(flat)
        said.append(_bytes_of(scales))
        return _SCALES[said[0].long()]

    codes, _ = to_blocks(flat, _BLOCK, representable)
    return [codes, *said]


def _refuse_large(flat: Tensor) -> None:
    """Raise if a finite number is too large; NaN and Inf travel, and the remote side refuses them."""
    limit = _LARGEST_SCALE * _LARGEST_CODE
    largest = torch.where(torch.isfinite(flat), flat, 0.0).abs().amax().item()
    if largest > limit:
        raise NonFinite(
            f'rows hold a number of magnitude {largest:.4g}, and compression="int8" carries at most {limit:.4g}; use '
            '"bfloat16" or None (compression= of a ParameterClient, row_compression= of an Executor)'
        )


def _bytes_of(scales: Tensor) -> Tensor:
    """Return the smallest representable scales that are not below these."""
    steps = (torch.ceil(2 * torch.log2(scales)) + _UNIT).clamp(1, _NO_NUMBER - 1)
    steps = torch.where(torch.isfinite(scales), steps, _NO_NUMBER)
    return torch.where(scales == 0, 0, steps).to(torch.uint8)
