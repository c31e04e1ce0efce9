"""Collectives as early and as few as possible, and their waits as late as possible, to overlap with backward.

In the captured graph, each gradient's all-reduce and its wait come after the backward pass. ``bucket_collectives``
moves each to where its gradient is final and merges neighbours into one transfer; ``sink_waits`` moves each wait to its
first reader. ::

    g2, g1, reduce g2, wait, reduce g1, wait, update      as captured
    g2, reduce g2, g1, reduce g1, wait, wait, update      after both

Every rank holds the same graph, so every rank launches the same collectives in the same order.
"""

from __future__ import annotations

import math
from itertools import accumulate

import torch
from torch import fx

from anabranch.graph.effects import Effects, is_collective, is_wait
from anabranch.graph.nodes import evaluate
from anabranch.graph.operation_graph import AnyGraph, OperationGraph

__all__ = ["bucket_collectives", "sink_waits"]

_aten = torch.ops.aten
_BUCKET_BYTES = 25 << 20


def bucket_collectives(graph: AnyGraph, bucket_bytes: int = _BUCKET_BYTES) -> AnyGraph:
    """``graph`` with all-reduces launched as soon as their inputs are final, and merged up to ``bucket_bytes``.

    Neighbours with the same operation, group, dtype and device are merged. Sums of two ranks have the same bits; with
    more ranks the transport may add in another order than without buckets.
    """
    if not any(_is_all_reduce(node) for node in graph.fx.nodes):
        return graph
    graph = graph.copy()
    _hoist(graph)
    bucket: list[fx.Node] = []
    for node in [node for node in graph.fx.nodes if _is_all_reduce(node)]:
        if bucket and (_kind(bucket[0]) != _kind(node) or _bytes([*bucket, node]) > bucket_bytes):
            _merge(graph, bucket)
            bucket = []
        bucket.append(node)
    _merge(graph, bucket)
    return graph


def sink_waits(graph: AnyGraph) -> AnyGraph:
    """``graph`` with each wait for a collective, and nodes that depend only on waits, right before its first reader."""
    if not any(is_wait(node) for node in graph.fx.nodes):
        return graph
    graph = graph.copy()
    effects = graph.effects()
    awaited: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if is_wait(node) or (any(s in awaited for s in node.all_input_nodes) and _is_movable(node, effects)):
            awaited.add(node)
    for node in reversed([node for node in graph.fx.nodes if node in awaited]):
        if node.users:
            min(node.users).prepend(node)
    return graph


def _is_all_reduce(node: fx.Node) -> bool:
    return is_collective(node) and str(node.target) == "_c10d_functional.all_reduce.default"


def _is_movable(node: fx.Node, effects: Effects) -> bool:
    """Return True if the node may run anywhere after its inputs."""
    if node.op != "call_function" or effects.written_by(node):
        return False
    if effects.must_stay(node) and not is_collective(node):
        return False
    return not any(effects.root[source] in effects.writers for source in (node, *node.all_input_nodes))


def _hoist(graph: OperationGraph) -> None:
    """Move all-reduces, and the nodes that only they need, to where their inputs are final."""
    waiting = {node: len(node.all_input_nodes) for node in _to_hoist(graph)}
    for node in list(graph.fx.nodes):
        if node in waiting:
            continue
        cursor, ready = node, [node]
        while ready:
            done = ready.pop(0)
            if done is not node:
                cursor.append(done)
                cursor = done
            for user in done.users:
                if user in waiting:
                    waiting[user] -= 1
                    if not waiting[user]:
                        ready.append(user)


def _to_hoist(graph: OperationGraph) -> set[fx.Node]:
    """Return the all-reduces, and the nodes among them that only they need, not those in the computation before."""
    effects = graph.effects()
    nodes = list(graph.fx.nodes)
    start = next(index for index, node in enumerate(nodes) if _is_all_reduce(node))
    while start and nodes[start - 1].meta.get("phase") == "between":
        start -= 1
    hoisted: set[fx.Node] = set()
    for node in reversed(nodes[start:]):
        wanted = _is_all_reduce(node) or (node.users and all(user in hoisted for user in node.users))
        if wanted and node.all_input_nodes and _is_movable(node, effects):
            hoisted.add(node)
    return hoisted


def _kind(node: fx.Node) -> object:
    example = node.meta["val"]
    return node.args[1:], example.dtype, example.device


def _bytes(nodes: list[fx.Node]) -> int:
    return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in nodes)


def _merge(graph: OperationGraph, bucket: list[fx.Node]) -> None:
    """One all-reduce of the members end to end, launched in the place of the last one."""
    if len(bucket) < 2:
        return
    last = bucket[-1]
    sizes = [math.prod(node.meta["val"].shape) for node in bucket]
    with graph.fx.inserting_before(last):
        flat = [_made(graph, _aten.reshape.default, node.args[0], [-1], like=node) for node in bucket]
        joined = _made(graph, _aten.cat.default, flat, like=last)
        launched = _made(graph, last.target, joined, *last.args[1:], like=joined)
    waits = [user for node in bucket for user in node.users]
    assert all(map(is_wait, waits)), "a collective's result is read only by its wait"
    with graph.fx.inserting_before(min(waits)):
        whole = _made(graph, waits[0].target, launched, like=launched)
    for node, start, size in zip(bucket, accumulate(sizes, initial=0), sizes, strict=False):
        for wait in list(node.users):
            with graph.fx.inserting_before(wait):
                part = _made(graph, _aten.slice.Tensor, whole, 0, start, start + size, like=whole)
                shaped = _made(graph, _aten.view.default, part, list(node.meta["val"].shape), like=part)
            wait.replace_all_uses_with(shaped)
            graph.fx.erase_node(wait)
        graph.fx.erase_node(node)


def _made(graph: OperationGraph, target: object, *args: object, like: fx.Node) -> fx.Node:
    """Return a new node that calls ``target``, with the marks of ``like`` and an example of its result."""
    node = graph.fx.call_function(target, args)  # type: ignore[arg-type]
    node.meta.update({key: like.meta[key] for key in ("scope", "phase", "recorded") if key in like.meta})
    with torch.no_grad():
        if is_collective(node) or is_wait(node):
            node.meta["val"] = torch.empty_like(like.meta["val"])
        else:
            node.meta["val"] = evaluate(node, lambda source: source.meta["val"])
    return node
