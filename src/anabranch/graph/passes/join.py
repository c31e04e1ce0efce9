"""Joins two graphs: an output of the first feeds the input of the second that has the same name."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from anabranch.graph.nodes import copy_node
from anabranch.graph.operation_graph import AnyGraph, Input


def join(first: AnyGraph, second: AnyGraph, keep: Collection[str]) -> AnyGraph:
    """``first`` followed by ``second``, as one graph.

    An input of ``second`` is fed by the output of ``first`` of the same name, or shares an input of ``first`` that is
    bound to the same tensor or, if free, has the same name.

    Args:
        first: the graph whose operations run first.
        second: the graph that takes its results.
        keep: names of outputs of ``first`` that the joint graph still returns, before those of ``second``.
    """
    joint = fx.Graph()
    inputs: list[Input] = []
    mapping: dict[fx.Node, fx.Node] = {}
    by_tensor: dict[int, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}

    def place(node: fx.Node, binding: Input) -> fx.Node:
        placed = joint.node_copy(node, mapping.__getitem__)
        inputs.append(binding)
        if binding.bound is not None:
            by_tensor[id(binding.bound)] = placed
        else:
            by_name[binding.name] = placed
        return placed

    for node, binding in zip(first.placeholders, first.bindings, strict=True):
        mapping[node] = place(node, binding)
    yielded = dict(zip(first.outputs, first.results, strict=True))
    waiting = list(zip(second.placeholders, second.bindings, strict=True))
    for node, binding in waiting:
        if binding.name in yielded and binding.bound is None:
            continue
        shared = by_tensor.get(id(binding.bound)) if binding.bound is not None else by_name.get(binding.name)
        mapping[node] = shared if shared is not None else place(node, binding)
    _copy_operations(first.fx, joint, mapping)
    for node, binding in waiting:
        if node not in mapping:
            source = yielded[binding.name]
            assert isinstance(source, fx.Node)
            mapping[node] = mapping[source]
    _copy_operations(second.fx, joint, mapping)
    names = [name for name in first.outputs if name in keep]
    results = [yielded[name] for name in names] + list(second.results)
    joint.output(tuple(mapping[r] if isinstance(r, fx.Node) else r for r in results))  # type: ignore[misc]
    return type(first)(joint, inputs, [*names, *second.outputs])


def _copy_operations(source: fx.Graph, target: fx.Graph, mapping: dict[fx.Node, fx.Node]) -> None:
    for node in source.nodes:
        if node.op not in ("placeholder", "output"):
            mapping[node] = copy_node(target, node, mapping.__getitem__)
