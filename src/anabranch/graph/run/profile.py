"""The time of each operation of a graph, measured one by one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter

import torch
from torch import fx

from anabranch.graph.nodes import evaluate
from anabranch.graph.operation_graph import OperationGraph

__all__ = ["profile"]


def profile(graph: OperationGraph, leaves: Sequence[object], runs: int) -> dict[str, float]:
    """Return the median seconds of each operation over ``runs`` runs, by its name. On CUDA, each operation is
    synchronised.
    """
    seen: dict[str, list[float]] = {}
    has_cuda = torch.cuda.is_available()
    for _ in range(runs):
        given = iter(leaves)
        values: dict[fx.Node, object] = {}
        for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
            values[node] = next(given) if binding.bound is None else binding.bound
        with torch.no_grad():
            for node in graph.fx.nodes:
                if node.op != "call_function":
                    continue
                start = perf_counter()
                values[node] = evaluate(node, values.__getitem__)
                if has_cuda:
                    torch.cuda.current_stream().synchronize()
                seen.setdefault(node.name, []).append(perf_counter() - start)
    return {name: statistics.median(times) for name, times in seen.items()}
