"""The distinct ids of a batch, of all tables at once: the rows that a step reads, and each lookup's place among them.

Computed once for each batch: prefetching, reading and looking up all need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.tables.kernels import routing

__all__ = ["Distinct", "distinct_ids", "unique_of"]


@dataclass(frozen=True, slots=True)
class Distinct:
    """The distinct ids of one table's lookups.

    Attributes:
        given: all ids, flat; a copy, because the caller's tensor may change.
        ids: the valid ones, each once, ascending.
        inverse: the index in ``ids`` of each of ``given``; ``None`` if some are outside the table.
    """

    given: Tensor
    ids: Tensor
    inverse: Tensor | None

    def is_of(self, ids: Tensor) -> bool:
        """Return True if ``ids`` equal the given ones, whatever their shape, dtype and device."""
        return ids.numel() == len(self.given) and torch.equal(self.given, ids.detach().cpu().long().reshape(-1))

    def of(self, ids: Tensor) -> Tensor | None:
        """``inverse`` in the form of ``ids``, if they are the given ones."""
        return None if self.inverse is None or not self.is_of(ids) else self.inverse.view(ids.shape)


def distinct_ids(wanted: Mapping[str, Tensor], rows: Mapping[str, int]) -> dict[str, Distinct]:
    """Return the distinct ids of each table, without those outside it.

    >>> found = distinct_ids({"users": torch.tensor([[7, 3], [7, 7]])}, {"users": 10})["users"]
    >>> found.ids, found.of(torch.tensor([[7, 3], [7, 7]]))
    (tensor([3, 7]), tensor([[1, 0],
            [1, 1]]))

    Args:
        wanted: ids by table, of any shape.
        rows: the number of rows of each table.
    """
    flat, counts, limits = list[Tensor](), list[int](), list[int]()
    for name, ids in wanted.items():
        flat.append(ids.detach().cpu().long().reshape(-1))
        counts.append(ids.numel())
        limits.append(rows[name])
    if not flat:
        return {}
    starts = np.concatenate([[0], np.cumsum(counts)])
    together = torch.cat(flat)
    out, out_starts = torch.empty_like(together), np.zeros_like(starts)
    inverse, whole = torch.empty_like(together), np.empty(len(flat), np.bool_)
    routing.distinct_all(together.numpy(), starts, np.array(limits), out.numpy(), out_starts, inverse.numpy(), whole)
    each = torch.split(out[: out_starts[-1]], np.diff(out_starts).tolist())
    parts = zip(wanted, torch.split(together, counts), each, torch.split(inverse, counts), whole.tolist(), strict=True)
    distinct = {}
    for name, given, ids, places, all_of in parts:
        distinct[name] = Distinct(given, ids, places if all_of else None)
    return distinct


def unique_of(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Each of ``ids`` once, ascending, and the index of each among them."""
    found, inverse = torch.unique(ids.long(), return_inverse=True)
    return found, inverse
