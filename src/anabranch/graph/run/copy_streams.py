"""CUDA: values that cross a boundary are copied in parallel with as much of the computation as possible.

::

    compute:   x ──● ──> y ──> z ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ● ──> reads the answer
                   │ event: x is there                     │ event: the answer is there
    copies:        └─> x to main memory, far side, answer ─┘

Kernels are launched without waiting, but a crossing blocks its thread until the answer has arrived. So kernels that do
not need the answer are launched before it, and the copy of ``x`` waits only for ``x``. On a CPU neither pass helps, so
a program on a CPU has neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, fx

from anabranch.graph.crossings import Crossing, crossing_of
from anabranch.graph.effects import Effects
from anabranch.graph.operation_graph import AnyGraph, OperationGraph
from anabranch.tensors import flatten

__all__ = ["copy_beside_compute", "crosses_from_cuda", "launch_before_crossings"]


def crosses_from_cuda(graph: OperationGraph) -> bool:
    """Return True if a tensor on a CUDA device crosses a boundary."""
    return any(
        source.meta["val"].is_cuda
        for node in graph.fx.nodes
        if crossing_of(node) is not None
        for source in node.all_input_nodes
        if isinstance(source.meta.get("val"), Tensor)
    )


def launch_before_crossings(graph: AnyGraph) -> AnyGraph:
    """``graph`` with the nodes between a crossing and the next that do not need its results moved before it.

    Random draws, writes, collectives and reads of memory that is written stay in place.
    """
    graph = graph.copy()
    effects = graph.effects()
    for crossing in [node for node in graph.fx.nodes if crossing_of(node) is not None]:
        late = {crossing}
        node = crossing.next
        while node.op != "output" and crossing_of(node) is None:
            following = node.next
            if late.isdisjoint(node.all_input_nodes) and _may_move(node, effects):
                crossing.prepend(node)
            else:
                late.add(node)
            node = following
    return graph


def _may_move(node: fx.Node, effects: Effects) -> bool:
    if node.op != "call_function" or effects.must_stay(node) or effects.written_by(node):
        return False
    return not any(effects.root[each] in effects.writers for each in (node, *node.all_input_nodes))


def copy_beside_compute(graph: AnyGraph) -> AnyGraph:
    """``graph`` with an event once a crossing's inputs are computed, and crossings that copy on a separate stream."""
    graph = graph.copy()
    order = {node: position for position, node in enumerate(graph.fx.nodes)}
    for node in [node for node in graph.fx.nodes if crossing_of(node) is not None]:
        crossing = crossing_of(node)
        assert crossing is not None
        sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), Tensor)]
        computed = [source for source in sources if source.op != "placeholder"]
        with (
            graph.fx.inserting_after(max(computed, key=order.__getitem__))
            if computed
            else graph.fx.inserting_before(next(n for n in graph.fx.nodes if n.op != "placeholder"))
        ):
            ready = graph.fx.call_function(_note_ready, (sources,))
        node.target = _Beside(crossing)
        node.args = (ready, *node.args)
    return graph


def _note_ready(tensors: list[Tensor]) -> torch.cuda.Event | None:
    """Return an event that comes when the current stream has computed ``tensors``; ``None`` on a CPU."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class _Beside(Crossing):
    """A crossing whose copies run on the copy stream."""

    def __init__(self, crossing: Crossing) -> None:
        super().__init__(crossing.boundary, crossing.wants, crossing.phase)
        self._crossing = crossing

    def __call__(self, ready: torch.cuda.Event | None, *arguments: object) -> tuple[object, ...]:
        if ready is None:
            return self._crossing(*arguments)
        taken = list(_on_cuda(arguments))
        device = taken[0].device
        compute, copies = torch.cuda.current_stream(device), _copy_stream(device)
        copies.wait_event(ready)
        with torch.cuda.stream(copies):
            brought = self._crossing(*arguments)
        compute.wait_stream(copies)
        # The allocator may reuse memory only when both streams are done with it.
        for tensor in taken:
            tensor.record_stream(copies)
        for tensor in _on_cuda(brought):
            tensor.record_stream(compute)
        return brought


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _on_cuda(values: object) -> Iterator[Tensor]:
    return (leaf for leaf in flatten(values)[0] if isinstance(leaf, Tensor) and leaf.is_cuda)
