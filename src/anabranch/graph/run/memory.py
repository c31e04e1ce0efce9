"""The memory of a run: the number of bytes alive at once, and a graph that recomputes values to fit a budget."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from anabranch.graph.effects import Effects, is_view
from anabranch.graph.nodes import bytes_of
from anabranch.graph.operation_graph import AnyGraph, OperationGraph
from anabranch.graph.passes import drop_dead_nodes, drop_handles, lower


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


# Recomputing: chosen by minimum cut, until a run fits a budget.
#
# At the peak the graph consists of operations that have run (F) and those that will run (B). Without recomputation
# every value of F that B needs is kept. A cut between the values that exist anyway and those that B needs is a set from
# which the rest can be recomputed; the cut of fewest bytes is kept. Its capacities: a value's bytes to keep it, 0 to
# recompute it if that is allowed (no random numbers, no writes, no inputs that are written), infinity otherwise.
#
#     source --infinity--> values that may not be recomputed
#     value_in --bytes--> value_out --infinity--> its readers in F
#     value_out --infinity--> sink                         if B reads it
#
# First only elementwise operations and views are recomputed. If that does not fit, whole segments of F are, each from
# the values that cross into it: with that number of segments with which the fewest operations run twice. B walks the
# segments backwards, so that one segment's values are alive at a time.


def recompute(graph: AnyGraph, budget_bytes: int) -> AnyGraph:
    """See ``Graph.recompute``."""
    graph = drop_dead_nodes(drop_handles(graph))
    plan = plan_memory(graph)
    if plan.peak_bytes <= budget_bytes:
        return graph
    smaller: dict[AnyGraph, int] = {}
    for segments in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        candidate = _recomputed(graph, plan.peak, segments)
        smaller[candidate] = plan_memory(candidate).peak_bytes
        if not segments and smaller[candidate] <= budget_bytes:
            return candidate
    if fitting := [candidate for candidate, peak in smaller.items() if peak <= budget_bytes]:
        return min(fitting, key=lambda candidate: len(candidate.fx.nodes))
    raise ValueError(
        f"no recomputation found fits into {budget_bytes} bytes: a run needs {plan.peak_bytes}, with recomputation "
        f"{min(smaller.values())}; give it at least that, or capture a smaller batch"
    )


def recompute_marked(graph: AnyGraph) -> AnyGraph:
    """``graph`` with the values of ``torch.utils.checkpoint``'s regions recomputed in backward instead of kept.

    Random numbers and writes are not repeated: their results are kept, and the bits are the same.
    """
    if not any(node.meta.get("checkpointed") for node in graph.fx.nodes):
        return graph
    graph = drop_dead_nodes(drop_handles(graph)).copy()
    nodes = [node for node in graph.fx.nodes if node.op == "call_function"]
    at = next((index for index, node in enumerate(nodes) if node.meta.get("phase") == "backward"), len(nodes))
    before, after = nodes[:at], nodes[at:]
    known = set(before)
    wanted = {source for reader in after for source in reader.all_input_nodes if source in known}
    allowed = {
        node for node in _recomputable(before, graph.effects(), cheap_only=False) if node.meta.get("checkpointed")
    }
    kept = wanted - allowed
    _place(graph, after, _needed_again(wanted, kept, allowed))
    return drop_dead_nodes(graph)


def _recomputed(graph: AnyGraph, peak: str, segments: int) -> AnyGraph:
    """``graph`` with the values that need not be kept over the operation ``peak`` recomputed after it: in so many
    segments, or, with 0, the cheap ones alone.
    """
    graph = graph.copy()
    nodes = [node for node in graph.fx.nodes if node.op == "call_function"]
    at = next((index for index, node in enumerate(nodes) if node.name == peak), len(nodes))
    position = {node: index for index, node in enumerate(nodes)}
    before, after = nodes[:at], nodes[at:]
    wanted = {s for reader in after for s in reader.all_input_nodes if position.get(s, at) < at}
    allowed = set(_recomputable(before, graph.effects(), cheap_only=not segments))
    bounds = _bounds(before, max(1, segments))
    allowed -= _crossing(before, bounds, position)
    kept = _minimum_cut(before, allowed, wanted)
    _place(graph, after, _needed_again(wanted, kept, allowed))
    return drop_dead_nodes(graph)


def _bounds(before: list[fx.Node], segments: int) -> list[int]:
    """Split ``before`` into segments that compute about equally many bytes; returns where each begins, and the end."""
    sizes = [bytes_of(node.meta.get("val")) for node in before]
    total, done, bounds = sum(sizes), 0, [0]
    for index, size in enumerate(sizes):
        if done >= total * len(bounds) / segments and len(bounds) < segments:
            bounds.append(index)
        done += size
    return bounds + [len(before)] * (segments - len(bounds))


def _crossing(before: list[fx.Node], bounds: list[int], position: dict[fx.Node, int]) -> set[fx.Node]:
    """Return the values that the forward carries over the start of a segment."""
    crossing = set()
    for node in before:
        last = max(
            (position[reader] for reader in node.users if position.get(reader, len(before)) < len(before)), default=0
        )
        start = bisect.bisect_right(bounds, position[node])
        if start < len(bounds) and bounds[start] <= last:
            crossing.add(node)
    return crossing


def _recomputable(before: list[fx.Node], effects: Effects, *, cheap_only: bool) -> Iterator[fx.Node]:
    order = {node: index for index, node in enumerate(before)}
    found: set[fx.Node] = set()

    def is_final(source: fx.Node, reader: fx.Node) -> bool:
        writers = effects.writers.get(effects.root[source], ())
        return all(order.get(writer, len(before)) < order[reader] for writer in writers)

    for node in before:
        if effects.must_stay(node) or effects.written_by(node):
            continue
        if cheap_only and isinstance(node.target, OpOverload) and not _is_cheap(node):
            continue
        # A value that is read again must be unchanged: nothing may write to it later, nor ever to the value itself.
        if effects.root[node] in effects.writers and effects.root[node] is node:
            continue
        if node.target is operator.getitem and node.args[0] not in found:  # a part exists as long as the whole
            continue
        if all(is_final(source, node) for source in node.all_input_nodes):
            found.add(node)
            yield node


def _is_cheap(node: fx.Node) -> bool:
    assert isinstance(node.target, OpOverload)
    return torch.Tag.pointwise in node.target.tags or is_view(node)


def _minimum_cut(before: list[fx.Node], allowed: set[fx.Node], wanted: set[fx.Node]) -> set[fx.Node]:
    """Return the values to keep."""
    if not wanted:
        return set()
    # Takes half a second, only in processes that recompute.
    import networkx  # type: ignore[import-untyped]

    network = networkx.DiGraph()
    network.add_node("source")
    network.add_node("sink")
    for node in before:
        inner, outer = ("in", node), ("out", node)
        network.add_edge(inner, outer, capacity=_weight(node))
        if node not in allowed:
            network.add_edge("source", inner, capacity=math.inf)
        if node in wanted:
            network.add_edge(outer, "sink", capacity=math.inf)
        for reader in node.users:
            if reader in allowed:
                network.add_edge(outer, ("in", reader), capacity=math.inf)
    _, (reached, _) = networkx.minimum_cut(network, "source", "sink")
    return {node for node in before if ("in", node) in reached and ("out", node) not in reached}


def _weight(node: fx.Node) -> float:
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return math.inf
    size = bytes_of(value)
    return float(size) if isinstance(value, Tensor) and not is_view(node) else size + 1.0


def _needed_again(wanted: set[fx.Node], kept: set[fx.Node], allowed: set[fx.Node]) -> set[fx.Node]:
    again: set[fx.Node] = set()
    waiting = [node for node in wanted if node not in kept]
    while waiting:
        node = waiting.pop()
        if node in again or node in kept or node.op == "placeholder" or node not in allowed:
            continue
        again.add(node)
        waiting.extend(node.all_input_nodes)
    return again


def _place(graph: OperationGraph, after: list[fx.Node], again: set[fx.Node]) -> None:
    """Recompute each value right before its first reader after the peak, and redirect later readers to it."""
    copies: dict[fx.Node, fx.Node] = {}

    def remade(node: fx.Node, reader: fx.Node) -> fx.Node:
        if node not in again:
            return node
        if node not in copies:
            for source in node.all_input_nodes:
                remade(source, reader)
            with graph.fx.inserting_before(reader):
                copies[node] = graph.fx.node_copy(node, lambda source: copies.get(source, source))
        return copies[node]

    for reader in after:
        for source in list(reader.all_input_nodes):
            replacement = remade(source, reader)
            if replacement is not source:
                reader.replace_input_with(source, replacement)
