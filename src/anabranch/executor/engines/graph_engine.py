"""The graph engine: a step captured once for each kind of batch, then run as generated code.

::

    a single worker       batch ─> [forward, backward, check, clipping, optimizers: one graph] ─> loss
    else                  batch ─> [forward, backward ─ ─ ─ ─ ─ ─ ─] ─> .grad ─> [optimizers] ─> loss
                                         └ gradient final ─> sinks ─ ─ ─ ─ ─ ─ ┘

Sparse rows leave the graph as they are: duplicates are merged, clipped and applied after it. Each graph is compared
with the tape on its first batch (``trial.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

from torch import Tensor

from anabranch.executor.engines.engine import Begin, Compare, Engine, Fetch, GradientSink, StepOutput
from anabranch.executor.engines.gradients import all_finite, clip_norm, nonfinite_names
from anabranch.executor.engines.trial import Check, Snapshot, Trials, check_gradients, check_results
from anabranch.executor.loaders.upcoming import UpcomingIds
from anabranch.executor.steps import TrainStep
from anabranch.graph import Graph, SparseRows, StepProgram
from anabranch.graph.dynamo.slow_capture import PATIENCE
from anabranch.graph.step.lookups import as_sparse_gradient
from anabranch.graph.step.program import Prepared
from anabranch.graph.step.step_state import Between, SparseGradients
from anabranch.interrupts import hold_interrupts
from anabranch.record import spans
from anabranch.tensors import Structure

_log = logging.getLogger("anabranch")


class GraphEngine(Engine):
    """Differentiates one ``TrainStep`` as a captured graph.

    Args:
        step: the step to run.
        compile: compile the graph with Inductor; gradients are then not left in ``.grad``.
        name: of the step, for the log.
    """

    def __init__(self, step: TrainStep, *, compile: bool = False, name: str = "default") -> None:  # noqa: A002
        self._program = StepProgram(
            step.model,
            step.loss,
            step.optimizers,
            between=None if step.clip_grad_norm is None else _clipping(step.clip_grad_norm),
            compile=compile,
            leaves_gradients=not compile,
            activation_budget=step.activation_budget,
            gate=None if step.skip_nonfinite is None else self._admits,
            when_slow=lambda: _say_what_is_captured(step, name),
        )
        # Inductor's kernels round differently, and the tape would not fit the budget.
        reason = "the tape would not fit activation_budget" if step.activation_budget is not None else None
        reason = "compile=True rounds differently" if compile else reason
        self._trials = Trials(self._program, step.model, f"step {name!r}", reason)
        self._clips, self._in_parts = step.clip_grad_norm is not None, False
        self._nonfinite: list[str] = []
        super().__init__(step)

    @property
    def name(self) -> str:
        """The name that ``Executor.engine`` returns."""
        return "graph+inductor" if self._program.compile else "graph"

    @property
    def graph(self) -> Graph | None:
        """The graph of the last run."""
        return self._program.graph

    def follow_model(self) -> None:
        """Look up the model's parameters: some were replaced."""
        super().follow_model()
        self._program.follow_model()

    @contextmanager
    def watched(self, upcoming: UpcomingIds, batch: Structure) -> Iterator[None]:
        """Let ``upcoming`` learn from the run in the block which ids it looks up."""
        yield
        if self._program.captures:  # not if it is a mistake that the tape has run
            upcoming.learn_from(self._program.graph)

    def differentiate(self, batch: Structure, rows: float, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward and backward in one graph, which calls ``begin(loss)`` and passes on each gradient as it goes."""
        tape = super().differentiate

        def on_tape(compare: Callable[[Check], None]) -> StepOutput:
            self.passed_on = {}
            try:
                ran = tape(batch, rows, fetch, begin, seed)
                compare(partial(self._check, ran.loss, ran.returned, self.passed_on))
            finally:
                self.passed_on = None
            return ran

        prepare = partial(self._program.prepare, batch, fetch.modules, whole=False)
        return self._trials.run(partial(self._differentiate, batch, fetch, begin, seed), prepare, on_tape)

    def step(self, batch: Structure, rows: float, fetch: Fetch, compare: Compare | None = None) -> StepOutput | None:
        """Return the whole step as one graph; ``None`` where it clips gradients that are not in the graph."""
        if self._in_parts or (self._clips and self._clips_others()):
            return None
        tape = super().step

        def on_tape(compare: Callable[[Check], None]) -> StepOutput | None:
            def between(loss: Tensor, returned: Mapping[str, Tensor]) -> None:
                parameters = self._program.parameters.values()  # as they are now: some were replaced
                tapes: dict[Tensor, Tensor] = {p: p.grad for p in parameters if p.grad is not None}
                compare(partial(self._check, loss, returned, tapes))

            return tape(batch, rows, fetch, between)

        prepare = partial(self._program.prepare, batch, [*fetch.modules, *fetch.gradients], whole=True)
        try:
            return self._trials.run(partial(self._run_whole, batch, fetch), prepare, on_tape)
        except SparseGradients:  # before anything has run
            self._in_parts = True
            return None

    def _check(
        self,
        loss: Tensor,
        returned: Mapping[str, Tensor],
        tapes: Mapping[Tensor, Tensor],
        results: Mapping[str, object],
        prepared: Prepared,
        before: Snapshot,
    ) -> None:
        """Raise ``Differs`` if the graph's results are not the tape's."""
        check_results(results, {**returned, "loss": loss})
        graphs = prepared.joint.backward.sort(results)
        check_gradients({**graphs.dense, **self._as_gradients(graphs.sparse)}, tapes, self._program.parameters, before)

    def _as_gradients(self, sparse: Mapping[str, Sequence[SparseRows]]) -> dict[str, Tensor]:
        return {name: as_sparse_gradient(lookups, self.parameters[name]) for name, lookups in sparse.items()}

    def _differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float, may_trace: bool) -> StepOutput:
        self._program.set_seed(seed)
        listener = _RunListener(self.parameters, self._sinks, begin, fetch)
        with spans.span("forward and backward", "compute"):
            ran = self._program.backward(batch, fetch.modules, listener, may_trace=may_trace)
        for name, gradient in self._as_gradients(ran.sparse).items():
            listener.gradient(name, gradient)
        return self._sort(ran.outputs, fetch)

    def _run_whole(self, batch: Structure, fetch: Fetch, may_trace: bool) -> StepOutput:
        names: Sequence[str] = ()
        begin = None
        if fetch.names is not None:
            names, begin = (*fetch.modules, *fetch.gradients), lambda outputs: fetch.check(dict.fromkeys(outputs))
        began = spans.begin()
        outputs = self._program.run(batch, fetch=names, begin=begin, may_trace=may_trace)
        if began:
            spans.complete(began, "graph", "compute")
        return self._sort(outputs, fetch)

    def _clips_others(self) -> bool:
        """Return True if clipping sees gradients that no optimizer of the step clears: they add up outside of the
        graph.
        """
        names = self._program.names
        return any(parameter.requires_grad and parameter not in names for parameter in self.parameters.values())

    def _admits(
        self, dense: list[Tensor], names: Sequence[str], sparse: Mapping[str, Sequence[SparseRows]], own: bool
    ) -> bool:
        if not sparse and all_finite(dense, own=own):
            return True
        self._nonfinite = nonfinite_names(zip(names, dense, strict=True), own=own)
        self._nonfinite += nonfinite_names(self._as_gradients(sparse).items())
        return not self._nonfinite

    def update(self) -> None:
        """Step the optimizers on the gradients in ``.grad``."""
        hold_interrupts()
        dense: dict[str, Tensor] = {}
        sparse: dict[str, list[SparseRows]] = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                merged = gradient.coalesce()
                sparse[name] = [SparseRows(merged._indices()[0], merged._values())]
            elif gradient is not None:
                dense[name] = gradient
        with spans.span("optimizer", "compute"):
            self._program.update(dense, sparse)

    def _is_whole(self, name: str, outputs: Mapping[str, Structure]) -> bool:
        """Return True if the graph's gradient is the parameter's whole gradient, not an addition to it."""
        owned = self.parameters[name.removesuffix(".grad")] in self._program.names
        return name in outputs and (owned or not self._program.leaves_gradients)

    def _sort(self, outputs: Mapping[str, Structure], fetch: Fetch) -> StepOutput:
        nonfinite, self._nonfinite = self._nonfinite, []
        recorded = {*fetch.modules, *fetch.gradients, "loss"}
        returned = cast("Mapping[str, Tensor]", {key: one for key, one in outputs.items() if key not in recorded})
        if fetch.names is not None:
            gradients = {name: outputs[name] for name in fetch.gradients if self._is_whole(name, outputs)}
            fetch.record({**gradients, **{name: outputs[name] for name in fetch.modules}})
            fetch.check(returned)
        return StepOutput(cast(Tensor, outputs["loss"]), returned, nonfinite)


class _RunListener:
    """Passes on the events of a running backward graph, after a final check of the names to fetch."""

    def __init__(
        self, parameters: Mapping[str, Tensor], sinks: Sequence[GradientSink], begin: Begin, fetch: Fetch
    ) -> None:
        self._parameters, self._begin, self._fetch = parameters, begin, fetch
        self._ready = {name: sink.ready for sink in sinks for name in sink.parameters}

    def begin(self, outputs: Sequence[str]) -> None:
        """Raise ``ValueError`` for a name to fetch that the step has not, before anything has changed."""
        self._fetch.check(dict.fromkeys(outputs))

    def loss(self, value: Tensor) -> None:
        """Record the loss."""
        self._begin(value)

    def gradient(self, name: str, value: Tensor) -> None:
        """Record a final gradient."""
        parameter = self._parameters[name]
        parameter.grad = self._ready[name](parameter, value) if name in self._ready else value


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


def _clipping(max_norm: float) -> Between:
    """Return the clipping that a graph traces, into new memory: gradients may share theirs."""

    def clip(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {name: gradient.clone() for name, gradient in gradients.items()}
        clip_norm([*copies.values()], max_norm)
        return copies

    return clip
