"""Which row of a table an id has. A fixed vocabulary computes it; a dynamic one looks it up and admits new ids."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import NotFound
from anabranch.parameter_server.kernels import Kernels
from anabranch.parameter_server.placement import Placement

__all__ = ["FixedVocabulary", "Vocabulary"]

Ids = NDArray[np.int64]


class Vocabulary(Protocol):
    """From ids to rows of one shard's part of a table."""

    def locate(self, ids: Ids, *, step: int, training: bool) -> Ids:
        """The row of each id, -1 for one that the table has not; ``training`` may admit it."""

    def ids(self, rows: Ids) -> Ids:
        """The ids of rows that are in use."""

    def in_use(self) -> Ids:
        """The rows that have an id, ascending."""


class FixedVocabulary:
    """The ids ``range(rows)``, or this shard's part of them."""

    def __init__(self, name: str, placement: Placement, shard: int, kernels: Kernels) -> None:
        assert placement.rows is not None
        self._name, self._placement, self._shard, self._kernels = name, placement, shard, kernels
        self.rows = placement.count(shard)

    def locate(self, ids: Ids, *, step: int, training: bool) -> Ids:
        """The row of each id.

        Raises:
            NotFound: an id outside the table, or one that another shard holds; says which, and where in ``ids``.
        """
        rows = self._placement.rows
        assert rows is not None
        bad = self._kernels.first_outside(ids, rows)
        if bad >= 0:
            raise NotFound(f"table {self._name} has ids 0 to {rows - 1}; ids[{bad}] is {ids[bad]}")
        if self._placement.shards > 1:
            strangers = np.flatnonzero(self._placement.owners(ids) != self._shard)
            if strangers.size:
                at = strangers[0]
                raise NotFound(f"table {self._name}: ids[{at}] is {ids[at]}, which shard {self._shard} does not hold")
        return self._placement.places(ids)

    def ids(self, rows: Ids) -> Ids:
        """The ids of ``rows``."""
        return self._placement.ids(self._shard, rows)

    def in_use(self) -> Ids:
        """Every row."""
        return np.arange(self.rows)
