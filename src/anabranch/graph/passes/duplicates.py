"""Merges nodes that compute the same value."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false

from anabranch.graph.effects import Effects
from anabranch.graph.operation_graph import AnyGraph
from anabranch.graph.passes.dead_nodes import drop_dead_nodes

__all__ = ["merge_duplicates"]


def merge_duplicates(graph: AnyGraph) -> AnyGraph:
    """``graph`` with one node where several compute the same operation on the same values, and without dead nodes.

    Values are equal if the nodes are and their memory has not been written in between. Nodes that draw random
    numbers, write, or whose memory is written later stay apart. Of two results of the graph one becomes a copy of the
    other: whoever gets them may write to each.
    """
    graph = graph.copy()
    effects = graph.effects()
    writes: dict[fx.Node, int] = {}
    first: dict[object, fx.Node] = {}
    moved: dict[fx.Node, fx.Node] = {}

    def memory(node: fx.Node) -> fx.Node:
        root = effects.root[node]
        return moved.get(root, root)

    results = {memory(node) for node in graph.fx.output_node().all_input_nodes}
    for node in list(graph.fx.nodes):
        for written in effects.written_by(node):
            root = effects.root[written]
            writes[root] = writes.get(root, 0) + 1
        if node.op != "call_function" or not _may_merge(node, effects):
            continue
        key = _key(node, effects, writes)
        twin = first.setdefault(key, node) if key is not None else node
        if twin is node:
            continue
        one, other = memory(twin), memory(node)
        if one is not other and one in results and other in results:
            _copy(twin, node)
            continue
        if other in results:
            results.add(one)
        moved[other] = one
        node.replace_all_uses_with(twin)
        graph.fx.erase_node(node)
    return drop_dead_nodes(graph)


def _copy(source: fx.Node, node: fx.Node) -> None:
    """Let ``node`` copy ``source`` instead of computing the same again, if the copy has the same strides."""
    value = source.meta.get("val")
    if isinstance(value, Tensor) and is_non_overlapping_and_dense_or_false(value):
        node.target, node.args, node.kwargs = torch.ops.aten.clone.default, (source,), {}


def _may_merge(node: fx.Node, effects: Effects) -> bool:
    if effects.must_stay(node) or effects.written_by(node):
        return False
    root = effects.root[node]
    fresh = root is node
    return not (fresh and root in effects.writers)


def _key(node: fx.Node, effects: Effects, writes: dict[fx.Node, int]) -> object:
    def part(value: object) -> object:
        if isinstance(value, fx.Node):
            return value, writes.get(effects.root[value], 0)
        if isinstance(value, (tuple, list)):
            return tuple(part(item) for item in value)
        if isinstance(value, slice):
            return slice, value.start, value.stop, value.step
        return type(value), value

    key = (node.target, part(node.args), tuple((name, part(value)) for name, value in sorted(node.kwargs.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key if isinstance(node.target, OpOverload) or node.all_input_nodes else None
