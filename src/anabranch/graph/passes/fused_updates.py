"""Placement of fused optimizer updates: one as early as possible for each large parameter.

The pass only regroups the fused optimizer that the user requested (``fused=True``): its kernel treats each tensor on
its own, so the results are the same bits. An optimizer that is not fused is never fused here: that rounds differently.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, fx

from anabranch.graph.effects import Effects, arguments
from anabranch.graph.operation_graph import AnyGraph, OperationGraph

_FUSED = {"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}
_LARGE = 1 << 16


def spread_fused_updates(graph: AnyGraph, large: int = _LARGE) -> AnyGraph:
    """``graph`` with each parameter of ``large`` or more elements updated as soon as its gradient is final.

    The gradient is then still in the processor's cache, and is freed at once. The counters of steps are advanced first.
    Not for graphs that cross a boundary: a crossing that fails leaves the state as it was.
    """
    if not any(_elements(each) >= large for node in _fused(graph) for each in cast("list[fx.Node]", node.args[0])):
        return graph
    graph = graph.copy()
    for node in _fused(graph):
        _spread(graph, node, large)
    return graph


def _fused(graph: OperationGraph) -> list[fx.Node]:
    return [
        node
        for node in graph.fx.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _FUSED
    ]


def _spread(graph: OperationGraph, node: fx.Node, large: int) -> None:
    lists = [list(value) if isinstance(value, (list, tuple)) else None for value in node.args]
    parameters = lists[0]
    assert parameters is not None
    apart = [i for i, parameter in enumerate(parameters) if _elements(parameter) >= large]
    if not apart or not _advance_steps_first(graph, node):
        return
    order = {each: position for position, each in enumerate(graph.fx.nodes)}
    effects = graph.effects()
    readers = _readers(graph, effects)
    for index in apart:
        picked = [values if not values else [values[index]] if values is not None else None for values in lists]
        args = tuple(value if p is None else p for value, p in zip(node.args, picked, strict=True))
        needed = [source for values in picked if values for source in values]
        after = [source for source in needed if source.op != "placeholder"]
        after += [
            reader
            for source in needed
            for reader in readers.get(effects.root[source], ())
            if reader is not node and order[reader] < order[node]
        ]
        if not after:
            continue
        with graph.fx.inserting_after(max(after, key=order.__getitem__)):
            early = graph.fx.create_node("call_function", node.target, args, dict(node.kwargs))
        early.meta.update(node.meta)
    kept = [
        [v for i, v in enumerate(values) if i not in apart] if values else value
        for values, value in zip(lists, node.args, strict=True)
    ]
    if kept[0]:
        node.args = tuple(kept)
    else:
        graph.fx.erase_node(node)


def _elements(parameter: fx.Node) -> int:
    value = parameter.meta["val"]
    return math.prod(value.shape) if isinstance(value, Tensor) else 0


def _readers(graph: OperationGraph, effects: Effects) -> dict[fx.Node, list[fx.Node]]:
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.fx.nodes:
        for source in node.all_input_nodes:
            readers.setdefault(effects.root[source], []).append(node)
    return readers


def _advance_steps_first(graph: OperationGraph, node: fx.Node) -> bool:
    """Move the increments of the step counters to the front of the graph, if nothing else reads the counters."""
    steps = next((list(v) for name, v in arguments(node) if name == "state_steps" and isinstance(v, (list, tuple))), [])
    movable = []
    for user in {user for step in steps for user in step.users}:
        if user is node:
            continue
        if not _increments(user):
            return False
        movable.append(user)
    first = next(each for each in graph.fx.nodes if each.op != "placeholder")
    for user in movable:
        if user is not first:
            first.prepend(user)
    return True


def _increments(node: fx.Node) -> bool:
    targets = (torch.ops.aten._foreach_add_.Scalar, torch.ops.aten._foreach_add_.Tensor, torch.ops.aten.add_.Tensor)
    return node.target in targets and all(source.op == "placeholder" for source in node.all_input_nodes)
