"""One straight-line program of a step: for these tensors, whole numbers and hyperparameters."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, fx

from anabranch.errors import CaptureError
from anabranch.graph.crossings import crossing_of
from anabranch.graph.dynamo.front import TracedCall
from anabranch.graph.dynamo.traced_calls import Arguments, arrange, picker
from anabranch.graph.effects import is_collective
from anabranch.graph.graph import Graph
from anabranch.graph.operation_graph import OperationGraph
from anabranch.graph.passes import drop_dead_nodes, join
from anabranch.graph.run.codegen import Program
from anabranch.graph.run.cuda_graphs import Replayed, can_replay
from anabranch.graph.run.inductor import compiled
from anabranch.graph.run.memory import recompute_marked
from anabranch.graph.step.backward import (
    Backward,
    Report,
    capture_backward,
    capture_forward,
    loss_of,
    output_names,
)
from anabranch.graph.step.lookups import as_sparse_gradient
from anabranch.graph.step.step_state import SparseGradients, StepState
from anabranch.graph.trace import TraceRecorder, TraceSource, build
from anabranch.interrupts import hold_interrupts


@dataclass(frozen=True, slots=True)
class JointKey:
    """The purpose of a program, in addition to the state that guards check.

    Attributes:
        whole: with the update; else forward and backward alone.
        epoch: the binding of state.
        numbers: the numbers in the optimizers' groups.
        gradients: the gradients requested, as ``<parameter>.grad``.
    """

    whole: bool
    epoch: object
    numbers: object
    gradients: tuple[str, ...]


class Joint:
    """Forward, backward and, if the key says so, the update.

    Attributes:
        key: the program's purpose.
        backward: the graph of forward and backward.
        graph: all that runs, in one graph.
        memory: looks at the memory of the arguments, if the program writes to one.
        confirmed: the program was compared with the tape, which has run a batch of it, and may run without
            ``may_trace``. A step that the tape could not run, because of a mistake or an interrupt, has compared
            nothing.
    """

    def __init__(self, step: StepState, call: TracedCall, args: Sequence[object], key: JointKey) -> None:
        self._step_of, self.key = weakref.ref(step), key  # Dynamo keeps what belongs to a code object
        self.confirmed = False
        self._outputs = output_names(call)
        arguments = arrange(call, args, step.tensors)
        try:
            self.backward = self._captured(call, arguments, args)
        except CaptureError:
            if not call.numbers and not any(isinstance(value, int) for value in args):
                raise
            # An operation that reads a number's value, like dropout its probability: a graph for each value.
            arguments = arrange(call, args, step.tensors, fix_numbers=True)
            self.backward = self._captured(call, arguments, args)
        self._bind(call, arguments, args)
        graph = recompute_marked(self.backward.graph)
        if step.activation_budget is not None:
            graph = _fitted(graph, step.activation_budget)
        self.backward = replace(self.backward, graph=graph)
        parameters = step.parameters
        self._gradient_names = [f"{name}.grad" for name in self.backward.dense]
        # No gradient adds to an existing one, and none is sparse.
        dense_only = not self.backward.lookups
        self._all_held = dense_only and all(parameters[name] in step.names for name in self.backward.dense)
        kept = self.backward.kept
        self._plain = [i for i, n in enumerate(self._outputs) if n.startswith("result.") and i not in kept]
        written = written_inputs(self.backward.graph)
        self.memory = SharedMemory(arguments, written) if any(s.name in written for s in arguments.sources) else None
        self._between = self._trace_between() if key.whole else None
        self._program: Program | None = None
        self._rest: Program | None = None
        self._whole: Program | None = None
        self._reporting: Program | None = None
        self._reports: list[Report] = []
        self._rest_reads: Sequence[str] = ()
        self._yielded: Sequence[str] = ()
        self._own = _own_memory(self.backward.graph)
        self.graph = self.backward.graph

    @property
    def _step(self) -> StepState:
        found = self._step_of()
        assert found is not None
        return found

    def _captured(self, call: TracedCall, arguments: Arguments, args: Sequence[object]) -> Backward:
        if not self._step.differentiates:
            return capture_forward(call, arguments, args)
        seed = None if self.key.whole else self._step.seed_of(loss_of(call))
        return capture_backward(call, arguments, args, self._wanted(), seed)

    def _wanted(self) -> list[str]:
        step, asked = self._step, {name.removesuffix(".grad") for name in self.key.gradients}
        every = not self.key.whole or step.between is not None or step.leaves_gradients
        named = step.parameters.items()
        return [n for n, p in named if p.requires_grad and (every or n in asked or p in step.names)]

    def _bind(self, call: TracedCall, arguments: Arguments, args: Sequence[object]) -> None:
        """Keep what the values of Dynamo's placeholders are compared with, and pick the program's arguments."""
        self._bound = [args[index] for index in arguments.bound]
        self._fixed = arguments.fixed
        self._free, self._numbers = arguments.free, call.numbers
        self._pick_bound, self._pick_free = picker(arguments.bound), picker(arguments.free)
        self._reads_numbers = any(index in call.numbers for index in arguments.free)
        # Where Dynamo passes whole numbers they may be sizes that it does not guard; a graph is of one size.
        sized = any(isinstance(value, int) and not isinstance(value, bool) for value in args)
        self._shapes = [(index, value.shape) for index, value in enumerate(args) if sized and isinstance(value, Tensor)]

    def fits(self, args: Sequence[object], key: JointKey) -> bool:
        """Return True if this is the program for these arguments.

        The bound tensors are identical, and the shapes and values that the graph holds are equal.
        """
        if key is not self.key and key != self.key:
            return False
        if not all(map(operator.is_, self._pick_bound(args), self._bound)):
            return False
        if self._shapes and any(args[index].shape != shape for index, shape in self._shapes):  # type: ignore[attr-defined]
            return False
        return not self._fixed or all(args[index] == value for index, value in self._fixed)

    def _free_of(self, args: Sequence[object]) -> Sequence[object]:
        """Return the arguments of the program."""
        if self._reads_numbers:
            return [args[i].item() if i in self._numbers else args[i] for i in self._free]  # type: ignore[attr-defined]
        return self._pick_free(args)

    def in_order(self, results: Mapping[str, object]) -> list[object]:
        """Return the results as Dynamo's code expects them."""
        ordered = [results[name] for name in self._outputs]
        for index in self._plain:
            value = ordered[index]
            if isinstance(value, Tensor) and value.requires_grad:  # a view of a parameter, made with autograd off
                ordered[index] = value.detach()
        for index in self.backward.kept:
            ordered[index] = _without_history(cast(Tensor, ordered[index]))
        return ordered

    # --- running

    def run(
        self,
        step: StepState,
        args: Sequence[object],
        begin: Callable[[Sequence[str]], None] | None,
        report: Report | None,
        later: list[Callable[[], None]],
    ) -> dict[str, object]:
        """Run the program; returns the results by name.

        Args:
            step: the program's own, which it holds weakly.
            args: the values of Dynamo's placeholders.
            begin: called with the names of the loss's results before the program runs.
            report: called while backward runs.
            later: receives the optimizers' own step if it is outside the graph.
        """
        free = self._free_of(args)
        if begin is not None:
            begin(self.backward.outputs)
        if not self.key.whole:
            return self._run_backward(step, free, report)
        if self._rest is None:
            self.take_state()
        if self._whole is not None:
            hold_interrupts()  # nothing in the program says when it begins to update
            return self._finish(step, dict(zip(self.graph.outputs, self._whole.run(*free), strict=True)), later)
        results: dict[str, object] = dict(
            zip(self.backward.graph.outputs, (self._program or self._apart()).run(*free), strict=True)
        )
        if not self._admitted(step, results):
            return self._finish(step, results)
        if self._rest is not None and self.key.numbers == step.numbers:
            inputs = [results[name] for name in self._rest_reads]
            results.update(zip(self._yielded, self._rest.run(*inputs), strict=True))
            return self._finish(step, results, later)
        # The first time, when optimizers have no state yet; where they step outside the graph; and where the gate has
        # let schedulers go back to other numbers, behind an earlier step that has updated nothing.
        if self._between is not None:
            inputs = [results[b.name] for b in self._between.bindings if b.bound is None]
            results |= dict(zip(self._between.outputs, self._between.program().run(*inputs), strict=True))
        names = [name for name in self.backward.dense if step.parameters[name] in step.names]
        gradients = {name: cast(Tensor, results[f"{name}.grad"]) for name in names}
        sparse = self.backward.sparse_of(results)

        def step_on() -> None:
            step.step_eagerly(gradients, sparse)
            self.take_state()

        later.append(step_on)
        return self._finish(step, results)

    def _admitted(self, step: StepState, results: Mapping[str, object]) -> bool:
        """Return True if the optimizers step on the gradients among the ``results``."""
        if (gate := step.gate) is not None:
            dense = [cast(Tensor, results[name]) for name in self._gradient_names]
            sparse = self.backward.sparse_of(results) if self.backward.lookups else {}
            if not gate(dense, self.backward.dense, sparse, self._own):
                return False
        hold_interrupts()
        return True

    def communicates(self) -> bool:
        """Return True if the loss has collectives of its own, which a run in addition to the tape's would repeat."""
        return any(map(is_collective, self.backward.graph.fx.nodes))

    def run_backward(self, args: Sequence[object]) -> dict[str, object]:
        """Run forward and backward alone, without Python's side effects; returns the graph's results by name."""
        return dict(zip(self.backward.graph.outputs, self._apart().run(*self._free_of(args)), strict=True))

    def _run_backward(self, step: StepState, free: Sequence[object], report: Report | None) -> dict[str, object]:
        reports, backward = self._reports, self.backward
        if report is None or step.compile:
            results = dict(zip(backward.graph.outputs, self._apart().run(*free), strict=True))
            for name in backward.reported if report is not None else ():
                report(name, cast(Tensor, results[name]))  # type: ignore[misc]
            return results
        if self._reporting is None:
            self._reporting = backward.graph.reporting_program(backward.reported, lambda *r: reports[0](*r))
        reports.append(report)
        try:
            return dict(zip(backward.graph.outputs, self._reporting.run(*free), strict=True))
        finally:
            reports.clear()  # it leads to the executor, and Dynamo keeps the program

    def take_state(self) -> None:
        """Capture the update once there is optimizer state."""
        step = self._step
        waits = self.key.whole and self._rest is None and step.refused_update is None
        if waits and self.key.numbers == step.read_numbers():
            self._join()

    def _finish(
        self, step: StepState, results: dict[str, object], later: list[Callable[[], None]] | None = None
    ) -> dict[str, object]:
        """Return the results, with the gradients requested in final form, and leave gradients as ``backward()`` does.

        Args:
            step: the program's own.
            results: of the graph.
            later: receives the optimizers' step on the rows that the graph yields, if they have not made it.
        """
        parameters, sparse = step.parameters, dict[str, Tensor]()
        if self.backward.lookups:
            lookups = self.backward.sparse_of(results)
            if step.leaves_gradients or self.key.gradients:
                sparse = {f"{name}.grad": as_sparse_gradient(rows, parameters[name]) for name, rows in lookups.items()}
            if later is not None:
                later.append(lambda: step.step_eagerly({}, lookups))
        if step.leaves_gradients:
            if self._all_held:
                for name, key in zip(self.backward.dense, self._gradient_names, strict=True):
                    parameters[name].grad = results[key]  # type: ignore[assignment]
            else:
                gradients = {key: cast(Tensor, results[key]) for key in self._gradient_names} | sparse
                for key, gradient in gradients.items():
                    leave_gradient(parameters[key.removesuffix(".grad")], gradient, step.names)
        return results | sparse if sparse else results

    # --- making

    def _apart(self) -> Program:
        if self._program is None:
            graph = self.backward.graph
            self._program = compiled(graph, graph.program) if self._step.compile else graph.program()
        return self._program

    def _join(self) -> None:
        step, backward = self._step, self.backward
        front, between = backward.graph, self._between
        keep = {*backward.outputs, *self.key.gradients, *backward.rows}
        if step.leaves_gradients:
            keep |= {f"{name}.grad" for name in backward.dense}
        examples = self._gradient_examples()
        dense = {name: example for name, example in examples.items() if step.parameters[name] in step.names}
        update = step.captured_update(dense) if dense else None
        if dense and update is None:
            if step.refused_update is not None:
                self.key = replace(self.key, numbers=None)  # the optimizers read them directly
            return
        self.graph, rest = front, update
        if between is not None:
            self.graph = join(front, between, [name for name in keep if name not in between.outputs])
            rest = between if update is None else join(between, update, keep)
        if update is not None:
            self.graph = drop_dead_nodes(join(self.graph, update, keep))
        # Two programs: forward and backward, also by Inductor or as a CUDA graph, and the rest. An interrupt ends a
        # wait for an expert or a server at once, and the gate comes before ``between``, whose norm would spread one NaN
        # over all gradients. Else one, which costs less to call.
        replays = not step.compile and can_replay(front)
        self._rest = Program("", lambda: ())
        if not (step.compile or replays or step.gate or any(crossing_of(node) for node in front.fx.nodes)):
            self._whole = self.graph.program()
            return
        if rest is not None:
            self._rest, self._yielded = rest.program(), rest.outputs
            self._rest_reads = [binding.name for binding in rest.bindings if binding.bound is None]
        if replays:
            read_at_once = [name in self._rest_reads and name not in self.key.gradients for name in front.outputs]
            self._program = Replayed(self._apart(), front, read_at_once)

    def _gradient_examples(self) -> dict[str, Tensor]:
        """Return an example of each dense gradient, by the parameter's name."""
        graph, names = self.backward.graph, self.backward.dense
        examples = dict(zip(graph.outputs, graph.examples(), strict=True))
        return {name: cast(Tensor, examples[f"{name}.grad"]) for name in names}

    def _trace_between(self) -> Graph | None:
        between, backward = self._step.between, self.backward
        if between is None:
            return None
        if backward.lookups:
            raise SparseGradients(
                f"the table {backward.lookups[0][0]!r} has a sparse gradient, which between cannot see; use backward() "
                "and update(), or sparse=False"
            )
        names = self._gradient_names
        sources = [TraceSource(f"{name}.grad", example) for name, example in self._gradient_examples().items()]

        def body(values: Sequence[Tensor], recorder: TraceRecorder) -> list[object]:
            recorder.phase = "between"
            with torch.no_grad():
                gradients = between(dict(zip(backward.dense, values, strict=True)))
            return [gradients[name] for name in backward.dense]

        return build(body, sources, names)


def leave_gradient(parameter: Tensor, gradient: Tensor, held: Container[Tensor]) -> None:
    """Set ``parameter.grad``; where no optimizer's ``zero_grad`` clears it, add to it."""
    if parameter.grad is None or parameter in held:
        parameter.grad = gradient
    else:
        accumulate(parameter, gradient)


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``parameter.grad`` as autograd does."""
    assert parameter.grad is not None
    with torch.no_grad():
        if parameter.grad.is_sparse and not gradient.is_sparse:
            parameter.grad = gradient + parameter.grad
        else:
            parameter.grad += gradient


def _fitted(graph: Graph, budget_bytes: int) -> Graph:
    try:
        return graph.recompute(budget_bytes)
    except ValueError as error:
        raise CaptureError(f"the step does not fit its activation_budget: {error}") from error


def _own_memory(graph: Graph) -> bool:
    """Return True if every gradient that the graph yields has been computed in it, and is not a view of an input."""
    effects = graph.effects()
    outputs = zip(graph.outputs, cast("Sequence[fx.Node]", graph.fx.output_node().args[0]), strict=True)
    return all(effects.root[node].op == "call_function" for name, node in outputs if name.endswith(".grad"))


class _Lost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, anchor: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[None, None]:
        raise CaptureError(
            "a gradient reaches a tensor that the model kept from an earlier step, which ran as a graph and recorded "
            "no history; detach() it where it is kept, or use engine='tape'"
        )


def _without_history(value: Tensor) -> Tensor:
    """Return ``value``, which the model keeps, as a tensor that raises ``CaptureError`` if a gradient arrives.

    On the tape it would keep the history of its step. A graph has none, and its gradient must not be silently missing.
    """
    with torch.enable_grad():
        return _Lost.apply(value, torch.empty(0, requires_grad=True, device="cpu"))  # type: ignore[no-any-return,no-untyped-call]


# Tensors that a graph writes to must share no memory with others that it is given.
#
# A graph treats its inputs as separate tensors, as during tracing, and orders its operations accordingly. Dynamo does
# not guard against tensors that share memory later: two views of one batch, a buffer that is given another's ``.data``.
# Such a step is refused.


_Range = tuple[int, int]


def written_inputs(graph: OperationGraph) -> set[str]:
    """Return the names of the inputs that a graph changes."""
    effects = graph.effects()
    pairs = zip(graph.placeholders, graph.bindings, strict=True)
    return {binding.name for node, binding in pairs if effects.writers.get(effects.root[node])}


class SharedMemory:
    """The memory of a program's arguments, of which it writes to those named ``written``."""

    def __init__(self, arguments: Arguments, written: Collection[str]) -> None:
        sources, first = arguments.sources, dict[int, int]()
        for position, index in enumerate(arguments.place):
            if index is not None and _has_memory(sources[index].value):
                first.setdefault(index, position)
        order = sorted(first, key=lambda index: not sources[index].state)  # bound ones first
        self._pick = picker([first[index] for index in order])
        self._written = [sources[index].name in written for index in order]
        self._bound = sum(sources[index].state for index in order)
        self._places: list[int] | None = None
        self._ranges: list[_Range] = []

    def check(self, args: Sequence[object]) -> None:
        """Raise if an argument that is written to shares memory with another one.

        Raises:
            CaptureError: it does; nothing has happened.
        """
        tensors: Sequence[Tensor] = self._pick(args)  # type: ignore[assignment]
        bound, free = tensors[: self._bound], tensors[self._bound :]
        places = list(map(Tensor.data_ptr, bound))
        if places != self._places:
            self._places, self._ranges = places, list(map(_range, bound))
        if ranges_overlap([*self._ranges, *map(_range, free)], self._written):
            raise CaptureError(
                "a tensor that the step changes in place shares memory with another of its inputs (views of one "
                "tensor in the batch, or '.data' of one buffer given to another), which a graph would not notice; "
                "clone one of them, or use engine='tape'"
            )


def ranges_overlap(ranges: Sequence[_Range], written: Sequence[bool]) -> bool:
    """Return True if two of the ranges overlap, of which one at least is written to."""
    last = last_written = 0
    for (start, end), is_written in sorted(zip(ranges, written, strict=True)):
        if start < end and (start < last_written or (is_written and start < last)):
            return True
        last = max(last, end)
        if is_written:
            last_written = max(last_written, end)
    return False


def _range(tensor: Tensor) -> _Range:
    """Return the first byte of a tensor and the one after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if not tensor.numel():
        return start, start
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return start, start + tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in steps))


def _has_memory(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.device.type != "meta"
