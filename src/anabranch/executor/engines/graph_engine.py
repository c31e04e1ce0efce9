"""The graph engine: a step captured once for each kind of batch, then run as generated code.

::

    a single worker       batch ─> [forward, backward, clipping, optimizers: one graph] ─> loss
    else                  batch ─> [forward, backward ─ ─ ─ ─ ─ ─ ─] ─> .grad ─> [optimizers] ─> loss
                                         └ gradient final ─> bucket ─> all_reduce ┘

Sparse rows leave the graph as they are: duplicates are merged, clipped and applied after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from anabranch import spans
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.executor.engines.clipping import clip_gradients
from anabranch.executor.engines.engine import Begin, Ready, StepOutput
from anabranch.executor.engines.fetching import Fetch
from anabranch.executor.engines.finite import all_finite, nonfinite_names
from anabranch.executor.steps import TrainStep
from anabranch.graph import SparseRows, StepProgram
from anabranch.graph.dynamo.slow_capture import PATIENCE
from anabranch.graph.step.joint import leave_gradient
from anabranch.graph.step.lookups import as_sparse_gradient
from anabranch.graph.step.program import Between, Prepared, SparseGradients
from anabranch.interrupts import hold_interrupts
from anabranch.tensors import Structure

__all__ = ["GraphEngine"]

_log = logging.getLogger("anabranch")

_LOSS = "loss"


class GraphEngine:
    """Differentiates one ``TrainStep`` as a captured graph.

    Args:
        step: the step to run.
        compile: compile the graph with Inductor; gradients are then not left in ``.grad``.
        name: of the step, for the log.

    Attributes:
        may_trace: capture new kinds of batches; otherwise they are a ``GuardMiss``.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        compile: bool = False,  # noqa: A002
        name: str = "default",
    ) -> None:
        self._step = step
        self.name = "graph+inductor" if compile else "graph"
        between = None if step.clip_grad_norm is None else _clipping(step.clip_grad_norm)
        self._program = StepProgram(
            step.model,
            step.loss,
            step.optimizers,
            between=between,
            compile=compile,
            leaves_gradients=not compile,
            activation_budget=step.activation_budget,
            gate=None if step.skip_nonfinite is None else self._admits,
            when_slow=lambda: _say_what_is_captured(step, name),
        )
        self.may_trace = True
        self._parameters = parameters_here(step.model)
        self._ready: Ready | None = None
        self._attached: frozenset[str] = frozenset()
        self._in_parts = False
        self._nonfinite: list[str] = []

    @property
    def program(self) -> StepProgram:
        """The captured graphs."""
        return self._program

    def attach(self, parameters: Mapping[str, Tensor], ready: Ready) -> None:
        """Hands the gradients of these parameters to ``ready`` from now on."""
        self._ready = ready
        self._attached = frozenset(parameters)

    def follow_model(self) -> None:
        """Look up the model's parameters again: some were replaced."""
        self._program.follow_model()
        self._parameters = parameters_here(self._step.model)

    def differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward and backward in one graph, which calls ``begin(loss)`` and passes on each gradient as it goes."""
        assert self._ready is not None
        self._program.set_seed(seed)
        listener = _RunListener(self._parameters, self._attached, self._ready, begin, fetch)
        with spans.span("forward and backward", "compute"):
            found = self._program.backward(batch, fetch.modules, listener, may_trace=self.may_trace)
        for name, lookups in found.sparse.items():
            listener.gradient(name, as_sparse_gradient(lookups, self._parameters[name]))
        return self._sort(found.outputs, fetch)

    def step(self, batch: Structure, fetch: Fetch) -> StepOutput:
        """Return the whole step as one graph, except for the work of sparse tables between gradients and optimizers."""
        if not self._in_parts and not self._clips_others:
            try:
                asked = [*fetch.modules, *fetch.gradients]
                with spans.span("graph", "compute"):
                    found = self._program.run(batch, fetch=asked, begin=_check(fetch), may_trace=self.may_trace)
                return self._sort(found, fetch)
            except SparseGradients:  # before anything has run
                self._in_parts = True
        return self._step_in_parts(batch, fetch)

    def _step_in_parts(self, batch: Structure, fetch: Fetch) -> StepOutput:
        assert self._step.clip_grad_norm is not None
        with spans.span("forward and backward", "compute"):
            found = self._program.backward(batch, fetch.modules, may_trace=self.may_trace)
        ran, held = self._sort(found.outputs, fetch), self._program.names
        for name, gradient in found.dense.items():
            leave_gradient(self._parameters[name], gradient, held)
        for name, lookups in found.sparse.items():
            leave_gradient(self._parameters[name], as_sparse_gradient(lookups, self._parameters[name]), held)
        admitted = self._step.skip_nonfinite is None or self._admits(
            [*found.dense.values()], [*found.dense], found.sparse, False
        )
        if not admitted:
            nonfinite, self._nonfinite = self._nonfinite, []
            return StepOutput(ran.loss, ran.returned, nonfinite)
        clip_gradients(self._parameters.values(), self._step.clip_grad_norm)
        self.update()
        return ran

    @property
    def _clips_others(self) -> bool:
        """True if clipping sees gradients that no optimizer of the step clears: they add up outside of the graph."""
        if self._step.clip_grad_norm is None:
            return False
        held = self._program.names
        return any(parameter.requires_grad and parameter not in held for parameter in self._parameters.values())

    def _admits(
        self, dense: list[Tensor], names: Sequence[str], sparse: Mapping[str, Sequence[SparseRows]], own: bool
    ) -> bool:
        if not sparse and all_finite(dense, own=own):
            return True
        self._nonfinite = nonfinite_names(zip(names, dense, strict=True), own=own)
        rows = ((name, as_sparse_gradient(lookups, self._parameters[name])) for name, lookups in sparse.items())
        self._nonfinite += nonfinite_names(rows)
        return not self._nonfinite

    def update(self) -> None:
        """Step the optimizers on the gradients in ``.grad``."""
        hold_interrupts()
        with spans.span("optimizer", "compute"):
            self._program.update(*self._gradients())

    def prepare(self, batch: Structure, fetch: Fetch, *, whole: bool) -> Prepared:
        """Capture the step for this batch and run nothing; ``whole`` with the update."""
        if whole and not self._in_parts and not self._clips_others:
            try:
                return self._program.prepare(batch, [*fetch.modules, *fetch.gradients], whole=True)
            except SparseGradients:
                self._in_parts = True
        return self._program.prepare(batch, fetch.modules, whole=False)

    def _gradients(self) -> tuple[dict[str, Tensor], dict[str, list[SparseRows]]]:
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
        return dense, sparse

    def _is_whole(self, name: str, outputs: Mapping[str, Structure]) -> bool:
        """Return True if the graph's gradient is the parameter's whole gradient, not an addition to it."""
        held = self._parameters[name.removesuffix(".grad")] in self._program.names
        return name in outputs and (held or not self._program.leaves_gradients)

    def _sort(self, outputs: Mapping[str, Structure], fetch: Fetch) -> StepOutput:
        nonfinite, self._nonfinite = self._nonfinite, []
        if fetch.names is None:  # everything, and nothing besides
            returned = {name: value for name, value in outputs.items() if name != _LOSS}
            return StepOutput(cast(Tensor, outputs[_LOSS]), cast("Mapping[str, Tensor]", returned), nonfinite)
        asked = {*fetch.modules, *fetch.gradients, _LOSS}
        returned = {name: value for name, value in outputs.items() if name not in asked}
        fetch.record({name: outputs[name] for name in fetch.modules})
        fetch.record_gradients({name: outputs[name] for name in fetch.gradients if self._is_whole(name, outputs)})
        fetch.check(cast("Mapping[str, Tensor]", returned))
        return StepOutput(cast(Tensor, outputs[_LOSS]), cast("Mapping[str, Tensor]", returned), nonfinite)


class _RunListener:
    """Passes on the events of a running backward graph, after a final check of the names to fetch."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        attached: Collection[str],
        ready: Ready,
        begin: Begin,
        fetch: Fetch,
    ) -> None:
        self._parameters, self._attached, self._ready = parameters, attached, ready
        self._begin, self._fetch = begin, fetch

    def begin(self, outputs: Sequence[str]) -> None:
        """Raise ``ValueError`` for a name to fetch that the step has not, before anything has changed."""
        self._fetch.check(dict.fromkeys(outputs))

    def loss(self, value: Tensor) -> None:
        """Record the loss."""
        self._begin(value)

    def gradient(self, name: str, value: Tensor) -> None:
        """Record a final gradient."""
        parameter = self._parameters[name]
        parameter.grad = self._ready(parameter, value) if name in self._attached else value


def _say_what_is_captured(step: TrainStep, name: str) -> None:
    modules, parameters = sum(1 for _ in step.model.modules()), sum(1 for _ in step.model.parameters())
    _log.warning(
        "capturing step %r as a graph has taken more than %.0f seconds so far: %s, %d modules, %d parameters",
        name,
        PATIENCE,
        type(step.model).__name__,
        modules,
        parameters,
    )


def _check(fetch: Fetch) -> Callable[[Sequence[str]], None] | None:
    if fetch.names is None:
        return None
    return lambda outputs: fetch.check(dict.fromkeys(outputs))


def _clipping(max_norm: float) -> Between:
    """Clips dense gradients in the graph as ``clip_gradients`` does, into new memory: gradients may share theirs."""

    def clip(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        if not gradients:
            return gradients
        copies = {name: gradient.clone() for name, gradient in gradients.items()}
        holders = [SimpleNamespace(grad=copy) for copy in copies.values()]
        torch.nn.utils.clip_grad_norm_(cast("list[Tensor]", holders), max_norm)
        return copies

    return clip
