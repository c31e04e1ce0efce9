"""Balancing: cuts that make the costliest stage as cheap as possible, by time or by size, boundaries included.

Layers are measured one by one on a copy of the module, each forward and backward on the output of the previous one. The
copy draws its random numbers from a separate stream, so neither buffers nor the process's generator are touched.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.pipeline.stage.packet import size_of
from anabranch.pipeline.stage.partition import Layer, flatten_layers
from anabranch.pipeline.stage.random_streams import drawing_from
from anabranch.pipeline.stage.skips import SkipName, SkipStore, declaration_of, using_store
from anabranch.tensors import Structure, flatten, map_structure

_MEASURING_SECONDS = 1.0
_MOST_REPEATS = 20


def balance_by_time(n: int, module: nn.Module, sample: Structure) -> list[int]:
    """Return the number of layers for each of ``n`` stages so that the slowest is as fast as possible.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    >>> sum(balance_by_time(2, model, torch.randn(8, 64)))
    4

    Args:
        n: the number of stages.
        module: the ``nn.Sequential`` to split; nested ones count as the layers inside.
        sample: a batch of the size that a microbatch will have.

    Returns:
        The number of flattened layers of each stage. A stage's time is that of its layers, forward and backward, and
        of copying the values that cross its ends, skips included.

    Raises:
        ValueError: more stages than layers, or fewer than one.

    Source: torchgpipe.balance (Kim et al., 2020), which leaves boundaries out.
    """
    profile = _Profile(n, module, sample)
    profile.measure_times()
    return _cut(n, profile.seconds, profile.boundaries(profile.copy_seconds))


def balance_by_size(n: int, module: nn.Module, sample: Structure) -> list[int]:
    """Return the number of layers for each of ``n`` stages so that the largest is as small as possible.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 80), nn.Linear(80, 8))
    >>> balance_by_size(2, model, torch.randn(2, 8))
    [3, 1]

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
    profile = _Profile(n, module, sample)
    return _cut(n, [float(size) for size in profile.sizes], profile.boundaries(float))


@dataclass(slots=True)
class _Seen:
    """The measured input, outputs and kept memory of one layer."""

    value: Structure
    kept_bytes: int
    out_bytes: int
    skips: dict[SkipName, Structure] = field(default_factory=dict)


class _Profile:
    """The layers of a copy of a module, and measurements of running them on a sample."""

    def __init__(self, n: int, module: nn.Module, sample: Structure) -> None:
        self._layers = flatten_layers(copy.deepcopy(module))
        if not 1 <= n <= len(self._layers):
            raise ValueError(f"{len(self._layers)} layers cannot make {n} stages; choose 1 to {len(self._layers)}")
        self._store = _Recording()
        self._seen: list[_Seen] = []
        with drawing_from(0, 0, 0, 0):
            value = _leaf(sample)
            for layer in self._layers:
                seen, value = self._look(layer, value)
                self._seen.append(seen)
        self.seconds = [0.0] * len(self._layers)
        self.sizes = [
            2 * sum(parameter.nbytes for parameter in parameters_here(layer.module).values()) + seen.kept_bytes
            for layer, seen in zip(self._layers, self._seen, strict=True)
        ]

    def _look(self, layer: Layer, value: Structure) -> tuple[_Seen, Structure]:
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            parts = [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]
            kept.update((part.untyped_storage().data_ptr(), part.untyped_storage().nbytes()) for part in parts)
            return tensor

        popped = self._store.values_for(layer)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), using_store(self._store):
            output = layer.module(_cloned(value))
        for tensor in (*parameters_here(layer.module).values(), *layer.module.buffers()):
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        return _Seen(value, sum(kept.values()), _bytes(output), popped), _leaf(output)

    def measure_times(self) -> None:
        """Fill ``seconds``: the fastest of several forwards and backwards of each layer."""
        fastest = [float("inf")] * len(self._layers)
        until = time.perf_counter() + _MEASURING_SECONDS
        for repeat in range(_MOST_REPEATS):
            for index, (layer, seen) in enumerate(zip(self._layers, self._seen, strict=True)):
                fastest[index] = min(fastest[index], _time_of(layer, seen))
            if repeat and time.perf_counter() > until:
                break
        self.seconds = fastest

    def boundaries(self, cost: Callable[[int], float]) -> list[float]:
        """Return the cost of the cut before each layer, from the bytes of the value and of the skips that cross it."""
        crossing = [0] + [seen.out_bytes for seen in self._seen[:-1]]
        for name, (first, last) in self._store.spans(self._layers).items():
            for cut in range(first + 1, last + 1):
                crossing[cut] += self._store.sizes[name]
        return [cost(size) for size in crossing]

    @staticmethod
    def copy_seconds(size: int) -> float:
        """Seconds for a copy of ``size`` bytes, there and, as a gradient, back."""
        source = torch.zeros(size, dtype=torch.uint8, device="cpu")
        target = source.clone()
        started = time.perf_counter()
        target.copy_(source)
        return 2 * (time.perf_counter() - started)


class _Recording(SkipStore):
    """A store that records the size of each skip, and makes a popped skip the start of a new graph."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[SkipName, int] = {}

    def put(self, name: SkipName, value: Structure, *, shared: bool = False) -> None:
        self.sizes[name] = _bytes(value)
        super().put(name, _leaf(value), shared=True)

    def values_for(self, layer: Layer) -> dict[SkipName, Structure]:
        """Return the skips that the layer is about to pop."""
        declarations = filter(None, map(declaration_of, layer.module.modules()))
        names = [name for declaration in declarations for name in declaration.pops]
        return {name: self.take(name, shared=True) for name in names if name in self}

    def spans(self, layers: Sequence[Layer]) -> dict[SkipName, tuple[int, int]]:
        """Return the layers that stash and last pop each skip."""
        spans: dict[SkipName, tuple[int, int]] = {}
        for index, layer in enumerate(layers):
            for declaration in filter(None, map(declaration_of, layer.module.modules())):
                for name in declaration.pops:
                    spans[name] = (spans[name][0], index)
                spans.update(dict.fromkeys(declaration.stashes, (index, index)))
        return spans


def _time_of(layer: Layer, seen: _Seen) -> float:
    store = SkipStore()
    for name, value in seen.skips.items():
        store.put(name, value)
    with drawing_from(0, 0, 0, 0), using_store(store):
        value = _cloned(seen.value)
        _synchronize()
        started = time.perf_counter()
        output = layer.module(value)
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


def _cloned(value: Structure) -> Structure:
    """Return the same values in their own memory: the layer may change them in place."""
    return map_structure(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)


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
