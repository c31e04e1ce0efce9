"""A value at a stage's boundary: cut off the graph it comes from, and made the start of the next one.

::

    stage j                                     stage k
    ... ── grad_fn ──> tensor ──(cut)──> detached ──(enter)──> tensor ── ...
              ^ 1                                     ^ 2
    1  an edge, kept by stage j: backward starts here with the gradient that stage k sends
    2  a node of k's graph whose backward puts the gradient into a box, to be sent to stage j

Neither end keeps the tensor itself. What ``enter`` returns is no leaf, so the stage may change it in place, and when
the stage's own operations do not need it any more its memory is free.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from anabranch.pipeline.copies import brought
from anabranch.tensors import Structure, flatten, unflatten

if TYPE_CHECKING:
    from optree import PyTreeSpec

__all__ = ["Gradients", "Packet", "cut", "enter"]

Gradients = list[Tensor | None]
"""A gradient for each leaf of a packet; ``None`` where none flows."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A structure of detached tensors and plain values, with the word for each whether it awaits a gradient.

    ``doubled`` are the leaves whose memory goes some other way too: whoever gets them must not change them.
    """

    treedef: PyTreeSpec
    leaves: list[object]
    needs_grad: tuple[bool, ...]
    doubled: tuple[int, ...] = ()

    def structure(self) -> Structure:
        """The value as it was, without its graph."""
        return unflatten(self.treedef, self.leaves)

    def versions(self) -> list[int]:
        """A number for each tensor that changes when the tensor is changed in place."""
        return [leaf._version for leaf in self.leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]

    def cloned(self, only: Collection[int] | None = None) -> Packet:
        """A copy that shares no memory with it, or none that starts at one of ``only`` these addresses."""
        leaves = [
            leaf.clone() if isinstance(leaf, Tensor) and (only is None or address in only) else leaf
            for leaf, address in zip(self.leaves, self.addresses(), strict=True)
        ]
        return Packet(self.treedef, leaves, self.needs_grad, self.doubled)

    def addresses(self) -> list[int]:
        """For each leaf where its memory starts; 0 for what has none."""
        return [
            leaf.data_ptr() if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel() else 0
            for leaf in self.leaves
        ]


def cut(value: Structure) -> tuple[Packet, list[GradientEdge | None]]:
    """``value`` off its graph, and for each leaf the place in that graph where its gradient enters."""
    leaves, treedef = flatten(value)
    edges = [get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]
    detached = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Packet(treedef, detached, tuple(edge is not None for edge in edges)), edges


def enter(packet: Packet, device: torch.device, phony: Tensor) -> tuple[Structure, Gradients]:
    """The value as the start of a graph on ``device``, and the box into which its backward puts the gradients.

    ``phony`` is a leaf that requires grad: it makes the entering nodes part of the graph, and serves as their common
    end where backward is to stop at the boundary. In no-grad mode no graph starts and the box stays empty.
    """
    box: Gradients = [None] * len(packet.leaves)
    leaves: list[object] = []
    for index, (leaf, needs_grad) in enumerate(zip(packet.leaves, packet.needs_grad, strict=True)):
        if isinstance(leaf, Tensor):
            leaf = brought(leaf, device)
            if needs_grad:
                leaf = _Enter.apply(box, index, phony, leaf)  # type: ignore[no-untyped-call]
        leaves.append(leaf)
    return unflatten(packet.treedef, leaves), box


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, box: Gradients, index: int, _: Tensor, leaf: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.box, ctx.index = box, index  # type: ignore[attr-defined]
        return leaf.detach()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor | None) -> tuple[None, None, None, None]:
        ctx.box[ctx.index] = grad  # type: ignore[attr-defined]
        return None, None, None, None
