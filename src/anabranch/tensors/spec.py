"""``TensorSpec``: the declared shape, dtype and handling of one tensor that crosses a boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tensors.dtypes import dtype_name

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

    >>> TensorSpec(None, 512).check(torch.zeros(4, 7, 512))

    Args:
        shape: sizes of the dimensions after the batch dimension, each an int >= 0, or ``None`` for one that varies
            from call to call: only requests of equal sizes share a batch.
        dtype: the tensor's dtype.
        requires_grad: whether a gradient flows back to it; only floating dtypes can, others are taken as ``False``.
        compression: how its values travel: ``"float16"``, ``"bfloat16"``, ``"int8"`` (blockwise), or ``None`` for as
            they are. Floating dtypes only: ids are never rounded.
        pad: requests of unequal sizes of the one dimension that varies share a batch, filled up with zeros at the end;
            the module gets a bool ``mask`` (rows, longest), true where there are values.

    Raises:
        ValueError: a size that is neither an int >= 0 nor ``None``, an unknown compression, compression of a non-float
            dtype, or ``pad`` without exactly one dimension that varies.

    Source: the batch tensor descriptors of hivemind (Ryabinin and Gusev, "Towards Crowdsourced Training of Large
    Neural Networks using Decentralized Mixture-of-Experts", 2020).
    """

    __slots__ = ("compression", "dtype", "pad", "requires_grad", "shape", "varying")

    shape: tuple[int | None, ...]

    def __init__(
        self,
        *shape: int | None,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = True,
        compression: Compression | None = None,
        pad: bool = False,
    ) -> None:
        for size in shape:
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise ValueError(
                    f"TensorSpec sizes are ints >= 0, or None for any, without the batch dimension, got {size!r} in "
                    f"{shape}"
                )
        if pad and shape.count(None) != 1:
            raise ValueError(f"pad=True needs one dimension that varies, such as TensorSpec(None, 512), got {shape}")
        if compression is not None:
            if compression not in _COMPRESSIONS:
                raise ValueError(f"compression is one of {_COMPRESSIONS} or None, got {compression!r}")
            if not dtype.is_floating_point:
                raise ValueError(f"only floating tensors may be compressed, not {dtype}: its values would change")
        self.varying = tuple(index for index, size in enumerate(shape) if size is None)
        """The dimensions that vary, counted without the batch dimension."""
        self.shape = shape if self.varying else torch.Size(shape)  # type: ignore[arg-type]
        self.dtype = dtype
        self.requires_grad = requires_grad and (dtype.is_floating_point or dtype.is_complex)
        self.compression = compression
        self.pad = pad

    def zeros(self, rows: int, sizes: Sequence[int] = (), *, device: torch.device | str | None = None) -> Tensor:
        """Return a tensor of this spec with ``rows`` rows of zeros, with ``sizes`` for the dimensions that vary."""
        return torch.zeros(rows, *self.with_sizes(sizes), dtype=self.dtype, device=device)

    def with_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the shape, without the batch dimension, with ``sizes`` for the dimensions that vary."""
        if len(sizes) != len(self.varying):
            raise ValueError(f"{self} has {len(self.varying)} dimensions that vary, got sizes {tuple(sizes)}")
        given = iter(sizes)
        return tuple(next(given) if size is None else size for size in self.shape)

    def sizes_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the dimensions that vary in a tensor's ``shape``, whose first ones are the batch."""
        batch = len(shape) - len(self.shape)
        return tuple(shape[batch + dimension] for dimension in self.varying)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if ``shape``, without the batch dimension, is one of this spec's."""
        if not self.varying:
            return shape == self.shape
        return len(shape) == len(self.shape) and all(
            size is None or size == came for size, came in zip(self.shape, shape, strict=True)
        )

    def check(self, tensor: object, name: str = "tensor") -> None:
        """Raise ``SchemaError``, calling the tensor ``name``, unless ``tensor`` is rows of this spec."""
        if isinstance(tensor, Tensor):
            if tensor.ndim and tensor.dtype == self.dtype and self.fits(tensor.shape[1:]):
                return
            came = f"{_show_shape(tensor.shape)} {dtype_name(tensor.dtype)}"
        else:
            came = type(tensor).__name__
        raise SchemaError(f"{name}: expected {self.describe()}, got {came}")

    def describe(self) -> str:
        """Return shape and dtype for messages."""
        sizes = ("any" if size is None else size for size in self.shape)
        return f"{_show_shape(('rows', *sizes))} {dtype_name(self.dtype)}"

    def _key(self) -> tuple[object, ...]:
        return self.shape, self.dtype, self.requires_grad, self.compression, self.pad

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
        if self.pad:
            extras.append("pad=True")
        return f"TensorSpec({', '.join([*map(str, self.shape), *extras])})"


def _show_shape(sizes: tuple[object, ...] | torch.Size) -> str:
    return f"({', '.join(map(str, sizes))})"
