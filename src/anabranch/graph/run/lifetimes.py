"""Lifetimes of a run's values, and the number of bytes alive at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from anabranch.graph.nodes import bytes_of
from anabranch.graph.operation_graph import OperationGraph
from anabranch.graph.run.lowering import lower


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one run.

    Attributes:
        peak_bytes: most bytes that the run has allocated at once; inputs and state are the caller's and not counted.
        peak: the operation during which the peak is reached.
        intervals: for each value that owns memory, the indices of the operations that make it and that use it last; a
            returned value is alive to the end.
        alive: the bytes that are allocated at each operation.
        reused: operations done in place, with the value whose memory they reuse.
    """

    peak_bytes: int
    peak: str
    intervals: dict[str, tuple[int, int]]
    alive: list[int]
    reused: dict[str, str]


def plan_memory(graph: OperationGraph) -> MemoryPlan:
    """Return the plan of the program that ``graph`` runs as."""
    lowered = lower(graph)
    effects = lowered.effects()
    nodes = [node for node in lowered.fx.nodes if node.op == "call_function"]
    index = {node: position for position, node in enumerate(nodes)}
    first: dict[fx.Node, int] = {}
    last: dict[fx.Node, int] = {}
    sizes: dict[fx.Node, int] = {}
    for node in nodes:
        if effects.root[node] is node and (size := bytes_of(node.meta.get("val"))):
            first[node], sizes[node] = index[node], size
        for source in (node, *node.all_input_nodes):
            last[effects.root[source]] = index[node]
    for result in lowered.fx.output_node().all_input_nodes:
        last[effects.root[result]] = len(nodes)
    change = [0] * (len(nodes) + 2)
    for root, start in first.items():
        change[start] += sizes[root]
        change[last[root] + 1] -= sizes[root]
    alive = list(accumulate(change[:-1]))
    peak = max(alive)
    return MemoryPlan(
        peak_bytes=peak,
        peak=nodes[min(alive.index(peak), len(nodes) - 1)].name if nodes else "",
        intervals={root.name: (first[root], last[root]) for root in first},
        alive=alive,
        reused={node.name: node.meta["reused"].name for node in nodes if "reused" in node.meta},
    )
