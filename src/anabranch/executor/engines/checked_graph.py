"""The engine of ``engine="graph"``: graphs from the first batch on, each compared with the tape on its first batch.

::

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
from collections.abc import Callable, Mapping

from torch import Tensor

from anabranch.autodiff.boundary.answers import Answers
from anabranch.errors import CaptureError
from anabranch.executor.engines.engine import Begin, Ready, StepOutput
from anabranch.executor.engines.fetching import Fetch
from anabranch.executor.engines.graph_engine import GraphEngine
from anabranch.executor.engines.tape_engine import TapeEngine
from anabranch.executor.engines.trial import Differs, Snapshot, check_gradients, check_results, repeat
from anabranch.executor.steps import TrainStep
from anabranch.graph.dynamo.front import GuardMiss
from anabranch.graph.dynamo.refusals import Raises
from anabranch.graph.step.program import Prepared
from anabranch.tensors import Structure

__all__ = ["CheckedGraph"]

_log = logging.getLogger("anabranch")


class CheckedGraph(GraphEngine):
    """Differentiates one ``TrainStep`` as a captured graph, once it was bitwise equal to the tape on a batch.

    Args:
        step: what to run.
        name: of the step, for the log.
    """

    def __init__(self, step: TrainStep, *, name: str = "default") -> None:
        super().__init__(step, name=name)
        self._tape = TapeEngine(step)
        self._step_name = name
        self.may_trace = False
        self._refused: str | None = None

    @property
    def tape(self) -> TapeEngine:
        """The tape engine, for a run that must use it."""
        return self._tape

    def attach(self, parameters: Mapping[str, Tensor], ready: Ready) -> None:
        """Hands the gradients of these parameters to ``ready`` from now on."""
        super().attach(parameters, ready)
        self._tape.attach(parameters, ready)

    def follow_model(self) -> None:
        """Look up the model's parameters again: some were replaced."""
        super().follow_model()
        self._tape.follow_model()

    def differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward and backward; ``begin(loss)`` is called before the first gradient is final."""
        self._raise_refusal()
        try:
            return super().differentiate(batch, fetch, begin, seed)
        except GuardMiss:
            pass
        try:
            prepared = self.prepare(batch, fetch, whole=False)
        except (ValueError, TypeError, Raises) as error:
            return self._from_the_tape(error, lambda: self._tape.differentiate(batch, fetch, begin, seed))
        if prepared.talks():
            return self._at_once(prepared, lambda: super(CheckedGraph, self).differentiate(batch, fetch, begin, seed))
        before, answers = Snapshot(self._step.model, prepared.args), Answers()
        with answers.noted():
            ran, gradients = self._tape.differentiate_noting(batch, fetch, begin, seed)
        self._compare(prepared, before, answers, ran.loss, ran.returned, gradients)
        self._program.finish(prepared)
        return ran

    def step(self, batch: Structure, fetch: Fetch) -> StepOutput:
        """Return the whole step as one graph; on the tape where the graph is new."""
        self._raise_refusal()
        try:
            return super().step(batch, fetch)
        except GuardMiss:
            pass
        try:
            prepared = self.prepare(batch, fetch, whole=True)
        except (ValueError, TypeError, Raises) as error:
            return self._from_the_tape(error, lambda: self._tape.step(batch, fetch))
        if prepared.talks():
            return self._at_once(prepared, lambda: super(CheckedGraph, self).step(batch, fetch))
        before, answers = Snapshot(self._step.model, prepared.args), Answers()

        def between(loss: Tensor, returned: Mapping[str, Tensor]) -> None:
            gradients = before.gradients_after(self._program.parameters.values())
            self._compare(prepared, before, answers, loss, returned, gradients)

        with answers.noted():
            ran = self._tape.step(batch, fetch, between)
        self._program.finish(prepared)
        return ran

    def _from_the_tape(self, mistake: Exception, run: Callable[[], StepOutput]) -> StepOutput:
        """Let the tape raise the user's mistake in its place; if it does not, the next run is refused."""
        ran = run()
        self._refused = f"the step cannot be captured: {mistake}; use engine='tape'"
        return ran

    def _at_once(self, prepared: Prepared, run: Callable[[], StepOutput]) -> StepOutput:
        """Run a graph that is not compared: its collectives would be one more than the other workers expect."""
        _log.info(
            "a graph of step %r is not compared with the tape: the loss itself communicates between workers",
            self._step_name,
        )
        self.may_trace = True
        try:
            ran = run()
        finally:
            self.may_trace = False
        prepared.confirm()
        return ran

    def _raise_refusal(self) -> None:
        if self._refused is not None:
            raise CaptureError(self._refused)

    def _compare(
        self,
        prepared: Prepared,
        before: Snapshot,
        answers: Answers,
        loss: Tensor,
        returned: Mapping[str, Tensor],
        gradients: Mapping[Tensor, Tensor],
    ) -> None:
        after = Snapshot(self._step.model, prepared.args, before)
        parameters = self._program.parameters

        def check(results: Mapping[str, object]) -> None:
            check_results(results, loss, returned)
            found = prepared.joint.backward.sort(results)
            check_gradients(found.dense, found.sparse, gradients, parameters, before.gradients_before())

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
