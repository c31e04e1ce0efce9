"""From a traced function to a ``Graph``: inputs named and bound, constants lifted, artefacts of the trace removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn

from anabranch.graph.graph import Graph
from anabranch.graph.operation_graph import Input, InputKind
from anabranch.graph.passes.dead_nodes import drop_dead_nodes, drop_handles
from anabranch.graph.trace.make_fx import Interceptor, TraceSource, constants, trace


def build(
    body: Callable[..., Sequence[object]],
    sources: Sequence[TraceSource],
    outputs: Sequence[str],
    *,
    kinds: Mapping[str, InputKind] | None = None,
    may_read: bool = False,
    interceptor: Interceptor | None = None,
) -> Graph:
    """Traces ``body``, which yields ``outputs`` (names that it may add to while it runs), and cleans the trace."""
    module = trace(body, sources, may_read=may_read, interceptor=interceptor)
    graph = module.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    inputs = [_input(source, node, kinds or {}) for source, node in zip(sources, placeholders, strict=True)]
    for index, (node, tensor) in enumerate(constants(module).items()):
        with graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(node):
            lifted = graph.placeholder(f"constant_{index}")
        lifted.meta.update(node.meta)
        lifted.meta["val"] = tensor.detach()
        node.replace_all_uses_with(lifted)
        graph.erase_node(node)
        placeholders.append(lifted)
        inputs.append(Input(f"constant.{index}", "constant", tensor))
    _drop_profiling(graph)
    output = graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    return drop_dead_nodes(drop_handles(Graph(graph, inputs, list(outputs))))


def _input(source: TraceSource, node: fx.Node, kinds: Mapping[str, InputKind]) -> Input:
    if not source.state:
        return Input(source.name)
    assert isinstance(source.value, Tensor)
    kind: InputKind = kinds.get(source.name) or kinds.get("") or "constant"
    if isinstance(source.value, nn.Parameter):
        kind = "parameter"
    return Input(source.name, kind, source.value)


def _drop_profiling(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "profiler":
            graph.erase_node(node)
