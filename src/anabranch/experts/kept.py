"""Activations kept between forward and backward: the forward's own graph, for callers that come back in time.

Each request's inputs are leaves of its own inside the batch's graph, and its outputs are slices of the batch's, so its
backward can be run alone or with any others. The graph is over a copy of the parameters as they were: updates between
a forward and its backward would otherwise change what the graph has saved. One copy serves all forwards between two
updates.

What is kept is bounded in rows; the oldest goes first, and its caller sends the inputs again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Kept", "KeptActivations", "ParameterCopy", "join_leaves"]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterCopy:
    """A module's parameters as they were, for graphs that outlive an update."""

    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> ParameterCopy:
        """A copy of ``module``'s parameters as they are."""
        named = module.named_parameters()
        return cls({name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in named})

    def trained(self) -> list[Tensor]:
        """Those that take gradients."""
        return [tensor for tensor in self.tensors.values() if tensor.requires_grad]

    def give_gradients(self, module: nn.Module) -> None:
        """Moves the gradients that arrived here to ``module``'s parameters."""
        for name, parameter in module.named_parameters():
            gradient = self.tensors[name].grad
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self.tensors[name].grad = None


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """One request's part of a forward's graph."""

    leaves: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    parameters: ParameterCopy
    rows: int


class KeptActivations:
    """What is kept for backwards to come, by the tickets that callers gave.

    >>> kept = KeptActivations(4)
    >>> copy = ParameterCopy.of(nn.Linear(1, 1))
    >>> for ticket in (b"a", b"b", b"c"):
    ...     kept.put(ticket, Kept([], [], copy, rows=2))
    >>> b"a" in kept, b"c" in kept
    (False, True)

    Args:
        rows: the most rows kept.
    """

    def __init__(self, rows: int) -> None:
        self.budget = rows
        self._entries: OrderedDict[bytes, Kept] = OrderedDict()
        self._rows = 0

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._entries

    def put(self, ticket: bytes, kept: Kept) -> None:
        """Keeps a request's part of a graph, at the cost of the oldest ones."""
        self.drop(ticket)
        if kept.rows > self.budget:
            return
        self._entries[ticket] = kept
        self._rows += kept.rows
        while self._rows > self.budget:
            self._rows -= self._entries.popitem(last=False)[1].rows

    def get(self, ticket: bytes) -> Kept | None:
        """What is kept under ``ticket``."""
        return self._entries.get(ticket)

    def drop(self, ticket: bytes) -> None:
        """Lets go what is kept under ``ticket``."""
        entry = self._entries.pop(ticket, None)
        if entry is not None:
            self._rows -= entry.rows


def join_leaves(columns: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """Each input of a batch as one tensor that remembers the requests it was joined from."""
    joined: list[Tensor | None] = []
    for column in columns:
        present = [tensor for tensor in column if tensor is not None]
        joined.append(torch.cat(present) if len(present) > 1 else (present[0] if present else None))
    return joined
