"""A graph in Graphviz's language."""

from __future__ import annotations

from anabranch.graph.operation_graph import OperationGraph
from anabranch.graph.view.graph_page import records_of


def to_dot(graph: OperationGraph) -> str:
    """``graph`` as a ``digraph``: a box per operation, a cluster per module, shapes on edges, boundaries coloured."""
    records, arrows = records_of(graph), list[str]()
    clusters: dict[str, list[str]] = {}
    for record in records:
        name, boundary = _quoted(record["name"]), record["boundary"]
        shape = ", shape=ellipse" if record["phase"] in ("input", "output") else ""
        colour = f', style=filled, fillcolor="#ffd34d", tooltip={_quoted(boundary)}' if boundary else ""
        box = f"  {name} [label={_quoted(record['label'])}{shape}{colour}];"
        clusters.setdefault(record["scope"], []).append(box)
        for source in (records[index] for index in record["inputs"]):
            arrows.append(f"  {_quoted(source['name'])} -> {name} [label={_quoted(source['shape'])}];")
    lines = ["digraph graph_ {", "  rankdir=TB; node [shape=box, fontname=Helvetica];"]
    for index, (scope, boxes) in enumerate(clusters.items()):
        lines += [f"  subgraph cluster_{index} {{ label={_quoted(scope)};", *boxes, "  }"] if scope else boxes
    return "\n".join([*lines, *arrows, "}"])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
