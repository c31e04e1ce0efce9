"""Tensors that share memory: views of one tensor do, unless their elements lie beside each other.

The halves of ``x.chunk(2, dim=1)`` interleave without sharing an element, so their ranges of addresses do not decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["sharing_pairs"]

_MOST_WORK = 10_000
"""Steps in which NumPy may look for an element that two tensors share; without an answer they count as sharing."""


def sharing_pairs(leaves: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Return the places, the lower one first, of every two dense tensors in ``leaves`` that share memory.

    >>> x = torch.zeros(4, 6)
    >>> list(sharing_pairs([*x.chunk(2, dim=1), "text", x[:, 2:]]))
    [(0, 3), (1, 3)]
    """
    if len(leaves) < 2:
        return
    ranges = [(*found, place) for place, leaf in enumerate(leaves) if (found := _range(leaf)) is not None]
    reaching: list[tuple[int, int]] = []
    for start, end, place in sorted(ranges):
        reaching = [(until, other) for until, other in reaching if until > start]
        for _, other in reaching:
            if _share(leaves[place], leaves[other]):
                yield min(place, other), max(place, other)
        reaching.append((end, place))


def _range(leaf: object) -> tuple[int, int] | None:
    """Return the addresses of its first element and after its last; ``None`` for a leaf without such memory."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return None
    shape, start = leaf.shape, leaf.data_ptr()
    if not start or 0 in shape:
        return None
    last = sum((size - 1) * stride for size, stride in zip(shape, leaf.stride(), strict=True))
    return start, start + (last + 1) * leaf.itemsize


def _share(one: object, other: object) -> bool:
    try:
        return np.shares_memory(
            np.asarray(_Layout(one)),
            np.asarray(_Layout(other)),
            max_work=_MOST_WORK,  # type: ignore[arg-type] # NumPy's types name only its two special values
        )
    except np.exceptions.TooHardError:
        return True


class _Layout:
    """The places of a tensor's elements, for NumPy, which does not read them: they may be on any device."""

    def __init__(self, tensor: object) -> None:
        assert isinstance(tensor, Tensor)
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
        }
