"""``EvalProgram``: an evaluation as graphs, forward only, with the same guards as a training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.autodiff.hooks import OutputRecorder
from anabranch.autodiff.opaque import learn_forms
from anabranch.errors import CaptureError
from anabranch.graph.batch_kinds import kind_of
from anabranch.graph.dynamo.front import DynamoFront, GuardMiss, TracedCall, mark
from anabranch.graph.dynamo.traced_calls import Binding, arrange, run_calls
from anabranch.graph.effects import is_collective
from anabranch.graph.graph import Graph, InputKind
from anabranch.graph.passes.duplicates import merge_duplicates
from anabranch.graph.run.codegen import Program
from anabranch.graph.run.inductor import compiled
from anabranch.graph.run.shared_memory import SharedMemory, written_inputs
from anabranch.graph.trace.backward import output_names
from anabranch.graph.trace.build import build
from anabranch.graph.trace.make_fx import TraceRecorder, undisturbed
from anabranch.tensors import Structure

__all__ = ["EvalProgram", "PreparedEvaluation"]

_MOST_GRAPHS = 64


class PreparedEvaluation:
    """A program that was made for a batch and has not run."""

    def __init__(self, forward: _Forward, args: Sequence[object]) -> None:
        self.forward, self.args = forward, args

    def run(self) -> dict[str, object]:
        """Run on the batch that it was made for; returns the results by name."""
        return dict(zip(self.forward.graph.outputs, self.forward.results(self.args), strict=True))

    def confirm(self) -> None:
        """Let the program run from now on without ``may_trace``: its results were those of eager mode."""
        self.forward.confirmed = True

    def talks(self) -> bool:
        """Return True if it has collectives of its own, which a run in addition to the eager one would repeat."""
        return any(map(is_collective, self.forward.graph.fx.nodes))


class _OnlyPrepared(BaseException):
    """Ends a run after the guards, before any computation."""


class EvalProgram:
    """The result of ``outputs(model, batch)``, computed by graphs.

    >>> model = nn.Linear(3, 1)
    >>> program = EvalProgram(model, lambda model, batch: {"y": model(batch)})
    >>> with torch.no_grad():
    ...     bool((program.run(torch.ones(2, 3))[0]["y"] == model(torch.ones(2, 3))).all())
    True

    Args:
        model: the caller sets its mode; graphs are guarded by it.
        outputs: returns a mapping of tensors.
        compile: compile the graph with Inductor.
    """

    def __init__(
        self,
        model: nn.Module,
        outputs: Callable[..., object],
        *,
        compile: bool = False,  # noqa: A002
    ) -> None:
        self.model, self._compile = model, compile
        self._front = DynamoFront(_marked(outputs), self._make, what="the evaluation")
        self._recorder = OutputRecorder()
        self._preparing = self._may_trace = False
        self._kinds: set[object] = set()
        self._last: Graph | None = None

    @property
    def graph(self) -> Graph:
        """The graph of the last run."""
        if self._last is None:
            raise RuntimeError("nothing has been captured yet; run a batch first")
        return self._last

    def run(
        self, batch: Structure, fetch: Sequence[str] = (), *, may_trace: bool = True
    ) -> tuple[Any, dict[str, Structure]]:
        """Return the result of ``outputs``, and the outputs of the submodules ``fetch``; to be called under
        ``no_grad``.

        Args:
            batch: a nested structure of tensors.
            fetch: names of submodules.
            may_trace: make a graph if none fits; otherwise raise ``GuardMiss``, also for a graph that was prepared but
                never confirmed.
        """
        kind = (kind_of(batch), tuple(fetch))
        if kind not in self._kinds and len(self._kinds) >= _MOST_GRAPHS:
            raise CaptureError(
                f"{_MOST_GRAPHS} kinds of batches have been captured for this evaluation; pad batches to a few shapes, "
                "or use engine='tape'"
            )
        if may_trace and kind not in self._kinds:
            learn_forms(self.model.modules())
        self._may_trace = may_trace
        with self._recorder.recording(self.model, tuple(fetch)) as outputs:
            found = self._front.run(kind, self.model, batch, may_trace=may_trace)
        self._kinds.add(kind)
        return found, dict(outputs)

    def prepare(self, batch: Structure, fetch: Sequence[str] = ()) -> PreparedEvaluation:
        """Capture the evaluation for this batch without running it."""
        self._preparing = True
        try:
            self.run(batch, fetch)
        except _OnlyPrepared as prepared:
            return PreparedEvaluation(*prepared.args)
        finally:
            self._preparing = False
        raise CaptureError("the evaluation computes nothing from tensors")

    def _make(self, call: TracedCall) -> Callable[..., Sequence[object]]:
        program = weakref.ref(self)
        known: list[_Forward] = []

        def run(*args: object) -> Sequence[object]:
            mine = program()
            assert mine is not None
            for forward in known:
                if forward.binding.fits(args):
                    break
            else:
                if len(known) >= _MOST_GRAPHS:
                    raise CaptureError("the tensors that the model holds change from run to run; use engine='tape'")
                with undisturbed():
                    forward = _Forward(mine, call, args)
                call.release_tensors()
                known.insert(0, forward)
            mine._last = forward.graph
            if not (forward.confirmed or mine._may_trace):
                raise GuardMiss("the graph of the evaluation has not been compared with eager mode yet")
            forward.memory.check(args)
            if mine._preparing:
                raise _OnlyPrepared(forward, args)
            return forward.in_order(args)

        return run


class _Forward:
    """One program, for given tensors and whole numbers."""

    def __init__(self, program: EvalProgram, call: TracedCall, args: Sequence[object]) -> None:
        model = program.model
        self.confirmed = False
        tensors = {tensor: name for name, tensor in model.named_buffers()}
        tensors |= {tensor: name for name, tensor in model.named_parameters()}
        arguments = arrange(call, args, tensors, {"0": "", "1": "batch"})
        kinds: dict[str, InputKind] = {source.name: "buffer" for source in arguments.sources if source.state}
        self.binding = Binding(call, arguments, args)
        self._outputs = output_names(call)
        names = list(dict.fromkeys(self._outputs))

        def traced(values: Sequence[Tensor], recorder: TraceRecorder) -> list[object]:
            with torch.no_grad():
                results, _ = run_calls(call, arguments.given(args, values), recorder)
            return list(dict(zip(self._outputs, results, strict=True)).values())

        self.graph = merge_duplicates(build(traced, arguments.sources, names, kinds=kinds))
        self._program: Program = compiled(self.graph) if program._compile else self.graph.program()
        self.memory = SharedMemory(arguments, written_inputs(self.graph))

    def results(self, args: Sequence[object]) -> tuple[object, ...]:
        """Return the results in the order of the graph's outputs."""
        return self._program.run(*self.binding.free(args))

    def in_order(self, args: Sequence[object]) -> Sequence[object]:
        """Return the results as Dynamo's code expects them."""
        found = dict(zip(self.graph.outputs, self.results(args), strict=True))
        return [found[name] for name in self._outputs]


def _marked(outputs: Callable[..., object]) -> Callable[..., object]:
    """Return ``outputs`` with its results named, in a form that Dynamo can read."""

    def marked(model: nn.Module, batch: object) -> object:
        result = outputs(model, batch)
        if not isinstance(result, Mapping):
            return result
        named = {}
        for name, value in result.items():
            named[name] = mark(name, value) if isinstance(value, Tensor) else value
        return named

    return marked
