"""Backward in two parts: B computes the gradients of a stage's inputs, W later those of its weights.

::

                       weight side
              w ──> T ──┐            v: a node on the way to the inputs that also has an edge to the weight side
    inputs ── ... ────> v ── ... ──> outputs
              <── B ────┴────────────            B: outputs to inputs only; notes the gradient that reaches each v
              W: from each v, with that gradient, down its weight side only

The engine skips the gradients of edges that lead to no requested leaf, so B and W together do the work of one
backward. A weight that several nodes reach (a module called twice) is left to B: the path to it from one node could
pass another, and count it twice. The same holds for a weight that joins at a ``torch.autograd.Function``, which would
do all its work twice, including side effects (an expert's update), if called for B and again for W; or at a node with a
hook, which would change a gradient twice, or compute what ``torch.utils.checkpoint`` did not save twice.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from anabranch.autodiff.hooks import watch_node
from anabranch.pipeline.stage.packet import sweep


@dataclass(slots=True)
class _SplitPoint:
    """A node ``v``, the leaves on its weight side alone, and the gradients that reached it in B."""

    node: Node
    leaves: list[Tensor]
    arrived: tuple[Tensor | None, ...] = ()

    def note(self, grads: tuple[Tensor | None, ...]) -> None:
        self.arrived = tuple(grads)


@dataclass(slots=True)
class SplitBackward:
    """The backward of one stage and microbatch, in two parts.

    >>> x, w = torch.ones(1, 2), torch.eye(2, requires_grad=True)
    >>> start = x.requires_grad_()
    >>> end = get_gradient_edge(torch.tanh(start @ w))
    >>> split = SplitBackward([end], [torch.ones(1, 2)], start)
    >>> split.inputs()
    >>> w.grad is None, start.grad is None
    (True, False)
    >>> split.weights()
    >>> w.grad is None
    False

    Args:
        edges: the edges from which backward starts.
        grads: the gradient for each.
        start: the leaf at the end of every way to the inputs.
        hooked: the sequence numbers of nodes with hooks.
    """

    edges: Sequence[GradientEdge]
    grads: Sequence[Tensor]
    start: Tensor
    hooked: Collection[int] = ()
    _split_points: list[_SplitPoint] = field(default_factory=list)
    _whole: bool = False

    def inputs(self) -> None:
        """B: accumulates into the inputs, and into the weights that cannot wait."""
        parts = _split_points(self.edges, get_gradient_edge(self.start).node, self.hooked)
        self._whole = parts is None
        if parts is None:
            return  # no input needs a gradient: W does all the work
        self._split_points, shared = parts
        hooks = [watch_node(split_point.node, split_point.note) for split_point in self._split_points]
        try:
            sweep(self.edges, self.grads, keep=True, inputs=[self.start, *shared])
        finally:
            for hook in hooks:
                hook.remove()

    def weights(self, *, keep: bool = False) -> None:
        """W: accumulates into the weights; ``keep`` leaves the graph ready for another backward."""
        if self._whole:
            sweep(self.edges, self.grads, keep=keep)
        for split_point in self._split_points:
            reached = {k: grad for k, grad in enumerate(split_point.arrived) if grad is not None}
            if reached and (leaves := _without_matrix(split_point)):
                edges = [GradientEdge(split_point.node, k) for k in reached]
                # Retained: a node of the weight side may serve several split points. All are freed with this object.
                sweep(edges, list(reached.values()), keep=True, inputs=leaves)


def _without_matrix(split_point: _SplitPoint) -> list[Tensor]:
    """Add a linear layer's share to its weight's gradient inside the multiplication; returns the remaining leaves.

    Autograd would first store the product and then add it: with a large weight and few rows, a tenth of the work.
    Only with a gradient to add to, so that a single microbatch gives bit for bit the gradient of the unsplit module.
    """
    node, leaves = split_point.node, split_point.leaves
    if node.name() != "AddmmBackward0" or node._saved_alpha != 1:  # type: ignore[attr-defined]
        return leaves
    turned = node.next_functions[2][0]
    if turned is None or turned.name() != "TBackward0":
        return leaves
    weight = getattr(turned.next_functions[0][0], "variable", None)
    left = [leaf for leaf in leaves if leaf is not weight]
    if weight is None or len(left) == len(leaves) or weight.grad is None:
        return leaves
    x, grad = node._saved_mat1, split_point.arrived[0]  # type: ignore[attr-defined]
    assert grad is not None
    alike = all(one.layout is torch.strided and one.dtype == weight.grad.dtype for one in (x, grad, weight.grad))
    if not alike or x.is_complex():  # addmm_ would need its conjugate
        return leaves
    with torch.no_grad():
        weight.grad.addmm_(grad.t(), x)
    return left


def _split_points(
    edges: Sequence[GradientEdge], start: Node, hooked: Collection[int]
) -> tuple[list[_SplitPoint], list[Tensor]] | None:
    """Return the nodes where the weight side joins, and the leaves that several of them, or an output, reach.

    ``None`` if no edge leads to ``start``.
    """
    roots = [edge.node for edge in edges]
    leaves: dict[Node, dict[Node, Tensor]] = {}  # of each node that does not lead to ``start``
    sides: dict[Node, dict[Node, Tensor]] = {}  # of each other one the leaves on its weight side
    for node in _post_order(roots):
        after = [following for following, _ in node.next_functions if following is not None]
        below = {key: leaf for following in after for key, leaf in leaves.get(following, {}).items()}
        if node is start or any(following in sides for following in after):
            sides[node] = below
        else:
            leaves[node] = {node: node.variable} if hasattr(node, "variable") else below
    if not sides:
        return None
    count = Counter(key for side in sides.values() for key in side)
    shared = {key: leaf for root in roots for key, leaf in leaves.get(root, {}).items()}
    for node, side in sides.items():
        runs_once = isinstance(node, BackwardCFunction) or node._sequence_nr() in hooked
        shared |= {key: leaf for key, leaf in side.items() if runs_once or count[key] > 1}
    alone = ((node, [leaf for key, leaf in side.items() if key not in shared]) for node, side in sides.items())
    return [_SplitPoint(node, side) for node, side in alone if side], list(shared.values())


def _post_order(roots: Sequence[Node]) -> list[Node]:
    """Return the nodes under ``roots``, each after all nodes that follow it on the way to the leaves."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(following, False) for following, _ in node.next_functions if following is not None]
    return order
