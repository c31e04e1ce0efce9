"""Storage of rows: in memory, or in a file that is mapped as far as the address space allows.

A table in memory, or mapped whole, is three arrays that kernels work on directly. A file larger than the address space
may hold (``RLIMIT_AS``) is mapped a window at a time: the rows of one request are copied out into separate arrays,
processed there, and copied back. The files have no names: they extend the machine's memory, and do not outlast the
process.
"""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.tables.kernels.selection import as_array

__all__ = ["FileStorage", "RowStorage"]

Array = NDArray[Any]
_WINDOW = 16 << 20  # bytes
_LINE = 64  # bytes
_LEAST_ROWS = 4096  # rows per window, so that windows of every array begin on a page


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
        self.values, self.stamps, self.sums = (
            _zeros(rows * width, kind) for width, kind in _columns(stride, dtype, with_sums)
        )

    @property
    def rows(self) -> int:
        """The number of rows that there is room for."""
        return len(self.stamps)

    @property
    def whole(self) -> RowStorage | None:
        """All rows in arrays without a copy, or ``None`` if only some are mapped at a time."""
        return self

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows; existing ones keep their places."""
        for name, width in (("values", self.stride), ("stamps", 1), ("sums", int(self.with_sums))):
            old = getattr(self, name)
            new = _zeros(rows * width, old.dtype)
            new[: old.size] = old
            setattr(self, name, new)

    def forget(self, rows: Array) -> None:
        """Make these rows begin again when they are next used."""
        self.stamps[rows] = 0

    @contextmanager
    def resident(
        self, rows: Array, *, changing: bool = True, counted: bool = False
    ) -> Iterator[tuple[RowStorage, Array]]:
        """Arrays that hold ``rows``, and the place of each of ``rows`` in them; -1 for a row of -1.

        Unless ``changing``, writes to them may be lost. What is ``counted`` counts as hits and misses of ``HotRows``.
        """
        yield self, rows

    def bytes(self) -> int:
        """Bytes of all arrays, whether their pages have been touched or not."""
        return self.values.nbytes + self.stamps.nbytes + self.sums.nbytes


class FileStorage:
    """Rows in a file without a name; see ``RowStorage``.

    Args:
        directory: on the disk that is to hold the rows.
        budget: bytes of address space to map at most; by default a quarter of what ``RLIMIT_AS`` leaves.

    Raises:
        OSError: the disk is full, or the directory does not exist.
    """

    def __init__(
        self,
        rows: int,
        stride: int,
        dtype: torch.dtype,
        *,
        with_sums: bool,
        directory: str | os.PathLike[str] | None,
        budget: int | None = None,
    ) -> None:
        self.stride = stride
        self.with_sums = with_sums
        self._dtype = dtype
        self._columns = _columns(stride, dtype, with_sums)
        self._budget = _address_space_left() // 4 if budget is None else budget
        self._files = [_file_without_a_name(self, directory) for _ in self._columns]
        self._windows: OrderedDict[tuple[int, int], Array] = OrderedDict()
        self._mapped = 0
        row_bytes = max(width * kind.itemsize for width, kind in self._columns)
        self._window_rows = max(_LEAST_ROWS, 1 << max(0, (_WINDOW // row_bytes).bit_length() - 1))
        self.whole: RowStorage | None = None
        self.rows = 0
        self.grow(rows)

    def grow(self, rows: int) -> None:
        """Make room for ``rows`` rows; existing ones keep their places."""
        self._windows.clear()
        self._mapped = 0
        self.whole = None
        self.rows = rows
        room = -(-rows // self._window_rows) * self._window_rows
        for file, (width, kind) in zip(self._files, self._columns, strict=True):
            os.ftruncate(file, room * width * kind.itemsize)
        if self.bytes() <= self._budget and rows:
            self.whole = RowStorage(0, self.stride, self._dtype, with_sums=self.with_sums)
            arrays = [self._map(column, 0, rows) for column in range(3)]
            self.whole.values, self.whole.stamps, self.whole.sums = arrays

    def forget(self, rows: Array) -> None:
        """Make these rows begin again when they are next used."""
        if rows.size:
            with self.resident(rows) as (storage, where):
                storage.stamps[where] = 0

    @contextmanager
    def resident(
        self, rows: Array, *, changing: bool = True, counted: bool = False
    ) -> Iterator[tuple[RowStorage, Array]]:
        """Arrays that hold ``rows``, and the place of each of ``rows`` in them; -1 for a row of -1.

        Unless ``changing``, writes to them may be lost. What is ``counted`` counts as hits and misses of ``HotRows``.
        """
        if self.whole is not None:
            yield self.whole, rows
            return
        distinct, inverse = np.unique(rows, return_inverse=True)
        unknown = int(distinct.size > 0 and distinct[0] < 0)
        distinct = distinct[unknown:]
        staged = RowStorage(distinct.size, self.stride, self._dtype, with_sums=self.with_sums)
        arrays = (staged.values, staged.stamps, staged.sums)
        self._copy(distinct, arrays, out=True)
        yield staged, inverse - unknown
        if changing:
            self._copy(distinct, arrays, out=False)

    def _copy(self, rows: Array, arrays: tuple[Array, Array, Array], *, out: bool) -> None:
        edges = np.flatnonzero(np.diff(rows // self._window_rows)) + 1
        for part in np.split(np.arange(rows.size), edges):
            if not part.size:
                continue
            window = int(rows[part[0]]) // self._window_rows
            inside = rows[part] - window * self._window_rows
            for column, (array, (width, _)) in enumerate(zip(arrays, self._columns, strict=True)):
                if width:
                    held = self._window(column, window).reshape(-1, width)
                    mine = array.reshape(-1, width)
                    if out:
                        mine[part] = held[inside]
                    else:
                        held[inside] = mine[part]

    def _window(self, column: int, window: int) -> Array:
        found = self._windows.get((column, window))
        if found is None:
            width, kind = self._columns[column]
            size = self._window_rows * width * kind.itemsize
            while self._windows and self._mapped + size > self._budget:
                _, left = self._windows.popitem(last=False)
                self._mapped -= left.nbytes
            found = self._map(column, window * self._window_rows, self._window_rows)
            self._windows[column, window] = found
            self._mapped += size
        self._windows.move_to_end((column, window))
        return found

    def _map(self, column: int, first: int, rows: int) -> Array:
        width, kind = self._columns[column]
        size = rows * width
        if not size:
            return np.zeros(0, kind)
        # An array over a mapping holds it; the last one to go unmaps it.
        memory = mmap.mmap(self._files[column], size * kind.itemsize, offset=first * width * kind.itemsize)
        return np.frombuffer(memory, kind)

    def bytes(self) -> int:
        """Bytes of all rows; the disk holds only those that were used."""
        return self.rows * sum(width * kind.itemsize for width, kind in self._columns)


def _zeros(size: int, kind: np.dtype[Any]) -> Array:
    """Zeros that begin on a cache line, so that a row of 16 floats is one line and not two.

    ``np.zeros`` gets untouched pages from the system, so a row costs memory only from its first use.
    """
    spare = _LINE // kind.itemsize
    memory = np.zeros(size + spare, kind)
    first = -memory.ctypes.data % _LINE // kind.itemsize
    return memory[first : first + size]


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


def _address_space_left() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return 1 << 62
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * mmap.PAGESIZE
    return max(limit - used, 0)
