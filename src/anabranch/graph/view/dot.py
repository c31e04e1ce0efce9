"""A graph in Graphviz's language."""

from __future__ import annotations

from torch import Tensor, fx

from anabranch.graph.operation_graph import OperationGraph
from anabranch.graph.view.graph_page import boundary_of


def to_dot(graph: OperationGraph) -> str:
    """``graph`` as a ``digraph``: a box per operation, a cluster per module, shapes on edges, boundaries coloured."""
    lines = ["digraph graph_ {", "  rankdir=TB; node [shape=box, fontname=Helvetica];"]
    for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
        lines.append(f"  {_quoted(node.name)} [label={_quoted(binding.name)}, shape=ellipse];")
    scopes: dict[str, list[fx.Node]] = {}
    for node in graph.fx.nodes:
        if node.op == "call_function":
            scopes.setdefault(node.meta.get("scope", ""), []).append(node)
    for index, (scope, nodes) in enumerate(scopes.items()):
        if scope:
            lines.append(f"  subgraph cluster_{index} {{ label={_quoted(scope)};")
        lines += [f"  {_quoted(node.name)} [label={_quoted(_operation(node))}{_colour(node)}];" for node in nodes]
        if scope:
            lines.append("  }")
    for node in graph.fx.nodes:
        if node.op == "call_function":
            lines += [
                f"  {_quoted(source.name)} -> {_quoted(node.name)} [label={_quoted(_form(source))}];"
                for source in node.all_input_nodes
            ]
    for name, result in zip(graph.outputs, graph.results, strict=True):
        if isinstance(result, fx.Node):
            lines.append(f"  {_quoted('output ' + name)} [label={_quoted(name)}, shape=ellipse];")
            lines.append(f"  {_quoted(result.name)} -> {_quoted('output ' + name)} [label={_quoted(_form(result))}];")
    return "\n".join([*lines, "}"])


def _colour(node: fx.Node) -> str:
    boundary = boundary_of(node)
    return f', style=filled, fillcolor="#ffd34d", tooltip={_quoted(boundary)}' if boundary else ""


def _operation(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))


def _form(node: fx.Node) -> str:
    value = node.meta.get("val")
    return "x".join(map(str, value.shape)) or "scalar" if isinstance(value, Tensor) else ""


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
