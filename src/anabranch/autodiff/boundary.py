"""A boundary: one differentiable operation, written once, at which the tape or the graph leaves this process.

::

    inputs ──┐                                                     ┌──> outputs
    entry ───┴──> [ forward: goes to the far side, and comes back ]┴╌╌> state ╌╌┐
                                                                                ╎ belongs to this run alone
    input gradients <── [ backward: goes there with the gradients ] <── output gradients

The tape records ``cross`` as one node of autograd's graph. While a tracer captures a graph, ``cross`` goes nowhere: the
tracer asks for the forms of the outputs and writes two nodes, forward and backward, that call the same two methods
whenever the graph runs. The entry token requires a gradient, so the far side learns of its gradients even where no
input wants one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx, once_differentiable

from anabranch.autodiff import opaque
from anabranch.autodiff.answers_of_thread import answered_by, answers_of_thread, inside_a_boundary
from anabranch.autodiff.isolated import IsolatedCall
from anabranch.autodiff.sessions import boundary_entry, hold_on_tape
from anabranch.errors import CaptureError

__all__ = [
    "Answers",
    "AnswersDiffer",
    "Boundary",
    "Crossed",
    "Form",
    "RecordedBoundary",
    "Tracer",
    "cross",
    "current_tracer",
    "outside_tracing",
    "run_backward",
    "run_forward",
    "traced_by",
]


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, dtype and device of an output, known before anything has been sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = True


@dataclass(slots=True)
class Crossed:
    """The result of a crossing.

    Attributes:
        outputs: memory of their own, not shared with an input.
        state: what backward needs beside the inputs; let go when backward has run, or when nobody can ask for it.
        no_gradient: which outputs have none.
        fresh: the outputs are known to lie in contiguous memory that was made for them: nobody has to look.
    """

    outputs: Sequence[Tensor]
    state: object = None
    no_gradient: Sequence[int] = ()
    fresh: bool = False


class Boundary(Protocol):
    """One kind of boundary at one place of a model.

    It holds nothing of a run, for several may be under way: what belongs to one is in the state that forward returns.

    Attributes:
        kind: what lies on the far side: ``"expert"``, ``"table"``.
        name: which one, for graphs and errors.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    def forward(self, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        """Goes there. ``wants`` says which inputs want a gradient; ``None``: there will be no backward."""

    def backward(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Return a gradient for each input. ``None`` is no gradient, on both sides."""

    def forms(self, inputs: Sequence[Tensor | None]) -> Sequence[Form]:
        """Return the outputs' forms for inputs like these, of which only shape, dtype and device may be read."""


class Tracer(Protocol):
    """The interface of a graph capture, or of a rehearsal, which looks at a run and captures nothing.

    Attributes:
        captures: a graph is made: values are not known yet.
    """

    @property
    def captures(self) -> bool: ...

    def entry(self) -> Tensor:
        """Return a leaf that requires a gradient, towards which the captured backward is to sweep."""

    def forward(self, boundary: Boundary, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        """Write the forward node."""

    def backward(
        self,
        boundary: Boundary,
        state: object,
        inputs: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
        wants: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Write the backward node."""

    def outside(self) -> AbstractContextManager[None]:
        """Return a block that is not traced."""


class _Capturing(threading.local):
    """The tracer of this thread; a captured backward runs on the thread that captures."""

    tracer: Tracer | None = None


_capturing = _Capturing()


@contextmanager
def traced_by(tracer: Tracer | None) -> Iterator[None]:
    """Boundaries that are crossed in the block are written down by ``tracer``, if there is one, and not crossed."""
    before, _capturing.tracer = _capturing.tracer, tracer
    try:
        yield
    finally:
        _capturing.tracer = before


def current_tracer() -> Tracer | None:
    """Return the tracer that captures a graph on this thread."""
    return _capturing.tracer


def outside_tracing() -> AbstractContextManager[None]:
    """Return a block whose operations are real ones even during a capture: asking what a graph must know."""
    tracer = _capturing.tracer
    return nullcontext() if tracer is None else tracer.outside()


def cross(boundary: Boundary, *inputs: Tensor | None, entry: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the outputs of ``boundary`` for ``inputs``, connected to them on the tape, or in the graph that is
    captured.

    >>> def positive(entry, x):  # how many there are is nobody's business on this side
    ...     return [x[x > 0].sum()[None]]
    >>> form = Form((1,), torch.float32, torch.device("cpu"))
    >>> far = RecordedBoundary("example", "positive", positive, lambda inputs: [form])
    >>> x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    >>> (total,) = cross(far, x)
    >>> total.sum().backward()
    >>> total.item(), x.grad
    (4.0, tensor([1., 0., 1.]))

    Args:
        boundary: where to.
        inputs: tensors, or ``None`` where there is none.
        entry: a leaf that requires a gradient, if the caller has one that its sweep will reach; by default one that
            every recording session's sweep does.

    Raises:
        CaptureError: somebody else than this package traces the model.
    """
    if torch.compiler.is_dynamo_compiling():
        return tuple(opaque.call(boundary.handle, inputs, {}))  # type: ignore[attr-defined]
    tracer = _capturing.tracer
    if tracer is None:
        for value in inputs:
            if isinstance(value, FakeTensor):
                raise CaptureError(
                    f"{boundary.kind} {boundary.name!r} lies across a boundary, which a tracer other than anabranch's "
                    "cannot record; run the model on the tape, or capture it with ab.capture or an Executor"
                )
    if not torch.is_grad_enabled():
        return tuple((run_forward if tracer is None else tracer.forward)(boundary, inputs, None).outputs)
    if entry is None:
        entry = boundary_entry() if tracer is None else tracer.entry()
    return cast(tuple[Tensor, ...], _Crossing.apply(entry, boundary, tracer, *inputs))  # type: ignore[no-untyped-call]


class _Crossing(torch.autograd.Function):
    """The node of the tape; see the module's drawing."""

    @staticmethod
    def forward(
        ctx: _CrossingContext, entry: Tensor, boundary: Boundary, tracer: Tracer | None, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.wants = ctx.needs_input_grad[3:]
        ctx.boundary, ctx.tracer, ctx.answers = boundary, tracer, answers_of_thread()
        crossed = (run_forward if tracer is None else tracer.forward)(boundary, inputs, ctx.wants)
        ctx.save_for_backward(*inputs)  # type: ignore[arg-type]
        ctx.held = hold_on_tape(crossed.state)
        ctx.mark_non_differentiable(*(crossed.outputs[index] for index in crossed.no_gradient))
        # Tells "no gradient" from zeros: an output that nobody used costs the far side nothing.
        ctx.set_materialize_grads(False)
        return tuple(crossed.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CrossingContext, *gradients: Tensor | None) -> tuple[object, ...]:
        inputs = ctx.saved_tensors  # an error if the graph has been freed
        if not ctx.held:
            raise RuntimeError(
                f"what was kept for the backward of {ctx.boundary.kind} {ctx.boundary.name!r} has been freed: its "
                "session ended, or its backward has run without retain_graph=True"
            )
        (state,) = ctx.held
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.held.clear()
        if ctx.tracer is not None:
            found = ctx.tracer.backward(ctx.boundary, state, inputs, gradients, ctx.wants)
        else:
            found = run_backward(ctx.boundary, state, inputs, gradients, ctx.wants, answers=ctx.answers)
        return None, None, None, *found


class _CrossingContext(FunctionCtx):
    boundary: Boundary
    tracer: Tracer | None
    answers: Answers | None
    wants: tuple[bool, ...]
    held: list[object]
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor | None, ...]


def run_forward(boundary: Boundary, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
    """Crosses, forward; the outputs, in order, have memory of their own, which their readers may reuse."""
    answers = answers_of_thread()
    if answers is not None and answers.replaying:
        return answers.replay_forward(boundary, inputs)
    with inside_a_boundary():
        crossed = boundary.forward(inputs, wants)
    if not crossed.fresh:
        taken = _memory_of(inputs)
        crossed.outputs = [_owned(output, taken) for output in crossed.outputs]
    if answers is not None:
        answers.note_forward(boundary, inputs, crossed)
    return crossed


def run_backward(
    boundary: Boundary,
    state: object,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    wants: Sequence[bool],
    *,
    answers: Answers | None = None,
) -> list[Tensor | None]:
    """Crosses, backward: gradients for the inputs that want one, in memory of their own, in order.

    ``answers`` are those of the forward: autograd runs the backward of CUDA tensors on threads of its own.
    """
    if answers is None or not answers.active:
        answers = answers_of_thread()
    if answers is not None and answers.replaying:
        return answers.replay_backward(boundary, gradients, wants)
    with inside_a_boundary():
        found = boundary.backward(state, inputs, gradients)
    taken = _memory_of([*inputs, *gradients])
    owned = [
        _owned(gradient, taken) if want and gradient is not None else None
        for gradient, want in zip(found, wants, strict=True)
    ]
    if answers is not None:
        answers.note_backward(boundary, gradients, owned)
    return owned


class AnswersDiffer(Exception):
    """A second run asks a boundary for something else than the first one did."""


class Answers:
    """The answers of boundaries in one run, to be given again in a second run that must leave no trace on the far side.

    A question is known by the boundary, the direction and the bits of the tensors that go there; calls at once may come
    in any order.

    Attributes:
        active: whether a block notes or gives them now.
        replaying: whether they are given.
    """

    def __init__(self) -> None:
        self.active = self.replaying = False
        self._kept: dict[tuple[str, str, str], list[tuple[list[Tensor | None], object]]] = {}
        self._left: dict[tuple[str, str, str], list[tuple[list[Tensor | None], object]]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the crossings of a block."""
        with self._during(replaying=False):
            yield

    @contextmanager
    def given_again(self) -> Iterator[None]:
        """Answer a block with what was noted; nothing is crossed.

        Raises:
            AnswersDiffer: it asks for something else, or for less.
        """
        self._left = {key: list(kept) for key, kept in self._kept.items()}
        with self._during(replaying=True):
            yield
        if any(self._left.values()):
            raise AnswersDiffer("the second run crosses fewer boundaries")

    @contextmanager
    def _during(self, *, replaying: bool) -> Iterator[None]:
        self.active, self.replaying = True, replaying
        try:
            with answered_by(self):
                yield
        finally:
            self.active = False

    def note_forward(self, boundary: Boundary, inputs: Sequence[Tensor | None], crossed: Crossed) -> None:
        """Keep an answer."""
        outputs = [output.detach().clone() for output in crossed.outputs]
        self._note((boundary.kind, boundary.name, "forward"), inputs, (outputs, list(crossed.no_gradient)))

    def note_backward(
        self, boundary: Boundary, gradients: Sequence[Tensor | None], found: Sequence[Tensor | None]
    ) -> None:
        """Keep the gradients that came back."""
        self._note((boundary.kind, boundary.name, "backward"), gradients, _copied(found))

    def _note(self, key: tuple[str, str, str], asked: Sequence[Tensor | None], answer: object) -> None:
        with self._lock:
            self._kept.setdefault(key, []).append((_copied(asked), answer))

    def replay_forward(self, boundary: Boundary, inputs: Sequence[Tensor | None]) -> Crossed:
        """Return the answer that was kept."""
        kept = self._again((boundary.kind, boundary.name, "forward"), inputs)
        outputs, no_gradient = cast("tuple[list[Tensor], list[int]]", kept)
        return Crossed([output.clone() for output in outputs], None, no_gradient, fresh=True)

    def replay_backward(
        self, boundary: Boundary, gradients: Sequence[Tensor | None], wants: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients that were kept."""
        kept = cast("list[Tensor | None]", self._again((boundary.kind, boundary.name, "backward"), gradients))
        return [value.clone() if want and value is not None else None for value, want in zip(kept, wants, strict=True)]

    def _again(self, key: tuple[str, str, str], asked: Sequence[Tensor | None]) -> object:
        with self._lock:
            left = self._left.get(key, [])
            for index, (before, answer) in enumerate(left):
                if _same_bits(asked, before):
                    del left[index]
                    return answer
        raise AnswersDiffer(f"the second run asks {key[0]} {key[1]!r} for something else")


def _copied(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if value is None else value.detach().clone() for value in values]


def _same_bits(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif (
            one.shape != other.shape
            or one.dtype != other.dtype
            or not bool((torch.eq(one, other) | (torch.isnan(one) & torch.isnan(other))).all())
        ):
            return False
    return True


def _memory_of(tensors: Sequence[Tensor | None]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None and tensor.numel()}


def _owned(tensor: Tensor, taken: set[int]) -> Tensor:
    if tensor.numel() and tensor.untyped_storage().data_ptr() in taken:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class RecordedBoundary:
    """A boundary that is written as a differentiable function, on a tape of its own.

    The tape lies behind the one node, so whatever the function records (how many rows, who answered) may differ from
    run to run without the graph around it noticing.

    Attributes:
        kind: as ``Boundary``.
        name: as ``Boundary``.
        function: takes the entry token (``None`` without a backward) and the inputs, returns the outputs. What it
            crosses itself it gives the entry to.
        output_forms: as ``Boundary.forms``.
    """

    kind: str
    name: str
    function: Callable[..., Sequence[Tensor]]
    output_forms: Callable[[Sequence[Tensor | None]], Sequence[Form]]
    handle: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", opaque.handle_of(self))

    def call_whole(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """``cross``, for a call that Dynamo leaves whole."""
        return cross(self, *inputs)

    def forms(self, inputs: Sequence[Tensor | None]) -> Sequence[Form]:
        """Return the outputs' forms."""
        return self.output_forms(inputs)

    def forward(self, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        """Run the function, recording it if a gradient may come."""
        if wants is None:
            with torch.no_grad():
                return Crossed(self.function(None, *inputs))
        entry = torch.empty((), requires_grad=True)
        leaves, given = [entry], list(inputs)
        for index, (value, want) in enumerate(zip(inputs, wants, strict=True)):
            if value is not None:
                given[index] = value.detach()
            if value is not None and want:
                leaves.append(given[index].requires_grad_())  # type: ignore[union-attr]
        with torch.enable_grad():
            outputs = self.function(entry, *given)
        places = [index for index, want in enumerate(wants) if want]
        call = IsolatedCall(leaves, outputs, [-1, *places], len(inputs))
        dead = [index for index, output in enumerate(call.outputs) if output is None]
        return Crossed([output.detach() for output in outputs], call, dead)

    def backward(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Sweeps the function's own tape."""
        assert isinstance(state, IsolatedCall)
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        found: list[Tensor | None] = [None] * len(inputs)
        swept = state.backward(gradients, retain=retain)
        for place, gradient in zip(state.places[1:], swept[1:], strict=True):
            found[place] = gradient
        return found
