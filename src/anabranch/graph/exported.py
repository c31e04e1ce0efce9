"""A graph as a ``torch.export.ExportedProgram``, for the tools that read those: AOTInductor, ExecuTorch, ONNX."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram, export

from anabranch.graph.nodes import evaluate
from anabranch.graph.operation_graph import OperationGraph
from anabranch.tensors import Structure, flatten, unflatten

__all__ = ["to_torch_export"]


def to_torch_export(graph: OperationGraph) -> ExportedProgram:
    """See ``Graph.to_torch_export``."""
    for node in _operations(graph):
        if not isinstance(node.target, OpOverload) and getattr(node.target, "__module__", "") not in (
            "_operator",
            "math",
        ):
            raise ValueError(
                f"operation {node.name!r} ({getattr(node.target, '__name__', node.target)}) belongs to this process (a "
                "boundary, a group of workers, a Python function), which no exported program can hold; export the "
                "graph of the local computation"
            )
    with torch.no_grad():  # backward is already among the operations, if it was requested
        return export(_Operations(graph), _example_inputs(graph))


def _operations(graph: OperationGraph) -> list[fx.Node]:
    return [node for node in graph.fx.nodes if node.op == "call_function"]


class _Operations(nn.Module):
    """The operations of a graph as a module that holds its state by the state's names."""

    def __init__(self, graph: OperationGraph) -> None:
        super().__init__()
        self._operations = graph
        written = _written(graph)
        for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
            if binding.bound is not None:  # an exported program writes to buffers, and to no parameter
                _hold(self, binding.name, binding.bound.detach() if node in written else binding.bound)

    def forward(self, *inputs: Structure) -> Structure:
        """Evaluate the operations one after the other."""
        graph = self._operations
        leaves = iter(flatten(inputs)[0])
        known: dict[fx.Node, object] = {}
        for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
            known[node] = next(leaves) if binding.bound is None else _held(self, binding.name)
        for node in _operations(graph):
            known[node] = evaluate(node, known.__getitem__)
        results = [known[result] if isinstance(result, fx.Node) else result for result in graph.results]
        structure = graph._output_structure
        return tuple(results) if structure is None else unflatten(structure, results)


def _written(graph: OperationGraph) -> set[fx.Node]:
    """Return the inputs that operations write to."""
    written = set[fx.Node]()
    for node in _operations(graph):
        schema = node.target._schema if isinstance(node.target, OpOverload) else None
        for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                several = value if isinstance(value, (list, tuple)) else [value]
                written.update(one for one in several if isinstance(one, fx.Node))
    return written


def _hold(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor under its qualified name; the parts between the dots become modules without a forward."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


def _held(module: nn.Module, name: str) -> Tensor:
    *path, last = name.split(".")
    for one in path:
        module = module.get_submodule(one)
    return getattr(module, last)  # type: ignore[no-any-return]


def _example_inputs(graph: OperationGraph) -> tuple[Structure, ...]:
    examples: list[Structure] = []
    for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
        value = node.meta.get("val")
        if binding.bound is None:
            examples.append(
                torch.zeros_like(value, device=value.device) if isinstance(value, Tensor) else binding.fixed
            )
    structure = graph._argument_structure
    return tuple(examples) if structure is None else tuple(unflatten(structure, examples))
