"""Activations kept between forward and backward: the forward's graph, for callers whose backward arrives in time.

The graph is the batch's, and each request knows its rows of it: its backward can run alone or with others, with zeros
for the gradients of the rest. The graph is over a copy of the parameters at that time: updates between a forward and
its backward would otherwise change the graph's saved tensors. One copy serves all forwards between two updates.

Kept rows are bounded; the oldest are evicted first, and their caller sends the inputs again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anabranch.experts.server.batching.padding import fill

__all__ = ["KeptActivations", "KeptBatch", "KeptRows", "ParameterCopy"]


@dataclass(frozen=True, slots=True, eq=False)
class ParameterCopy:
    """A module's parameters as they were, for graphs that outlive an update."""

    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> ParameterCopy:
        """Return a copy of ``module``'s current parameters."""
        named = module.named_parameters()
        return cls({name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in named})

    def trained(self) -> list[Tensor]:
        """Return the parameters that take gradients."""
        return [tensor for tensor in self.tensors.values() if tensor.requires_grad]

    def give_gradients(self, module: nn.Module, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of ``trained`` to those of ``module``'s parameters."""
        mine = {id(tensor): gradient for tensor, gradient in zip(self.trained(), gradients, strict=True)}
        for name, parameter in module.named_parameters():
            gradient = mine.get(id(self.tensors[name]))
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@dataclass(frozen=True, slots=True, eq=False)
class KeptBatch:
    """A forward's graph: its inputs, those with gradients as leaves, and its outputs."""

    leaves: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    parameters: ParameterCopy
    rows: int

    def backward(
        self, parts: Sequence[tuple[KeptRows, Sequence[Tensor | None]]]
    ) -> tuple[list[Tensor | None], list[Tensor | None], bool]:
        """Gradients of the leaves and of the trained parameters, and whether any output had a gradient.

        Args:
            parts: the parts to run back, each with a gradient for each of its outputs, where it has one.
        """
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        parts = sorted(parts, key=lambda part: part[0].start)
        for index, output in enumerate(self.outputs):
            if output is None or not output.requires_grad or all(its[index] is None for _, its in parts):
                continue
            seed: list[Tensor] = []
            position = 0
            for kept, its in parts:
                gradient = its[index]
                if gradient is not None:
                    if kept.start > position:
                        seed.append(output.new_zeros(kept.start - position, *output.shape[1:]))
                    placed = gradient.to(output.device, output.dtype, non_blocking=True)
                    seed.append(fill(placed, output.shape[1:]))
                    position = kept.start + kept.rows
            if position < self.rows:
                seed.append(output.new_zeros(self.rows - position, *output.shape[1:]))
            roots.append(output)
            seeds.append(torch.cat(seed) if len(seed) > 1 else seed[0])
        leaves = [leaf for leaf in self.leaves if leaf is not None and leaf.requires_grad]
        trained = self.parameters.trained()
        found: Sequence[Tensor | None] = [None] * (len(leaves) + len(trained))
        if roots and found:
            # Other requests of the same graph may still run their backward. On this thread alone: torch's thread of a
            # device may be waiting for this answer, in this same process.
            with torch.autograd.set_multithreading_enabled(False):
                found = torch.autograd.grad(roots, [*leaves, *trained], seeds, retain_graph=True, allow_unused=True)
        of_leaves = iter(found[: len(leaves)])
        gradients = [next(of_leaves) if leaf is not None and leaf.requires_grad else None for leaf in self.leaves]
        return gradients, _owned(found[len(leaves) :], [*seeds, *found[: len(leaves)]]), bool(roots)


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """One request's rows of a forward's graph, and its length if the graph is of padded requests."""

    batch: KeptBatch
    start: int
    rows: int
    length: int = 0


class KeptActivations:
    """Activations kept for later backwards, by the callers' tickets.

    >>> kept = KeptActivations(4)
    >>> batch = KeptBatch([], [], ParameterCopy.of(nn.Linear(1, 1)), rows=6)
    >>> for start, ticket in enumerate((b"a", b"b", b"c")):
    ...     kept.put(ticket, KeptRows(batch, 2 * start, rows=2))
    >>> b"a" in kept, b"c" in kept
    (False, True)

    Args:
        rows: the most rows kept.
    """

    def __init__(self, rows: int) -> None:
        self.budget = rows
        self._entries: OrderedDict[bytes, KeptRows] = OrderedDict()
        self._rows = 0

    def __contains__(self, ticket: bytes) -> bool:
        return ticket in self._entries

    def put(self, ticket: bytes, kept: KeptRows) -> None:
        """Keep a request's part of a graph, and evict the oldest ones beyond the budget."""
        self.drop(ticket)
        if kept.rows > self.budget:
            return
        self._entries[ticket] = kept
        self._rows += kept.rows
        while self._rows > self.budget:
            self._rows -= self._entries.popitem(last=False)[1].rows

    def get(self, ticket: bytes) -> KeptRows | None:
        """Return the activations kept under ``ticket``; ``None`` if they are gone."""
        return self._entries.get(ticket)

    def drop(self, ticket: bytes) -> None:
        """Frees the activations kept under ``ticket``."""
        entry = self._entries.pop(ticket, None)
        if entry is not None:
            self._rows -= entry.rows


def _owned(gradients: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients of parameters, each in its own memory, because they are changed in place.

    Autograd may return one tensor as the gradient of two, its own input, or an expanded value.
    """
    taken = {other.untyped_storage().data_ptr() for other in others if other is not None and not other.is_sparse}
    owned: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is None or gradient.is_sparse:
            owned.append(gradient)
            continue
        place = gradient.untyped_storage().data_ptr()
        mine = place not in taken and gradient.is_contiguous()
        taken.add(place)
        owned.append(gradient if mine else gradient.clone(memory_format=torch.contiguous_format))
    return owned
