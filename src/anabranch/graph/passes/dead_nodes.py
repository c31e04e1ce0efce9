"""Drops nodes without an effect: unused results, copies of handles, writes into memory that is never read again."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._prims_common import is_contiguous_or_false

from anabranch.graph.nodes import same_layout
from anabranch.graph.operation_graph import AnyGraph

_aten = torch.ops.aten
_HANDLES = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default}


def drop_handles(graph: AnyGraph, *, stops: bool = False) -> AnyGraph:
    """``graph`` without nodes that only make another handle of the same values.

    These are ``detach`` and ``alias``, two transpositions in a row, and a ``view`` to the present shape. A ``detach``
    in the user's code stays, because ``gradients`` must stop at it, unless ``stops``
    drops it too.
    """
    graph = graph.copy()
    for node in list(graph.fx.nodes):
        if node.meta.get("stop") and not stops:
            continue
        same = _same_values(node)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.fx.erase_node(node)
    return graph


def _same_values(node: fx.Node) -> fx.Node | None:
    if node.target in _HANDLES:
        return node.args[0]  # type: ignore[return-value]
    if node.target is _aten.t.default:
        inner = node.args[0]
        assert isinstance(inner, fx.Node)
        if inner.target is _aten.t.default:
            return inner.args[0]  # type: ignore[return-value]
    if node.target is _aten.view.default:
        _skip_inner_view(node)
    if node.target is _aten.view.default or node.target is _aten.expand.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = source.meta.get("val"), node.meta.get("val")
        if isinstance(before, Tensor) and isinstance(after, Tensor) and same_layout(before, after):
            return source
    return None


def _skip_inner_view(node: fx.Node) -> None:
    """Replace a view of a view of contiguous memory by one view."""
    inner = node.args[0]
    assert isinstance(inner, fx.Node)
    if inner.target is not _aten.view.default:
        return
    source = inner.args[0]
    assert isinstance(source, fx.Node)
    example = source.meta.get("val")
    if isinstance(example, Tensor) and is_contiguous_or_false(example):
        node.replace_input_with(inner, source)


def drop_dead_nodes(graph: AnyGraph) -> AnyGraph:
    """``graph`` without the nodes whose results reach no output, no state and no random number generator.

    A write in place is alive if its memory is state, or is read later by a live node.
    """
    graph = graph.copy()
    effects = graph.effects()
    live_memory = {effects.root[node] for node in graph.fx.nodes if node.op == "placeholder"}
    for node in reversed(list(graph.fx.nodes)):
        written = effects.written_by(node)
        if node.users or effects.must_stay(node) or any(effects.root[w] in live_memory for w in written):
            live_memory.update(effects.root[read] for read in node.all_input_nodes)
        elif node.op == "call_function":
            graph.fx.erase_node(node)
    return graph
