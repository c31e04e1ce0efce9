"""Views of a graph: one self-contained page, a block per module, shapes and bytes on the edges; Graphviz's language."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from anabranch.graph.crossings import crossing_of
from anabranch.graph.effects import is_collective, is_wait
from anabranch.graph.nodes import bytes_of
from anabranch.graph.operation_graph import OperationGraph
from anabranch.graph.run.memory import plan_memory
from anabranch.tensors.dtypes import dtype_name
from anabranch.view.page import page_of

_KINDS = {"argument": "inputs", "parameter": "parameters", "buffer": "buffers"}


def to_html(graph: OperationGraph, path: str | Path, title: str = "graph") -> None:
    """See ``Graph.to_html``."""
    Path(path).write_text(page_of("graph", title, graph_data(graph)), encoding="utf-8")


def graph_data(graph: OperationGraph) -> dict[str, object]:
    """Return what ``graph.js`` draws: the operations, the facts above them, and the bytes alive after each."""
    records = records_of(graph)
    plan = plan_memory(graph)
    operations = sum(record["phase"] not in ("input", "output") for record in records)
    facts = {"operations": operations, "peak": plan.peak_bytes}
    makers = [""] * len(plan.alive)
    for name, (first, _) in plan.intervals.items():
        makers[first] = name
    return {"nodes": records, "facts": facts, "alive": plan.alive, "makers": makers, "peak": plan.peak}


def records_of(graph: OperationGraph) -> list[dict[str, Any]]:
    """Return the inputs, operations and outputs, with what is shown of each."""
    records: list[dict[str, Any]] = []
    index: dict[fx.Node, int] = {}
    for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
        index[node] = len(records)
        kind = _KINDS.get(binding.kind, f"{binding.kind} state")
        records.append({**_look(node), "name": binding.name, "label": binding.name, "scope": kind, "phase": "input"})
    for node in graph.fx.nodes:
        if node.op == "call_function":
            index[node] = len(records)
            records.append({**_look(node), "inputs": [index[source] for source in node.all_input_nodes]})
    for name, result in zip(graph.outputs, graph.results, strict=True):
        if isinstance(result, fx.Node):
            look = {**_look(result), "inputs": [index[result]], "boundary": ""}
            records.append({**look, "name": f"output {name}", "label": name, "scope": "outputs", "phase": "output"})
    return records


def _look(node: fx.Node) -> dict[str, Any]:
    value = node.meta.get("val")
    tensor = value if isinstance(value, Tensor) else None
    return {
        "name": node.name,
        "label": str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target))),
        "scope": node.meta.get("scope", ""),
        "phase": node.meta.get("phase", "forward"),
        "shape": ("x".join(map(str, tensor.shape)) or "scalar") if tensor is not None else "",
        "dtype": dtype_name(tensor.dtype) if tensor is not None else "",
        "bytes": bytes_of(value),
        "boundary": boundary_of(node),
        "inputs": [],
    }


def boundary_of(node: fx.Node) -> str:
    """Return the label of the node's boundary if it leaves a device or process, else an empty string."""
    if is_collective(node):
        return "collective"
    if is_wait(node):
        return "wait"
    if (crossing := crossing_of(node)) is not None:
        return crossing.label
    device = node.kwargs.get("device")
    if node.target is not torch.ops.aten._to_copy.default or device is None:
        return ""
    source = cast(fx.Node, node.args[0]).meta.get("val")  # of a copy that the captured function makes
    return f"{source.device} -> {device}" if isinstance(source, Tensor) and source.device != device else ""


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
