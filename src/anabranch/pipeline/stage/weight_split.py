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
hook, which would change a gradient twice.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
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
        graph = _Graph(self.edges, get_gradient_edge(self.start).node, self.hooked)
        self._whole = not graph.reaches_start
        if self._whole:
            return  # no input needs a gradient: W does all the work
        shared: list[Tensor] = []
        self._split_points, shared = graph.split_points()
        hooks = [watch_node(split_point.node, _noting(split_point)) for split_point in self._split_points]
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
            reached = [(k, grad) for k, grad in enumerate(split_point.arrived) if grad is not None]
            if not reached:
                continue
            leaves = _without_matrix(split_point)
            if leaves:
                edges = [GradientEdge(split_point.node, k) for k, _ in reached]
                # Retained: a node of the weight side may serve several split points. All are freed with this object.
                sweep(edges, [grad for _, grad in reached], keep=True, inputs=leaves)


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
    if any(
        tensor.layout is not torch.strided or tensor.dtype != weight.grad.dtype for tensor in (x, grad, weight.grad)
    ):
        return leaves
    if x.is_complex():  # addmm_ would need its conjugate
        return leaves
    with torch.no_grad():
        weight.grad.addmm_(grad.t(), x)
    return left


def _noting(split_point: _SplitPoint) -> Callable[[tuple[Tensor | None, ...]], None]:
    def note(grads: tuple[Tensor | None, ...]) -> None:
        split_point.arrived = tuple(grads)

    return note


class _Graph:
    """The nodes under some edges, split by whether they lead to ``start``."""

    def __init__(self, edges: Sequence[GradientEdge], start: Node, hooked: Collection[int]) -> None:
        self._hooked = hooked
        self._roots = [edge.node for edge in edges]
        self._order = _post_order(self._roots)
        self._to_start: set[Node] = set()
        self._leaves: dict[Node, dict[Node, Tensor]] = {}
        for node in self._order:
            after = [following for following, _ in node.next_functions if following is not None]
            if node is start or any(following in self._to_start for following in after):
                self._to_start.add(node)
            elif hasattr(node, "variable"):
                self._leaves[node] = {node: node.variable}
            else:
                self._leaves[node] = {key: leaf for f in after for key, leaf in self._leaves.get(f, {}).items()}
        self.reaches_start = bool(self._to_start)

    def split_points(self) -> tuple[list[_SplitPoint], list[Tensor]]:
        """Return the nodes where the weight side joins, and the leaves that several of them, or an output, reach."""
        sides = {node: dict(self._weight_side(node)) for node in self._order if node in self._to_start}
        count = Counter(key for leaves in sides.values() for key in leaves)
        shared = {
            key: leaf
            for node, leaves in sides.items()
            for key, leaf in leaves.items()
            if count[key] > 1 or self._runs_once(node)
        }
        for root in self._roots:
            shared |= self._leaves.get(root, {})
        alone = ((node, [leaf for key, leaf in leaves.items() if key not in shared]) for node, leaves in sides.items())
        return [_SplitPoint(node, leaves) for node, leaves in alone if leaves], list(shared.values())

    def _runs_once(self, node: Node) -> bool:
        return isinstance(node, BackwardCFunction) or node._sequence_nr() in self._hooked

    def _weight_side(self, node: Node) -> Iterator[tuple[Node, Tensor]]:
        for following, _ in node.next_functions:
            if following is not None and following not in self._to_start:
                yield from self._leaves[following].items()


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
