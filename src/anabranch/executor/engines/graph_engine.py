"""The graph engine: a step captured once for each kind of batch, then run as generated code.

::

    a single worker       batch ─> [forward, backward, check, clipping, optimizers: one graph] ─> loss
    else                  batch ─> [forward, backward ─ ─ ─ ─ ─ ─ ─] ─> .grad ─> [optimizers] ─> loss
                                         └ gradient final ─> sinks ─ ─ ─ ─ ─ ─ ┘

Sparse rows leave the graph as they are: duplicates are merged, clipped and applied after it.

Each graph is compared with the tape on its first batch::

    batch ── a graph fits ──────────────────────────────────────────────────────────> graph
        └─ none does ──> captured (or refused: nothing has happened)
                         └─> the tape takes the step; in its middle the graph computes loss and gradients once more,
                             from the same state and random numbers: other bits, and the next run is refused;
                             an error of the tape is the caller's, and the graph waits for a batch without one

Code that no guard covers, such as a check of ``torch.compiler.is_compiling()``, makes a graph of a different function
than the one that Python runs. The tape's step counts, so a wrong graph never changes a parameter. A loss that itself
communicates between workers is not compared: the second run would send more than the other workers expect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor

from anabranch.autodiff.boundary.answers import Answers
from anabranch.errors import CaptureError
from anabranch.executor.engines.engine import Begin, Engine, Fetch, GradientSink, StepOutput
from anabranch.executor.engines.gradients import all_finite, clip_norm, nonfinite_names
from anabranch.executor.engines.tape_engine import TapeEngine
from anabranch.executor.engines.trial import Differs, Snapshot, check_gradients, check_results, repeat
from anabranch.executor.loaders.upcoming import UpcomingIds
from anabranch.executor.steps import TrainStep
from anabranch.graph import Graph, SparseRows, StepProgram
from anabranch.graph.dynamo.front import GuardMiss
from anabranch.graph.dynamo.refusals import Raises
from anabranch.graph.dynamo.slow_capture import PATIENCE
from anabranch.graph.step.lookups import as_sparse_gradient
from anabranch.graph.step.program import Prepared
from anabranch.graph.step.step_state import Between, SparseGradients
from anabranch.interrupts import hold_interrupts
from anabranch.record import spans
from anabranch.tensors import Structure

_log = logging.getLogger("anabranch")

_LOSS = "loss"

_Compare = Callable[..., None]
"""``compare(loss, returned, gradients)`` is given the tape's results; without gradients those in ``.grad`` count."""


class GraphEngine(Engine):
    """Differentiates one ``TrainStep`` as a captured graph.

    Args:
        step: the step to run.
        compile: compile the graph with Inductor; gradients are then not left in ``.grad``.
        compares: compare each graph's first batch with the tape, bit for bit.
        name: of the step, for the log.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        compile: bool = False,  # noqa: A002
        compares: bool = True,
        name: str = "default",
    ) -> None:
        super().__init__(step)
        self.name = "graph+inductor" if compile else "graph"
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
        self._tape = TapeEngine(step) if compares else None
        self._step_name = name
        self._refused: str | None = None
        self._ready: dict[str, Callable[[Tensor, Tensor], Tensor | None]] = {}
        self._clips, self._in_parts = step.clip_grad_norm is not None, False
        self._nonfinite: list[str] = []

    @property
    def graph(self) -> Graph | None:
        """The graph of the last run."""
        return self._program.graph

    def attach(self, sinks: Sequence[GradientSink]) -> None:
        """From now on ``differentiate`` passes the gradients of the sinks' parameters on as they become final."""
        self._ready = {name: sink.ready for sink in sinks for name in sink.parameters}
        if self._tape is not None:
            self._tape.attach(sinks)

    def follow_model(self) -> None:
        """Look up the model's parameters again: some were replaced."""
        super().follow_model()
        self._program.follow_model()
        if self._tape is not None:
            self._tape.follow_model()

    @contextmanager
    def watched(self, upcoming: UpcomingIds, batch: Structure) -> Iterator[None]:
        """Let ``upcoming`` learn from the run in the block which ids it looks up."""
        yield
        if self._program.captures:  # not if it is a mistake that the tape has run
            upcoming.learn_from(self._program.graph)

    def differentiate(self, batch: Structure, rows: float, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward and backward in one graph, which calls ``begin(loss)`` and passes on each gradient as it goes."""
        run = partial(self._differentiate, batch, fetch, begin, seed)
        if (ran := self._as_graph(run)) is not None:
            return ran

        def on_tape(tape: TapeEngine, compare: _Compare) -> StepOutput:
            ran, gradients = tape.differentiate_noting(batch, rows, fetch, begin, seed)
            compare(ran.loss, ran.returned, gradients)
            return ran

        return self._first(run, on_tape, batch, fetch, whole=False)

    def step(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput | None:
        """Return the whole step as one graph; ``None`` where it clips gradients that are not in the graph."""
        if self._in_parts or (self._clips and self._clips_others()):
            return None
        run = partial(self._run_whole, batch, fetch)
        try:
            if (ran := self._as_graph(run)) is not None:
                return ran
            return self._first(
                run, lambda tape, compare: tape.step(batch, rows, fetch, compare), batch, fetch, whole=True
            )
        except SparseGradients:  # before anything has run
            self._in_parts = True
            return None

    def add(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput:
        """``step`` where gradients are left from earlier steps, to which it adds."""
        if self._tape is None:
            raise CaptureError(
                "zero_grad of an optimizer leaves gradients, to which a graph would not add; use engine='tape'"
            )
        return self._tape.step(batch, rows, fetch)

    # Each graph's first batch.

    def _as_graph(self, run: Callable[[bool], StepOutput]) -> StepOutput | None:
        """Return ``run(may_trace)``; ``None`` if no graph fits, and a new one is to be compared."""
        if self._tape is None:
            return run(True)
        if self._refused is not None:
            raise CaptureError(self._refused)
        try:
            return run(False)
        except GuardMiss:
            return None

    def _first(
        self,
        run: Callable[[bool], StepOutput],
        on_tape: Callable[[TapeEngine, _Compare], StepOutput],
        batch: Structure,
        fetch: Fetch,
        *,
        whole: bool,
    ) -> StepOutput:
        assert self._tape is not None
        try:
            prepared = self._program.prepare(
                batch, [*fetch.modules, *fetch.gradients] if whole else fetch.modules, whole=whole
            )
        except (ValueError, TypeError, Raises) as error:
            # The tape raises the user's mistake in its place; if it does not, the next run is refused.
            ran = on_tape(self._tape, lambda loss, returned, gradients=None: None)
            self._refused = f"the step cannot be captured: {error}; use engine='tape'"
            return ran
        if prepared.talks():
            _log.info(
                "a graph of step %r is not compared with the tape: the loss itself communicates between workers",
                self._step_name,
            )
            ran = run(True)
            prepared.confirm()
            return ran
        before, answers = Snapshot(self._step.model, prepared.args), Answers()
        with answers.noted():
            ran = on_tape(self._tape, partial(self._compare, prepared, before, answers))
        self._program.finish(prepared)
        return ran

    def _compare(
        self,
        prepared: Prepared,
        before: Snapshot,
        answers: Answers,
        loss: Tensor,
        returned: Mapping[str, Tensor],
        gradients: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        """Run the graph on the tape's batch; a difference makes the next run an error."""
        seen = before.gradients_after(self._program.parameters.values()) if gradients is None else gradients
        after = Snapshot(self._step.model, prepared.args, before)

        def check(results: Mapping[str, object]) -> None:
            check_results(results, loss, returned)
            found = prepared.joint.backward.sort(results)
            check_gradients(found.dense, found.sparse, seen, self._program.parameters, before.gradients_before())

        try:
            repeat(before, after, answers, prepared.compute, check)
        except Differs as error:
            self._refused = (
                f"on the last batch the graph was not bitwise equal to the tape, whose step was kept: {error}; "
                "the code behaves differently under capture than in Python; use engine='tape'"
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the tape's step counts
            self._refused = (
                f"the graph failed on the last batch but the tape, whose step was kept, did not "
                f"({type(error).__name__}: {error}); use engine='tape'"
            )

    # Graphs.

    def _differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float, may_trace: bool) -> StepOutput:
        self._program.set_seed(seed)
        listener = _RunListener(self.parameters, self._ready, begin, fetch)
        with spans.span("forward and backward", "compute"):
            found = self._program.backward(batch, fetch.modules, listener, may_trace=may_trace)
        for name, lookups in found.sparse.items():
            listener.gradient(name, as_sparse_gradient(lookups, self.parameters[name]))
        return self._sort(found.outputs, fetch)

    def _run_whole(self, batch: Structure, fetch: Fetch, may_trace: bool) -> StepOutput:
        asked: Sequence[str] = ()
        begin = None
        if fetch.names is not None:
            asked, begin = (*fetch.modules, *fetch.gradients), lambda outputs: fetch.check(dict.fromkeys(outputs))
        began = spans.begin()
        found = self._program.run(batch, fetch=asked, begin=begin, may_trace=may_trace)
        if began:
            spans.complete(began, "graph", "compute")
        return self._sort(found, fetch)

    def _clips_others(self) -> bool:
        """Return True if clipping sees gradients that no optimizer of the step clears: they add up outside of the
        graph.
        """
        held = self._program.names
        return any(parameter.requires_grad and parameter not in held for parameter in self.parameters.values())

    def _admits(
        self, dense: list[Tensor], names: Sequence[str], sparse: Mapping[str, Sequence[SparseRows]], own: bool
    ) -> bool:
        if not sparse and all_finite(dense, own=own):
            return True
        self._nonfinite = nonfinite_names(zip(names, dense, strict=True), own=own)
        rows = ((name, as_sparse_gradient(lookups, self.parameters[name])) for name, lookups in sparse.items())
        self._nonfinite += nonfinite_names(rows)
        return not self._nonfinite

    def update(self) -> None:
        """Step the optimizers on the gradients in ``.grad``."""
        hold_interrupts()
        with spans.span("optimizer", "compute"):
            self._program.update(*self._gradients())

    def _gradients(self) -> tuple[dict[str, Tensor], dict[str, list[SparseRows]]]:
        dense: dict[str, Tensor] = {}
        sparse: dict[str, list[SparseRows]] = {}
        for name, parameter in self.parameters.items():
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
        held = self.parameters[name.removesuffix(".grad")] in self._program.names
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
        ready: Mapping[str, Callable[[Tensor, Tensor], Tensor | None]],
        begin: Begin,
        fetch: Fetch,
    ) -> None:
        self._parameters, self._ready = parameters, ready
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
