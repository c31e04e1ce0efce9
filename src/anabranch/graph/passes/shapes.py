"""Shapes of every value for other inputs: by capturing the function again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from anabranch.errors import CaptureError
from anabranch.graph.operation_graph import OperationGraph, Origin


def infer_shapes(graph: OperationGraph, input_shapes: Sequence[Sequence[int]]) -> dict[str, torch.Size]:
    """See ``Graph.infer_shapes``."""
    pairs = list(zip(graph.placeholders, graph.bindings, strict=True))
    free = [
        (node, binding.name)
        for node, binding in pairs
        if binding.bound is None and isinstance(node.meta.get("val"), Tensor) and binding.fixed is None
    ]
    if input_shapes and len(input_shapes) != len(free):
        names = ", ".join(name for _, name in free)
        raise ValueError(f"infer_shapes takes a shape for each of {names}, or none; got {len(input_shapes)}")
    others = [torch.Size(shape) for shape in input_shapes]
    if any(node.meta["val"].shape != shape for (node, _), shape in zip(free, others, strict=False)):
        return infer_shapes(_captured_again(graph.origin, others), ())
    values = {node: node.meta.get("val") for node in graph.fx.nodes}
    shapes = {binding.name: values[node].shape for node, binding in pairs if isinstance(values[node], Tensor)}
    for node in graph.fx.nodes:
        if node.op == "call_function" and isinstance(values[node], Tensor):
            shapes[node.name] = values[node].shape
    for name, result in zip(graph.outputs, graph.results, strict=True):
        if isinstance(result, fx.Node) and isinstance(values[result], Tensor):
            shapes[name] = values[result].shape
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def _captured_again(origin: Origin | None, shapes: list[torch.Size]) -> OperationGraph:
    if origin is None:
        raise ValueError("a graph from a file knows no shapes but its own; capture the function again")
    try:
        return origin(shapes)
    except CaptureError as error:
        raise ValueError(f"the captured function does not work on {[tuple(s) for s in shapes]}: {error}") from error
