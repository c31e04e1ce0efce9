"""Memory for received tensors: freed memory is reused for the next ones.

Fresh memory of some megabytes costs a page fault every four kilobytes.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from anabranch.tensors.dtypes import dtype_named

__all__ = ["Buffers"]

_SMALL_BYTES = 1 << 16


class Buffers:
    """The buffers of one receiving thread; tensors in them may be freed on any thread.

    >>> buffers = Buffers()
    >>> x = buffers.empty("float32", [1 << 15])
    >>> address = x.data_ptr()
    >>> del x
    >>> buffers.empty("float64", [1 << 14]).data_ptr() == address
    True
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._returned: deque[np.ndarray] = deque()  # by finalizers, at any moment: only an append is safe

    def empty(self, dtype_name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor of that dtype and shape, with arbitrary contents."""
        dtype = dtype_named(dtype_name)
        size = prod(shape) * dtype.itemsize
        if size < _SMALL_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = self._take(size)
        mine = memory[:size]
        weakref.finalize(mine, self._returned.append, memory).atexit = False
        return torch.from_numpy(mine).view(dtype).view(shape)

    def _take(self, size: int) -> np.ndarray:
        while self._returned:
            self._free.append(self._returned.popleft())
        for index, memory in enumerate(self._free):
            if size <= memory.size <= 4 * size:
                return self._free.pop(index)
        return np.empty(-(-size // _SMALL_BYTES) * _SMALL_BYTES, dtype=np.uint8)
