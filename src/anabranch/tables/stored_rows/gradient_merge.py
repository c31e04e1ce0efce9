"""``GradientMerge``: the gradients of repeated rows, added up before a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.tables.kernels.selection import Kernels, KernelThreads
from anabranch.tables.table_spec import TableSpec

__all__ = ["GradientMerge"]

Array = NDArray[Any]


class GradientMerge:
    """Sums of the gradients of each row of ``spec``'s table."""

    def __init__(self, spec: TableSpec, pool: KernelThreads, run: Kernels) -> None:
        self._spec, self._pool, self._kernels = spec, pool, run

    def merge(self, rows: Array, memory: Array, apart: int) -> tuple[Array, Array, Array, Array]:
        """Return the distinct rows, the sum of each one's gradients, and where each first appears.

        Unknown rows, which are -1, are dropped. The fourth result is, for each known one of ``rows``, its index among
        the distinct ones. Gradient ``i`` is at ``memory[i * apart:]``.
        """
        width, source = self._spec.width, np.empty(0, np.int64)
        if self._spec.rows is None and (rows < 0).any():
            source = np.flatnonzero(rows >= 0)
            rows = rows[source]
        buckets = np.empty(1 << (2 * rows.size + 1).bit_length(), np.int64)
        unique, inverse = np.empty_like(rows), np.empty_like(rows)
        count = self._kernels.merge(rows, buckets, unique, inverse)
        merged = np.empty(count * width, memory.dtype)
        self._pool.run(
            lambda first, last: self._kernels.merge_sums(memory, apart, width, source, inverse, merged, first, last),
            count,
            rows.size * width,
        )
        if self._spec.dtype in (torch.bfloat16, torch.float16):  # a gradient has its parameter's dtype
            most = torch.finfo(self._spec.dtype).max  # a sum may pass what float16 holds
            merged = torch.from_numpy(merged).clamp_(-most, most).to(self._spec.dtype).float().numpy()
        first = np.empty(count, np.int64)
        first[inverse[::-1]] = np.arange(rows.size)[::-1]
        return unique[:count], merged, source[first] if source.size else first, inverse
