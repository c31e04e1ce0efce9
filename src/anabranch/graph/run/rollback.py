"""``Rollback``: a step whose graph raises because of a value, such as an id outside a table, is run on the tape
instead.

Only the tape has the effects of the plain loop: the error at the user's own line, Python's effects before it, and the
other branch of an ``except`` around it. So the graph's changes up to then are restored. Checks run before all updates;
only buffers, inputs and the random state may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from anabranch.errors import AnabranchError
from anabranch.graph.crossings import crossing_of
from anabranch.graph.effects import is_collective, is_random, raises_on_values
from anabranch.graph.operation_graph import OperationGraph
from anabranch.tensors.memory import shown_once

__all__ = ["GraphRaised", "Rollback"]

_Result = TypeVar("_Result")
_MOST_BYTES = 4 << 20  # of buffers, copied before each step: a tenth of a millisecond per megabyte


class GraphRaised(Exception):
    """An operation of a graph raised ``error``; the state before the run is restored."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Rollback:
    """Runs a graph of forward and backward so that an error of an operation leaves no trace.

    Args:
        graph: that of forward and backward. One that crosses a boundary is not run twice, and one that writes large
            buffers is not copied: their errors are the run's.
    """

    def __init__(self, graph: OperationGraph) -> None:
        nodes = [node for node in graph.fx.nodes if node.op == "call_function"]
        crosses = any(crossing_of(node) is not None or is_collective(node) for node in nodes)
        self._possible = not crosses and any(map(raises_on_values, nodes))
        self._bound: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._free: list[int] = []
        self._without_autograd: Callable[[], AbstractContextManager[object]] = torch.no_grad
        random = [node for node in nodes if is_random(node)] if self._possible else []
        self._is_random = bool(random)
        self._random_devices = _devices_beside_the_cpu(random)
        if self._possible:
            self._find_written(graph)

    def add_update(self, graph: OperationGraph) -> None:
        """Take the graph of the update that runs in the same program: if it may raise, parameters may have changed."""
        if any(map(raises_on_values, graph.fx.nodes)):
            self._possible = False

    def _find_written(self, graph: OperationGraph) -> None:
        effects = graph.effects()
        free = 0
        for node, binding in zip(graph.placeholders, graph.bindings, strict=True):
            if effects.writers.get(effects.root[node]):
                if binding.bound is not None:
                    self._bound.append(shown_once(binding.bound))
                else:
                    self._free.append(free)
            free += binding.bound is None
        if sum(tensor.nbytes for tensor in self._bound) > _MOST_BYTES:
            self._possible = False
            return
        with torch.no_grad():
            self._copies = [torch.empty_like(tensor) for tensor in self._bound]
        if not any(tensor.requires_grad for tensor in self._bound):
            self._without_autograd = nullcontext  # buffers: a context costs as much as the copies

    def run(
        self, program: Callable[..., _Result], free: Sequence[object], has_started: Callable[[], bool] = lambda: False
    ) -> _Result:
        """Return ``program(*free)``.

        ``has_started``: true once results have left the program, after which its errors are the run's.

        Raises:
            GraphRaised: it raised, and nothing has happened.
        """
        if not self._possible:
            return program(*free)
        before = torch.default_generator.get_state() if self._is_random else None
        elsewhere = [(device, torch.get_device_module(device).get_rng_state(device)) for device in self._random_devices]
        values = [shown_once(value).detach() for i in self._free if isinstance(value := free[i], Tensor)]
        written = [(value, value.clone()) for value in values]
        if self._bound:
            with self._without_autograd():
                torch._foreach_copy_(self._copies, self._bound)
        try:
            return program(*free)
        except (AnabranchError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # Out of memory anywhere, also in the update.
            if has_started() or "can't allocate memory" in str(error):
                raise
            with torch.no_grad():
                for tensor, copy in [*zip(self._bound, self._copies, strict=True), *written]:
                    tensor.copy_(copy)
            if before is not None:
                torch.set_rng_state(before)
            for device, state in elsewhere:
                torch.get_device_module(device).set_rng_state(state, device)
            raise GraphRaised(error) from error


def _devices_beside_the_cpu(nodes: Iterable[fx.Node]) -> list[torch.device]:
    """Return the devices from whose generators ``nodes`` draw, apart from the CPU."""
    results = [leaf for node in nodes for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return [device for device in dict.fromkeys(result.device for result in results) if device.type != "cpu"]
