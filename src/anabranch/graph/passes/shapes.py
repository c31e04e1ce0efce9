"""Shapes of every value for other inputs: by replaying the operations on tensors without data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from anabranch.errors import CaptureError
from anabranch.graph.nodes import evaluate
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
    wanted = {node: torch.Size(shape) for (node, _), shape in zip(free, input_shapes, strict=False)}
    if all(node.meta["val"].shape == shape for node, shape in wanted.items()):
        values = {node: node.meta.get("val") for node in graph.fx.nodes}
    else:
        if graph.origin is not None:
            return infer_shapes(_captured_again(graph.origin, list(wanted.values())), ())
        values = _replayed(graph, wanted)
    shapes = {binding.name: values[node].shape for node, binding in pairs if isinstance(values[node], Tensor)}
    for node in graph.fx.nodes:
        if node.op == "call_function" and isinstance(values[node], Tensor):
            shapes[node.name] = values[node].shape
    for name, result in zip(graph.outputs, graph.results, strict=True):
        if isinstance(result, fx.Node) and isinstance(values[result], Tensor):
            shapes[name] = values[result].shape
    return {name: torch.Size(shape) for name, shape in shapes.items()}


def _captured_again(origin: Origin, shapes: list[torch.Size]) -> OperationGraph:
    try:
        return origin(shapes)
    except CaptureError as error:
        raise ValueError(f"the captured function does not work on {[tuple(s) for s in shapes]}: {error}") from error


def _replayed(graph: OperationGraph, wanted: dict[fx.Node, torch.Size]) -> dict[fx.Node, object]:
    values: dict[fx.Node, object] = {}
    with FakeTensorMode(), torch.no_grad():
        for node in graph.fx.nodes:
            example = node.meta.get("val")
            if node.op == "placeholder":
                if isinstance(example, Tensor):
                    shape = wanted.get(node, example.shape)
                    example = torch.empty(shape, dtype=example.dtype, device=example.device)
                values[node] = example
            elif node.op == "call_function":
                values[node] = _call(node, values)
    return values


def _call(node: fx.Node, values: dict[fx.Node, object]) -> object:
    try:
        return evaluate(node, values.__getitem__)
    except Exception as error:
        shapes = [tuple(v.shape) for v in (values[s] for s in node.all_input_nodes) if isinstance(v, Tensor)]
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{node.name} ({node.target}) does not work on {shapes}: {reason}") from error
