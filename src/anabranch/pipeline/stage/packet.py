"""A value at a stage's boundary: detached from its graph, and the start of the next one.

::

    stage j                                     stage k
    ... ── grad_fn ──> tensor ──(cut)──> detached ──(enter)──> tensor ── ...
              ^ 1                                     ^ 2
    1  an edge, kept by stage j: backward starts here with the gradient that stage k sends
    2  a node of k's graph whose backward puts the gradient into a box, to be sent to stage j

Neither end keeps the tensor itself. ``enter`` does not return a leaf, so the stage may change it in place, and its
memory is freed when the stage's own operations no longer need it.

A tensor may leave a stage by two routes, and no stage that receives one of them may change it in place::

    stage 0   x ── stash "long" ───────────────────────> stage 2   pops x, or x changed by stage 1?
              └───────────────> stage 1   relu_(x) ────>

In the unsplit module a change in place reaches both routes, and so do gradients. A stage's graph knows only one route,
and on another rank the two are not even the same memory. So the sending stage marks these tensors, views of one another
too, the marks are kept when a stage passes one on, and a stage that changes one gets an error. The same holds for what
every microbatch gets whole: a layer would change it for the microbatches after this one.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from optree import PyTreeSpec
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from anabranch.autodiff.layer_state import lazy_clone
from anabranch.tensors import Structure, flatten, map_structure, unflatten

Gradients = list[Tensor | None]
"""A gradient for each leaf of a packet; ``None`` for a leaf without one."""


def cloned(value: Structure) -> Structure:
    """Return the same values in their own memory: whoever gets them may change them in place."""
    return map_structure(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of a sparse one those of its indices and values.

    >>> size_of(torch.zeros(3)), size_of(torch.eye(3).to_sparse())
    (12, 60)
    """
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


@dataclass(slots=True)
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

    def kept(self, outside: Container[int], *, again: bool = False) -> Packet:
        """Return the same values, out of reach of changes in place; what no stage may change stays as it is.

        Only results of stages are cloned lazily, which moves them to other memory at the next write: what they pass on
        of the caller's (``outside``), or of an object or a global variable, may have a NumPy view that would not
        follow. A packet kept before (``again``) has memory of its own.
        """
        leaves = list(self.leaves)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                from_caller = memory_of(leaf) in outside
                if not (from_caller and index in self.doubled):
                    lazy = lazy_clone(leaf) if (again or self.needs_grad[index]) and not from_caller else None
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
                leaves[index] = leaf = leaf.to(device, non_blocking=device.type == "cuda")
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


# Tensors that leave by two routes.

Watched: TypeAlias = tuple[str, Tensor, int]
"""A tensor that a stage must not change, by the name it has in errors, and its version."""


def check_unchanged(watched: Sequence[Watched], stage: int) -> None:
    """Raise ``RuntimeError`` if one of them has been changed."""
    for what, tensor, version in watched:
        if tensor._version != version:
            raise RuntimeError(
                f"stage {stage} changes {what} in place, which is also sent to another stage or microbatch (or shares "
                "memory with what is), and cannot change there; make the operation out of place, or send a clone"
            )


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def mark_doubled(packets: Sequence[Packet], watched: Sequence[Watched], buffers: Collection[int]) -> None:
    """Mark leaves in the same memory as another one, a watched tensor, or one of these ``buffers``.

    Of the last there are copies from then on: later microbatches may change a buffer. Whether two views have an element
    in common is not asked: the halves of ``x.chunk(2, dim=1)`` interleave.
    """
    places: dict[int, list[tuple[Packet | None, int]]] = {}
    for _, tensor, _ in watched:
        places.setdefault(memory_of(tensor), []).append((None, 0))
    for packet in packets:
        for index, leaf in enumerate(packet.leaves):
            if not isinstance(leaf, Tensor) or leaf.is_nested:
                continue
            memory = memory_of(leaf)
            if memory in buffers:
                packet.leaves[index] = leaf.clone()
                packet.doubled = (*packet.doubled, index)
            else:
                places.setdefault(memory, []).append((packet, index))
    for ways in places.values():
        for sender, index in ways if len(ways) > 1 else ():
            if sender is not None and index not in sender.doubled:
                sender.doubled = (*sender.doubled, index)
