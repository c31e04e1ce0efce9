"""``RowTable``: one shard's part of a table, with its optimizer.

::

    ids ──locate──> rows ──prepare──> begun and up to date ──gather──> pulled
                      │                                        grads ──merge──> one a row ──step──> moved, stamped
                      └── -1: not in the vocabulary; read as its first values, its gradient is dropped

A row is initialised when it is first used, so a table of any size is created at once. The table counts its optimizer
steps, and a row's stamp is the step it is up to date with. Under an optimizer that also changes rows without a
gradient, the steps that a row missed are replayed when it is read, each with its own hyperparameters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tables.dynamic_vocabulary import DynamicVocabulary
from anabranch.tables.initial import table_key
from anabranch.tables.kernels.selection import KernelThreads, as_rows, kernels, working_dtype
from anabranch.tables.optimizers.row_optimizers import Family, RowOptimizer
from anabranch.tables.optimizers.squares import correct_second_moments, merged_squares
from anabranch.tables.row_storage import FileStorage, RowStorage
from anabranch.tables.shard_placement import Placement
from anabranch.tables.stored_rows import FirstValues, GradientMerge, MissedSteps, RowBlock, RowLayout
from anabranch.tables.stored_rows.step_on_rows import step_on_rows
from anabranch.tables.table_spec import TableSpec, state_dtype
from anabranch.tables.vocabulary import FixedVocabulary, Vocabulary

__all__ = ["RowTable"]

Array = NDArray[Any]
_NONE: Array = np.empty(0, np.int64)
_AT_ONCE = 16 << 20  # bytes


class RowTable:
    """Rows of numbers by id, and their optimizer.

    >>> from anabranch.tables import Constant
    >>> spec = TableSpec("words", rows=10, width=2, initial=Constant(1.0))
    >>> table = RowTable(spec, RowOptimizer(Family.SGD, lr=0.5))
    >>> table.push(torch.tensor([3, 5, 3]), torch.ones(3, 2))
    >>> table.pull(torch.tensor([3, 4, 5]))
    tensor([[0.0000, 0.0000],
            [1.0000, 1.0000],
            [0.5000, 0.5000]])

    Args:
        spec: the table.
        rule: its optimizer; later numbers are set by ``rule``.
        shard, shards: this part's number, and the number of parts.
        pool: threads that share the work; by default the caller's alone.
        kernels_kind: ``"compiled"`` or ``"plain"``; by default compiled if Numba is installed.
        scratch: the directory of the file of a table with ``memory_map``; by default the system's for temporary files.

    Not thread-safe: a shard lets one thread in at a time.
    """

    def __init__(
        self,
        spec: TableSpec,
        rule: RowOptimizer,
        *,
        shard: int = 0,
        shards: int = 1,
        pool: KernelThreads | None = None,
        kernels_kind: Literal["compiled", "plain"] | None = None,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        self.spec = spec
        self.shard = shard
        self.step = 0
        self.unadmitted = 0
        """Ids of pushes that found no room, counted in each step: their gradients were dropped."""
        self._located: Array = _NONE  # the rows of the last pull
        self._rule = rule
        self._kernels = kernels(kernels_kind)
        self._movers = kernels("plain") if spec.dtype == torch.float16 else self._kernels  # readers of weights
        self._pool = pool or KernelThreads(1)
        key = np.uint64(table_key(spec.seed, spec.name))
        self._layout = RowLayout(spec.width, spec.dtype, rule.states)
        self._first = FirstValues(spec, rule, key, self._layout, self._pool, self._movers)
        self._merging = GradientMerge(spec, self._pool, self._kernels)
        self._missed = MissedSteps(spec, rule, self._layout, self._pool, self._kernels)
        self.width = spec.width
        self.placement = Placement(spec.rows, shards, int(key), self._kernels)
        if spec.rows is None:
            kind = kernels_kind or ("plain" if self._kernels is kernels("plain") else "compiled")
            self._vocabulary: Vocabulary = DynamicVocabulary(spec, self.placement, shard, int(key), kind)
        else:
            self._vocabulary = FixedVocabulary(spec.name, self.placement, shard, self._kernels)
        with_sums = rule.family is Family.ROW_WISE_ADAGRAD
        make = partial(FileStorage, directory=scratch) if spec.memory_map else RowStorage
        self.storage = make(self._vocabulary.rows, self._layout.stride, spec.dtype, with_sums=with_sums)

    def __repr__(self) -> str:
        """Return its name, size and rule."""
        rows = "dynamic" if self.spec.rows is None else self.spec.rows
        dtype = str(self.spec.dtype).removeprefix("torch.")
        return f"RowTable({self.spec.name!r}, {rows} x {self.spec.width}, {dtype}, {self._rule.family.name})"

    @property
    def rule(self) -> RowOptimizer:
        """The optimizer with the hyperparameters of the next step."""
        return self._rule

    @rule.setter
    def rule(self, rule: RowOptimizer) -> None:
        if not self._rule.same_layout(rule):
            raise ValueError(
                f"table {self.spec.name} keeps the state of {self._rule.family} with {self._rule.states} numbers per "
                f"weight; {rule.family} with {rule.states} needs another table"
            )
        self._rule = self._first.rule = rule

    # --- for groups of tables ---------------------------------------------------------------------------------------

    @property
    def group_key(self) -> tuple[object, ...] | None:
        """Tables with equal keys may be processed together, by ``TableGroup``.

        ``None`` for a table that may not, because its ids have to be looked up.
        """
        if self.spec.rows is None or self._kernels is kernels("plain"):
            return None
        if not self._rule.compiled or self._layout.halves:
            return None
        return (
            self.spec.width, self.spec.dtype, self._rule.family, self._layout.stride, self.shard, self.placement.shards,
        )  # fmt: skip

    @property
    def in_file(self) -> bool:
        """True if its rows are in a file, because it may be larger than memory."""
        return self.spec.memory_map

    @property
    def rows_at_once(self) -> int:
        """The number of rows copied at once when all are copied: 16 MiB of them."""
        return max(1, _AT_ONCE // (self._layout.stride * self.spec.dtype.itemsize))

    @property
    def stride(self) -> int:
        """Values from one row to the next: weights and states."""
        return self._layout.stride

    @property
    def needed(self) -> int:
        """The stamp below which a row is not initialised, or lags."""
        return self.step + 1 if self._missed.lag else 1

    @property
    def moves_as_one(self) -> bool:
        """True if a step changes every row, so that all have the table's version."""
        return self._missed.lag and self._rule.moves_quiet_rows

    def count_step(self, constants: Array) -> None:
        """Record that a step with these constants was applied to all rows that had gradients."""
        self._missed.note(self.step, constants)
        self.step += 1

    # --- reading ----------------------------------------------------------------------------------------------------

    def pull(self, ids: Tensor, *, training: bool = False, out: Tensor | None = None) -> Tensor:
        """Return the rows of ``ids``, ``[*ids.shape, width]``, as of the last step.

        ``training`` admits new ids to a dynamic table; otherwise they read as their first values.
        The rows are written to ``out`` if it is given, which may be part of a larger tensor.

        Raises:
            NotFound: an id outside the table; says which, and where.
            SchemaError: ids that are not int64.
        """
        wanted = self._ids(ids)
        if out is None:
            out = torch.empty(*ids.shape, self.spec.width, dtype=self.spec.dtype, device="cpu")
        elif out.shape != (*ids.shape, self.spec.width) or out.dtype != self.spec.dtype or out.stride(-1) != 1:
            raise SchemaError(f"table {self.spec.name}: out has {tuple(out.shape)} {out.dtype}, not the rows' shape")
        rows = self._located = self._locate(wanted, training=training)
        memory, apart = as_rows(out, self.spec.width)
        self._prepare(self.storage, rows, wanted)
        self._pool.run(
            lambda first, last: self._movers.gather(
                self.storage.values, self._layout.stride, self.spec.width, rows, memory, apart, first, last
            ),
            rows.size,
            rows.size * self.spec.width,
        )
        if self._may_miss(rows):
            self._first.fill_missing(out.view(-1, self.spec.width), rows, wanted)
        return out

    def read(self, ids: Tensor, out: Tensor, *, training: bool = False) -> Tensor:
        """``pull`` into ``out``, and ``versions`` of the same rows, looked up once."""
        self.pull(ids, training=training, out=out)
        return self._versions_of(self._located)

    def answer(
        self, ids: Tensor, with_state: int, since: Tensor, *, training: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, some of which come only if they have changed.

        Args:
            ids: the first ``with_state`` of them come with their optimizer's state; the last ``len(since)`` come only
                if they have changed after the steps ``since``, int64.
            with_state: the number of ids with state.
            since: for each known one the table's step when it was read.
            training: as in ``pull``.

        Returns:
            Rows with their state, as ``pull_with_state`` has them; the rows that come without; and places of those that
            have changed among the known ones, ascending.
        """
        known = len(ids) - len(since)
        everyone = torch.empty(len(ids), self.spec.width, dtype=self.spec.dtype, device="cpu")
        versions = self.read(ids, everyone, training=training)[known:]
        changed = versions > since
        if not self.spec.stays:
            # An id that has lost its row reads as its first values, at any step.
            changed |= torch.full_like(changed, True) if self.moves_as_one else versions == 0
        places = torch.nonzero(changed)[:, 0]
        rows = everyone[with_state:known]
        if len(places):
            rows = torch.cat([rows, everyone[known:].index_select(0, places)])
        return self.pull_with_state(ids[:with_state]), rows, places

    def pull_with_state(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids`` with their optimizer's state: ``[len(ids), rule.row_width(width)]``."""
        wanted = self._ids(ids)
        rows = self._locate(wanted, training=False)
        out = torch.full(
            (rows.size, self._rule.row_width(self.spec.width)),
            self._rule.initial_state,
            dtype=state_dtype(self.spec.dtype),
            device="cpu",
        )
        self._prepare(self.storage, rows, wanted)
        known = np.flatnonzero(rows >= 0)
        there, at = torch.from_numpy(rows[known]), torch.from_numpy(known)
        out[at, : self._layout.row] = self._layout.read(self.storage, there)
        if self.storage.with_sums:
            out[at, self._layout.stride] = torch.from_numpy(self.storage.sums[rows[known]]).to(out.dtype)
        if self._may_miss(rows):
            self._first.fill_missing(out[:, : self.spec.width], rows, wanted)
        return out

    def check(self, ids: Tensor) -> None:
        """Raise the errors of ``pull`` for ids outside this part of the table; changes nothing."""
        self._vocabulary.locate(self._ids(ids), step=self.step, training=False)

    def admit(self, ids: Tensor) -> None:
        """Give rows to ids as ``pull`` in training does, without the answer."""
        wanted = self._ids(ids)
        self.prepare(self._locate(wanted, training=True), wanted)

    def versions(self, ids: Tensor, *, training: bool = False) -> Tensor:
        """Return the step at which each row last changed: int64 ``[len(ids)]``, 0 for one that never has.

        ``training`` admits ids, as in ``pull``.
        """
        return self._versions_of(self._locate(self._ids(ids), training=training))

    def _versions_of(self, rows: Array) -> Tensor:
        if self.moves_as_one:
            return torch.full((rows.size,), self.step, device="cpu")
        stamps = np.zeros_like(rows)
        known = rows >= 0 if self._may_miss(rows) else slice(None)
        stamps[known] = self.storage.stamps[rows[known]]
        return torch.from_numpy(np.maximum(stamps - 1, 0))

    # --- writing ----------------------------------------------------------------------------------------------------

    def push(self, ids: Tensor, grads: Tensor, squares: Tensor | None = None) -> None:
        """One optimizer step with ``grads``, ``[len(ids), width]``: repeated rows get their sum.

        ``squares`` are of gradients that are sums over several steps, ``[len(ids)]``, as ``squares.py`` describes them.

        Raises:
            NotFound: an id outside the table; says which, and where. Nothing is changed.
            SchemaError: ids or gradients of the wrong shape or dtype. Nothing is changed.
        """
        wanted = self._ids(ids)
        memory, apart = self._gradients(grads, wanted.size)
        rows = self._locate(wanted, training=True)
        if self._may_miss(rows):
            missed = np.unique(wanted[rows < 0])
            self.unadmitted += int(self._vocabulary.admits(missed, step=self.step).sum())
        unique, merged, first, inverse = self._merging.merge(rows, memory, apart)
        self._prepare(self.storage, unique, wanted[first])
        if squares is not None:
            known = torch.from_numpy(rows) >= 0
            own = grads.detach().reshape(-1, self.spec.width)[known]
            self._correct_second_moments(
                self.storage, unique, merged, merged_squares(own, squares[known], inverse, unique.size)
            )
        self._step(self.storage, unique, merged)

    def _correct_second_moments(self, storage: RowStorage, unique: Array, merged: Array, squares: Tensor) -> None:
        there = torch.from_numpy(unique)
        rows, sums = (
            self._layout.read(storage, there),
            torch.from_numpy(storage.sums[unique]) if storage.with_sums else None,
        )
        grads = torch.from_numpy(merged).view(-1, self.spec.width)
        correct_second_moments(rows, sums, grads, squares, self._rule, self._rule.constants(self.step + 1))
        self._layout.write(storage, there, rows)
        if sums is not None:
            storage.sums[unique] = sums.numpy()

    def _step(self, storage: RowStorage, unique: Array, merged: Array) -> None:
        constants = self._rule.constants(self.step + 1)
        self.count_step(constants)
        run = step_on_rows(storage, self._layout, self._rule, self._kernels)
        self._pool.run(lambda first, last: run(unique, merged, constants, first, last), unique.size, merged.size)
        storage.stamps[unique] = self.step + 1

    # --- rows that are not initialised, or lag ----------------------------------------------------------------------

    def prepare(self, rows: Array, ids: Array) -> None:
        """Make sure that ``rows``, those of ``ids``, are initialised and up to date."""
        self._prepare(self.storage, rows, ids)

    def _prepare(self, storage: RowStorage, rows: Array, ids: Array) -> None:
        """Initialise new rows, and bring those that lag up to the table's step."""
        if self._kernels.first_behind(storage.stamps, rows, self.needed) < 0:
            return
        known = np.flatnonzero(rows >= 0)
        rows, ids = rows[known], ids[known]
        fresh = storage.stamps[rows] == 0
        if fresh.any():
            self._first.begin(storage, rows[fresh], ids[fresh])
        if self._missed.lag:
            self._missed.catch_up(storage, np.unique(rows[storage.stamps[rows] <= self.step]), self.step)

    def _may_miss(self, rows: Array) -> bool:
        """Return True if some of ``rows`` may be -1: only a dynamic vocabulary has ids without a row."""
        return self.spec.rows is None and bool((rows < 0).any())

    # --- saving, moving ---------------------------------------------------------------------------------------------

    def blocks(self, rows: int = 1 << 16) -> Iterator[RowBlock]:
        """All initialised rows, in the order of memory, ``rows`` at a time; ``history`` belongs to them."""
        for first in range(0, self.used, rows):
            block = self.block(first, rows)
            if len(block.ids):
                yield block

    def block(self, first: int, rows: int) -> RowBlock:
        """Return the initialised ones of the ``rows`` rows from place ``first`` on."""
        part = self._vocabulary.in_use(first, rows)
        begun = self.storage.stamps[part] > 0
        part = part[begun]
        return RowBlock(
            _owned(self._vocabulary.ids(part)),
            self._layout.read(self.storage, torch.from_numpy(part)),
            _owned(self.storage.stamps[part]),
            _owned(self.storage.sums[part] if self.storage.with_sums else self.storage.sums[:0]),
            _owned(self._vocabulary.usage(part)),
        )

    def check_block(self, block: RowBlock, step: int, history: Tensor) -> None:
        """Raise if rows do not fit ``restore`` and ``resume``; changes nothing.

        Raises:
            NotFound: an id outside this part of the table.
            SchemaError: anything of another shape or dtype, or stamps of no step up to ``step``.
        """
        count, usage = block.ids.numel(), block.ids.numel() if self.spec.rows is None else 0
        wanted = {
            "ids": ((count,), torch.int64),
            "values": ((count, self._layout.row), state_dtype(self.spec.dtype)),
            "stamps": ((count,), torch.int64),
            "sums": ((count if self._rule.family is Family.ROW_WISE_ADAGRAD else 0,), working_dtype(self.spec.dtype)),
            "usage": ((usage, 2), torch.int64),
        }
        block.check(self.spec.name, wanted, step)
        self._missed.check(step, history)
        self._vocabulary.check_restored(self._ids(block.ids))

    def restore(self, block: RowBlock) -> None:
        """Restores the rows of ``blocks``, state and stamp included; ids are those of this shard."""
        ids = self._ids(block.ids)
        rows = self._vocabulary.restore(ids, block.usage.numpy())
        self._make_room(self._vocabulary.rows)
        self.storage.stamps[rows] = 0
        self._layout.write(self.storage, torch.from_numpy(rows), block.values)
        self.storage.stamps[rows] = block.stamps.numpy()
        if self.storage.with_sums:
            self.storage.sums[rows] = block.sums.numpy()

    @property
    def history(self) -> Tensor:
        """Constants of each step so far, ``[step, CONSTANTS]`` float64, for rows yet to catch up; else no rows."""
        return self._missed.history(self.step)

    def resume(self, step: int, history: Tensor) -> None:
        """Set the step count, and the constants, from which restored rows continue."""
        self._missed.resume(step, history)
        self.step = step

    @property
    def used(self) -> int:
        """The number of rows with an id."""
        return self._vocabulary.rows

    @property
    def evictions(self) -> int:
        """The number of ids whose row was evicted."""
        return self._vocabulary.evictions

    def bytes(self) -> int:
        """Bytes of rows, states and stamps that there is room for."""
        return self.storage.bytes()

    # --- checks of arguments ----------------------------------------------------------------------------------------

    def _ids(self, ids: Tensor) -> Array:
        if ids.dtype != torch.int64:
            raise SchemaError(f"table {self.spec.name}: ids must be int64, got {ids.dtype}; convert with ids.long()")
        return np.ascontiguousarray(ids.detach().cpu().reshape(-1).numpy())

    def _gradients(self, grads: Tensor, count: int) -> tuple[Array, int]:
        if grads.numel() != count * self.spec.width or not grads.is_floating_point():
            raise SchemaError(
                f"table {self.spec.name}: gradients of ({count}, {self.spec.width}) {self.spec.dtype} expected, got "
                f"{tuple(grads.shape)} {grads.dtype}"
            )
        rounded = grads.detach().cpu().to(self.spec.dtype)
        return as_rows(rounded.to(working_dtype(self.spec.dtype)), self.spec.width)

    def _locate(self, ids: Array, *, training: bool) -> Array:
        if training:  # before any id is admitted: there may not be enough memory
            self._make_room(self._vocabulary.rows_with(ids, step=self.step, enough=self.storage.rows))
        rows, reused = self._vocabulary.locate(ids, step=self.step, training=training)
        self.storage.stamps[reused] = 0
        return rows

    def _make_room(self, rows: int) -> None:
        if rows > self.storage.rows:
            room = 2 * self.storage.rows
            self.storage.grow(max(rows, room if self.spec.capacity is None else min(room, self.spec.capacity)))


def _owned(array: Array) -> Tensor:
    """Return a tensor with its own memory: one over an empty array has strides that cannot be viewed as bytes."""
    return torch.from_numpy(array).clone(memory_format=torch.contiguous_format)
