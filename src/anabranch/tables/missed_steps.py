"""``MissedSteps``: the constants of a table's steps, for rows that had no gradient in some of them.

A dense optimizer with decay or momentum also changes the rows without a gradient. A table does not: it keeps the
constants of each step, and a row's stamp is the step it is up to date with. Later steps are replayed, each with its own
constants, before the row is read or updated; so the results are the dense optimizer's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.tables.optimizers.row_optimizers import CONSTANTS, Family, RowOptimizer
from anabranch.tables.table_spec import TableSpec

# Positions of a step's constants, in the order of ``RowOptimizer.constants``.
_MOMENTUM, _SHARE, _BETA2, _DECAY, _EPS, _KEEP, _STEP = 1, 2, 3, 4, 6, 7, 10
_DECAYING = (Family.ADAM, Family.ADAMW, Family.SPARSE_ADAM, Family.RMSPROP, Family.ADAMAX)
_ADAMS = (Family.ADAM, Family.ADAMW, Family.SPARSE_ADAM)


class MissedSteps:
    """Constants of a table's steps.

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
        """Return the constants so far."""
        return self._history[: self._step]

    def history(self) -> Tensor:
        """Return the constants so far, ``[steps, CONSTANTS]``; no rows of a table that needs none.

        Later steps do not change them.
        """
        return torch.from_numpy(self.steps())

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
