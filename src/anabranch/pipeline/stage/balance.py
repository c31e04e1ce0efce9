"""Balancing: cuts that make the costliest stage as cheap as possible, by time or by size.

Layers are measured one by one on a copy of the module, each forward and backward on the output of the previous one. The
copy draws its random numbers from a separate stream, so neither buffers nor the process's generator are touched.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.pipeline.stage.packet import cloned, size_of
from anabranch.pipeline.stage.partition import declarations, flatten_layers
from anabranch.pipeline.stage.random_streams import drawing_from
from anabranch.pipeline.stage.skips import SkipName, SkipStore, using_store
from anabranch.tensors import Structure, flatten, map_structure

_MEASURING_SECONDS = 1.0
_MOST_REPEATS = 20


def balance_by_time(n: int, module: nn.Module, sample: Structure) -> list[int]:
    """Return the number of layers for each of ``n`` stages so that the slowest is as fast as possible.

    >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    >>> sum(balance_by_time(2, model, torch.randn(8, 64)))
    4

    Args:
        n: the number of stages.
        module: the ``nn.Sequential`` to split; nested ones count as the layers inside.
        sample: a batch of the size that a microbatch will have.

    Returns:
        The number of flattened layers of each stage. A stage's time is that of its layers, forward and backward.

    Raises:
        ValueError: more stages than layers, or fewer than one.

    Source: torchgpipe.balance (Kim et al., 2020).
    """
    layers, crossing = _look(n, module, sample)
    fastest = [math.inf] * len(layers)
    until = time.perf_counter() + _MEASURING_SECONDS
    for repeat in range(_MOST_REPEATS):
        fastest = list(map(min, fastest, map(_seconds, layers)))
        if repeat and time.perf_counter() > until:
            break
    return _cut(n, fastest, [0] * len(crossing))


def balance_by_size(n: int, module: nn.Module, sample: Structure) -> list[int]:
    """Return the number of layers for each of ``n`` stages so that the largest is as small as possible.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 80), nn.Linear(80, 8))
    >>> balance_by_size(2, model, torch.randn(2, 8))
    [2, 1]

    Args:
        n: the number of stages.
        module: the ``nn.Sequential`` to split; nested ones count as the layers inside.
        sample: a batch of the size that a microbatch will have.

    Returns:
        The number of flattened layers of each stage. A stage's size is the bytes of its parameters and their
        gradients, of the values that its layers keep for backward, and of those that cross its ends, skips included.

    Raises:
        ValueError: more stages than layers, or fewer than one.
    """
    layers, crossing = _look(n, module, sample)
    return _cut(n, [layer.size for layer in layers], crossing)


@dataclass(slots=True)
class _Layer:
    """A layer of a copy of a model, with what it got of the sample, and the bytes of it and of what it kept."""

    module: nn.Module
    value: Structure
    skips: dict[SkipName, Structure]
    size: int = 0

    def run(self, value: Structure) -> tuple[Structure, SkipStore]:
        store = SkipStore()
        for name, skip in self.skips.items():
            store.put(name, skip)
        with drawing_from(0, 0, 0, 0), using_store(store):
            return self.module(value), store


def _look(n: int, module: nn.Module, sample: Structure) -> tuple[list[_Layer], list[int]]:
    """Return the layers of a copy of the module that has run on the sample, and the bytes that cross before each."""
    layers = flatten_layers(copy.deepcopy(module))
    if not 1 <= n <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot make {n} stages; choose 1 to {len(layers)}")
    looked_at: list[_Layer] = []
    crossing = [0] * (len(layers) + 1)
    value, skips, reached = _leaf(sample), dict[SkipName, Structure](), dict[SkipName, int]()
    for index, one in enumerate(layers):
        declared = declarations([one])
        popped = [name for declaration in declared for name in declaration.pops if name in skips]
        for name in popped:
            for cut in range(reached[name] + 1, index + 1):
                crossing[cut] += _bytes(skips[name])
            reached[name] = index
        layer = _Layer(one.module, value, {name: skips[name] for name in popped})
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(partial(_note, kept), lambda tensor: tensor):
            output, store = layer.run(cloned(value))
        parameters = parameters_here(one.module).values()
        for tensor in (*parameters, *one.module.buffers()):
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        layer.size = 2 * sum(parameter.nbytes for parameter in parameters) + sum(kept.values())
        looked_at.append(layer)
        crossing[index + 1] += _bytes(output)
        value = _leaf(output)
        for name in (name for declaration in declared for name in declaration.stashes if name in store):
            skips[name], reached[name] = _leaf(store.take(name, shared=True)), index
    return looked_at, crossing[:-1]


def _note(kept: dict[int, int], tensor: Tensor) -> Tensor:
    parts = [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]
    kept.update((part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()) for part in parts)
    return tensor


def _seconds(layer: _Layer) -> float:
    """Return the time of a forward and a backward."""
    value = cloned(layer.value)
    _synchronize()
    started = time.perf_counter()
    output, _ = layer.run(value)
    tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _leaf(value: Structure) -> Structure:
    """Return the same values as the start of a graph."""

    def start(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        differentiable = leaf.is_floating_point() or leaf.is_complex()
        return leaf.detach().requires_grad_() if differentiable else leaf.detach()

    return map_structure(start, value)


def _bytes(value: Structure) -> int:
    return sum(size_of(leaf) for leaf in flatten(value)[0] if isinstance(leaf, Tensor))


def _cut(n: int, costs: Sequence[float], crossing: Sequence[float]) -> list[int]:
    """Return the sizes of ``n`` consecutive parts that minimise the cost of the costliest, including both its ends."""
    length = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    def part(start: int, end: int) -> float:
        return before[end] - before[start] + crossing[start] + (crossing[end] if end < length else 0.0)

    # best[end]: the costliest part and the cuts of the cheapest split of the first `end` layers so far.
    best: dict[int, tuple[float, list[int]]] = {end: (part(0, end), [end]) for end in range(1, length - n + 2)}
    for k in range(2, n + 1):
        best = {
            end: min((max(best[start][0], part(start, end)), [*best[start][1], end]) for start in best if start < end)
            for end in range(k, length - n + k + 1)
        }
    ends = best[length][1]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
