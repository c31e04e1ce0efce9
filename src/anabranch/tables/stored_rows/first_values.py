"""``FirstValues``: the numbers per row begins with, computed from its id when it is first used."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.tables.kernels._quantile import QUANTILE
from anabranch.tables.kernels.selection import Kernels, KernelThreads, as_array
from anabranch.tables.optimizers.row_optimizers import RowOptimizer
from anabranch.tables.row_storage import RowStorage
from anabranch.tables.stored_rows.layout import RowLayout
from anabranch.tables.table_spec import TableSpec

__all__ = ["FirstValues"]

Array = NDArray[Any]


class FirstValues:
    """Initial weights of ``spec``'s rows, drawn by their ids under ``key``, and initial states of ``rule``."""

    def __init__(
        self, spec: TableSpec, rule: RowOptimizer, key: np.uint64, layout: RowLayout, pool: KernelThreads, run: Kernels
    ) -> None:
        self._spec, self._key, self._layout, self._pool, self._run = spec, key, layout, pool, run
        self.rule = rule

    def begin(self, storage: RowStorage, rows: Array, ids: Array) -> None:
        """Give ``rows``, those of ``ids``, their initial weights and states."""
        rows, first = np.unique(rows, return_index=True)
        if self._layout.halves:
            begun = torch.full((rows.size, self._layout.row), self.rule.initial_state, device="cpu")
            begun[:, : self._spec.width] = self.of(ids[first])
            self._layout.write(storage, torch.from_numpy(rows), begun)
        else:
            self._write(storage.values, self._layout.stride, rows, ids[first])
        if storage.with_sums:
            storage.sums[rows] = self.rule.initial_state
        storage.stamps[rows] = 1

    def fill_missing(self, out: Tensor, rows: Array, ids: Array) -> None:
        """Write the initial weights of ``ids`` that have no row, where ``rows`` is -1, to ``out``."""
        unknown = np.flatnonzero(rows < 0)
        out[torch.from_numpy(unknown)] = self.of(ids[unknown]).to(out.dtype)

    def of(self, ids: Array) -> Tensor:
        """Return the initial weights of ``ids``, ``[len(ids), width]``."""
        values = torch.empty(ids.size, self._spec.width, dtype=self._spec.dtype, device="cpu")
        self._write(as_array(values), self._spec.width, np.arange(ids.size), ids)
        return values

    def _write(self, values: Array, stride: int, rows: Array, ids: Array) -> None:
        kind, low, high = self._spec.initial.numbers()
        self._pool.run(
            lambda first, last: self._run.initialise(
                values, stride, self._spec.width, rows, ids, self._key, kind, low, high,
                self.rule.initial_state, QUANTILE, first, last,
            ),
            rows.size,
            rows.size * stride,
        )  # fmt: skip
