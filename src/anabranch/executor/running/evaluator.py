"""Runs an ``EvalStep``: eagerly, as a graph, or eagerly until a graph has been shown to be equal and faster."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from anabranch.autodiff.boundary.answers import Answers
from anabranch.errors import CaptureError
from anabranch.executor.engines.graph_payoff import GraphPayoff
from anabranch.executor.engines.trial import Differs, Snapshot, bits_differ, repeat
from anabranch.executor.running.fetching import Fetch
from anabranch.executor.steps import EvalStep
from anabranch.graph.dynamo.front import CaptureElsewhere, GuardMiss
from anabranch.graph.dynamo.refusals import Raises
from anabranch.graph.evaluation import EvalProgram, PreparedEvaluation
from anabranch.graph.run.rollback import GraphRaised
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure

__all__ = ["Evaluator"]

_log = logging.getLogger("anabranch")
_MOST_TRIALS = 8
_MOST_MISSES = 16
_KEPT_TIMES = 32


@dataclass(frozen=True, slots=True)
class _EagerAndGraph:
    """The result of eager mode, the seconds of both, and the graph's failure."""

    returned: Mapping[str, Tensor]
    eager_seconds: float
    seconds: float
    failed: str | None


class Evaluator:
    """Runs one ``EvalStep``; the caller sets modes.

    Args:
        step: the step to run.
        engine: ``"tape"`` runs eagerly.
        compile: compile the graph with Inductor.
        capture_after: as ``Executor``.
        name: of the step, for the log.
    """

    def __init__(
        self,
        step: EvalStep,
        engine: Literal["auto", "graph", "tape"],
        *,
        compile: bool = False,  # noqa: A002
        capture_after: int | None = None,
        name: str = "default",
    ) -> None:
        self._step, self._engine, self._compile, self._after, self._name = step, engine, compile, capture_after, name
        pipe = any(isinstance(module, Pipe) for module in step.model.modules())
        self._program = None if engine == "tape" or pipe else EvalProgram(step.model, step.outputs, compile=compile)
        self._payoff = GraphPayoff()
        self._seconds: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._runs = self._trials = self._misses = 0
        self._on_graph = self._taken = False
        self._wrong: str | None = None
        self._why = "the tape was requested" if engine == "tape" else "a Pipe runs its stages by itself"
        if self._program is not None:
            self._why = "a graph was requested" if engine == "graph" else "no graph has been shown to be faster yet"

    @property
    def name(self) -> str:
        """The engine of the last run."""
        if not self._on_graph:
            return "tape"
        return "graph+inductor" if self._compile else "graph"

    @property
    def program(self) -> EvalProgram | None:
        """The captured graphs, if the last run was on one."""
        return self._program if self._on_graph else None

    def explain(self) -> str:
        """Return the reason, in one sentence, for the engine of the last run."""
        return self._why

    def run(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        """Return the result of the step's ``outputs``."""
        self._runs += 1
        if self._program is None:
            return self._eagerly(batch, fetch)
        if self._engine == "graph":
            return self._checked(self._program, batch, fetch)
        if self._taken:
            try:
                return self._as_graph(self._program, batch, fetch, may_trace=False)
            except CaptureElsewhere:
                return self._eagerly(batch, fetch)
            except GuardMiss:
                self._misses += 1
            except CaptureError as error:
                self._why = f"this evaluation runs eagerly: {error}"
                return self._eagerly(batch, fetch)
        if self._misses > _MOST_MISSES:
            self._refuse("Python values or batch shapes change from run to run")
        elif self._is_due():
            return self._try(self._program, batch, fetch)
        began = time.perf_counter()
        if self._payoff.wants_to_count:
            with self._payoff.counting(self._step.model):
                returned = self._eagerly(batch, fetch)
        else:
            returned = self._eagerly(batch, fetch)
        self._seconds.append(time.perf_counter() - began)
        self._payoff.spent(self._seconds[-1])
        return returned

    def _is_due(self) -> bool:
        if self._trials >= _MOST_TRIALS:
            return False
        if self._after is not None:
            return self._runs > self._after
        return self._payoff.pays(self._seconds)

    def _eagerly(self, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        self._on_graph = False
        with fetch.recording():
            returned = self._step.outputs(self._step.model, batch)
        _check(returned)
        fetch.check(returned)
        return returned

    def _as_graph(
        self, program: EvalProgram, batch: Structure, fetch: Fetch, *, may_trace: bool
    ) -> Mapping[str, Tensor]:
        found = None
        with suppress(GraphRaised):  # then the error and its location are those of the user's own code
            found = program.run(batch, fetch.modules, may_trace=may_trace)
        if found is None:
            return self._eagerly(batch, fetch)
        returned, outputs = found
        _check(returned)
        self._on_graph = True
        self._misses = 0
        fetch.record(outputs)
        fetch.check(returned)
        return cast("Mapping[str, Tensor]", returned)

    def _checked(self, program: EvalProgram, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        """Run as a graph; for a new graph, eagerly and compare."""
        if self._wrong is not None:
            raise CaptureError(self._wrong)
        try:
            return self._as_graph(program, batch, fetch, may_trace=False)
        except GuardMiss:
            pass
        try:
            prepared = program.prepare(batch, fetch.modules)
        except Raises as error:  # eager mode raises it too, after the operations before it
            returned = self._eagerly(batch, fetch)
            self._wrong = str(error)
            return returned
        if self._compile or prepared.talks():  # rounds differently, or the other workers would wait for two runs
            prepared.confirm()
            return self._as_graph(program, batch, fetch, may_trace=True)
        found = self._run_both(prepared, batch, fetch)
        if found.failed is not None:
            self._wrong = f"on the last batch {found.failed}; eager mode computed the result; use engine='tape'"
        else:
            prepared.confirm()
            self._on_graph = True
        return found.returned

    def _try(self, program: EvalProgram, batch: Structure, fetch: Fetch) -> Mapping[str, Tensor]:
        self._trials += 1
        began = time.perf_counter()
        try:
            prepared = program.prepare(batch, fetch.modules)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._refuse(str(error))
            return self._eagerly(batch, fetch)
        if prepared.talks():
            self._refuse("it communicates with the other workers itself, which a trial would repeat")
            return self._eagerly(batch, fetch)
        found = self._run_both(prepared, batch, fetch)
        if found.failed is not None:
            self._refuse(found.failed, final=True)
        else:
            prepared.confirm()
            self._judge(found)
        self._payoff.tried(time.perf_counter() - began - found.eager_seconds)
        return found.returned

    def _run_both(self, prepared: PreparedEvaluation, batch: Structure, fetch: Fetch) -> _EagerAndGraph:
        """Return the eager answer, and whether a graph gives the same."""
        model, answers = self._step.model, Answers()
        before = Snapshot(model, [], prepared.args)
        began = time.perf_counter()
        with answers.noted():
            returned = self._eagerly(batch, fetch)
        eager_seconds = time.perf_counter() - began
        after = Snapshot(model, [], prepared.args)

        def check(results: Mapping[str, object]) -> None:
            for name, value in returned.items():
                if isinstance(value, Tensor) and not self._compile and bits_differ(results.get(name), value):
                    raise Differs(f"the result {name!r}")

        seconds, failed = 0.0, None
        try:
            seconds = repeat(before, after, answers, prepared.run, check, rough=self._compile)
        except Differs as error:
            failed = f"the graph's results are not bitwise those of eager mode: {error}"
        except Exception as error:  # noqa: BLE001 - whatever it is, the eager run counts
            failed = f"the graph failed but eager mode did not ({type(error).__name__}: {error})"
        return _EagerAndGraph(returned, eager_seconds, seconds, failed)

    def _judge(self, found: _EagerAndGraph) -> None:
        usual = min([found.eager_seconds, *([statistics.median(self._seconds)] if self._seconds else [])])
        if self._after is None and found.seconds >= usual:
            self._refuse("the graph's results were bitwise equal but not faster")
            return
        self._taken = True
        self._why = (
            f"a graph gave bitwise equal results in {found.seconds * 1e3:.2f} ms, eager mode in {usual * 1e3:.2f} ms"
        )
        _log.info("step %r runs as a graph: %s", self._name, self._why)

    def _refuse(self, why: str, *, final: bool = False) -> None:
        self._why = f"this evaluation runs eagerly: {why}"
        _log.info("step %r: %s", self._name, self._why)
        if final or not self._taken:  # a graph that has shown itself wrong is asked no more, nor are its siblings
            self._program, self._taken = None, False


def _check(returned: object) -> None:
    if not isinstance(returned, Mapping):
        raise TypeError(f"outputs(model, batch) returns a dict of tensors, got {type(returned).__name__}")
