"""The graph engine: a step captured once for each kind of batch, then run as generated code.

::

    nobody to sum with    batch ─> [forward, backward, clipping, optimizers: one graph] ─> loss
    else                  batch ─> [forward, backward] ─> gradients ─> buckets ─> .grad ─> [optimizers] ─> loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from anabranch.executor.clipping import clip_gradients
from anabranch.executor.engine import Ran, Ready
from anabranch.executor.fetching import Fetch
from anabranch.executor.steps import TrainStep
from anabranch.graph import SparseRows, StepProgram
from anabranch.graph.lookups import as_sparse_gradient
from anabranch.tensors import Structure

__all__ = ["GraphEngine"]

_LOSS = "loss"


class GraphEngine:
    """Differentiates one ``TrainStep`` as a captured graph.

    Args:
        step: what to run.
        compile: hand the graph to Inductor.
    """

    def __init__(self, step: TrainStep, *, compile: bool = False) -> None:  # noqa: A002
        self._step = step
        self.name = "graph+inductor" if compile else "graph"
        self._program = StepProgram(step.model, step.loss, step.optimizers, compile=compile)
        self._parameters = dict(step.model.named_parameters())
        self._ready: Ready | None = None

    @property
    def program(self) -> StepProgram:
        """The captured graphs."""
        return self._program

    def attach(self, parameters: Mapping[str, Tensor], ready: Ready) -> None:
        """Hands the gradients of these parameters to ``ready`` from now on."""
        self._ready = ready

    def differentiate(self, batch: Structure, fetch: Fetch, begin: Callable[[Tensor], None]) -> Ran:
        """Forward and backward in one graph; ``begin(loss)`` is called when both are done."""
        assert self._ready is not None
        found = self._program.backward(batch, fetch.modules)
        ran = self._sort(found.outputs, fetch)
        begin(ran.loss)
        for name, gradient in found.dense.items():
            self._parameters[name].grad = self._ready(self._parameters[name], gradient)
        for name, lookups in found.sparse.items():
            table = self._parameters[name]
            self._ready(table, as_sparse_gradient(lookups, table))
        return ran

    def step(self, batch: Structure, fetch: Fetch) -> Ran:
        """The whole step as one graph."""
        if self._step.clip_grad_norm is not None or fetch.names is not None:
            return self._step_in_parts(batch, fetch)
        return self._sort(self._program.run(batch), fetch)

    def _step_in_parts(self, batch: Structure, fetch: Fetch) -> Ran:
        """As above, for what has something to do with the gradients before they are applied."""
        found = self._program.backward(batch, fetch.modules)
        ran = self._sort(found.outputs, fetch)
        for name, gradient in found.dense.items():
            self._parameters[name].grad = gradient
        for name, lookups in found.sparse.items():
            self._parameters[name].grad = as_sparse_gradient(lookups, self._parameters[name])
        if self._step.clip_grad_norm is not None:
            clip_gradients(self._parameters.values(), self._step.clip_grad_norm)
        self.update()
        return ran

    def update(self) -> None:
        """The optimizers' step on what ``.grad`` holds."""
        dense: dict[str, Tensor] = {}
        sparse: dict[str, list[SparseRows]] = {}
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is torch.strided:
                dense[name] = gradient
            else:
                merged = gradient.coalesce()
                sparse[name] = [SparseRows(merged._indices()[0], merged._values())]
        self._program.update(dense, sparse)

    def _sort(self, outputs: Mapping[str, Structure], fetch: Fetch) -> Ran:
        returned = {name: value for name, value in outputs.items() if name != _LOSS and name not in fetch.modules}
        fetch.record({name: outputs[name] for name in fetch.modules})
        fetch.check(cast("Mapping[str, Tensor]", returned))
        return Ran(cast(Tensor, outputs[_LOSS]), cast("Mapping[str, Tensor]", returned))
