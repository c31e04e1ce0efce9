"""Storage of rows: in memory, or in a file that extends the machine's memory and does not outlast the process."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.tables.kernels.selection import as_array

Array = NDArray[Any]
_LINE = 64  # bytes


class RowStorage:
    """Rows in memory.

    Attributes:
        values: row ``r`` is ``values[r * stride:(r + 1) * stride]``: weights, then states; bfloat16 as ``uint16``.
        stamps: for each row 0 if it is not initialised, else 1 + the step it is up to date with.
        sums: row-wise Adagrad's value per row, empty for other rules.
    """

    def __init__(self, rows: int, stride: int, dtype: torch.dtype, *, with_sums: bool) -> None:
        self.stride = stride
        self.with_sums = with_sums
        self._columns = _columns(stride, dtype, with_sums)
        self.values, self.stamps, self.sums = (
            self._new(column, rows * width) for column, (width, _) in enumerate(self._columns)
        )

    @property
    def rows(self) -> int:
        """The number of rows that there is room for."""
        return len(self.stamps)

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows; existing ones keep their places."""
        for column, (name, (width, _)) in enumerate(zip(("values", "stamps", "sums"), self._columns, strict=True)):
            old = getattr(self, name)
            new = self._new(column, rows * width)
            new[: old.size] = old
            setattr(self, name, new)

    def _new(self, column: int, size: int) -> Array:
        """Zeros that begin on a cache line, so that a row of 16 floats is one line and not two.

        ``np.zeros`` gets untouched pages from the system, so a row costs memory only from its first use.
        """
        kind = self._columns[column][1]
        memory = np.zeros(size + _LINE // kind.itemsize, kind)
        first = -memory.ctypes.data % _LINE // kind.itemsize
        return memory[first : first + size]

    def bytes(self) -> int:
        """Bytes of all arrays, whether their pages have been touched or not."""
        return self.values.nbytes + self.stamps.nbytes + self.sums.nbytes


class FileStorage(RowStorage):
    """Rows in files without names, mapped whole; the disk holds only rows that were used.

    Args:
        directory: on the disk that is to hold the rows.

    Raises:
        OSError: the disk is full, or the directory does not exist.
    """

    def __init__(
        self, rows: int, stride: int, dtype: torch.dtype, *, with_sums: bool, directory: str | os.PathLike[str] | None
    ) -> None:
        self._files = [_file_without_a_name(self, directory) for _ in range(3)]
        super().__init__(rows, stride, dtype, with_sums=with_sums)

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows: the files are mapped anew, nothing is copied."""
        self.values, self.stamps, self.sums = (
            self._new(column, rows * width) for column, (width, _) in enumerate(self._columns)
        )

    def _new(self, column: int, size: int) -> Array:
        kind = self._columns[column][1]
        if not size:
            return np.zeros(0, kind)
        os.ftruncate(self._files[column], size * kind.itemsize)
        # An array over a mapping holds it; the last one to go unmaps it.
        return np.frombuffer(mmap.mmap(self._files[column], size * kind.itemsize), kind)


def _file_without_a_name(owner: FileStorage, directory: str | os.PathLike[str] | None) -> int:
    """Return the descriptor of an unnamed file that is freed with ``owner``."""
    with tempfile.TemporaryFile(dir=directory) as file:
        descriptor = os.dup(file.fileno())
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def _columns(stride: int, dtype: torch.dtype, with_sums: bool) -> list[tuple[int, np.dtype[Any]]]:
    """Values per row, and their type, of values, stamps and sums."""
    sums = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
    values = as_array(torch.empty(0, dtype=dtype, device="cpu")).dtype
    return [(stride, values), (1, np.dtype(np.int64)), (int(with_sums), sums)]
