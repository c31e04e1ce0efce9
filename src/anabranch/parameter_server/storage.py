"""Where rows lie: one flat array of rows with their states, one of stamps, and a number a row where a rule needs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.parameter_server.kernels import as_array

__all__ = ["RowStorage"]

Array = NDArray[Any]


class RowStorage:
    """Rows in memory.

    Attributes:
        values: row ``r`` is ``values[r * stride:(r + 1) * stride]``: weights, then states; bfloat16 as ``uint16``.
        stamps: for each row 0 if it has not begun, else 1 + the step that it was last brought up to.
        sums: row-wise Adagrad's number a row, empty for other rules.
    """

    def __init__(self, rows: int, stride: int, dtype: torch.dtype, *, with_sums: bool) -> None:
        self.stride = stride
        self._kind = as_array(torch.empty(0, dtype=dtype)).dtype
        self._sums_kind = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
        self._with_sums = with_sums
        # np.zeros asks the system for untouched pages, so a row costs memory from its first use on.
        self.values: Array = np.zeros(rows * stride, self._kind)
        self.stamps: Array = np.zeros(rows, np.int64)
        self.sums: Array = np.zeros(rows if with_sums else 0, self._sums_kind)

    @property
    def rows(self) -> int:
        """How many rows there is room for."""
        return len(self.stamps)

    def grow(self, rows: int) -> None:
        """Makes room for ``rows`` rows; those that are there keep their places."""
        for name, size in (("values", rows * self.stride), ("stamps", rows), ("sums", rows * self._with_sums)):
            old = getattr(self, name)
            new = np.zeros(size, old.dtype)
            new[: old.size] = old
            setattr(self, name, new)

    def bytes(self) -> int:
        """Bytes of all arrays, whether their pages have been touched or not."""
        return self.values.nbytes + self.stamps.nbytes + self.sums.nbytes
