"""``Arena``: the memory of all rows of one kind, which several tables share, and the index of their ids.

Rows of one width, dtype and rule lie in one array, whichever table they belong to, in blocks of 1,024 rows of a table.
The array's addresses are reserved at once and its pages taken when they are first written, so it grows without a copy.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import binding
from numpy.typing import NDArray

from anabranch.tables.kernels import vocabulary
from anabranch.tables.kernels.rows import KernelThreads, as_array
from anabranch.tables.kernels.vocabulary import BLOCK, FULL, SLOTS, Index
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.table_spec import Placement, TableSpec, table_key
from anabranch.tensors.dtypes import working_dtype

Array = NDArray[Any]
U = np.uint64
_FILE = 1 << 40  # bytes of a file's addresses
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python has no name for before 3.13
_LARGE = 4 << 20  # bytes from which on large pages are asked for


def kind_of(spec: TableSpec, rule: RowOptimizer) -> tuple[object, ...]:
    """Return what tables that share an arena have in common."""
    return spec.width, spec.dtype, rule.number, rule.state_names, spec.memory_map


class Seen(NamedTuple):
    """Lookups, their rows, whether these are distinct, and whether they are begun and up to date.

    It holds until a row may have another place or step.
    """

    which: Array
    ids: Array
    starts: Array
    rows: Array
    distinct: bool
    settled: bool

    def are(self, which: Array, ids: Array, starts: Array) -> bool:
        """Return true if these are the same lookups."""
        return (
            self.ids.size == ids.size
            and np.array_equal(self.which, which)
            and np.array_equal(self.starts, starts)
            and np.array_equal(self.ids, ids)
        )


class Arena:
    """Rows of one kind.

    Args:
        spec, rule: of the first table, or any other of its kind.
        shard, shards: this part's number, and the number of parts.
        pool: threads that share the work.
        scratch: the directory of the file, if tables are mapped.

    Attributes:
        rule: the number of the update rule.
        states: how many numbers of state a row has.
        words, w, x: the memory, as 64-bit words, weights and states.
        shape: where the numbers of a row are, as ``kernels/rows.py`` takes it.
        facts, keys, firsts, index, usage: as the kernels take them; facts, keys and firsts have a row for each table.
        seen: the last lookups that were checked, or read in training.
        taken: the number of blocks in use, or that were.
        watchers: called with rows before they change.

    Raises:
        ValueError: float16 on a processor that cannot convert it.
    """

    def __init__(
        self,
        spec: TableSpec,
        rule: RowOptimizer,
        *,
        shard: int = 0,
        shards: int = 1,
        pool: KernelThreads | None = None,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        if spec.dtype == torch.float16 and not _converts_float16():
            raise ValueError(
                f"table {spec.name}: this processor has no F16C instructions, which float16 needs; use bfloat16"
            )
        self.shard, self.shards, self.pool = shard, shards, pool or KernelThreads(1)
        self.width, self.dtype, self.rule = spec.width, spec.dtype, rule.number
        self.states, self.state_dtype = rule.state_form(spec.width, spec.dtype)
        kinds = [as_array(torch.empty(0, dtype=dtype, device="cpu")).dtype for dtype in (self.dtype, self.state_dtype)]
        weight, state = (kind.itemsize for kind in kinds)
        behind = -(-(16 + self.width * weight) // state)  # numbers of states' size before a row's states
        pitch = -(-(behind + self.states) * state // 8)
        self.row_bytes = 8 * pitch
        self.shape = tuple(map(U, (self.width, pitch, self.row_bytes // weight, 16 // weight, self.row_bytes // state,
                                   behind)))  # fmt: skip
        self.pitch = self.shape[1]
        self._memory = _file(scratch) if spec.memory_map else _whole_memory()
        self._mapped = spec.memory_map
        self._rows = len(self._memory) // (self.row_bytes * BLOCK) * BLOCK
        whole = self._rows * self.row_bytes
        self.words: Array = np.frombuffer(self._memory, np.int64, whole // 8)
        self.w, self.x = (self.words.view(kind) for kind in kinds)
        self.least = 2.0**-7 if spec.dtype == torch.bfloat16 else 2.0**-16
        self.most = float(torch.finfo(spec.dtype).max) if weight == 2 else math.inf
        self.zeros = np.zeros(self.width, kinds[0])
        self.working = as_array(torch.empty(0, dtype=working_dtype(self.dtype), device="cpu")).dtype
        self.facts: Array = np.zeros((1, 5), np.int64)  # table 0 is nobody's
        self.keys: Array = np.zeros(1, np.uint64)
        self.firsts: Array = np.zeros((1, 4))
        self.taken, self._free = 0, list[int]()  # blocks: in use, and given back
        self._leaving: list[tuple[int, Array]] = []  # of tables that were dropped, which a snapshot may still read
        self.owner: Array = _zeros(self._rows // BLOCK, np.int32)
        self.usage: Array = np.zeros((0, 2), np.int64)
        one = np.zeros(1, np.int64)
        self.index = Index(one.astype(np.int32), np.array([1, 0]), one, one, one, self.owner, self.keys)
        self.seen: Seen | None = None
        self.hashes: Array = np.empty(0, np.uint64)  # room for those of lookups
        self.watchers: list[Callable[[Array], None]] = []

    # --- tables -----------------------------------------------------------------------------------------------------

    def add(self, spec: TableSpec, rule: RowOptimizer, placement: Placement) -> tuple[int, Array]:
        """Add a table; returns its number and its blocks, none yet of a dynamic one."""
        number = len(self.facts)
        blocks = np.empty(0, np.int64)
        if spec.rows is not None:
            blocks = self.take(number, -(-placement.count(self.shard) // BLOCK), together=True)
        fact = [0, -1, 0, 0, 0]
        if spec.rows is not None:
            fact = [int(blocks[0]) * BLOCK if blocks.size else 0, spec.rows, placement.half, 0, 0]
        elif not self.index.heads[1]:
            self._make_index()
        if spec.capacity is not None and not len(self.usage):
            self.usage = _zeros(2 * self._rows, np.int64).reshape(-1, 2)
        self.facts = np.vstack([self.facts, [fact]])
        self.keys = np.append(self.keys, np.uint64(table_key(spec.seed, spec.name)))
        self.firsts = np.vstack([self.firsts, [[*spec.initial.numbers(), rule.initial_accumulator_value]]])
        self.index = self.index._replace(keys=self.keys)
        return number, blocks

    def _make_index(self) -> None:
        segments = 8 + self._rows // (FULL // 8)
        self.index = self.index._replace(
            directory=_zeros(1 << vocabulary.DEEPEST, np.int32),
            heads=np.array([1, 2]),
            depths=_zeros(segments, np.int64),
            counts=_zeros(segments, np.int64),
            slots=_zeros(segments * SLOTS, np.int64, large=True),
        )
        self.index.directory[1] = 1
        self.index.depths[:2] = 1
        self.index.slots[: 2 * SLOTS] = vocabulary.FREE

    def take(self, number: int, count: int, *, together: bool = False) -> Array:
        """Give a table ``count`` more blocks, neighbours if they are to be ``together``."""
        free = np.sort(np.array(self._free, np.int64))
        if together and count:
            runs = np.flatnonzero(free[count - 1 :] - free[: max(free.size - count + 1, 0)] == count - 1)
            free = free[runs[0] :] if runs.size else free[:0]
        free = free[:count]
        more = count - free.size
        if (self.taken + more) * BLOCK > self._rows:
            raise MemoryError(f"no addresses are left for {more * BLOCK} more rows of {self.row_bytes} bytes")
        self._free = sorted(set(self._free) - set(free.tolist()))
        blocks = np.concatenate([free, np.arange(self.taken, self.taken + more)])
        small = self.taken * BLOCK * self.row_bytes < _LARGE
        self.taken += more
        if small and self.taken * BLOCK * self.row_bytes >= _LARGE and not self._mapped:
            _take_large_pages(self._memory)
        self.owner[blocks] = number
        return blocks

    def give_back(self, number: int, blocks: Array) -> None:
        """Take a table's blocks away; they are zeros again once no snapshot may read them."""
        self.facts[number, vocabulary.SIZE] = 0
        self.seen = None
        if self.watchers:
            self._leaving.append((number, blocks))
            return
        size = BLOCK * self.row_bytes
        for block in blocks.tolist():
            advice = mmap.MADV_REMOVE if self._mapped else mmap.MADV_DONTNEED
            try:
                self._memory.madvise(advice, block * size, size)
            except OSError:  # a file system without holes in files
                self.words[block * size // 8 : (block + 1) * size // 8] = 0
        self.owner[blocks] = 0
        self._free += blocks.tolist()

    def parts(self, words: Array) -> tuple[Array, Array, Array]:
        """Return the heads (ids, stamps), weights and states of the rows that lie in ``words``."""
        _, pitch, weights_apart, first, states_apart, behind = map(int, self.shape)
        weights = words.view(self.w.dtype).reshape(-1, weights_apart)[:, first : first + self.width]
        states = words.view(self.x.dtype).reshape(-1, states_apart)[:, behind : behind + self.states]
        return words.reshape(-1, pitch)[:, :2], weights, states

    def changing(self, rows: Array) -> None:
        """Show rows to whoever watches, before they change."""
        for watcher in tuple(self.watchers):
            watcher(rows)

    def unwatch(self, watcher: Callable[[Array], None]) -> None:
        """Call ``watcher`` no longer."""
        self.watchers.remove(watcher)
        if not self.watchers:
            leaving, self._leaving = self._leaving, []
            for number, blocks in leaving:
                self.give_back(number, blocks)


def _converts_float16() -> bool:
    if "x86" not in binding.get_process_triple():
        return True
    return bool(binding.get_host_cpu_features().get("f16c"))


def _whole_memory() -> mmap.mmap:
    """Addresses for all that the machine holds, and more that it may swap."""
    size = min(2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 1 << 42)
    while True:
        try:
            return _memory(size)
        except OSError:  # a system that counts addresses as memory
            if size < 1 << 30:
                raise
            size //= 2


def _memory(size: int) -> mmap.mmap:
    """Zeros that take no memory until they are written."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


def _take_large_pages(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)


def _zeros(count: int, kind: type, *, large: bool = False) -> Array:
    """Return an array of zeros that takes no memory until it is written."""
    memory = _memory(max(1, count) * np.dtype(kind).itemsize)
    if large:
        _take_large_pages(memory)
    return np.frombuffer(memory, kind, count)


def _file(directory: str | os.PathLike[str] | None) -> mmap.mmap:
    """Return a file without a name that takes no room on the disk until it is written."""
    with tempfile.TemporaryFile(dir=directory) as file:
        os.ftruncate(file.fileno(), _FILE)
        return mmap.mmap(file.fileno(), _FILE)
