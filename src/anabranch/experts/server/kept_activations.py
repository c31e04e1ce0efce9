"""Activations kept between forward and backward: the forward's graph, for callers whose backward arrives in time.

The graph is the batch's, and each request knows its rows of it: its backward can run alone or with others, with zeros
for the gradients of the rest. The graph is over copies of the parameters and buffers at that time: what writes
to them before the backward would otherwise change the graph's saved tensors. A copy takes no memory until one side is
written.

Kept rows are bounded; the oldest are evicted first, and their caller sends the inputs again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from anabranch.autodiff.layer_state import lazy_clone
from anabranch.autodiff.moved_parameter import parameters_here


def copies_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's parameters, as leaves, and buffers, by name."""
    copies = {
        name: copy_on_write(parameter).requires_grad_(parameter.requires_grad)
        for name, parameter in parameters_here(module).items()
    }
    return copies | {name: copy_on_write(buffer) for name, buffer in module.named_buffers()}


def take_writes(module: nn.Module, copies: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> None:
    """Write to ``module`` what a forward on ``copies`` has written to them; ``fresh`` are the copies before it."""
    with torch.no_grad():
        for name, own in [*parameters_here(module).items(), *module.named_buffers()]:
            copy = copies[name]
            if copy is not fresh[name] and not isinstance(own, nn.Parameter):
                owner, _, last = name.rpartition(".")
                setattr(module.get_submodule(owner), last, copy_on_write(copy))
            elif copy.layout is torch.strided and not is_unwritten(copy) and not torch.equal(copy, own):
                own.copy_(copy)


def is_unwritten(tensor: Tensor) -> bool:
    """Return True if neither ``tensor`` nor its copy on write has been written since."""
    return tensor.layout is torch.strided and bool(torch._C._is_cow_tensor(tensor))  # type: ignore[attr-defined]


def copy_on_write(tensor: Tensor) -> Tensor:
    """Return a detached copy whose memory is copied when the first of the two is written."""
    copy = lazy_clone(tensor.detach(), on_cuda=True)
    return tensor.detach().clone() if copy is None else copy


@dataclass(frozen=True, slots=True, eq=False)
class KeptBatch:
    """A forward's graph: its inputs, those with gradients as leaves, its outputs, the copies of parameters and buffers
    that it is over, and how often the expert had changed before.
    """

    leaves: Sequence[Tensor | None]
    outputs: Sequence[Tensor | None]
    copies: dict[str, Tensor]
    rows: int
    changes: int

    def backward(
        self, module: nn.Module, parts: Sequence[tuple[KeptRows, Sequence[Tensor | None]]]
    ) -> tuple[list[Tensor | None], bool]:
        """Add the gradients of the parameters to theirs in ``module``; return those of the leaves, and whether any
        output had a gradient.

        Args:
            module: the expert's.
            parts: the parts to run back, each with a gradient for each of its outputs, where it has one.
        """
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for index, output in enumerate(self.outputs):
            mine = [(kept, its[index]) for kept, its in parts if its[index] is not None]
            if output is None or not output.requires_grad or not mine:
                continue
            seed = torch.zeros_like(output)
            for kept, gradient in mine:
                assert gradient is not None
                rows = seed[kept.start : kept.start + kept.rows]
                rows[tuple(slice(size) for size in gradient.shape)].copy_(gradient, non_blocking=True)
            roots.append(output)
            seeds.append(seed)
        try:
            if roots:
                # Other requests of the same graph may still run their backward. On this thread alone: torch's thread of
                # a device may be waiting for this answer, in this same process. A part of the module that is
                # checkpointed runs again, from the copies too.
                with (
                    torch.autograd.set_multithreading_enabled(False),
                    _reparametrize_module(module, dict(self.copies), tie_weights=True),
                ):
                    torch.autograd.backward(roots, seeds, retain_graph=True)
            for name, copy in self.copies.items():
                if copy.grad is not None:
                    parameter = module.get_parameter(name)
                    parameter.grad = copy.grad if parameter.grad is None else parameter.grad + copy.grad
            return [None if leaf is None else leaf.grad for leaf in self.leaves], bool(roots)
        finally:
            for tensor in (*self.leaves, *self.copies.values()):
                if tensor is not None:
                    tensor.grad = None


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
    >>> batch = KeptBatch([], [], copies_of(nn.Linear(1, 1)), rows=6, changes=0)
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
        """Free the activations kept under ``ticket``."""
        entry = self._entries.pop(ticket, None)
        if entry is not None:
            self._rows -= entry.rows
