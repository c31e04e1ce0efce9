"""The memory of a run: the number of bytes alive at once, and a graph that recomputes values to fit a budget."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx
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


# Recomputing, until a run fits a budget.
#
# At the peak the graph consists of operations that have run (F) and those that will run (B). Without recomputation
# every value of F that B needs is kept. A value may be recomputed if it draws no random numbers, writes nothing, and
# reads nothing that is written later; it is made from those that may not, which are kept.
#
# First only elementwise operations and views are recomputed. If that does not fit, whole segments of F are, each from
# the values that cross into it: with that number of segments with which the fewest operations run twice. B walks the
# segments backwards, so that one segment's values are alive at a time. A minimum cut between what exists and what B
# needs, in bytes, was tried: on chains, an MLP, convolutions and transformers it fitted no smaller budget.


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
    before, after = _split(graph, lambda node: node.meta.get("phase") == "backward")
    recomputable = _recomputable(before, graph.effects(), cheap_only=False)
    return _placed(graph, after, {node for node in recomputable if node.meta.get("checkpointed")})


def _recomputed(graph: AnyGraph, peak: str, segments: int) -> AnyGraph:
    """``graph`` with the values that need not be kept over the operation ``peak`` recomputed after it: in so many
    segments, or, with 0, the cheap ones alone.
    """
    graph = graph.copy()
    before, after = _split(graph, lambda node: node.name == peak)
    allowed = set(_recomputable(before, graph.effects(), cheap_only=not segments))
    return _placed(graph, after, allowed - _crossing(before, _bounds(before, max(1, segments))))


def _split(graph: OperationGraph, begins: Callable[[fx.Node], bool]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the operations before the first that ``begins`` says, and the others."""
    nodes = [node for node in graph.fx.nodes if node.op == "call_function"]
    at = next((index for index, node in enumerate(nodes) if begins(node)), len(nodes))
    return nodes[:at], nodes[at:]


def _placed(graph: AnyGraph, after: list[fx.Node], allowed: set[fx.Node]) -> AnyGraph:
    """``graph`` with the values that ``after`` reads of those before it recomputed, if they are ``allowed`` to be."""
    again: set[fx.Node] = set()
    waiting = [source for reader in after for source in reader.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node in allowed and node not in again:
            again.add(node)
            waiting.extend(node.all_input_nodes)
    _place(graph, after, again)
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


def _crossing(before: list[fx.Node], bounds: list[int]) -> set[fx.Node]:
    """Return the values that the forward carries over the start of a segment."""
    crossing, position = set(), {node: index for index, node in enumerate(before)}
    for node in before:
        last = max((position[reader] for reader in node.users if reader in position), default=0)
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
