"""The engine of ``engine="auto"``: the tape, until a graph has been shown on real batches to be equal and faster.

::

    tape ── worth it? ──> trial of one batch ── same bits, quicker ──> graph ── guards miss ──> tape for that step,
      ^                        └ no: stays on the tape, without a word                             and another trial
      └────────────────────────────── too many misses, or slower than the tape was ────────────────────┘

Capturing takes a bounded part of the run's time. Runs do not wait for a graph that was not requested: a large step,
whose time is spent in kernels, is not captured. The workers of a job try together: a worker requests a trial in the
header of a run, and a graph rejected by one is rejected by all.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.answers import Answers
from anabranch.errors import CaptureError
from anabranch.executor.engines.engine import Begin, Ready, StepOutput
from anabranch.executor.engines.graph_engine import GraphEngine
from anabranch.executor.engines.graph_payoff import GraphPayoff
from anabranch.executor.engines.tape_engine import TapeEngine
from anabranch.executor.engines.trial import (
    Differs,
    Snapshot,
    check_gradients,
    check_results,
    repeat,
    wait_for_devices,
)
from anabranch.executor.running.fetching import Fetch
from anabranch.executor.steps import TrainStep
from anabranch.graph import StepProgram
from anabranch.graph.dynamo.front import CaptureElsewhere, GuardMiss
from anabranch.graph.run.rollback import GraphRaised
from anabranch.graph.step import Prepared
from anabranch.graph.trace.make_fx import one_at_a_time
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure

__all__ = ["AutoEngine"]

_log = logging.getLogger("anabranch")

_MOST_REFUSED = 3
_MOST_MISSES_IN_A_ROW = 16
_FREE_TRIALS = 8
_RUNS_A_TRIAL = 8
_KEPT_TIMES = 32


class AutoEngine:
    """Runs one ``TrainStep`` on the tape, and as a graph once that has been shown to be equal and faster.

    Args:
        step: the step to run.
        compile: compile the graph with Inductor, which rounds differently: results are then compared approximately.
        capture_after: try a graph after exactly this many runs, and keep it if it is bitwise equal, even if slower;
            ``None`` keeps it only if it is faster.
        name: of the step, for the log.
    """

    def __init__(
        self,
        step: TrainStep,
        *,
        compile: bool = False,  # noqa: A002
        capture_after: int | None = None,
        name: str = "default",
    ) -> None:
        self._step, self._compile, self._after, self._name = step, compile, capture_after, name
        self._tape = TapeEngine(step)
        self._graph: GraphEngine | None = None
        self._attached: tuple[Mapping[str, Tensor], Ready] | None = None
        self._payoff = GraphPayoff()
        self._on_graph = False
        self._taken = False
        self._update_checked = False
        self._runs = self._graph_runs = self._trials = 0
        self._misses_in_a_row = 0
        self._refused: Counter[str] = Counter()
        self._tape_seconds: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._graph_seconds: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._why = "the tape runs until a graph has been shown on your batches to be bitwise equal and faster"
        self._why_not_now: str | None = None
        self._gives_up = _runs_by_itself(step.model)
        if self._gives_up:
            self._why = "a Pipe runs its stages by a schedule of its own"
        self._together = False
        self._agreed = False
        self._rejects = False

    # The executor's queries.

    @property
    def name(self) -> str:
        """The engine of the last run."""
        return ("graph+inductor" if self._compile else "graph") if self._on_graph else self._tape.name

    @property
    def tape(self) -> TapeEngine:
        """The tape engine, for a run that must use it."""
        return self._tape

    @property
    def program(self) -> StepProgram | None:
        """The captured graphs, if the last run was on one."""
        return self._graph.program if self._graph is not None and self._on_graph else None

    def stay_on_tape(self, why: str) -> None:
        """Record that the next run uses the tape, and why."""
        self._on_graph, self._why_not_now = False, why

    def explain(self) -> str:
        """Return the reason, in one sentence, for the engine of the last run."""
        if self._on_graph and self._graph is not None:
            return self._why + self._graph.program.said_of_update
        return self._why_not_now or self._why

    # Votes of the workers.

    def vote(self) -> tuple[bool, bool]:
        """Return whether this worker wants to try a graph in the next run, and whether it rejects the tried one."""
        self._together = True
        rejects, self._rejects = self._rejects, False
        return self._is_due(ahead=1), rejects

    def decided(self, wants: int, rejects: int) -> None:
        """Take the counts of the workers that do."""
        self._agreed = wants > 0
        if rejects:
            self._give_up("on another worker the graph was not bitwise equal to the tape, or was refused")

    # Running.

    def attach(self, parameters: Mapping[str, Tensor], ready: Ready) -> None:
        """Hands the gradients of these parameters to ``ready`` from now on, whichever engine computes them."""
        self._attached = parameters, ready
        self._tape.attach(parameters, ready)
        if self._graph is not None:
            self._graph.attach(parameters, ready)

    def follow_model(self) -> None:
        """Look up the model's parameters again: some were replaced."""
        self._tape.follow_model()
        if self._graph is not None:
            self._graph.follow_model()

    def differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward and backward; ``begin(loss)`` is called before the first gradient is final."""
        return self._run(
            lambda graph: graph.differentiate(batch, fetch, begin, seed),
            lambda: self._tape.differentiate(batch, fetch, begin, seed),
            lambda: self._try_backward(batch, fetch, begin, seed),
        )

    def step(self, batch: Structure, fetch: Fetch) -> StepOutput:
        """Forward, backward, clipping and the optimizers' step."""
        return self._run(
            lambda graph: graph.step(batch, fetch),
            lambda: self._tape.step(batch, fetch),
            lambda: self._try_step(batch, fetch),
        )

    def update(self) -> None:
        """Step the optimizers on the gradients in ``.grad``."""
        if self._graph is None or not self._on_graph:
            # Replacements by the optimizers in their own step are not changes; earlier replacements are.
            known = self._graph is not None and self._graph.program.knows_state()
            self._tape.update()
            if known and self._graph is not None:
                self._graph.program.note_update()
        elif self._update_checked:
            self._graph.update()
        else:
            self._try_update(self._graph)

    def _run(
        self,
        on_graph: Callable[[GraphEngine], StepOutput],
        on_tape: Callable[[], StepOutput],
        trial: Callable[[], StepOutput],
    ) -> StepOutput:
        self._runs += 1
        self._why_not_now, elsewhere = None, False
        if self._taken and self._graph is not None:
            began, why = time.perf_counter(), None
            try:
                ran = on_graph(self._graph)
            except CaptureElsewhere:
                elsewhere = True
                self._why_not_now = "this step ran on the tape: another thread was capturing a graph"
            except GuardMiss:
                self._misses_in_a_row += 1
                self._why_not_now = "this step ran on the tape: no graph for its Python values or shapes exists yet"
            except GraphRaised as error:
                why = f"the graph raised {type(error.error).__name__}: {error}"
            except CaptureError as error:  # before anything has happened: a hook that was set, a mode
                why = str(error)
            else:
                self._on_graph = True
                self._graph_runs += 1
                self._misses_in_a_row = 0
                self._graph_seconds.append(time.perf_counter() - began)
                self._look_back()
                return ran
            if why is not None:  # outside the handler, so that the tape's error has no context
                self._on_graph, self._why_not_now = False, f"this step runs on the tape: {why}"
                return on_tape()
        self._on_graph = False
        if self._misses_in_a_row > _MOST_MISSES_IN_A_ROW:
            self._give_up("Python values or batch shapes change from step to step, so no graph is valid for long")
        if self._tries_now() and not elsewhere:
            return trial()
        began = time.perf_counter()
        if self._payoff.wants_to_count:
            with self._payoff.counting(self._step.model):
                ran = on_tape()
        else:
            ran = on_tape()
        self._tape_seconds.append(time.perf_counter() - began)
        self._payoff.spent(self._tape_seconds[-1])
        return ran

    def _tries_now(self) -> bool:
        if self._gives_up:
            return False
        agreed, self._agreed = self._agreed, False
        if self._together and not self._taken:
            return agreed
        return self._is_due()

    def _is_due(self, ahead: int = 0) -> bool:
        """Return True if a trial would pay now."""
        if self._gives_up or torch.is_anomaly_enabled():
            return False
        if self._trials >= _FREE_TRIALS + self._graph_runs // _RUNS_A_TRIAL:
            return False
        if self._after is not None:
            return self._runs + ahead > self._after
        if not self._payoff.pays(self._tape_seconds):
            if self._payoff.known and not self._taken:
                self._why = self._payoff.reason(self._tape_seconds)
            return False
        return True

    def _look_back(self) -> None:
        """Return to the tape if the graph is slower."""
        if self._after is not None or len(self._graph_seconds) < _KEPT_TIMES or not self._tape_seconds:
            return
        if statistics.median(self._graph_seconds) > 1.02 * statistics.median(self._tape_seconds):
            self._give_up("the graph was bitwise equal to the tape but not faster")

    def _give_up(self, why: str) -> None:
        if not self._gives_up:
            self._gives_up, self._taken, self._on_graph = True, False, False
            self._graph = None
            self._why = why
            _log.info("step %r runs on the tape: %s", self._name, why)

    # Trials.

    def _try_step(self, batch: Structure, fetch: Fetch) -> StepOutput:
        def noting() -> tuple[StepOutput, Mapping[Tensor, Tensor]]:
            return self._tape.step(batch, fetch), {}

        return self._try(batch, fetch, lambda: self._tape.step(batch, fetch), noting, whole=True)

    def _try_backward(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float) -> StepOutput:
        (self._graph or self._make_graph()).program.set_seed(seed)
        return self._try(
            batch,
            fetch,
            lambda: self._tape.differentiate(batch, fetch, begin, seed),
            lambda: self._tape.differentiate_noting(batch, fetch, begin, seed),
            whole=False,
        )

    def _try(
        self,
        batch: Structure,
        fetch: Fetch,
        on_tape: Callable[[], StepOutput],
        noting: Callable[[], tuple[StepOutput, Mapping[Tensor, Tensor]]],
        *,
        whole: bool,
    ) -> StepOutput:
        """Return the tape's run, and a graph's run from the same state; ``noting`` also returns gradients."""
        self._trials += 1
        began = time.perf_counter()
        with one_at_a_time:  # PyTorch's tracers patch modules for the whole process
            prepared = self._prepare(batch, fetch, whole=whole)
            if prepared is None:
                self._payoff.tried(time.perf_counter() - began)
                return on_tape()
            if whole and not prepared.joint.captures_update:
                return self._try_gradients(prepared, batch, fetch)
            before, answers = Snapshot(self._step.model, self._step.optimizers, prepared.args), Answers()
            wait_for_devices()
            tape_began = time.perf_counter()
            with answers.noted():
                ran, gradients = noting()
            wait_for_devices()
            tape_seconds = time.perf_counter() - tape_began
            try:
                seconds = self._repeat(prepared, before, answers, ran, gradients)
            except Differs as error:
                self._refuse(f"the graph is not bitwise equal to the tape: {error}", final=True)
            except Exception as error:  # noqa: BLE001 - whatever it is, the tape's step counts
                self._refuse(f"the graph failed but the tape did not ({type(error).__name__}: {error})", final=True)
            else:
                prepared.confirm()
                self._judge(seconds, tape_seconds)
            self._payoff.tried(time.perf_counter() - began - tape_seconds)
            return ran

    def _try_gradients(self, prepared: Prepared, batch: Structure, fetch: Fetch) -> StepOutput:
        """Return a trial in the middle of the tape's step: optimizers outside the graph step once."""
        before, answers = Snapshot(self._step.model, (), prepared.args), Answers()
        assert self._graph is not None
        parameters = self._graph.program.parameters
        found: list[float] = []
        began = time.perf_counter()
        spent = 0.0

        def between(loss: Tensor, returned: Mapping[str, Tensor]) -> None:
            nonlocal spent
            tape_ended = time.perf_counter()
            gradients = before.gradients_after(parameters.values())
            after = Snapshot(self._step.model, (), prepared.args, before)

            def check(results: Mapping[str, object]) -> None:
                if not self._compile:
                    check_results(results, loss, returned)
                    sorted_ = prepared.joint.backward.sort(results)
                    check_gradients(sorted_.dense, sorted_.sparse, gradients, parameters, before.gradients_before())

            try:
                seconds = repeat(before, after, answers, prepared.differentiate, check, rough=self._compile)
            except Differs as error:
                self._refuse(f"the graph is not bitwise equal to the tape: {error}", final=True)
            except Exception as error:  # noqa: BLE001 - whatever it is, the tape's step counts
                self._refuse(f"the graph failed but the tape did not ({type(error).__name__}: {error})", final=True)
            else:
                found.append(seconds - (tape_ended - began))
            spent = time.perf_counter() - tape_ended

        with answers.noted():
            ran = self._tape.step(batch, fetch, between)
        tape_seconds = time.perf_counter() - began - spent
        if found:
            try:
                self._graph.program.finish(prepared)
            except Exception as error:  # noqa: BLE001 - the tape's step counts
                self._refuse(f"the update cannot be a graph ({type(error).__name__}: {error})", final=True)
            else:
                self._judge(tape_seconds + found[0], tape_seconds)
        self._payoff.tried(spent)
        return ran

    def _prepare(self, batch: Structure, fetch: Fetch, *, whole: bool) -> Prepared | None:
        """Return a graph that may be tried on this batch, or record the reason for none."""
        try:
            prepared = (self._graph or self._make_graph()).prepare(batch, fetch, whole=whole)
        except (CaptureError, torch.OutOfMemoryError) as error:
            self._refuse(str(error))
            return None
        except (ValueError, TypeError):  # the user's mistake, which the tape raises as well
            return None
        if prepared.talks():
            self._refuse("the loss communicates with the other workers itself, which a trial would repeat", final=True)
            return None
        return prepared

    def _repeat(
        self,
        prepared: Prepared,
        before: Snapshot,
        answers: Answers,
        ran: StepOutput,
        gradients: Mapping[Tensor, Tensor],
    ) -> float:
        """Return the seconds that the graph takes to repeat the tape's step.

        Raises:
            Differs: it is not bitwise equal.
        """
        after = Snapshot(self._step.model, self._step.optimizers, prepared.args, before)

        def check(results: Mapping[str, object]) -> None:
            if self._compile:
                return
            check_results(results, ran.loss, ran.returned)
            if gradients and self._graph is not None:
                found = prepared.joint.backward.sort(results)
                known = self._graph.program.parameters
                check_gradients(found.dense, found.sparse, gradients, known, before.gradients_before())

        return repeat(before, after, answers, prepared.run, check, rough=self._compile)

    def _judge(self, seconds: float, tape_seconds: float) -> None:
        usual = min([tape_seconds, *([statistics.median(self._tape_seconds)] if self._tape_seconds else [])])
        if self._after is None and seconds >= usual:
            self._refuse("the graph was bitwise equal to the tape but not faster")
            return
        self._taken = True
        self._update_checked = False
        self._misses_in_a_row = 0
        self._why = (
            f"a graph of this step was bitwise equal to the tape on your batch after {self._runs} runs, in "
            f"{seconds * 1e3:.2f} ms where the tape took {usual * 1e3:.2f} ms"
        )
        _log.info("step %r runs as a graph: %s", self._name, self._why)

    def _refuse(self, why: str, *, final: bool = False) -> None:
        self._why = f"this step runs on the tape: {why}"
        self._rejects = True
        self._refused[why] += 1
        _log.info("step %r: %s", self._name, self._why)
        if final:  # a graph that has shown itself wrong is asked no more, nor are its siblings
            self._gives_up, self._taken, self._graph = True, False, None
        if self._taken:
            return  # the graphs that proved themselves stay
        if sum(self._refused.values()) >= _MOST_REFUSED:
            self._gives_up, self._graph = True, None

    def _try_update(self, graph: GraphEngine) -> None:
        step = self._step
        if not graph.captures_update():
            self._tape.update()
            graph.program.note_update()
            self._update_checked = graph.program.refused_update is not None  # from now on they step outside the graph
            return
        before = Snapshot(step.model, step.optimizers)
        self._tape.update()
        after = Snapshot(step.model, step.optimizers, since=before)

        def run() -> Mapping[str, object]:
            graph.program.note_update()  # restoring state is not a change
            graph.update()
            return {}

        try:
            repeat(before, after, Answers(), run, lambda _: None, rough=self._compile)
        except (Differs, CaptureError) as error:
            self._give_up(f"the optimizer's step as a graph differs from the tape: {error}")
        else:
            graph.program.note_update()
            self._update_checked = True

    def _make_graph(self) -> GraphEngine:
        self._graph = GraphEngine(
            self._step,
            compile=self._compile,
            leaves_gradients=True,
            name=self._name,
            level=logging.INFO,
        )
        self._graph.may_trace = False
        if self._attached is not None:
            self._graph.attach(*self._attached)
        return self._graph


def _runs_by_itself(model: nn.Module) -> bool:
    """Return True if the model has a pipe, which runs its stages on other threads or ranks."""
    return any(isinstance(module, Pipe) for module in model.modules())
