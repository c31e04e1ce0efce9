"""Runs elementwise operations in the memory of an argument that no later operation reads."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from anabranch.graph.effects import Effects
from anabranch.graph.nodes import same_layout
from anabranch.graph.operation_graph import AnyGraph, OperationGraph

_COMMUTATIVE = {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor}


def reuse_in_place(graph: AnyGraph) -> AnyGraph:
    """``graph`` with elementwise operations done in place where the argument's memory is not used afterwards.

    The values are the same bits: the kernel is the same. Memory of inputs, state and results is never reused.
    """
    graph = graph.copy()
    effects = graph.effects()
    last = _last_readers(graph, effects)
    constant = _constants(graph, effects)
    for node in graph.fx.nodes:
        target = _in_place(node.target) if isinstance(node.target, OpOverload) else None
        if target is None or effects.written_by(node):
            continue
        for index in range(2 if node.target in _COMMUTATIVE and not node.kwargs and len(node.args) == 2 else 1):
            if node not in constant and _dies(node, index, effects, last, constant):
                if index:
                    node.args = (node.args[1], node.args[0])
                node.meta["reused"] = node.args[0]
                node.target = target
                break
    return graph


def _dies(node: fx.Node, index: int, effects: Effects, last: dict[fx.Node, fx.Node], constant: set[fx.Node]) -> bool:
    """Return True if the argument has the result's form and its memory is not used later or by another argument."""
    source = node.args[index]
    if not isinstance(source, fx.Node) or not _same_form(source.meta.get("val"), node.meta.get("val")):
        return False
    root = effects.root[source]
    if root.op == "placeholder" or root in constant or last.get(root) is not node:
        return False
    return sum(effects.root[other] is root for other in node.all_input_nodes) == 1


def _constants(graph: OperationGraph, effects: Effects) -> set[fx.Node]:
    """Nodes that depend on no input and no state: generated code computes them once, and all runs share them."""
    found: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if node.op != "call_function" or effects.must_stay(node) or effects.root[node] in effects.writers:
            continue
        if str(node.target).endswith("_like.default") or found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _same_form(before: object, after: object) -> bool:
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return same_layout(before, after) and before.device == after.device


def _last_readers(graph: OperationGraph, effects: Effects) -> dict[fx.Node, fx.Node]:
    """For each memory, the last node that reads any part of it; that may be the graph's output."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.fx.nodes:
        for source in node.all_input_nodes:
            last[effects.root[source]] = node
    return last


@cache
def _in_place(op: OpOverload) -> OpOverload | None:
    """Return the operator that writes the same result into its first argument, if ``op`` is elementwise and has one."""
    namespace, name = op._schema.name.split("::")
    if namespace != "aten" or torch.Tag.pointwise not in op.tags or name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, f"{name}_", None)
    found = getattr(packet, op._overloadname, None) if packet is not None else None
    if not isinstance(found, OpOverload):
        return None
    theirs = [(a.name, str(a.type)) for a in found._schema.arguments]
    return found if theirs == [(a.name, str(a.type)) for a in op._schema.arguments] else None
