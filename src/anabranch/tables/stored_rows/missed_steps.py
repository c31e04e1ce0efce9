"""``MissedSteps``: optimizer steps that rows missed, replayed when a row is next used.

A dense optimizer with decay or momentum also changes the rows without a gradient. A table does not: it keeps the
constants of each step, and a row's stamp is the step it is up to date with. Later steps are replayed, each with its own
constants, before the row is read or updated; so the results are the dense optimizer's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tables.kernels.selection import Kernels, KernelThreads
from anabranch.tables.optimizers.row_optimizers import CONSTANTS, Family, RowOptimizer
from anabranch.tables.row_storage import RowStorage
from anabranch.tables.stored_rows.layout import RowLayout
from anabranch.tables.stored_rows.step_on_rows import step_on_rows
from anabranch.tables.table_spec import TableSpec

__all__ = ["MissedSteps"]

Array = NDArray[Any]
# Positions of a step's constants, in the order of ``RowOptimizer.constants``.
_MOMENTUM, _SHARE, _BETA2, _DECAY, _EPS, _KEEP, _STEP = 1, 2, 3, 4, 6, 7, 10
_LOOK_EVERY = 64  # missed steps between two checks for rows that no longer change
_DECAYING = (Family.ADAM, Family.ADAMW, Family.SPARSE_ADAM, Family.RMSPROP, Family.ADAMAX)


class MissedSteps:
    """Constants of a table's steps, and the replay of those that a row missed.

    Attributes:
        lag: whether a step so far changes rows that had no gradient.
    """

    def __init__(
        self, spec: TableSpec, rule: RowOptimizer, layout: RowLayout, pool: KernelThreads, run: Kernels
    ) -> None:
        self._table, self._rule, self._layout, self._pool, self._kernels = spec.name, rule, layout, pool, run
        self._working = np.float64 if spec.dtype == torch.float64 else np.float32
        self._kept = spec.every_row_moves
        self._history: Array = np.empty((64 if self._kept else 0, CONSTANTS))  # rows [0, step) are filled
        self.lag = False

    def note(self, step: int, constants: Array) -> None:
        """Keep the constants of the step after ``step``, which was applied to the rows with gradients."""
        if not self._kept:
            return
        if step == len(self._history):
            self._history = np.concatenate([self._history, np.empty_like(self._history)])
        self._history[step] = constants
        self.lag = self.lag or self._moves_quiet_rows(self._history[step:][:1])

    def history(self, step: int) -> Tensor:
        """Return a copy of the constants of the first ``step`` steps, ``[step, CONSTANTS]``; else no rows."""
        return torch.from_numpy(self._history[: step if self._kept else 0].copy())

    def check(self, step: int, history: Tensor) -> None:
        """Raise ``SchemaError`` unless ``history`` is that of ``step`` steps."""
        expected = (step if self._kept else 0, CONSTANTS)
        if history.shape != expected or history.dtype != torch.float64:
            raise SchemaError(f"table {self._table}: history of {expected} expected, got {tuple(history.shape)}")

    def resume(self, step: int, history: Tensor) -> None:
        """Set the constants of the steps so far."""
        self.check(step, history)
        if self._kept:
            self._history = np.concatenate([history.numpy(), np.empty((64, CONSTANTS))])
            self.lag = self._moves_quiet_rows(self._history[:step])

    def _moves_quiet_rows(self, history: Array) -> bool:
        """Return True if any of these steps changes a row without a gradient."""
        if self._rule.family in _DECAYING:
            return len(history) > 0
        momentum = self._rule.family is Family.SGD and bool(history[:, _MOMENTUM].any())
        return momentum or bool(history[:, _DECAY].any())

    def catch_up(self, storage: RowStorage, rows: Array, step: int) -> None:
        """Bring ``rows`` up to ``step``: the steps after its stamp are applied to each."""
        if not rows.size:
            return
        since = storage.stamps[rows] - 1
        missed = self._history[since.min() : step]
        if self._moves_quiet_rows(missed):
            if self._rule.family in (Family.ADAGRAD, Family.ROW_WISE_ADAGRAD) or not self._replays:
                self._replay_whole_steps(storage, rows, since, step)
            else:
                self._replay(storage, rows, since, missed, step)
        storage.stamps[rows] = step + 1

    def _replay_whole_steps(self, storage: RowStorage, rows: Array, since: Array, until: int) -> None:
        run = step_on_rows(storage, self._layout, self._rule, self._kernels)
        for step in range(int(since.min()), until):
            late = rows[since <= step]
            there = torch.from_numpy(late)
            may_rest = not self._replays and step % _LOOK_EVERY == 0
            before = self._layout.read(storage, there) if may_rest else None
            run(late, np.zeros(late.size * self._layout.width, self._working), self._history[step], 0, late.size)
            if before is not None:
                resting = late[self._rests(self._layout.read(storage, there), before, self._history[step:until])]
                if resting.size:
                    awake = ~np.isin(rows, resting)
                    rows, since = rows[awake], since[awake]
                    if not rows.size:
                        return

    @property
    def _replays(self) -> bool:
        """True if one kernel replays all steps that a row missed; it would not round float16 between two of them."""
        return self._rule.compiled and not self._layout.halves

    def _rests(self, after: Tensor, before: Tensor, history: Array) -> Array:
        """Return for each row, moved by the first of these steps, whether none of the others would change a bit of it.

        That is so if this one did not, the numbers that moments decay by stay, and what would move weights is 0.
        """
        adam = self._rule.family in (Family.ADAM, Family.ADAMW)
        decays = history[:, _DECAY].any() or (adam and (history[:, _KEEP] != 1).any())
        steady = (history[:, _SHARE:_STEP] == history[0, _SHARE:_STEP]).all()
        if decays or not steady:
            return np.zeros(len(after), np.bool_)
        quiet = (after == before).all(1)
        for number, name in enumerate(self._rule.state_names, 1):
            if name in ("exp_avg", "momentum_buffer"):
                quiet &= (after[:, number * self._layout.width : (number + 1) * self._layout.width] == 0).all(1)
        return quiet.numpy()

    def _replay(self, storage: RowStorage, rows: Array, since: Array, missed: Array, until: int) -> None:
        adam, width = self._rule.family is not Family.SGD, self._layout.width
        moments = missed[:, [_SHARE, _BETA2]] if adam else missed[:, [_MOMENTUM]]
        # With L2 decay, or with nothing beside the root, a move may grow again without a gradient.
        may_rest = not missed[:, _DECAY].any() and (not adam or bool((missed[:, _EPS] > 0).all()))
        steady = bool((moments == moments[0]).all()) and not (adam and (missed[:, _KEEP] != 1).any())
        zeros, history = np.zeros(width, self._working), self._history[:until]
        self._pool.run(
            lambda first, last: self._kernels.replay(
                storage.values, self._layout.stride, width, rows, since, history, adam, may_rest, steady, zeros,
                np.empty(width, self._working), first, last,
            ),
            rows.size,
            rows.size * width * len(missed),
        )  # fmt: skip
