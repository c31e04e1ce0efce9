"""``TableGroup``: tables of one kind, read and updated in one call.

A kernel's fixed cost is the same for ten rows and ten thousand, and a model has dozens of
tables. So those with the same number of values per row, type and rule are processed together: one kernel finds, merges,
updates and stamps the rows of all of them, and threads divide the tables. The result for a table is that of
``RowTable``, bit for bit, and rare cases are left to ``RowTable``: rows that are not initialised, or lag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import NotFound, SchemaError
from anabranch.tables.kernels.selection import KernelThreads, as_array, working_dtype
from anabranch.tables.optimizers.row_optimizers import Family
from anabranch.tables.row_table import RowTable

__all__ = ["Grouping", "TableGroup", "balanced", "side_by_side"]

Array = NDArray[Any]
_NONE: Array = np.empty(0, np.int64)
_REMEMBERED = 64  # messages of different tables


class TableGroup:
    """Tables of one width, dtype and rule, whose lookups of a step are known together.

    >>> from anabranch.tables import Constant, Family, RowOptimizer, TableSpec
    >>> rule = RowOptimizer(Family.SGD, lr=0.5)
    >>> tables = [RowTable(TableSpec(name, 10, 2, initial=Constant(1.0)), rule) for name in ("users", "items")]
    >>> group = TableGroup(tables)
    >>> group.push(torch.tensor([[3, 3], [4, 5]]), torch.ones(2, 2, 2))
    >>> group.pull(torch.tensor([[3, 0], [4, 5]])).shape
    torch.Size([2, 2, 2])
    >>> tables[0].pull(torch.tensor([3, 4]))
    tensor([[0., 0.],
            [1., 1.]])

    Lookups come in one of two layouts. ``ids`` of ``[tables, batch]`` have rows and gradients of
    ``[batch, tables, width]``, as a model concatenates its embeddings. Flat ``ids`` with ``counts``, the number of each
    table has, have rows and gradients of ``[len(ids), width]``, as messages have them.

    Args:
        tables: those of one ``group_key``, none of them ``None``; they may be used by themselves as well.
        pool: threads that share out the tables; by default the caller's alone.

    Raises:
        ValueError: tables of different kinds, or that no group can have.
    """

    def __init__(self, tables: Sequence[RowTable], pool: KernelThreads | None = None) -> None:
        kinds = {table.group_key for table in tables}
        if len(kinds) != 1 or None in kinds:
            raise ValueError(
                "the tables of a group have one width, dtype and optimizer rule and are kept in memory; these are "
                f"{kinds}"
            )
        from anabranch.tables.kernels import _compiled_group  # only with Numba: a table without it has no group_key

        self._kernels = _compiled_group
        self.tables = list(tables)
        self._pool = pool or KernelThreads(1)
        first = self.tables[0]
        self._width, self._dtype, self._stride = first.spec.width, first.spec.dtype, first.stride
        self._like = as_array(torch.empty(0, dtype=self._dtype, device="cpu"))
        self._kind = _compiled_group.kind_of(first.rule.family, first.rule.states)
        # Tables with a group_key never move in memory.
        arrays = [table.storage for table in self.tables]
        self._values_at, self._stamps_at, self._sums_at = (
            np.array([getattr(held, name).ctypes.data for held in arrays], np.uint64)
            for name in ("values", "stamps", "sums")
        )
        self._sizes = np.array([held.rows for held in arrays])
        placements = [table.placement for table in self.tables]
        self._limits = np.array([placement.rows for placement in placements])
        self._halves = np.array([placement.half for placement in placements])
        self._keys = np.array([placement.key for placement in placements], np.uint64)
        self._shard, self._shards = first.shard, placements[0].shards
        self._scratches: list[tuple[Array, Array, Array]] = []

    def __repr__(self) -> str:
        """Return its tables."""
        return f"TableGroup({self.tables})"

    def pull(
        self,
        ids: Tensor,
        counts: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        versions: Tensor | None = None,
    ) -> Tensor:
        """Return the rows of each table's ids, as of its last step; their versions too if an array for them is given.

        Raises:
            NotFound: an id outside its table; says which, and where.
            SchemaError: ids, counts or out of another shape or dtype.
        """
        flat, starts, shape = self._lookups(ids, counts)
        if out is None:
            out = torch.empty(shape, dtype=self._dtype, device="cpu")
        elif out.shape != shape or out.dtype != self._dtype or not out.is_contiguous():
            raise SchemaError(f"out of {tuple(shape)} {self._dtype} expected, got {tuple(out.shape)} {out.dtype}")
        at, apart = self._layout(starts, counts is None)
        self._gather(
            flat, starts, self._width, as_array(out), at, apart, _NONE if versions is None else versions.numpy()
        )
        if versions is not None:
            for k, table in enumerate(self.tables):
                if table.moves_as_one:
                    versions[int(starts[k]) : int(starts[k + 1])] = table.step
        return out

    def answer(
        self, ids: Tensor, counts: Sequence[int], with_state: Sequence[int], known: Sequence[int], since: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Rows of flat ids, some of which come only if they have changed; as ``RowTable.answer`` for each table.

        Args:
            ids: flat, of all tables.
            counts: the number of each table's ids.
            with_state: for each table the number of its first ids that come with their state.
            known: for each table the number of its last ids, which come only if they have changed.
            since: for each of those the step when it was read, int64.

        Returns:
            Rows with state; those without; places among each table's known ones; and each table's number of these.
        """
        flat, starts, _ = self._lookups(ids, counts)
        rows = self._locate(flat, starts)
        stated_starts, since_starts = (np.append(0, np.cumsum(some)) for some in (with_state, known))
        if since_starts[-1] != len(since) or (np.add(with_state, known) > counts).any():
            raise SchemaError(f"of {list(counts)} ids {list(with_state)} and {list(known)} with {len(since)} steps")
        changed, found = np.empty(len(since), np.bool_), np.zeros(len(self.tables), np.int64)
        behind = np.zeros(len(self.tables), np.bool_)
        needed = np.array([table.needed for table in self.tables])
        steps = np.array([table.step if table.moves_as_one else -1 for table in self.tables])

        def look(part: int, first: int, last: int) -> None:
            self._kernels.changed_all(
                self._stamps_at, self._sizes, rows, starts, needed, steps, since.numpy(), since_starts, changed, found,
                behind, first, last,
            )  # fmt: skip

        self._share_out(look, starts)
        for k in np.flatnonzero(behind).tolist():
            some = slice(int(starts[k]), int(starts[k + 1]))
            self.tables[k].prepare(rows[some], flat[some])
            look(0, k, k + 1)
        places_at = np.append(0, np.cumsum(found))
        out_at = np.append(0, np.cumsum(np.diff(starts) - with_state - known + found))
        holds_states = self.tables[0].rule.family is not Family.ROW_WISE_ADAGRAD
        states = torch.empty(
            int(stated_starts[-1]) if holds_states else 0, self._stride, dtype=self._dtype, device="cpu"
        )
        out = torch.empty(int(out_at[-1]), self._width, dtype=self._dtype, device="cpu")
        places = torch.empty(int(places_at[-1]), dtype=torch.int64, device="cpu")

        def pick(part: int, first: int, last: int) -> None:
            self._kernels.pick_all(
                self._values_at, self._sizes, self._stride, self._width, rows, starts, np.asarray(with_state),
                since_starts, changed, as_array(states), stated_starts, as_array(out), out_at, places.numpy(),
                places_at, first, last,
            )  # fmt: skip

        self._share_out(pick, starts)
        if not holds_states:
            at = starts[:-1].tolist()
            parts = zip(self.tables, at, with_state, strict=True)
            states = torch.cat([table.pull_with_state(ids[first : first + n]) for table, first, n in parts])
        return states, out, places, found.tolist()

    def _gather(self, flat: Array, starts: Array, width: int, out: Array, at: Array, apart: int, stamps: Array) -> None:
        """Copy the first ``width`` numbers of each row."""
        rows = self._locate(flat, starts)
        behind = np.zeros(len(self.tables), np.bool_)
        needed = np.array([table.needed for table in self.tables])

        def gather(part: int, first: int, last: int) -> None:
            self._kernels.gather_all(
                self._values_at, self._stamps_at, self._sizes, self._stride, width, rows, starts, needed,
                out, at, apart, stamps, behind, first, last,
            )  # fmt: skip

        self._share_out(gather, starts)
        for k in np.flatnonzero(behind).tolist():
            some = slice(int(starts[k]), int(starts[k + 1]))
            self.tables[k].prepare(rows[some], flat[some])
            gather(0, k, k + 1)

    def push(
        self, ids: Tensor, grads: Tensor, counts: Sequence[int] | None = None, squares: Tensor | None = None
    ) -> None:
        """One optimizer step of every table with the gradients of its lookups; those of one id are summed.

        ``squares`` are of gradients that are sums over several steps, one of each flat id, as ``squares.py`` has them.

        Raises:
            NotFound: an id outside its table; says which, and where. Nothing is changed.
            SchemaError: ids, counts or gradients of another shape or dtype. Nothing is changed.
        """
        flat, starts, shape = self._lookups(ids, counts)
        if grads.shape != shape or not grads.is_floating_point():
            raise SchemaError(f"gradients of {tuple(shape)} {self._dtype} expected, got {tuple(grads.shape)}")
        if squares is not None and squares.shape != (flat.size,):
            raise SchemaError(f"{flat.size} ids have squares {tuple(squares.shape)}")
        own = np.empty(0, np.float32) if squares is None else squares.float().contiguous().numpy()
        rows = self._locate(flat, starts)
        rounded = grads.detach().cpu().to(self._dtype)
        memory = as_array(rounded.to(working_dtype(self._dtype)).contiguous())
        at, apart = self._layout(starts, counts is None)
        behind = np.zeros(len(self.tables), np.bool_)
        needed = np.array([table.needed for table in self.tables])
        marks = np.array([table.step + 2 for table in self.tables])
        constants = self._constants()
        most = int(np.diff(starts).max(initial=0))
        self._provide(most, memory)

        def step(part: int, first: int, last: int) -> None:
            self._kernels.step_all(
                self._kind,
                self._values_at, self._stamps_at, self._sums_at, self._sizes, self._stride, self._width,
                rows, starts, needed, marks, memory, at, apart, own, constants, self._like, *self._scratches[part],
                behind, first, last,
            )  # fmt: skip

        self._share_out(step, starts)
        for k, table in enumerate(self.tables):
            if behind[k]:
                begin, end = int(starts[k]), int(starts[k + 1])
                table.push(
                    torch.from_numpy(flat[begin:end]),
                    rounded[:, k] if counts is None else rounded[begin:end],
                    None if squares is None else squares[begin:end],
                )
            else:
                table.count_step(constants[k])

    def check(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Raise the errors of ``pull`` for flat ids outside their tables; changes nothing."""
        flat, starts, _ = self._lookups(ids, counts)
        self._locate(flat, starts)

    def _lookups(self, ids: Tensor, counts: Sequence[int] | None) -> tuple[Array, Array, tuple[int, ...]]:
        """Return the flat ids, where each table's begin, and the shape of their rows."""
        tables = len(self.tables)
        fits = ids.shape[:1] == (tables,) and ids.ndim == 2 if counts is None else ids.ndim == 1
        if ids.dtype != torch.int64 or not fits:
            raise SchemaError(f"int64 ids of {tables} tables expected, got {tuple(ids.shape)} {ids.dtype}")
        starts = np.zeros(tables + 1, np.int64)
        if counts is None:
            starts[1:] = np.arange(1, tables + 1) * ids.shape[1]
            shape: tuple[int, ...] = (ids.shape[1], tables, self._width)
        else:
            if len(counts) != tables or min(counts) < 0 or sum(counts) != len(ids):
                raise SchemaError(f"{len(ids)} ids are not those of {tables} tables with {list(counts)}")
            np.cumsum(counts, out=starts[1:])
            shape = (len(ids), self._width)
        return np.ascontiguousarray(ids.detach().cpu().reshape(-1).numpy()), starts, shape

    def _layout(self, starts: Array, side_by_side: bool) -> tuple[Array, int]:
        """Return the offset of each table's first row among all numbers, and the distance between its rows."""
        if side_by_side:
            return np.arange(len(self.tables)) * self._width, len(self.tables) * self._width
        return starts[:-1] * self._width, self._width

    def _locate(self, flat: Array, starts: Array) -> Array:
        rows = np.empty_like(flat)
        bad = self._kernels.locate_all(
            flat, starts, self._limits, self._halves, self._keys, self._shard, self._shards, rows, 0, len(self.tables)
        )
        if bad >= 0:
            k = int(np.searchsorted(starts, bad, "right")) - 1
            self.tables[k].check(torch.from_numpy(flat[starts[k] : starts[k + 1]]))
            raise NotFound(f"table {self.tables[k].spec.name} has no row for id {flat[bad]}")
        return rows

    def _constants(self) -> Array:
        """Constants of each table's next step; tables at the same step with the same rule share them."""
        found: dict[tuple[int, int], Array] = {}
        each = []
        for table in self.tables:
            key = (id(table.rule), table.step)
            if key not in found:
                found[key] = table.rule.constants(table.step + 1)
            each.append(found[key])
        return np.stack(each)

    def _provide(self, most: int, memory: Array) -> None:
        if not self._scratches or self._scratches[0][1].shape[1] < most:
            room = 1 << max(most - 1, 1).bit_length()
            self._scratches = [self._kernels.new_scratch(room, self._width, memory) for _ in range(self._pool.threads)]

    def _share_out(self, run: Callable[[int, int, int], None], starts: Array) -> None:
        """Call ``run(part, first, last)`` for ranges of tables with about equally many lookups each."""
        lookups = int(starts[-1])
        parts = max(1, min(self._pool.threads, len(self.tables)))
        edges = np.searchsorted(starts[:-1], [lookups * k / parts for k in range(parts + 1)])
        edges[-1] = len(self.tables)

        def work(first: int, last: int) -> None:
            for part in range(first, last):
                if edges[part] < edges[part + 1]:
                    run(part, int(edges[part]), int(edges[part + 1]))

        self._pool.run(work, parts, lookups * self._width)


class Grouping:
    """Groups of a shard's tables that are processed together, cached by the names in a message."""

    def __init__(self, pool: KernelThreads) -> None:
        self._pool = pool
        self._found: dict[tuple[str, ...], list[tuple[TableGroup | None, list[str]]]] = {}

    def of(
        self, tables: Mapping[str, RowTable], counts: Mapping[str, int]
    ) -> list[tuple[TableGroup | None, list[str]]]:
        """Each group with its tables' names, and under ``None`` the tables that are processed one by one.

        Args:
            tables: all tables, by name.
            counts: the number of lookups of each requested table, in their order.
        """
        if not balanced(list(counts.values()), self._pool.threads):
            return [(None, list(counts))]
        names = tuple(counts)
        found = self._found.get(names)
        if found is None:
            alike: dict[tuple[object, ...] | None, list[str]] = {}
            for name in names:
                alike.setdefault(tables[name].group_key, []).append(name)
            found = [
                (
                    TableGroup([tables[name] for name in some], self._pool) if group_key and len(some) > 1 else None,
                    some,
                )
                for group_key, some in alike.items()
            ]
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            self._found[names] = found
        return found

    def forget(self) -> None:
        """Forgets all groups, because the tables have changed."""
        self._found.clear()


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` of contiguous tensors; without a copy where each begins in memory where the last one ends.

    >>> whole = torch.arange(6)
    >>> side_by_side(whole.split([1, 2, 3])).data_ptr() == whole.data_ptr()
    True
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.contiguous()
    end, rows = first.data_ptr(), 0
    for tensor in tensors:
        if not tensor.is_contiguous() or (tensor.numel() and tensor.data_ptr() != end):
            return torch.cat(list(tensors))
        end += tensor.nbytes
        rows += tensor.shape[0]
    begun = next((tensor for tensor in tensors if tensor.numel()), first)
    if begun.untyped_storage().nbytes() < begun.storage_offset() * begun.itemsize + end - begun.data_ptr():
        return torch.cat(list(tensors))  # neighbours by chance, in memory of different owners
    return begun.as_strided((rows, *first.shape[1:]), first.stride())


def balanced(counts: Sequence[int], threads: int) -> bool:
    """Return True if dividing whole tables keeps all threads busy: no table has far more than a thread's share."""
    return threads == 1 or max(counts, default=0) * threads <= 1.5 * math.fsum(counts)
