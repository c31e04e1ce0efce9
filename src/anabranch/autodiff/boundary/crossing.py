"""A boundary: one differentiable operation, written once, at which the tape or the graph leaves this process.

::

    inputs ──┐                                                     ┌──> outputs
    entry ───┴──> [ forward: goes to the far side, and comes back ]┴╌╌> state ╌╌┐
                                                                                ╎ belongs to this run alone
    input gradients <── [ backward: goes there with the gradients ] <── output gradients

The tape records ``cross`` as one node of autograd's graph. While a tracer captures a graph, ``cross`` goes nowhere: the
tracer requests the forms of the outputs and writes two nodes, forward and backward, that call the same two methods
whenever the graph runs. The entry token requires a gradient, so the remote side learns of its gradients even where no
input wants one. It stands for the parameters there: a sweep that does not reach it, ``torch.autograd.grad(y, x)``,
changes nothing there, and what is frozen has none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from anabranch.autodiff.grad_sessions import boundary_entry, hold_on_tape
from anabranch.autodiff.isolated import IsolatedCall
from anabranch.errors import CaptureError

# What a second call may answer otherwise than a first one of the same step.
_CHANGING = frozenset({"expert", "mixture"})

Tensors: TypeAlias = "Sequence[Tensor | None]"
"""Inputs, outputs or gradients of a boundary; ``None`` in place of one that is not there."""
_Answer: TypeAlias = "tuple[list[Tensor | None], Sequence[int]]"


@dataclass(slots=True)
class Crossed:
    """The result of a crossing.

    Attributes:
        outputs: in their own memory, not shared with an input.
        state: the values that backward needs in addition to the inputs; freed when backward has run or is impossible.
        no_gradient: which outputs have none.
        fresh: the outputs are known to be in newly allocated contiguous memory, so no check is needed.
        reads_inputs: backward reads the inputs, which are saved for it.
        differentiable_again: backward is itself made of crossings and torch's operations, to be recorded.
    """

    outputs: Sequence[Tensor]
    state: object = None
    no_gradient: Sequence[int] = ()
    fresh: bool = False
    reads_inputs: bool = True
    differentiable_again: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, dtype and device of an output, known before anything has been sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = True


class Boundary(Protocol):
    """One kind of boundary at one place of a model.

    It holds nothing of a run, for several may be in progress: what belongs to one is in the state that forward returns.

    Attributes:
        kind: what is on the remote side: ``"expert"``, ``"table"``.
        name: which one, for graphs and errors.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    def forward(self, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        """Run the remote forward. ``wants``: which inputs require a gradient; ``None``: there will be no backward."""

    def backward(self, state: object, inputs: Tensors, gradients: Tensors, *, updates: bool) -> Tensors:
        """Return a gradient for each input. ``None`` is not a gradient, on both sides. Without ``updates`` nothing
        there is to change: ``torch.autograd.grad`` accumulates into no parameter.
        """

    def forms(self, inputs: Tensors) -> Sequence[Form]:
        """Return the outputs' forms for inputs like these, of which only shape, dtype and device may be read."""


class Tracer:
    """Observes a run, in which boundaries are not crossed: here, only the forms of their outputs are requested. A graph
    capture, which writes them down, and a dry run, which answers them, derive from it.

    Attributes:
        captures: a graph is made: values are not known yet.
        failure: the error of a call that TorchDynamo keeps whole, of which its own error only says that there was one.
    """

    captures = True
    failure: Exception | None = None

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Run a block that is not traced."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), traced_by(None):
            yield

    def entry(self) -> Tensor:
        """Return a leaf that requires a gradient, towards which the captured backward is to sweep."""
        return torch.empty((), requires_grad=True, device="cpu")

    def forward(self, boundary: Boundary, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        """Return outputs of a crossing."""
        with self.outside():
            forms = boundary.forms(inputs)
        outputs = [torch.empty(form.shape, dtype=form.dtype, device=form.device) for form in forms]
        return Crossed(outputs, None, [i for i, form in enumerate(forms) if not form.differentiable])

    def backward(
        self,
        boundary: Boundary,
        state: object,
        inputs: Tensors,
        gradients: Tensors,
        wants: Sequence[bool],
        updates: bool,
    ) -> Tensors:
        """Return gradients of its inputs."""
        what = f"{boundary.kind} {boundary.name!r}"
        raise CaptureError(f"the loss itself differentiates through {what}, which a graph cannot; use engine='tape'")


class _OfThread(threading.local):
    tracer: Tracer | None = None  # a captured backward runs on the thread that captures
    answers: Answers | None = None
    first: FirstForward | None = None
    depth = 0  # boundaries in progress: crossings inside one are part of its answer


_own = _OfThread()


@contextmanager
def _with(**own: object) -> Iterator[None]:
    """Let the calling thread have these until the block ends."""
    before = {name: getattr(_own, name) for name in own}
    vars(_own).update(own)
    try:
        yield
    finally:
        vars(_own).update(before)


def traced_by(tracer: Tracer | None) -> AbstractContextManager[None]:
    """Return a block in which boundaries are written down by ``tracer``, if there is one, and not crossed."""
    return _with(tracer=tracer)


def current_tracer() -> Tracer | None:
    """Return the tracer that captures a graph on this thread."""
    return _own.tracer


def outside_tracing() -> AbstractContextManager[None]:
    """Return a block whose operations are executed even during a capture, to request facts for the graph."""
    tracer = _own.tracer
    return nullcontext() if tracer is None else tracer.outside()


def cross(boundary: Boundary, *inputs: Tensor | None, entry: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the outputs of ``boundary`` for ``inputs``, connected to them on the tape, or in the graph that is
    captured.

    >>> from anabranch.autodiff.boundary.crossing import RecordedBoundary
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
            every recording session's sweep does. A ``Parameter`` stands for those there: they may be frozen.

    Raises:
        CaptureError: a tracer other than this package traces the model.
        ValueError: it is called inside ``torch.func``.
    """
    if torch.compiler.is_dynamo_compiling():  # ``whole_calls`` hides from it those that a graph can have
        raise CaptureError(f"{boundary.kind} {boundary.name!r} cannot be part of a graph; use engine='tape'")
    tracer = _own.tracer
    if tracer is None:
        for value in inputs:
            if isinstance(value, FakeTensor):
                raise CaptureError(
                    f"{boundary.kind} {boundary.name!r} is across a boundary, which a tracer other than anabranch's "
                    "cannot record; run the model on the tape, or capture it with ab.capture or an Executor"
                )
    if torch._C._are_functorch_transforms_active():
        what = f"{boundary.kind} {boundary.name!r} is across a boundary, which torch.func (grad, vjp, vmap)"
        raise ValueError(f"{what} cannot transform; use torch.autograd.grad, and a batch in place of vmap")
    recorded = torch.is_grad_enabled()
    if isinstance(entry, nn.Parameter) and not entry.requires_grad:  # frozen there
        entry, recorded = None, recorded and any(value is not None and value.requires_grad for value in inputs)
    elif recorded and (entry is None or isinstance(entry, nn.Parameter)):
        entry = boundary_entry(entry) if tracer is None else tracer.entry()
    if not recorded:
        return tuple((run_forward if tracer is None else tracer.forward)(boundary, inputs, None).outputs)
    return cast(tuple[Tensor, ...], _Crossing.apply(entry, boundary, tracer, *inputs))  # type: ignore[no-untyped-call]


class _Crossing(torch.autograd.Function):
    """The node of the tape; see the module's drawing."""

    @staticmethod
    def forward(
        ctx: Any, entry: Tensor | None, boundary: Boundary, tracer: Tracer | None, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.wants = ctx.needs_input_grad[3:]
        ctx.boundary, ctx.tracer, ctx.answers = boundary, tracer, current_answers()
        crossed = (run_forward if tracer is None else tracer.forward)(boundary, inputs, ctx.wants)
        ctx.reads_inputs = crossed.reads_inputs
        if crossed.reads_inputs:
            ctx.save_for_backward(*inputs)
        ctx.state = [None] if crossed.state is None else hold_on_tape(crossed.state)
        ctx.differentiable_again = crossed.differentiable_again
        if crossed.no_gradient:
            ctx.mark_non_differentiable(*(crossed.outputs[index] for index in crossed.no_gradient))
        # Distinguishes "no gradient" from zeros: an unused output costs the remote side nothing.
        ctx.set_materialize_grads(False)
        return tuple(crossed.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[object, ...]:
        if ctx.differentiable_again:
            return None, None, None, *_Crossing.backward_once(ctx, *gradients)
        with torch.no_grad():
            answer = _Crossing.backward_once(ctx, *gradients)
        if torch.is_grad_enabled():
            # Not torch's once_differentiable: where the gradients that come here do not require grad, it lets those
            # that are returned pass for constants, and a penalty loses this part in silence; as it does in a sweep
            # towards given tensors, unless the error lies on the way to these.
            ways = [value for value in (*ctx.saved_tensors, *gradients) if value is not None and value.requires_grad]
            once: Any = torch._C._functions.DelayedError(
                f"the gradient of {ctx.boundary.kind} {ctx.boundary.name!r} cannot be differentiated again: second "
                "derivatives do not cross a boundary; leave it out of the penalty",
                len(answer) + len(ways),
            )
            answer = once(*(value if value is None else value.requires_grad_() for value in answer), *ways)
        return None, None, None, *answer[: len(ctx.wants)]

    @staticmethod
    def backward_once(ctx: Any, *gradients: Tensor | None) -> Tensors:
        # An error if the graph has been freed, which is none for who saved nothing.
        inputs = ctx.saved_tensors if ctx.reads_inputs else (None,) * len(ctx.wants)
        updates = ctx.needs_input_grad[0] and reaches(ctx.next_functions[0][0])
        if not ctx.state:
            what = f"the saved tensors for the backward of {ctx.boundary.kind} {ctx.boundary.name!r} have been freed"
            raise RuntimeError(f"{what}: its session ended, or its backward has run without retain_graph=True")
        (state,) = ctx.state
        if state is not None and not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.state.clear()
        if (tracer := cast("Tracer | None", ctx.tracer)) is not None:
            return tracer.backward(ctx.boundary, state, inputs, gradients, ctx.wants, updates)
        return run_backward(ctx.boundary, state, inputs, gradients, ctx.wants, answers=ctx.answers, updates=updates)


def reaches(entry: Any) -> bool:
    """Return True if the sweep in progress goes to the node of a leaf, too."""
    try:  # private: needs_input_grad says only that an input requires a gradient, not that this sweep wants it
        return bool(torch._C._will_engine_execute_node(entry))
    except RuntimeError:  # its gradient is to be returned: a session's sweep, or a capture's, which go to tokens
        return True


def run_forward(boundary: Boundary, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
    """Cross, forward; the outputs, in order, have their own memory, which their readers may reuse."""
    outermost = not _own.depth
    answers = _own.answers if outermost else None
    if answers is not None and answers.replaying:
        outputs, no_gradient = answers.replay((boundary.kind, boundary.name, "forward"), inputs)
        return Crossed(cast("list[Tensor]", outputs), None, no_gradient, fresh=True)
    first = _own.first if outermost and boundary.kind in _CHANGING else None
    if first is not None and (answer := first.answer()) is not None:
        return answer
    _own.depth += 1
    try:
        crossed = boundary.forward(inputs, wants)
    finally:
        _own.depth -= 1
    if not crossed.fresh:
        crossed.outputs = cast("list[Tensor]", in_own_memory(crossed.outputs, inputs))
    if answers is not None:
        key = boundary.kind, boundary.name, "forward"
        answers.note(key, inputs, crossed.outputs, list(crossed.no_gradient))
    if first is not None:
        first.note(crossed)
    return crossed


def run_backward(
    boundary: Boundary,
    state: object,
    inputs: Tensors,
    gradients: Tensors,
    wants: Sequence[bool],
    *,
    answers: Answers | None = None,
    updates: bool = True,
) -> list[Tensor | None]:
    """Cross, backward: gradients for the inputs that require one, in order.

    ``answers`` are those of the forward: autograd runs the backward of CUDA tensors on its own threads.
    """
    if answers is None or not answers.active:
        answers = current_answers()
    if answers is not None and answers.replaying:
        answer, _ = answers.replay((boundary.kind, boundary.name, "backward"), gradients)
        return [gradient if want else None for gradient, want in zip(answer, wants, strict=True)]
    _own.depth += 1
    try:
        sent_back = boundary.backward(state, inputs, gradients, updates=updates)
    finally:
        _own.depth -= 1
    answer = [gradient if want else None for gradient, want in zip(sent_back, wants, strict=True)]
    if answers is not None:
        answers.note((boundary.kind, boundary.name, "backward"), gradients, answer)
    return answer


def in_own_memory(tensors: Tensors, others: Tensors) -> list[Tensor | None]:
    """Return contiguous tensors that share no memory with ``others``."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others if tensor is not None and tensor.numel()}
    return [None if tensor is None else _owned(tensor, taken) for tensor in tensors]


def _owned(tensor: Tensor, taken: set[int]) -> Tensor:
    if tensor.numel() and tensor.untyped_storage().data_ptr() in taken:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


@dataclass(frozen=True, slots=True)
class RecordedBoundary:
    """A boundary that is written as a differentiable function, on its own tape.

    The tape is inside the one node, so the function's recordings (the number of rows, the experts that answered) may
    differ from run to run without affecting the graph around it.

    Attributes:
        kind: as ``Boundary``.
        name: as ``Boundary``.
        function: takes the entry token (``None`` without a backward) and the inputs, returns the outputs. What it
            crosses itself it gives the entry to.
        forms: as ``Boundary.forms``.
    """

    kind: str
    name: str
    function: Callable[..., Sequence[Tensor]]
    forms: Callable[[Tensors], Sequence[Form]]

    def forward(self, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        """Run the function, recording it if a gradient may come."""
        if wants is None:
            with torch.no_grad():
                return Crossed(self.function(None, *inputs))
        entry = torch.empty((), requires_grad=True, device="cpu")
        detached = [None if value is None else value.detach() for value in inputs]
        places = [index for index, want in enumerate(wants) if want]
        leaves = [cast(Tensor, detached[place]).requires_grad_() for place in places]
        with torch.enable_grad():
            outputs = self.function(entry, *detached)
        call = IsolatedCall([entry, *leaves], outputs, [-1, *places], len(inputs))
        dead = [index for index, output in enumerate(call.outputs) if output is None]
        return Crossed([output.detach() for output in outputs], call, dead)

    def backward(self, state: object, inputs: Tensors, gradients: Tensors, *, updates: bool) -> list[Tensor | None]:
        """Sweep the function's own tape."""
        assert isinstance(state, IsolatedCall)
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        answer: list[Tensor | None] = [None] * len(inputs)
        if not updates:  # not towards the entry
            state = IsolatedCall(state.leaves[1:], state.outputs, state.places[1:], state.arity)
        for place, gradient in zip(state.places, state.backward(gradients, retain=retain), strict=True):
            if place >= 0:
                answer[place] = gradient
        return answer


# --- answers of one run, given again in a second run of the same step
#
# They belong to a thread, and are carried to the threads that help it: crossings that another executor, or a server in
# this process, makes at the same time are not part of this step.


class AnswersDiffer(Exception):
    """A second run asks a boundary for something else than the first one did."""


class Answers:
    """The answers of boundaries in one run, replayed in a second run that must have no effect on the remote side.

    A request is identified by its boundary and direction and by the bits of the tensors sent; concurrent calls may
    arrive in any order.

    Attributes:
        active: whether a block notes or gives them now.
        replaying: whether they are given.
    """

    def __init__(self) -> None:
        self.active = self.replaying = False
        self._noted: list[tuple[tuple[str, ...], list[Tensor | None], _Answer]] = []
        self._left = self._noted
        self._lock = threading.Lock()

    @contextmanager
    def noted(self, *, replaying: bool = False) -> Iterator[None]:
        """Note the crossings of a block."""
        self.active, self.replaying = True, replaying
        try:
            with replay_from(self):
                yield
        finally:
            self.active = False

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Answer the crossings of a block with the recorded answers; nothing is sent.

        Raises:
            AnswersDiffer: it requests something else, or for less.
        """
        self._left = list(self._noted)
        with self.noted(replaying=True):
            yield
        if self._left:
            raise AnswersDiffer("the second run crosses fewer boundaries")

    def note(self, key: tuple[str, ...], request: Tensors, answer: Tensors, no_gradient: Sequence[int] = ()) -> None:
        """Keep the answer to a request to the boundary and direction ``key``."""
        entry = key, _copied(request), (_copied(answer), no_gradient)
        with self._lock:
            self._noted.append(entry)

    def replay(self, key: tuple[str, ...], request: Tensors) -> _Answer:
        """Return the answer that was kept, and which outputs have no gradient."""
        with self._lock:
            for index, (of, before, (answer, no_gradient)) in enumerate(self._left):
                if of == key and len(request) == len(before) and all(map(_same_bits, request, before)):
                    del self._left[index]
                    return _copied(answer), no_gradient
        raise AnswersDiffer(f"the second run makes a different request to {key[0]} {key[1]!r}")


class FirstForward:
    """The answers of experts in a forward that will run again: in the second one experts would have changed, by their
    own statistics at least, so that it is given the answers of the first, in their order.

    Attributes:
        again: the second one runs.
    """

    def __init__(self) -> None:
        self._crossed: list[Crossed] = []
        self._left: list[Crossed] = []
        self.again = False

    def current(self, *, again: bool) -> AbstractContextManager[None]:
        """Return a block that keeps the answers to this thread's calls, or answers them ``again``."""
        self.again, self._left = again, list(self._crossed) if again else []
        return _with(first=self)

    def note(self, crossed: Crossed) -> None:
        """Keep an answer."""
        if not self.again:
            self._crossed.append(_with_copies(crossed))

    def answer(self) -> Crossed | None:
        """Return the next answer; ``None`` in the first forward, or for a call that the first one did not make."""
        return _with_copies(self._left.pop(0)) if self._left else None


def _with_copies(crossed: Crossed) -> Crossed:
    return replace(crossed, outputs=[output.clone() for output in crossed.outputs])


def _copied(values: Tensors) -> list[Tensor | None]:
    return [None if value is None else value.detach().clone() for value in values]


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bool((torch.eq(one, other) | (torch.isnan(one) & torch.isnan(other))).all())


def current_answers() -> Answers | None:
    """Return those of the calling thread; ``None`` without any, and in the middle of a boundary."""
    return None if _own.depth else _own.answers


def runs_again() -> bool:
    """Return True in the second run of such a forward on the calling thread."""
    return _own.first is not None and _own.first.again


def replay_from(answers: Answers | None) -> AbstractContextManager[None]:
    """Return a block in which the calling thread's crossings are noted or answered."""
    return _with(answers=answers)
