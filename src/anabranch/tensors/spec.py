"""``TensorSpec``: the declared shape, dtype and handling of one tensor that crosses a boundary."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tensors.dtypes import dtype_name

__all__ = ["Compression", "TensorSpec"]

Compression = Literal["float16", "bfloat16", "int8"]
_COMPRESSIONS: tuple[Compression, ...] = ("float16", "bfloat16", "int8")


class TensorSpec:
    """Shape and dtype of one tensor of a request, less its batch dimension.

    >>> spec = TensorSpec(512, dtype=torch.float32)
    >>> spec.zeros(4).shape
    torch.Size([4, 512])
    >>> spec.check(torch.zeros(4, 511), "args.0")
    Traceback (most recent call last):
    anabranch.errors.SchemaError: args.0: expected (rows, 512) float32, got (4, 511) float32

    Args:
        shape: sizes of the dimensions after the batch dimension, each an int >= 0.
        dtype: the tensor's dtype.
        requires_grad: whether a gradient flows back to it; only floating dtypes can, others are taken as ``False``.
        compression: how its values travel: ``"float16"``, ``"bfloat16"``, ``"int8"`` (blockwise), or ``None`` for as
            they are. Floating dtypes only: ids are never rounded.

    Raises:
        ValueError: a size that is not an int >= 0, an unknown compression, or compression of a non-float dtype.

    Source: the batch tensor descriptors of hivemind (Ryabinin and Gusev, "Towards Crowdsourced Training of Large
    Neural Networks using Decentralized Mixture-of-Experts", 2020).
    """

    __slots__ = ("compression", "dtype", "requires_grad", "shape")

    def __init__(
        self,
        *shape: int,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = True,
        compression: Compression | None = None,
    ) -> None:
        for size in shape:
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ValueError(f"TensorSpec sizes are ints >= 0 without the batch dimension, got {size!r} in {shape}")
        if compression is not None:
            if compression not in _COMPRESSIONS:
                raise ValueError(f"compression is one of {_COMPRESSIONS} or None, got {compression!r}")
            if not dtype.is_floating_point:
                raise ValueError(f"only floating tensors may be compressed, not {dtype}: its values would change")
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.requires_grad = requires_grad and (dtype.is_floating_point or dtype.is_complex)
        self.compression = compression

    @classmethod
    def like(cls, tensor: Tensor, *, compression: Compression | None = None) -> TensorSpec:
        """Return the spec of ``tensor``, whose dim 0 is the batch."""
        if tensor.ndim == 0:
            raise SchemaError("a tensor of no dimensions has no batch dimension; give it one with tensor[None]")
        return cls(*tensor.shape[1:], dtype=tensor.dtype, requires_grad=tensor.requires_grad, compression=compression)

    def zeros(self, rows: int, *, device: torch.device | str | None = None) -> Tensor:
        """Return a tensor of this spec with ``rows`` rows of zeros."""
        return torch.zeros(rows, *self.shape, dtype=self.dtype, device=device)

    def check(self, tensor: object, name: str = "tensor") -> None:
        """Raise ``SchemaError``, calling the tensor ``name``, unless ``tensor`` is rows of this spec."""
        if isinstance(tensor, Tensor):
            if tensor.ndim and tensor.shape[1:] == self.shape and tensor.dtype == self.dtype:
                return
            came = f"{_show_shape(tensor.shape)} {dtype_name(tensor.dtype)}"
        else:
            came = type(tensor).__name__
        expected = _show_shape(("rows", *self.shape))
        raise SchemaError(f"{name}: expected {expected} {dtype_name(self.dtype)}, got {came}")

    def _key(self) -> tuple[object, ...]:
        return self.shape, self.dtype, self.requires_grad, self.compression

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, TensorSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        extras = [f"dtype={self.dtype}"]
        if not self.requires_grad:
            extras.append("requires_grad=False")
        if self.compression is not None:
            extras.append(f"compression={self.compression!r}")
        return f"TensorSpec({', '.join([*map(str, self.shape), *extras])})"


def _show_shape(sizes: tuple[object, ...] | torch.Size) -> str:
    return f"({', '.join(map(str, sizes))})"
