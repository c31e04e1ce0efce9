"""A value at a stage's boundary: detached from its graph, and the start of the next one.

::

    stage j                                     stage k
    ... ── grad_fn ──> tensor ──(cut)──> detached ──(enter)──> tensor ── ...
              ^ 1                                     ^ 2
    1  an edge, kept by stage j: backward starts here with the gradient that stage k sends
    2  a node of k's graph whose backward puts the gradient into a box, to be sent to stage j

Neither end keeps the tensor itself. ``enter`` does not return a leaf, so the stage may change it in place, and its
memory is freed when the stage's own operations no longer need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from anabranch.autodiff.layer_state import lazy_clone
from anabranch.pipeline.stage.device_transfers import on_device
from anabranch.tensors import Structure, flatten, unflatten

if TYPE_CHECKING:
    from optree import PyTreeSpec


Gradients = list[Tensor | None]
"""A gradient for each leaf of a packet; ``None`` for a leaf without one."""


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of a sparse one those of its indices and values.

    >>> size_of(torch.zeros(3)), size_of(torch.eye(3).to_sparse())
    (12, 60)
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


@dataclass(frozen=True, slots=True)
class Packet:
    """A structure of detached tensors and plain values, and for each whether it awaits a gradient.

    ``doubled`` are the leaves whose memory is sent by another route too, or to every microbatch: a receiving stage must
    not change them.
    """

    treedef: PyTreeSpec
    leaves: list[object]
    needs_grad: tuple[bool, ...]
    doubled: tuple[int, ...] = ()

    def structure(self) -> Structure:
        """Return the original value, without its graph."""
        return unflatten(self.treedef, self.leaves)

    def kept(self, *, from_caller: bool) -> Packet:
        """Return the same values, out of reach of changes in place; what no stage may change stays as it is."""
        leaves = list(self.leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not (from_caller and index in self.doubled):
                lazy = None if from_caller else lazy_clone(leaf)
                leaves[index] = leaf.clone() if lazy is None else lazy
        return Packet(self.treedef, leaves, self.needs_grad, self.doubled)


Message = list[Packet] | list[Gradients]
"""One packet, or one packet's gradients, for each route between two stages."""


def cut(value: Structure) -> tuple[Packet, list[GradientEdge | None]]:
    """``value`` detached from its graph, and for each leaf the place in that graph where its gradient enters."""
    leaves, treedef = flatten(value)
    edges: list[GradientEdge | None] = [None] * len(leaves)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                edges[index] = get_gradient_edge(leaf)
            leaves[index] = leaf.detach()
    return Packet(treedef, leaves, tuple([edge is not None for edge in edges])), edges


def enter(packet: Packet, device: torch.device, phony: Tensor) -> tuple[list[object], Gradients]:
    """Return the leaves as the start of a graph on ``device``, and the box into which its backward puts the gradients.

    ``phony`` is a leaf that requires grad: it makes the entering nodes part of the graph, and is the common leaf where
    backward stops at the boundary. In no-grad mode no graph starts and the box stays empty.
    """
    leaves, box = list(packet.leaves), cast(Gradients, [None] * len(packet.leaves))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.device != device:
                leaves[index] = leaf = on_device(leaf, device)
            if packet.needs_grad[index]:
                leaves[index] = _Enter.apply(box, index, phony, leaf)  # type: ignore[no-untyped-call]
    return leaves, box


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


def sweep(edges: Sequence[GradientEdge], grads: Sequence[Tensor], *, keep: bool, inputs: Sequence[Tensor] = ()) -> None:
    """Accumulate gradients into ``inputs``, or all leaves.

    Not by ``torch.autograd.backward``, which with inputs leaves the thread's function mode: a layer that is
    checkpointed in itself runs again in a sweep, and draws its random numbers through the mode.
    """
    options = {"allow_unreachable": True, "accumulate_grad": True}
    _engine_run_backward(tuple(edges), tuple(grads), keep, False, tuple(inputs), **options)
