"""The graph engine: a step captured once for each kind of batch, then run as generated code.

::

    a single worker       batch ─> [forward, backward] ─> check ─> [clipping, optimizers] ─> loss
    else                  batch ─> [forward, backward ─ ─ ─ ─ ─ ─ ─] ─> .grad ─> [optimizers] ─> loss
                                         └ gradient final ─> sinks ─ ─ ─ ─ ─ ─ ┘

Sparse rows leave the graph as they are: duplicates are merged, clipped and applied after it.

A new graph's first batch is run on the tape and then again as the graph, and compared bitwise (``Trials``).
The tape's run is the step that counts. The graph's leaves no trace: state is restored before it and after it, random
numbers are drawn again, boundaries answer with what they answered the tape, and Python's part of the step is not
repeated, for the program is run behind Dynamo's guards and without what Dynamo does afterwards.

::

    batch ── a graph fits ──────────────────────────────────────────────────────────> graph
        └─ none does ──> captured, or a CaptureError: nothing has happened
                         └─> the tape takes the step; in its middle the graph computes loss and gradients once more,
                             from the same state and random numbers: other bits, and the next run is refused;
                             an error of the tape is the caller's, and the graph waits for a batch without one

Code that no guard covers, such as a check of ``torch.compiler.is_compiling()``, makes a graph of a different function
than the one that Python runs. The tape's step counts, so a wrong graph never changes a parameter. A loss that itself
communicates between workers is not compared: the second run would send more than the other workers expect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.crossing import Answers, AnswersDiffer
from anabranch.autodiff.moved_parameter import Elsewhere, parameters_here
from anabranch.errors import CaptureError
from anabranch.executor.engines.engine import Begin, Engine, Fetch, GradientSink, StepOutput
from anabranch.executor.engines.gradients import all_finite, clip_norm, nonfinite_names
from anabranch.executor.randomness import random_state, restore_random_state, same_random_state
from anabranch.executor.steps import TrainStep
from anabranch.graph import Graph, SparseRows, StepProgram
from anabranch.graph.dynamo.front import GuardMiss
from anabranch.graph.step.joint import Joint
from anabranch.graph.step.lookups import as_sparse_gradient
from anabranch.graph.step.program import Prepared
from anabranch.graph.step.step_state import Between, SparseGradients
from anabranch.interrupts import hold_interrupts
from anabranch.record import spans
from anabranch.tensors import Structure

_log = logging.getLogger("anabranch")
_T = TypeVar("_T")
Check: TypeAlias = "Callable[[Mapping[str, object], Joint, Snapshot], None]"
"""``check(results, joint, before)`` raises ``Differs`` if the results of a graph, which was run from the state
``before``, are not those of the tape."""


class GraphEngine(Engine):
    """Differentiates one ``TrainStep`` as a captured graph.

    Args:
        step: the step to run.
        sinks: take gradients elsewhere.
        compile: compile the graph with Inductor; gradients are then not left in ``.grad``.
        name: of the step, for the log.
    """

    def __init__(
        self,
        step: TrainStep,
        sinks: Sequence[GradientSink] = (),
        *,
        compile: bool = False,  # noqa: A002 - the executor's own word
        name: str = "default",
    ) -> None:
        super().__init__(step, sinks)
        self._compile, self._what, self._in_parts = compile, f"step {name!r}", False
        self._nonfinite: list[str] = []
        self._passed_on: dict[Tensor, Tensor] | None = None  # to be compared with a new graph's

    @cached_property
    def _program(self) -> StepProgram:
        """Made at the first run: it is bound to the parameters that are here."""
        step = self._step
        return StepProgram(
            step.model,
            step.loss,
            step.optimizers,
            between=None if step.clip_grad_norm is None else _clipping(step.clip_grad_norm),
            compile=self._compile,
            leaves_gradients=not self._compile,
            activation_budget=step.activation_budget,
            gate=None if step.skip_nonfinite is None else self._admits,
        )

    @cached_property
    def _trials(self) -> Trials:
        # Inductor's kernels round differently, and the tape would not fit the budget.
        reason = "the tape would not fit activation_budget" if self._step.activation_budget is not None else None
        reason = "compile=True rounds differently" if self._compile else reason
        return Trials(self._program, self._step.model, self._what, reason)

    @property
    def name(self) -> str:
        """The name that ``Executor.engine`` returns."""
        return "graph+inductor" if self._compile else "graph"

    @property
    def graph(self) -> Graph | None:
        """The graph of the last run."""
        return self._program.graph if "_program" in vars(self) else None

    def differentiate(self, batch: Structure, rows: float, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward and backward in one graph, which calls ``begin(loss)`` and passes on each gradient as it goes."""
        tape = super().differentiate

        def on_tape(compare: Callable[[Check], None]) -> StepOutput:
            self._passed_on = tapes = dict[Tensor, Tensor]()
            try:
                ran = tape(batch, rows, fetch, begin, seed)
            finally:
                self._passed_on = None
            # Those of sinks that take them at the end.
            tapes |= {p: p.grad for p in self._takers if p not in tapes and p.grad is not None}
            compare(partial(self._check, ran.loss, ran.returned, tapes))
            return ran

        prepare = partial(self._program.prepare, batch, fetch.modules, whole=False)
        return self._trials.run(partial(self._differentiate, batch, fetch, begin, seed), prepare, on_tape)

    def _pass_on(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        if self._passed_on is not None and parameter in self._takers:
            self._passed_on[parameter] = gradient.detach().clone()  # a sink may write to it
        return super()._pass_on(parameter, gradient)

    def step(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput | None:
        """Return the whole step as one graph; ``None`` where it clips gradients that are not in the graph."""
        if self._in_parts or (self._step.clip_grad_norm is not None and self._clips_others()):
            return None
        update = super().update

        def on_tape(compare: Callable[[Check], None]) -> StepOutput:
            ran = self._sweep(batch, fetch)
            parameters = self._program.parameters.values()  # as they are now: some were replaced
            tapes: dict[Tensor, Tensor] = {p: p.grad for p in parameters if p.grad is not None}
            compare(partial(self._check, ran.loss, ran.returned, tapes))
            return self._finish(ran, update)

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
        joint: Joint,
        before: Snapshot,
    ) -> None:
        """Raise ``Differs`` if the graph's results are not the tape's."""
        check_results(results, {**returned, "loss": loss})
        graphs = joint.backward.sort(results)
        check_gradients({**graphs.dense, **self._as_gradients(graphs.sparse)}, tapes, self._program.parameters, before)

    def _as_gradients(self, sparse: Mapping[str, Sequence[SparseRows]]) -> dict[str, Tensor]:
        return {name: as_sparse_gradient(lookups, self.parameters[name]) for name, lookups in sparse.items()}

    def _differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float, may_trace: bool) -> StepOutput:
        self._program.set_seed(seed)

        def report(output: str, value: Tensor) -> None:
            if output == "loss":
                begin(value)
                return
            name = output.removesuffix(".grad")
            parameter = self.parameters[name]
            taker = self._takers.get(parameter)
            parameter.grad = value if taker is None else taker.ready(parameter, value)

        def check(outputs: Sequence[str]) -> None:
            fetch.check(dict.fromkeys(outputs))

        with spans.span("forward and backward", "compute"):
            ran = self._program.backward(batch, fetch.modules, check, report, may_trace=may_trace)
        for name, gradient in self._as_gradients(ran.sparse).items():
            report(f"{name}.grad", gradient)
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
        if (late := self.late_check) is not None:
            self.settle()
            self._program.read_numbers()  # schedulers may have gone back, also behind another step that shares them
            if own and not sparse and late.look([self.parameters[name] for name in names], dense):
                return True
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


def _clipping(max_norm: float) -> Between:
    """Return the clipping that a graph traces, into new memory: gradients may share theirs."""

    def clip(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        copies = {name: gradient.clone() for name, gradient in gradients.items()}
        clip_norm([*copies.values()], max_norm)
        return copies

    return clip


# The first batch of each graph.


class Differs(Exception):
    """The graph is not bitwise equal to the tape; names the difference."""


class Trials:
    """Runs a step's graphs; on the first batch of each the plain code takes the step, and the graph is compared.

    Args:
        program: makes the graphs.
        model: its tensors are what a step changes.
        what: the step, for the log.
        uncompared: the reason why no graph is compared, if there is one.
    """

    def __init__(self, program: StepProgram, model: nn.Module, what: str, uncompared: str | None) -> None:
        self._program, self._model, self._what = program, model, what
        self._compares = uncompared is None
        self._refused: str | None = None
        if uncompared is not None:
            _log.info("the first batches of %s as a graph are not compared with the tape: %s", what, uncompared)

    def run(
        self,
        as_graph: Callable[[bool], _T],
        prepare: Callable[[], Prepared],
        on_tape: Callable[[Callable[[Check], None]], _T],
    ) -> _T:
        """Run the step once.

        Args:
            as_graph: ``as_graph(may_trace)`` runs the graph.
            prepare: captures without running.
            on_tape: ``on_tape(compare)`` runs the plain code, and calls ``compare(check)`` once its results are there;
                ``check`` is given the graph's.

        Raises:
            CaptureError: an earlier comparison failed.
        """
        if not self._compares:
            return as_graph(True)
        if self._refused is not None:
            raise CaptureError(self._refused)
        try:
            return as_graph(False)
        except GuardMiss:
            pass
        joint, args = prepare()
        if joint.communicates():
            _log.info("a graph of %s is not compared with the tape: it communicates between workers", self._what)
            ran = as_graph(True)
            joint.confirmed = True
            return ran
        before, answers = Snapshot(self._model, args), Answers()
        with answers.noted():
            ran = on_tape(partial(self._compare, joint, args, before, answers))
        self._program.finish(joint)
        return ran

    def _compare(self, joint: Joint, args: Sequence[object], before: Snapshot, answers: Answers, check: Check) -> None:
        """Run the graph once on the batch that the tape has run, and leave the tape's state."""
        after = Snapshot(self._model, args)
        failure = None
        try:
            before.restore()
            with answers.replayed():
                results = joint.run_backward(args)
            check(results, joint, before)
            after.compare()
        except (Differs, AnswersDiffer) as error:
            failure = f"on the last batch the graph was not bitwise equal to the tape, whose step was kept: {error}"
            failure += "; the code behaves differently under capture than in Python"
        except Exception as error:  # noqa: BLE001 - whatever it is, the tape's step counts
            why = f"{type(error).__name__}: {error}"
            failure = f"the graph failed on the last batch but the tape, whose step was kept, did not ({why})"
        finally:
            after.restore()
        if failure is not None:
            self._refused = f"{failure}; use engine='tape'"


class Snapshot:
    """Everything that forward and backward of a graph may change: tensors, and torch's random state.

    Args:
        model: its parameters and buffers.
        others: further tensors.

    Attributes:
        gradients: copies of those that were in ``.grad``, to which a step adds.
    """

    def __init__(self, model: nn.Module, others: Iterable[object]) -> None:
        tensors = [*model.parameters(), *model.buffers(), *(value for value in others if isinstance(value, Tensor))]
        # Sparse batches are read only.
        here = (t for t in dict.fromkeys(tensors) if not isinstance(t, Elsewhere))
        self._tensors = [t for t in here if t.layout is torch.strided]
        with torch.no_grad():
            self._memories = [_without_repeats(tensor).detach() for tensor in self._tensors]
            self._copies = [memory.clone() for memory in self._memories]
        known = parameters_here(model).values()
        self.gradients: dict[Tensor, Tensor] = {p: p.grad.detach().clone() for p in known if p.grad is not None}
        self._random = random_state()

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for memory, copy in zip(self._memories, self._copies, strict=True):
                memory.copy_(copy)
        restore_random_state(self._random)

    def compare(self) -> None:
        """Raise ``Differs`` if anything is not bitwise as it was."""
        for tensor, memory, copy in zip(self._tensors, self._memories, self._copies, strict=True):
            if bits_differ(memory, copy):
                raise Differs(f"a tensor of shape {tuple(tensor.shape)} that the step changes has a different value")
        if not same_random_state(self._random, random_state()):
            raise Differs("it draws other random numbers")


def bits_differ(one: Any, other: Any) -> bool:
    """Return True if two results are not bitwise equal; NaN equals NaN."""
    if isinstance(one, Tensor) != isinstance(other, Tensor):
        return True
    if not isinstance(one, Tensor):
        return bool(one != other) and not (one != one and other != other)
    if one.layout is not torch.strided:
        one, other = one.coalesce(), other.coalesce()
        return bits_differ(one.indices(), other.indices()) or bits_differ(one.values(), other.values())
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not one.is_floating_point():
        return not torch.equal(one, other)
    # Zeros of either sign compare equal, but 1 / x differs a step later.
    same = torch.eq(one, other) & (torch.signbit(one) == torch.signbit(other))
    return not bool((same | (torch.isnan(one) & torch.isnan(other))).all())


def check_results(graphs: Mapping[str, object], tapes: Mapping[str, object]) -> None:
    """Raise ``Differs`` if one of the tape's results is not bitwise the graph's."""
    for name, value in tapes.items():
        if isinstance(value, Tensor) and bits_differ(graphs.get(name), value.detach()):
            raise Differs(f"the result {name!r}")


def check_gradients(
    graphs: Mapping[str, Tensor], tapes: Mapping[Tensor, Tensor], parameters: Mapping[str, Tensor], before: Snapshot
) -> None:
    """Raise ``Differs`` if a gradient is not bitwise the tape's, or only one of them has it.

    Args:
        graphs: the graph's, by name.
        tapes: the tape's, added to those that were there before.
        parameters: by name.
        before: the state that the step began with.
    """
    for name, parameter in parameters.items():
        gradient, expected, earlier = graphs.get(name), tapes.get(parameter), before.gradients.get(parameter)
        if gradient is None:
            # A gradient from before the step to which nothing was added is not of this step.
            if expected is not None and (earlier is None or bits_differ(earlier, expected)):
                raise Differs(f"the gradient of {name!r}, which the graph does not compute")
        elif expected is None or expected.layout is not gradient.layout:
            raise Differs("which parameters have a gradient")
        elif bits_differ(gradient if earlier is None else earlier + gradient, expected):
            raise Differs(f"the gradient of {name!r}")


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return a view of each number of an expanded tensor once, to be copied and written."""
    tensor = tensor.as_subclass(Tensor)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
