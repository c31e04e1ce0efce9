"""The last passes before code is generated: handles dropped, faster kernels, memory reused in place."""

from __future__ import annotations

from anabranch.graph.operation_graph import AnyGraph
from anabranch.graph.passes.dead_nodes import drop_handles
from anabranch.graph.passes.in_place import reuse_in_place
from anabranch.graph.passes.table_gradients import sum_table_gradients


def lower(graph: AnyGraph) -> AnyGraph:
    """Return the graph that the program of ``graph`` is generated from."""
    return reuse_in_place(sum_table_gradients(drop_handles(graph, stops=True)))
