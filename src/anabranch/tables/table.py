"""``Table``: one shard's part of a table, with its optimizer; ``TableGroup``: those of one arena, in one call.

::

    ids ──locate──> rows ──settle──> admitted, begun, up to date ──visit──> pulled
                      │                                  grads ──merge──> one a row ──step──> moved, stamped
                      └── -1: not in the vocabulary; read as its first values, its gradient is dropped

A row is initialised when it is first used, so a table of any size is created at once. A table counts its optimizer
steps, and a row's stamp is the step it is up to date with. Under an optimizer that also changes rows without a
gradient, the steps that a row missed are replayed when it is read, each with its own hyperparameters.

In a table without a range any int64 is an id: training gives rows to new ids, evaluation reads them as their first
values. If the table is full, a new id evicts the row unused longest, or used in the fewest steps (of equal ones that of
the lowest id), but none that the running step has used: then the id waits for another step. The same calls give the
same rows on every machine, so a log can be replayed: random admission is drawn from the id and the step.

A kernel's fixed cost is the same for ten rows and ten thousand, and a model has dozens of tables, so those of an arena
are worked on together; only rows that are new, or lag, are settled table by table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import NotFound, SchemaError
from anabranch.tables.arena import Arena, Seen
from anabranch.tables.kernels import rows as kernels
from anabranch.tables.kernels import vocabulary
from anabranch.tables.kernels.rows import as_array
from anabranch.tables.kernels.vocabulary import BLOCK, LAGS, STEP
from anabranch.tables.optimizers.row_optimizers import CONSTANTS, Family, RowOptimizer
from anabranch.tables.row_block import RowBlock
from anabranch.tables.table_spec import Placement, TableSpec
from anabranch.tensors.dtypes import working_dtype

Array = NDArray[Any]
_NONE: Array = np.empty(0, np.int64)
_NO_SQUARES: Array = np.empty(0, np.float32)
# Positions of a step's constants, in the order of ``RowOptimizer.constants``.
_MOMENTUM, _SHARE, _BETA2, _DECAY, _EPS, _KEEP, _STEP = 1, 2, 3, 4, 6, 7, 10
_DECAYING = (Family.ADAM, Family.ADAMW, Family.SPARSE_ADAM, Family.RMSPROP, Family.ADAMAX)
_ADAMS = (Family.ADAM, Family.ADAMW, Family.SPARSE_ADAM)


class Table:
    """Rows of numbers by id, and their optimizer.

    >>> from anabranch.tables import Constant, Family
    >>> spec = TableSpec("words", rows=10, width=2, initial=Constant(1.0))
    >>> table = Table(spec, RowOptimizer(Family.SGD, lr=0.5))
    >>> table.push(torch.tensor([3, 5, 3]), torch.ones(3, 2))
    >>> table.pull(torch.tensor([3, 4, 5]))
    tensor([[0.0000, 0.0000],
            [1.0000, 1.0000],
            [0.5000, 0.5000]])

    Args:
        spec: the table.
        rule: its optimizer; later numbers are set by ``rule``.
        arena: the memory of its rows, of its kind; by default one of its own.

    Attributes:
        number: the table's in its arena.
        used: the number of rows with an id.
        evictions: ids that lost their row to another.
        unadmitted: ids of pushes that found no room, counted in each step: their gradients were dropped.

    Not thread-safe: a shard lets one thread in at a time.
    """

    def __init__(self, spec: TableSpec, rule: RowOptimizer, arena: Arena | None = None) -> None:
        self.spec, self._rule, self.arena = spec, rule, arena or Arena(spec, rule)
        self.placement = Placement.of(spec, self.arena.shards)
        self.number, self._blocks = self.arena.add(spec, rule, self.placement)
        self.missed = MissedSteps(spec, rule)
        self.evictions = self.unadmitted = 0
        self.used = 0 if spec.rows is None else self.placement.count(self.arena.shard)
        self._capacity = None if spec.capacity is None else -(-spec.capacity // self.arena.shards)
        self._heap, self._heap_size = np.empty((self._capacity or 0, 3), np.int64), 0

    @property
    def rule(self) -> RowOptimizer:
        """The optimizer with the hyperparameters of the next step."""
        return self._rule

    @rule.setter
    def rule(self, rule: RowOptimizer) -> None:
        if rule is self._rule:
            return
        self._rule = rule  # of the same layout, which ``requests.check`` sees to
        self.arena.firsts[self.number, 3] = rule.initial_accumulator_value

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return int(self.arena.facts[self.number, STEP])

    @property
    def moves_as_one(self) -> bool:
        """True if a step changes every row, so that all have the table's version."""
        return self.missed.lag and self._rule.moves_quiet_rows

    def bytes(self) -> int:
        """Bytes of the rows with an id."""
        return self.used * self.arena.row_bytes

    # --- as a group of one ------------------------------------------------------------------------------------------

    @property
    def _alone(self) -> TableGroup:
        return TableGroup([self])  # not kept: its reference back would keep a file open until garbage is collected

    def pull(self, ids: Tensor, *, training: bool = False) -> Tensor:
        """Return the rows of ``ids``, ``[*ids.shape, width]``, as of the last step.

        ``training`` admits new ids to a dynamic table; otherwise they read as their first values.

        Raises:
            NotFound: an id outside the table; says which, and where.
        """
        return self._alone.pull(ids.reshape(-1), [ids.numel()], training=training).view(*ids.shape, self.spec.width)

    def push(self, ids: Tensor, grads: Tensor, squares: Tensor | None = None) -> None:
        """One optimizer step with ``grads``, ``[*ids.shape, width]``: repeated rows get their sum.

        ``squares`` are of gradients that are sums over several steps, ``[len(ids)]``.

        Raises:
            NotFound: an id outside the table; says which, and where. Nothing is changed.
        """
        self._alone.push(ids.reshape(-1), grads, [ids.numel()], squares)

    def versions(self, ids: Tensor) -> Tensor:
        """Return the step at which each row last changed: int64 ``[len(ids)]``, 0 for one that never has."""
        versions = torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        self._alone.pull(ids.reshape(-1), [ids.numel()], versions=versions)
        return versions

    def pull_with_state(self, ids: Tensor) -> Tensor:
        """Return rows with their optimizer's state: ``[len(ids), rule.row_width(width)]``."""
        return self._alone.answer(ids, [len(ids)], [len(ids)], [0], ids[:0])[0]

    # --- rows that are new, or lag ----------------------------------------------------------------------------------

    def settle(self, ids: Array, rows: Array, *, training: bool, distinct: bool) -> None:
        """Correct ``rows``, where ``ids`` are; in training give rows to ids without one. Begin them, bring them up to
        date.
        """
        arena = self.arena
        if self.spec.rows is None:
            vocabulary.correct(arena.index, arena.words, arena.pitch, self.number, ids, rows)
        elif not training and not self.missed.lag:  # a look takes no memory: these read as their first values
            rows[arena.words[rows * int(arena.pitch) + 1] == 0] = -1
        arena.changing(rows)
        if training and self.spec.rows is None:
            self._admit(ids, rows)
        before, row = np.empty(self.spec.width, arena.working), np.empty(int(arena.pitch), np.int64)

        def prepare(thread: int, threads: int) -> None:
            kernels.prepare(
                arena.rule, self.number, arena.facts, arena.keys, arena.firsts, arena.words, arena.w, arena.x,
                arena.shape, arena.states, self.missed.steps(), self.missed.may_rest, self.missed.steady, arena.zeros,
                before.copy(), row.copy(), ids, rows, thread, threads,
            )  # fmt: skip

        arena.pool.run(prepare, rows.size if distinct else 0)

    def draw(self, ids: Array) -> Array:
        """Those of ``ids`` that this step admits, if there is room."""
        if self.spec.admission == 1:
            return ids
        chance = _mixed(_mixed(ids, self.placement.key).view(np.int64) + np.int64(self.step), self.placement.key)
        return ids[(chance >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.spec.admission]

    def _admit(self, ids: Array, rows: Array) -> None:
        arena = self.arena
        if self._capacity is not None:
            vocabulary.use(rows, arena.usage, self.step)
        missing = np.flatnonzero(rows < 0)
        distinct, lookups = np.unique(ids[missing], return_inverse=True)  # sorts, which is quicker than hashing
        new = self.draw(distinct)
        if not new.size:
            return
        room = new.size if self._capacity is None else self._capacity - self.used
        fresh = min(new.size, room)
        evicted = self._victims(new.size - fresh)
        new = new[: fresh + evicted.size]  # the lowest ids, in whatever order they come
        into = np.concatenate([self._more_rows(fresh), evicted])
        arena.changing(into)
        vocabulary.remove(arena.index, arena.words, arena.pitch, self.number, evicted)
        self.evictions += evicted.size
        self._enter(new, into, fresh, np.broadcast_to([1, self.step], (new.size, 2)))
        if new.size:
            at = np.minimum(np.searchsorted(new, distinct), new.size - 1)
            rows[missing] = np.where(new[at] == distinct, into[at], -1)[lookups]

    def _victims(self, count: int) -> Array:
        if not count:
            return _NONE
        arena, rows = self.arena, np.empty(count, np.int64)
        many, self._heap_size = vocabulary.victims(
            self._heap, self._heap_size, arena.usage, self.step, self.spec.eviction == "frequency", arena.index,
            arena.words, arena.pitch, self.number, rows,
        )  # fmt: skip
        return rows[:many]

    def _more_rows(self, count: int) -> Array:
        """Rows for ``count`` more ids."""
        end = self.used + count
        if end > self._blocks.size * BLOCK:
            more = self.arena.take(self.number, -(-end // BLOCK) - self._blocks.size)
            self._blocks = np.concatenate([self._blocks, more])
        return self._rows_at(self.used, end)

    def _rows_at(self, first: int, last: int) -> Array:
        places = np.arange(first, last)
        rows: Array = self._blocks[places // BLOCK] * BLOCK + places % BLOCK
        return rows

    def _enter(self, ids: Array, rows: Array, fresh: int, usage: Array) -> None:
        """Give rows to new ids, of which so many are not those of evicted ids."""
        arena, arena.seen = self.arena, None
        if not vocabulary.enter(arena.index, arena.words, arena.pitch, self.number, ids, rows):
            raise MemoryError(f"table {self.spec.name}: too many ids share their bits")
        self.used += fresh
        if self._capacity is not None:
            arena.usage[rows] = usage
            self._heap_size = vocabulary.rank(
                self._heap, self._heap_size, ids, rows, arena.usage, self.spec.eviction == "frequency"
            )

    def drop(self) -> None:
        """Give the rows back to the arena."""
        if self.spec.rows is None:
            rows = self._rows_at(0, self.used)
            vocabulary.remove(self.arena.index, self.arena.words, self.arena.pitch, self.number, rows)
        self.arena.give_back(self.number, self._blocks)

    # --- saving, moving ---------------------------------------------------------------------------------------------

    def check_block(self, block: RowBlock) -> None:
        """Raise if rows do not fit ``restore``; changes nothing.

        Raises:
            NotFound: an id outside this part of the table.
            SchemaError: anything of another shape or dtype, or stamps of no step so far.
            ValueError: an id of a dynamic table that has a row already.
        """
        block.check(self.spec, self._rule, self.step)
        arena, ids, rows = self.arena, block.ids.numpy(), self._alone.check(block.ids, [block.ids.numel()])
        if self.spec.rows is not None:
            return
        vocabulary.correct(arena.index, arena.words, arena.pitch, self.number, ids, rows)
        if (rows >= 0).any() or np.unique(ids).size != ids.size:
            raise ValueError("an id already has a row; restore into an empty table")

    def restore(self, block: RowBlock) -> None:
        """Restore the rows of a block that ``check_block`` takes, state and stamp included.

        All ids of a dynamic table get a row, also beyond this shard's share of the capacity: a checkpoint's ids do not
        spread over the shards quite evenly. From then on a new id evicts another.
        """
        arena, ids = self.arena, block.ids.numpy()
        if self.spec.rows is None:
            rows = self._more_rows(ids.size)
            if self._capacity is not None and self.used + ids.size > self._capacity:
                self._capacity = self.used + ids.size
                self._heap = np.concatenate([self._heap, np.empty((self._capacity - len(self._heap), 3), np.int64)])
            arena.changing(rows)
            self._enter(ids, rows, ids.size, block.usage.numpy())
        else:
            rows = self._alone.check(block.ids, [ids.size])
            arena.changing(rows)
        arena.seen = None
        heads, weights, states = arena.parts(arena.words)
        weights[rows] = as_array(block.weights).reshape(rows.size, arena.width)
        states[rows] = as_array(block.states).reshape(rows.size, arena.states)
        heads[rows, 0], heads[rows, 1] = ids, block.stamps.numpy()

    @property
    def history(self) -> Tensor:
        """Constants of each step so far, ``[step, CONSTANTS]`` float64, for rows yet to catch up; else no rows.

        Later steps do not change them.
        """
        return torch.from_numpy(self.missed.steps())

    def resume(self, step: int, history: Tensor) -> None:
        """Set the step count, and the constants, from which restored rows continue."""
        self.missed.resume(step, history)
        self.arena.facts[self.number, STEP], self.arena.facts[self.number, LAGS] = step, self.missed.lag
        self.arena.seen = None


class MissedSteps:
    """Constants of a table's steps, for rows that had no gradient in some of them.

    A dense optimizer with decay or momentum also changes the rows without a gradient. A table does not: it keeps the
    constants of each step, and a row's stamp is the step it is up to date with. Later steps are replayed, each with its
    own constants, before the row is read or updated; so the results are the dense optimizer's.

    Attributes:
        lag: whether a step so far changes rows that had no gradient.
        may_rest: whether a row that no longer moves without a gradient stays so: no step has L2 decay, and each has a
            number beside its root.
        steady: whether the constants of moments never change, nor do weights decay.
    """

    def __init__(self, spec: TableSpec, rule: RowOptimizer) -> None:
        self._table, self._family = spec.name, rule.family
        self._kept = spec.every_row_moves
        self._history: NDArray[np.float64] = np.empty((64 if self._kept else 0, CONSTANTS))
        self._step = 0  # rows [0, step) are filled
        self.lag, self.may_rest, self.steady = False, True, True

    def note(self, constants: NDArray[np.float64]) -> None:
        """Keep the constants of the next step, which was applied to the rows with gradients."""
        if not self._kept:
            return
        if self._step == len(self._history):
            self._history = np.concatenate([self._history, np.empty_like(self._history)])
        self._history[self._step] = constants
        self._step += 1
        self._look(self._history[self._step - 1 : self._step])

    def _look(self, steps: NDArray[np.float64]) -> None:
        adam, sgd = self._family in _ADAMS, self._family is Family.SGD
        self.lag = self.lag or (
            (self._family in _DECAYING and len(steps) > 0)
            or bool(steps[:, _DECAY].any())
            or (sgd and bool(steps[:, _MOMENTUM].any()))
        )
        self.may_rest = self.may_rest and not (steps[:, _DECAY].any() or (adam and bool((steps[:, _EPS] <= 0).any())))
        moments = [_MOMENTUM] if sgd else [_SHARE, _BETA2] if adam else list(range(_SHARE, _STEP))
        changed = (steps[:, moments] != self._history[0, moments]).any() if len(steps) else False
        self.steady = self.steady and not (changed or (adam and (steps[:, _KEEP] != 1).any()))

    def steps(self) -> NDArray[np.float64]:
        """Return the constants so far, ``[steps, CONSTANTS]``; no rows of a table that needs none."""
        return self._history[: self._step]

    def check(self, step: int, history: Tensor) -> None:
        """Raise ``SchemaError`` unless ``history`` is that of ``step`` steps."""
        expected = (step if self._kept else 0, CONSTANTS)
        if history.shape != expected or history.dtype != torch.float64:
            raise SchemaError(f"table {self._table}: history of {expected} expected, got {tuple(history.shape)}")

    def resume(self, step: int, history: Tensor) -> None:
        """Set the constants of the steps so far."""
        self.check(step, history)
        if self._kept:
            self._history, self._step = np.concatenate([history.numpy(), np.empty((64, CONSTANTS))]), step
            self.lag, self.may_rest, self.steady = False, True, True
            self._look(self._history[:step])


class TableGroup:
    """Tables of one arena, whose lookups of a step are known together: flat ids, and the number that each table has.

    >>> from anabranch.tables import Constant, Family
    >>> rule = RowOptimizer(Family.SGD, lr=0.5)
    >>> specs = [TableSpec(name, 10, 2, initial=Constant(1.0)) for name in "ab"]
    >>> arena = Arena(specs[0], rule)
    >>> tables = [Table(spec, rule, arena) for spec in specs]
    >>> TableGroup(tables).push(torch.tensor([3, 3, 4]), torch.ones(3, 2), [2, 1])
    >>> tables[0].pull(torch.tensor([3, 4]))
    tensor([[0., 0.],
            [1., 1.]])
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables, self.arena = list(tables), tables[0].arena
        assert all(table.arena is self.arena for table in tables)
        self._which = np.array([table.number for table in tables])
        self._capped = np.array([table.spec.capacity is not None for table in tables])
        self._kept = [table for table in tables if table.spec.every_row_moves]

    def pull(
        self,
        ids: Tensor,
        counts: Sequence[int],
        *,
        out: Tensor | None = None,
        versions: Tensor | None = None,
        training: bool = False,
    ) -> Tensor:
        """Return the rows of each table's ids, as of its last step; their versions too if an array for them is given.

        Raises:
            NotFound: an id outside its table; says which, and where.
        """
        flat, starts = self._lookups(ids, counts)
        if out is None:
            out = torch.empty(len(ids), self.arena.width, dtype=self.arena.dtype, device="cpu")
        self._rows(flat, starts, as_array(out), _NONE if versions is None else versions.numpy(), training=training)
        if versions is not None:
            self._move_as_one(versions.numpy(), starts)
        return out

    def answer(
        self,
        ids: Tensor,
        counts: Sequence[int],
        with_state: Sequence[int],
        known: Sequence[int],
        since: Tensor,
        *,
        training: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Rows of flat ids, some of which come only if they have changed.

        Args:
            ids: flat, of all tables.
            counts: the number of each table's ids.
            with_state: for each table the number of its first ids that come with their state.
            known: for each table the number of its last ids, which come only if they have changed.
            since: for each of those the step when it was read, int64.
            training: as in ``pull``.

        Returns:
            Rows with state; those without; of each known one, whether it has changed; and each table's number of rows
            without state.
        """
        flat, starts = self._lookups(ids, counts)
        versions = np.empty(flat.size, np.int64)
        rows, _ = self._rows(flat, starts, self.arena.zeros[:0], versions, training=training)
        evicts = np.repeat([not table.spec.stays for table in self.tables], known)
        ends, many = starts[1:], np.asarray(known)
        lookups = _ranges(ends - many, many)
        lost = evicts & (versions[lookups] == 0)  # an id that has lost its row reads as its first values, at any step
        self._move_as_one(versions, starts)
        lost |= evicts & np.repeat([table.moves_as_one for table in self.tables], known)
        changed = (versions[lookups] > since.numpy()) | lost
        come = np.ones(flat.size, np.bool_)
        come[_ranges(starts[:-1], np.asarray(with_state))] = False
        come[lookups] = changed
        edges = np.append(0, np.cumsum(come))[starts]
        out = torch.empty(int(edges[-1]), self.arena.width, dtype=self.arena.dtype, device="cpu")
        visit, _ = self._visits(slice(None), flat[come], edges, as_array(out), _NONE, training=False)
        self.arena.pool.run(partial(visit, rows[come]), int(edges[-1]))
        states = []
        for table, first, some in zip(self.tables, starts.tolist(), with_state, strict=False):
            states.append(self._with_state(table, flat[first : first + some], rows[first : first + some]))
        return torch.cat(states), out, torch.from_numpy(changed), np.diff(edges).tolist()

    def _with_state(self, table: Table, ids: Array, rows: Array) -> Tensor:
        """Weights and states of rows of ``table``."""
        arena = self.arena
        out = torch.empty(rows.size, arena.width + arena.states, dtype=working_dtype(arena.dtype), device="cpu")
        kernels.states(
            arena.keys, arena.firsts, arena.w, arena.x, arena.shape, arena.states, table.number, ids, rows,
            as_array(out),
        )  # fmt: skip
        return out

    def push(self, ids: Tensor, grads: Tensor, counts: Sequence[int], squares: Tensor | None = None) -> None:
        """One optimizer step of every table with the gradients of its lookups; those of one id are summed.

        ``squares`` are of gradients that are sums over several steps, one of each id.

        Raises:
            NotFound: an id outside its table; says which, and where. Nothing is changed.
        """
        arena = self.arena
        flat, starts = self._lookups(ids, counts)
        assert grads.numel() == flat.size * arena.width
        moves = as_array(grads.detach().cpu().to(arena.dtype))
        own = _NO_SQUARES if squares is None else squares.float().contiguous().numpy()
        rows, distinct = self._rows(flat, starts, moves[:0], _NONE, training=True)
        arena.seen = None
        for k in np.flatnonzero(self._capped).tolist():
            part = slice(starts[k], starts[k + 1])
            if (rows[part] < 0).any():
                self.tables[k].unadmitted += self.tables[k].draw(np.unique(flat[part][rows[part] < 0])).size
        constants, working = self._constants(), np.empty(0, arena.working)
        arena.changing(rows)

        def move(thread: int, threads: int) -> None:
            some = rows, starts, moves, own
            if own.size or not distinct:
                some = kernels.merge(arena.shape[0], arena.most, *some, working, thread, threads)
                thread, threads = 0, 1
            kernels.step(
                arena.rule, self._which, arena.facts, arena.words, arena.w, arena.x, arena.shape, constants,
                arena.least, *some, thread, threads,
            )  # fmt: skip

        arena.pool.run(move, rows.size)
        arena.facts[self._which, STEP] += 1
        for table in self._kept:
            table.missed.note(constants[self.tables.index(table)])
            arena.facts[table.number, LAGS] = table.missed.lag

    def check(self, ids: Tensor, counts: Sequence[int]) -> Array:
        """Raise the errors of ``pull`` for flat ids outside their tables; changes nothing. Returns where they are."""
        flat, starts = self._lookups(ids, counts)
        seen = self.arena.seen
        if seen is not None and seen.are(self._which, flat, starts):
            return seen.rows
        rows, distinct = self._locate(flat, starts)
        self.arena.seen = Seen(self._which, flat.copy(), starts, rows, distinct, settled=False)
        return rows

    def admit(self, ids: Tensor, counts: Sequence[int]) -> None:
        """Give rows to ids as ``pull`` in training does, without the answer."""
        flat, starts = self._lookups(ids, counts)
        self._rows(flat, starts, self.arena.zeros[:0], _NONE, training=True)

    # --- rows of lookups --------------------------------------------------------------------------------------------

    def _lookups(self, ids: Tensor, counts: Sequence[int]) -> tuple[Array, Array]:
        """Return the flat ids, and where each table's begin."""
        assert ids.dtype == torch.int64
        starts = np.zeros(len(self.tables) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        assert starts[-1] == ids.numel()
        return np.ascontiguousarray(ids.detach().cpu().reshape(-1).numpy()), starts

    def _locate(
        self, flat: Array, starts: Array, visit: Callable[[Array, int, int], None] | None = None
    ) -> tuple[Array, bool]:
        """Rows, but for false tags, and whether each table's ids ascend.

        ``visit`` is called with the rows on each thread that has located its share of them.
        """
        arena = self.arena
        if arena.hashes.size < flat.size:
            arena.hashes = np.empty(2 * flat.size, np.uint64)
        rows, bads, falls = np.empty_like(flat), list[int](), list[int]()

        def part(thread: int, threads: int) -> None:
            bad, fall = vocabulary.locate(
                self._which, arena.facts, arena.shard, arena.shards, arena.index, flat, starts, arena.hashes, rows,
                thread, threads,
            )  # fmt: skip
            falls.append(fall)
            if bad >= 0:
                bads.append(bad)
            elif visit is not None:
                visit(rows, thread, threads)

        arena.pool.run(part, flat.size)
        if bads:
            bad = min(bads)
            k = int(np.searchsorted(starts, bad, "right")) - 1
            spec, at = self.tables[k].spec, bad - starts[k]
            if spec.rows is not None and not 0 <= flat[bad] < spec.rows:
                raise NotFound(f"table {spec.name} has ids 0 to {spec.rows - 1}; ids[{at}] is {flat[bad]}")
            raise NotFound(f"table {spec.name}: ids[{at}] is {flat[bad]}, which shard {arena.shard} does not hold")
        return rows, not any(falls)

    def _rows(self, flat: Array, starts: Array, out: Array, versions: Array, *, training: bool) -> tuple[Array, bool]:
        """Rows of lookups, up to date and copied to ``out`` if it has room; and whether they are distinct.

        A push that brings the ids of the last pull in training uses the rows located then.
        """
        arena, seen = self.arena, self.arena.seen
        visit, unready = self._visits(slice(None), flat, starts, out, versions, training=training)
        if seen is None or not seen.are(self._which, flat, starts):
            rows, distinct = self._locate(flat, starts, visit)
        else:
            rows, distinct = seen.rows, seen.distinct
            if seen.settled and training and not out.size and not versions.size:
                return rows, distinct
            arena.pool.run(partial(visit, rows), flat.size)
        if not training and unready.any():
            rows = rows.copy()  # those of a push that has been checked stay
        for k in np.flatnonzero(unready | self._capped if training else unready).tolist():
            part = slice(int(starts[k]), int(starts[k + 1]))
            self.tables[k].settle(flat[part], rows[part], training=training, distinct=distinct)
            again, _ = self._visits(slice(k, k + 1), flat, starts[k : k + 2], out, versions, training=False)
            arena.pool.run(partial(again, rows), rows[part].size)
        if training and (out.size or versions.size):
            arena.seen = Seen(self._which, flat.copy(), starts, rows, distinct, settled=True)
        return rows, distinct

    def _visits(
        self, part: slice, flat: Array, starts: Array, out: Array, versions: Array, *, training: bool
    ) -> tuple[Callable[[Array, int, int], None], Array]:
        """Return what visits a thread's share of rows, and where it marks the tables that have more to do."""
        arena, which = self.arena, self._which[part]
        unready = np.zeros(which.size, np.bool_)

        def visit(rows: Array, thread: int, threads: int) -> None:
            kernels.visit(
                which, arena.facts, arena.keys, arena.firsts, arena.owner, arena.words, arena.w, arena.shape, training,
                flat, rows, starts, out, versions, unready, thread, threads,
            )  # fmt: skip

        return visit, unready

    def _move_as_one(self, versions: Array, starts: Array) -> None:
        for table in self._kept:
            if table.moves_as_one:
                k = self.tables.index(table)
                versions[starts[k] : starts[k + 1]] = table.step

    def _constants(self) -> Array:
        """Constants of each table's next step; tables at the same step with the same rule share them."""
        known: dict[tuple[int, int], Array] = {}
        each = []
        for table, step in zip(self.tables, self.arena.facts[self._which, STEP].tolist(), strict=True):
            key = (id(table._rule), step)
            if key not in known:
                known[key] = table._rule.constants(step + 1)
            each.append(known[key])
        return np.stack(each)


def side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` of contiguous tensors; without a copy where each begins in memory where the last one ends.

    >>> whole = torch.arange(6)
    >>> side_by_side(whole.split([1, 2, 3])).data_ptr() == whole.data_ptr()
    True
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.contiguous()
    end, rows, begun = first.data_ptr(), 0, first
    for tensor in tensors:
        if not tensor.is_contiguous() or (tensor.numel() and tensor.data_ptr() != end):
            return torch.cat(list(tensors))
        end += tensor.nbytes
        rows += tensor.shape[0]
        begun = begun if begun.numel() else tensor
    if begun.untyped_storage().nbytes() < begun.storage_offset() * begun.itemsize + end - begun.data_ptr():
        return torch.cat(list(tensors))  # neighbours by chance, in memory of different owners
    return begun.as_strided((rows, *first.shape[1:]), first.stride())


def _mixed(ids: Array, key: int) -> NDArray[np.uint64]:
    """64 bits of each id that depend on every bit of id and key."""
    x = ids.view(np.uint64) ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _ranges(firsts: Array, counts: Array) -> Array:
    """``first .. first + count - 1`` of each, one behind the other."""
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ranges: Array = np.repeat(firsts, counts) + offsets
    return ranges
