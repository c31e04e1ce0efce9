"""``RowSnapshot``: rows of tables as of one moment, read a piece at a time while the tables change.

::

    begin, under the lock:    nothing is copied; of each row a bit will say that it was read
    the reader, piece by piece:  lock; copy the next rows that were not read yet; unlock; hand them on
    whoever changes a row:    copies it first, if it was not read yet, into one of a few buffers, which the reader takes
                              first; if none is free, writes one to a file without a name, which the reader reads later

So each row is read once, as it was at the beginning, whoever comes first. Nothing depends on what a change is: a push,
steps that were missed, an admission, an eviction, rows of a checkpoint. Blocks of a table that is dropped stay as they
are until the snapshot has ended. A change waits for one write at most, and never for the reader.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.errors import CheckpointError
from anabranch.tables.arena import Arena
from anabranch.tables.kernels.rows import as_tensor, keep
from anabranch.tables.kernels.vocabulary import BLOCK
from anabranch.tables.row_block import Piece, RowBlock
from anabranch.tables.table import Table

Array = NDArray[Any]
_BUFFER = 4 << 20  # bytes copied under the lock at once
_BUFFERS = 8
_MARKS = 3  # words beside each row: its table, and its usage


@dataclass(slots=True)
class _Part:
    """One arena: of its blocks' rows those that were read, and the tables; ``buffer`` has ``count`` rows that have
    changed since.
    """

    arena: Arena
    owner: Array
    written: Array
    next: int = 0
    buffer: Array | None = None
    count: int = 0

    @property
    def limit(self) -> int:
        return self.owner.size * BLOCK

    def keep(self, rows: Array, buffer: Array, count: int) -> tuple[int, int]:
        arena, (out, marks) = self.arena, self.views(buffer)
        done, count = keep(
            rows, self.limit, self.written, self.owner, arena.words, arena.pitch, arena.usage, out, marks, count
        )
        return done, count

    def room(self, buffer: Array) -> int:
        return buffer.size // (int(self.arena.pitch) + _MARKS)

    def views(self, buffer: Array) -> tuple[Array, Array]:
        pitch, room = int(self.arena.pitch), self.room(buffer)
        return buffer[: room * pitch], buffer[room * pitch : room * (pitch + _MARKS)].reshape(room, _MARKS)

    def piece(self, buffer: Array, count: int) -> Piece:
        """Rows of a buffer in the form for a checkpoint."""
        arena, (words, marks) = self.arena, self.views(buffer)
        rows = np.argsort(marks[:count, 0], kind="stable")
        heads, weights, states = (part[rows] for part in arena.parts(words))
        usage = marks[rows if arena.usage.size else rows[:0], 1:]
        tables, counts = np.unique(marks[:count, 0], return_counts=True)
        parts = [heads[:, 0], weights, states, heads[:, 1], usage]
        dtypes = [torch.int64, arena.dtype, arena.state_dtype, torch.int64, torch.int64]
        return Piece((tables - 1).tolist(), counts.tolist(), RowBlock(*map(as_tensor, parts, dtypes)))


class RowSnapshot:
    """An iterator over all rows of ``tables`` as they were when it was made, which was under ``lock``.

    >>> from threading import RLock
    >>> from anabranch.tables import Constant, Family, RowOptimizer, TableSpec
    >>> table = Table(TableSpec("t", 4, 1, initial=Constant(1.0)), RowOptimizer(Family.SGD, lr=1.0))
    >>> table.push(torch.tensor([1, 3]), torch.zeros(2, 1))
    >>> lock = RLock()
    >>> with lock:
    ...     snapshot = RowSnapshot([table], lock)
    >>> with lock:
    ...     table.push(torch.tensor([1]), torch.ones(1, 1))
    >>> [(piece.rows.ids.tolist(), piece.rows.weights.tolist()) for piece in snapshot]
    [([3], [[1.0]]), ([1], [[1.0]])]

    Args:
        tables: whose rows are read.
        lock: held by whoever changes them.
        scratch: the directory of the file for what a slow reader has not taken yet.
        seconds: it ends so long after ``touch``, or the last piece.
        buffer, buffers: bytes of a buffer, and their number.

    Attributes:
        spills: changes that waited for a write.
        piece_bytes: the most that one piece has.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        lock: AbstractContextManager[object],
        scratch: str | os.PathLike[str] | None = None,
        *,
        seconds: float = math.inf,
        buffer: int = _BUFFER,
        buffers: int = _BUFFERS,
    ) -> None:
        self.spills = 0
        self._lock, self._scratch, self._seconds = lock, scratch, seconds
        self._file: BinaryIO | None = None
        self._closed, self._fault = False, ""
        self._parts = []
        for arena in {id(table.arena): table.arena for table in tables}.values():
            place = np.zeros(len(arena.facts), np.int32)  # 1 + the table's place in ``tables``
            for k, table in enumerate(tables):
                if table.arena is arena:
                    place[table.number] = k + 1
            written = np.zeros(arena.taken * BLOCK // 8, np.uint8)
            self._parts.append(_Part(arena, place[arena.owner[: arena.taken]], written))
        longest = max((int(part.arena.pitch) + _MARKS for part in self._parts), default=1)
        self._words, self._room = max(buffer // 8, longest), buffers
        self.piece_bytes = 8 * self._words
        self._free: list[Array] = []
        self._full: deque[tuple[_Part, Array, int]] = deque()
        self._spilled: deque[tuple[_Part, int, int]] = deque()
        self._own = np.empty(self._words, np.int64)  # the reader's
        self._watchers = [(part.arena, functools.partial(self._change, part)) for part in self._parts]
        for arena, watcher in self._watchers:
            arena.watchers.append(watcher)
        self.touch()

    def touch(self) -> None:
        """Let it live for as long as it may without a word."""
        self._until = time.monotonic() + self._seconds

    @property
    def ended(self) -> bool:
        """True once everything was read, or it was closed, or nobody has read it for too long."""
        if time.monotonic() > self._until:
            self.close(f"nobody has read it for {self._seconds:g} s")
        return self._closed

    def close(self, fault: str = "it was closed") -> None:
        """Free what it holds."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._fault = True, fault
            for arena, watcher in self._watchers:
                arena.unwatch(watcher)
            self._watchers, self._parts, self._free = [], [], []
            self._full.clear()
            self._spilled.clear()
            if self._file is not None:
                self._file.close()

    # --- whoever changes rows, under the lock -----------------------------------------------------------------------

    def _change(self, part: _Part, rows: Array) -> None:
        if part.next == part.limit or self.ended:
            return
        try:
            while rows.size:
                if part.buffer is None:
                    part.buffer, part.count = self._empty(), 0
                done, part.count = part.keep(rows, part.buffer, part.count)
                rows = rows[done:]
                if rows.size:
                    self._full.append((part, part.buffer, part.count))
                    part.buffer = None
        except (OSError, MemoryError) as error:  # harms the reader, not the change
            self.close(f"{type(error).__name__}: {error}")

    def _empty(self) -> Array:
        """Return an empty buffer; if all are full, one is written to the file."""
        if self._free:
            return self._free.pop()
        if self._room:
            self._room -= 1
            return np.empty(self._words, np.int64)
        if not self._full:  # of more arenas than there are buffers
            self._put_aside()
        part, buffer, count = self._full.popleft()
        if self._file is None:
            self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=self._scratch))  # noqa: SIM115 - ``close`` closes it
        self._spilled.append((part, self.spills * buffer.nbytes, count))
        if os.pwrite(self._file.fileno(), buffer.data, self.spills * buffer.nbytes) < buffer.nbytes:
            raise OSError("the disk is full")
        self.spills += 1
        return buffer

    def _put_aside(self) -> None:
        part = next(part for part in self._parts if part.buffer is not None)
        assert part.buffer is not None
        self._full.append((part, part.buffer, part.count))
        part.buffer = None

    # --- the reader -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        """Return the next rows; raise ``CheckpointError`` if it has ended before all were read."""
        count = 0
        while not count:
            self.touch()
            try:
                part, buffer, count = self._take()
                piece = part.piece(buffer, count)
            except (OSError, MemoryError) as error:  # these rows count as read
                self.close(f"{type(error).__name__}: {error}")
                raise
            if buffer is not self._own:
                with self._lock:
                    self._free.append(buffer)
        self.touch()
        return piece

    def _take(self) -> tuple[_Part, Array, int]:
        own, count = self._own, 0
        while True:
            with self._lock:
                if self.ended:
                    if self._fault:
                        raise CheckpointError(f"a snapshot has ended before all was read: {self._fault}")
                    raise StopIteration
                if self._full and not count:
                    return self._full.popleft()
                if self._spilled and not count:
                    part, at, count = self._spilled.popleft()
                    assert self._file is not None
                    file = os.dup(self._file.fileno())  # ``close`` may close it meanwhile
                    break
                todo = next((part for part in self._parts if part.next < part.limit), None)
                if todo is not None:
                    rows = np.arange(todo.next, min(todo.next + todo.room(own), todo.limit))
                    done, count = todo.keep(rows, own, count)
                    todo.next += done
                    # A table with few rows is walked on, but not while others wait to be read.
                    if count and (done < rows.size or todo.next == todo.limit or self._full):
                        return todo, own, count
                elif any(part.buffer is not None for part in self._parts):
                    self._put_aside()
                else:
                    self.close("")
        try:
            if os.preadv(file, [own.data], at) < own.nbytes:  # without the lock
                raise CheckpointError("the file of a snapshot was cut")
        finally:
            os.close(file)
        return part, own, count
