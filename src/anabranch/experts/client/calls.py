"""The boundary operation: any number of expert calls, made at once, as one node of autograd's graph.

::

      inputs of all calls ──┐
      entry token ──────────┴──> [ forward ╌╌ state ╌╌ backward ] ──> outputs of the calls that were answered

             forward: all requests at once, one deadline, stragglers cancelled
             backward: all gradients at once, to those that answered; each expert updates itself

``anabranch.autodiff.boundary`` makes the node; the entry token makes the outputs require grad where no input does, so
that the experts still learn.

A backward runs the forward again from the weights that the expert has by then. Where others train it too, it may have
changed since the forward, which is normal and counted. Where this process has changed it itself, the results are not
those of a local module, which is said once.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from anabranch.autodiff.boundary.crossing import Crossed, Form, cross
from anabranch.deadline import Deadline
from anabranch.errors import ActivationsGone, BoundaryError, NonFinite, PeerLost, ProtocolError
from anabranch.experts import wire
from anabranch.experts.compression import check_parts, wire_parts
from anabranch.experts.schema import Schema, first_not_finite
from anabranch.transport import Answer, Client, Outcome, Request
from anabranch.transport.frame import ReplyHeader

__all__ = [
    "Calls",
    "ExpertBoundary",
    "ExpertCall",
    "ask",
    "ask_gradients",
    "call_experts",
    "expect",
    "output_forms",
    "sample_forms",
]

_TICKET_BYTES = 16
_log = logging.getLogger("anabranch")

_changes_by_us: dict[tuple[str, str], int] = {}
"""This process's changes of the expert of an endpoint and a uid: several modules may call one expert."""
_warned: set[tuple[str, str]] = set()
_ours = threading.Lock()
"""Of both: several threads may call one expert, too."""
_OWN_CHANGE = (
    "%s: an output is that of the expert after %d changes, but its gradient that of the expert after %d: %s. Give its "
    "server keep_activations=, a number of rows, and backwards use the forward's own weights and buffers; "
    "statistics().stale_backwards counts those that did not"
)
_BACK = "its server has gone back to an earlier state"
_BY_US = (
    "this process has changed it in between, by the backward of another call or a forward that writes to the expert"
)


def changed_by_us(endpoint: str, uid: str, *, again: bool) -> int:
    """Return how often this process had changed an expert; it has now changed it ``again``."""
    with _ours:
        before = _changes_by_us.get((endpoint, uid), 0)
        _changes_by_us[endpoint, uid] = before + again
        return before


class ExpertCall(msgspec.Struct, eq=False):
    """One call of an expert: its inputs and its outcome.

    Attributes:
        uid: the expert.
        endpoint: its server.
        schema: the expert's schema.
        inputs: the inputs, flat, in the schema's order; freed once sent.
        evaluating: the caller is in eval mode, so the expert runs in eval mode too.
        outputs: the answer; freed once passed on, because the graph must not hold its own outputs.
        answered: true if there was an answer.
        error: the reason for a missing answer; ``None`` without an answer means that the call was cancelled.
        gradient_error: the reason for a missing gradient.
        ticket: names the activations that the server keeps for the backward; empty if it keeps none.
        changes: how often the expert had changed before its forward, and ``changed_by_us`` by this process.
        given: names and versions of the outputs, while others hold them: they explain why a gradient was refused.
    """

    uid: str
    endpoint: str
    schema: Schema
    inputs: Sequence[Tensor | None]
    evaluating: bool = False
    outputs: list[Tensor | None] | None = None
    answered: bool = False
    error: Exception | None = None
    gradient_error: Exception | None = None
    ticket: bytes = b""
    changes: int = 0
    changed_by_us: int = 0
    rows: int = 0
    given: Sequence[tuple[str, weakref.ref[Tensor], int]] = ()

    def __post_init__(self) -> None:
        for tensor in self.inputs:
            if tensor is not None:
                self.rows = tensor.shape[0]
                return


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """Counters of the calls of a ``RemoteExpert`` or a mixture since it was made.

    Attributes:
        calls: calls of experts.
        answered: those that were answered.
        failed: those that failed, by the name of the error.
        cancelled: calls cancelled as stragglers.
        rows: rows sent to each expert, by uid: how evenly the experts are used.
        stale_backwards: backwards of an expert that had changed since their forward.
        avoided: experts that a mixture avoids at the moment.
    """

    calls: int
    answered: int
    failed: dict[str, int]
    cancelled: int
    rows: dict[str, int]
    stale_backwards: int
    avoided: frozenset[str] = frozenset()


class CallCounts:
    """The counters behind ``CallStatistics``; a copy of their module begins its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = self._answered = self._cancelled = self._stale = 0
        self._failed, self._rows = Counter[str](), Counter[str]()

    def __reduce__(self) -> tuple[type[CallCounts], tuple[()]]:
        return CallCounts, ()

    def read(self, avoided: frozenset[str] = frozenset()) -> CallStatistics:
        """Return the counters so far."""
        with self._lock:
            failed, rows = dict(self._failed), dict(self._rows)
            return CallStatistics(self._calls, self._answered, failed, self._cancelled, rows, self._stale, avoided)

    def forward(self, call: ExpertCall) -> None:
        """Count a call whose forward has ended."""
        with self._lock:
            self._calls += 1
            self._rows[call.uid] += call.rows
            self._answered += call.answered
            self._cancelled += not call.answered and call.error is None
        if call.error is not None:
            self.failure(call.error)

    def failure(self, error: Exception) -> None:
        """Count a call, or a backward, that failed."""
        with self._lock:
            self._failed[type(error).__name__] += 1

    def backward(self, call: ExpertCall, changes: int, *, updates: bool) -> None:
        """Count a backward whose gradients are those of the expert as it was after so many changes, and which
        ``updates`` it.
        """
        expert = call.endpoint, call.uid
        ours = changed_by_us(*expert, again=updates)
        if changes == call.changes or not call.rows:
            return
        with self._lock:
            self._stale += 1
        back = changes < call.changes
        with _ours:
            warns = (back or ours > call.changed_by_us) and expert not in _warned
            if warns:
                _warned.add(expert)
        if warns:
            _log.warning(_OWN_CHANGE, call.uid, call.changes, changes, _BACK if back else _BY_US)


class Calls(msgspec.Struct, eq=False):
    """Calls that are made together, and their limits.

    Attributes:
        client: sends the requests.
        calls: the calls.
        forward_timeout: seconds for all of the forward together.
        backward_timeout: seconds for all of the backward together.
        enough: called with the calls after each answer; once it returns true, the others have ``grace`` seconds left.
        grace: seconds; ``None``: as long as the deadline.
        check_backward: called with the calls after the backward; raises if too few gradients arrived.
        finite_only: treats an answer that holds NaN, Inf or a number above 1e18 as missing.
        deadline: the deadline of the forward, if it started before the calls were known.
        counts: where they are counted.
    """

    client: Client
    calls: Sequence[ExpertCall]
    forward_timeout: float
    backward_timeout: float
    enough: Callable[[Sequence[ExpertCall]], bool] | None = None
    grace: float | None = None
    check_backward: Callable[[Sequence[ExpertCall]], None] | None = None
    finite_only: bool = False
    deadline: Deadline | None = None
    counts: CallCounts = msgspec.field(default_factory=CallCounts)


class ExpertBoundary:
    """The boundary of the calls of one forward; see the module's drawing.

    Args:
        kind: ``expert``, or ``experts`` for those of a mixture.
        name: of the expert, or of some.
        ask: goes there: gets the inputs, and whether there will be a backward.
        forms: returns the forms of the outputs for such inputs. Of a mixture's calls these are known only at run time,
            so it is captured around them.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        ask: Callable[[Sequence[Tensor | None], bool], Crossed],
        forms: Callable[[Sequence[Tensor | None]], Sequence[Form]],
    ) -> None:
        self.kind, self.name = kind, name
        self.forms = forms
        self._ask = ask

    def forward(self, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        return self._ask(inputs, wants is not None)

    def backward(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
    ) -> list[Tensor | None]:
        return ask_gradients(cast("Calls", state), inputs, gradients, updates=updates)


def _no_forms(inputs: Sequence[Tensor | None]) -> Sequence[Form]:
    raise AssertionError("a mixture is captured around its calls")


def call_experts(calls: Calls, entry: Tensor | None = None) -> list[list[Tensor | None] | None]:
    """Make the calls; returns the outputs of the answered ones, which in grad mode require grad where they can.

    Raises no error of an expert: it is in ``call.error``, and the caller decides which answers it needs.

    Args:
        calls: the calls to make.
        entry: a leaf towards which the caller's sweep goes, as for ``cross``.
    """
    flat = [tensor for call in calls.calls for tensor in call.inputs]
    name = ", ".join(call.uid for call in calls.calls[:3])
    boundary = ExpertBoundary("experts", name, lambda inputs, keep: ask(calls, keep=keep), _no_forms)
    outputs = iter(cross(boundary, *flat, entry=entry))
    return [
        [None if spec is None else next(outputs) for spec in call.schema.output_specs] if call.answered else None
        for call in calls.calls
    ]


def ask(calls: Calls, *, keep: bool) -> Crossed:
    """Return the answers to all calls, flat; with ``keep``, servers that can keep activations for a backward do so."""
    if keep:
        for call in calls.calls:
            call.ticket = os.urandom(_TICKET_BYTES)
    _ask_forward(calls)
    outputs: list[Tensor] = []
    no_gradient: list[int] = []
    for call in calls.calls:
        calls.counts.forward(call)
        schema = call.schema
        if call.outputs is not None and schema.gives_as_is and schema.gives_gradients:
            outputs += cast("list[Tensor]", call.outputs)
        else:
            for output, spec in zip(call.outputs or (), schema.output_specs, strict=call.answered):
                if output is not None and spec is not None:
                    if not spec.requires_grad:
                        no_gradient.append(len(outputs))
                    outputs.append(output)
        if keep:
            call.given = [
                (f"output {index}", weakref.ref(output), output._version)
                for index, output in enumerate(call.outputs or ())
                if output is not None
            ]
        call.outputs = None
        call.inputs = ()
    # Received into memory made for them, or copied from there to a device.
    return Crossed(outputs, calls, no_gradient, fresh=True)


def output_forms(schema: Schema, rows: int, device: torch.device) -> list[Form]:
    """Return the forms of the outputs of an expert of this schema for ``rows`` rows."""
    return [
        Form((rows, *spec.with_sizes(())), spec.dtype, device, spec.requires_grad)
        for spec in schema.output_specs
        if spec is not None
    ]


def sample_forms(
    client: Client,
    uid: str,
    endpoint: str,
    schema: Schema,
    inputs: Sequence[Tensor | None],
    rows: int,
    deadline: Deadline,
) -> list[Form]:
    """Return the forms of the outputs of an expert whose sizes vary, for inputs like these.

    It is called with zeros in eval mode, which changes nothing there.
    """
    zeros = [
        None if tensor is None or spec is None else spec.zeros(1, spec.sizes_of(tensor.shape))
        for tensor, spec in zip(inputs, schema.inputs, strict=True)
    ]
    call = ExpertCall(uid, endpoint, schema, zeros, evaluating=True)
    (outcome,) = client.gather([_request_of(call)], deadline)
    if isinstance(outcome, Exception):
        raise outcome
    assert outcome is not None, "a single request cannot be cancelled"
    device = next(tensor.device for tensor in inputs if tensor is not None)
    outputs = wire.from_wire(outcome.tensors, schema.output_specs)
    return [
        Form((rows, *output.shape[1:]), spec.dtype, device, spec.requires_grad)
        for output, spec in zip(outputs, schema.output_specs, strict=True)
        if output is not None and spec is not None
    ]


def _ask_forward(calls: Calls) -> None:
    deadline = calls.deadline or Deadline.after(calls.forward_timeout)
    requests = [_request_of(call) for call in calls.calls]
    enough = calls.enough

    def take(outcomes: Sequence[Outcome]) -> None:
        for call, outcome in zip(calls.calls, outcomes, strict=True):
            if outcome is not None and not call.answered and call.error is None:
                _take_outputs(call, outcome, finite_only=calls.finite_only)

    if enough is None:
        take(calls.client.gather(requests, deadline))
        return

    def enough_came(outcomes: Sequence[Outcome]) -> bool:
        take(outcomes)
        return enough(calls.calls)

    grace = deadline.remaining() if calls.grace is None else calls.grace
    take(calls.client.gather(requests, deadline, enough=enough_came, grace=grace))


def _request_of(call: ExpertCall) -> Request:
    schema = call.schema
    as_is = schema.takes_as_is
    return Request(
        call.endpoint,
        wire.FORWARD_EVAL if call.evaluating else wire.FORWARD,
        call.uid,
        cast("Sequence[Tensor]", call.inputs) if as_is else wire.to_wire(call.inputs, schema.inputs),
        payload=call.ticket,
        schema=schema.hash,
        check=expect(schema.output_layout, call.rows),
        role="experts",
    )


def _take_outputs(call: ExpertCall, outcome: Answer | Exception, *, finite_only: bool) -> None:
    if isinstance(outcome, Exception):
        call.error = outcome
        return
    try:
        kept, call.changes, changed = wire.read_answer(outcome.payload)
    except ProtocolError as error:
        # Another one: the traceback of ``error``, and of what it is from, holds this call, a cycle.
        call.error = ProtocolError(str(error), peer=call.endpoint)
        return
    if kept != call.ticket:
        call.ticket = b""
    call.changed_by_us = changed_by_us(call.endpoint, call.uid, again=changed)
    outputs: list[Tensor | None]
    if call.schema.gives_as_is:
        outputs = [*outcome.tensors]
    else:
        outputs = wire.from_wire(outcome.tensors, call.schema.output_specs)
    name = None
    if finite_only:
        names = [f"output {index}" for index in range(len(outputs))]
        name = first_not_finite(outputs, names, moderate=True)
    if name is not None:
        call.error = NonFinite(f"{call.uid}: the module's {name} holds NaN, Inf or a number above 1e18")
        return
    for tensor in call.inputs:
        if tensor is not None:
            if not tensor.is_cpu:
                outputs = [None if output is None else output.to(tensor.device) for output in outputs]
            break
    call.outputs = outputs
    call.answered = True


def ask_gradients(
    calls: Calls, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
) -> list[Tensor | None]:
    """Return the gradients of all inputs, from the experts whose outputs have one; with ``updates`` these update
    themselves.
    """
    answers: list[Tensor | None] = [None] * len(inputs)
    asked: list[_Backward] = []
    position = first = 0
    for call in calls.calls:
        end = first + len(call.schema.inputs)
        if call.answered:
            mine: list[Tensor | None] = []
            for spec in call.schema.output_specs:
                mine.append(None if spec is None or not spec.requires_grad else gradients[position])
                position += spec is not None
            if mine.count(None) < len(mine):
                asked.append(_Backward(call, first, inputs[first:end], mine))
        first = end
    outcomes = _gather_gradients(calls, asked, updates=updates)
    try:
        for backward, outcome in zip(asked, outcomes, strict=True):
            call = backward.call
            try:
                gradients_there, changes = _read_gradients(backward, outcome, finite_only=calls.finite_only)
            except (BoundaryError, ValueError) as error:
                calls.counts.failure(error)
                call.gradient_error = _with_cause(call, error) if isinstance(error, NonFinite) else error
                continue
            calls.counts.backward(call, changes, updates=updates)
            for index, (gradient, like) in enumerate(zip(gradients_there, backward.inputs, strict=True)):
                if gradient is not None and like is not None:
                    answers[backward.first + index] = gradient.to(like.device)
        if calls.check_backward is not None:
            calls.check_backward([backward.call for backward in asked])
    finally:
        # Otherwise a cycle: the graph holds the error, and its traceback the graph.
        outcome = None
        outcomes.clear()
        for backward in asked:
            backward.call.gradient_error = None
    return answers


class _Backward(NamedTuple):
    """One expert's part of a backward: its call, the place of its first input, its inputs, its outputs' gradients."""

    call: ExpertCall
    first: int
    inputs: Sequence[Tensor | None]
    gradients: Sequence[Tensor | None]

    def request(self, *, updates: bool) -> Request:
        """Return the request; it has the inputs for experts that do not have the activations."""
        call, schema = self.call, self.call.schema
        sent = [] if call.ticket else wire.to_wire(self.inputs, schema.inputs)
        return Request(
            call.endpoint,
            wire.BACKWARD_EVAL if call.evaluating else wire.BACKWARD,
            call.uid,
            [*sent, *wire.to_wire(self.gradients, schema.output_specs)],
            payload=wire.pack((wire.present(self.gradients), call.ticket, updates)),
            schema=schema.hash,
            once=True,
            check=_expect_gradients(call, self.inputs),
            role="experts",
        )


def _with_cause(call: ExpertCall, error: NonFinite) -> NonFinite:
    """``error``, or one about NaN in the module's output, if that output still exists unchanged."""
    came = [
        (name, output)
        for name, ref, version in call.given
        if (output := ref()) is not None and output._version == version
    ]
    name = first_not_finite([output for _, output in came], [name for name, _ in came])
    if name is None:
        return error
    better = NonFinite(f"{call.uid}: the module's own {name} held NaN or Inf, and so its backward was refused: {error}")
    for note in getattr(error, "__notes__", ()):
        better.add_note(note)
    return better


def _gather_gradients(calls: Calls, asked: Sequence[_Backward], *, updates: bool) -> list[Outcome]:
    """Request gradients, again with the inputs where activations are gone."""
    if not asked:
        return []
    deadline = Deadline.after(calls.backward_timeout)
    outcomes = calls.client.gather([backward.request(updates=updates) for backward in asked], deadline)
    gone = [i for i, outcome in enumerate(outcomes) if asked[i].call.ticket and isinstance(outcome, ActivationsGone)]
    if gone and not deadline.expired():
        for index in gone:
            asked[index].call.ticket = b""
        again = calls.client.gather([asked[index].request(updates=updates) for index in gone], deadline)
        for index, outcome in zip(gone, again, strict=True):
            outcomes[index] = outcome
    return outcomes


def _read_gradients(backward: _Backward, outcome: Outcome, *, finite_only: bool) -> tuple[list[Tensor | None], int]:
    """Return the received gradients, and after how many changes of the expert they are its; raise the error received
    instead.
    """
    assert outcome is not None, "a backward is never cut off"
    call = backward.call
    if isinstance(outcome, Exception):
        try:
            raise outcome
        finally:
            del outcome
    if outcome.payload == wire.GONE:
        raise PeerLost(
            f"{call.uid} has executed this backward once, but its gradients are lost: the connection broke before they "
            "arrived, and the server no longer has them, because it restarted or has since answered others",
            peer=call.endpoint,
        )
    present, changes = wire.read_gradients(outcome.payload)
    gradients = wire.from_wire(outcome.tensors, call.schema.inputs, present)
    name = first_not_finite(gradients, call.schema.input_names, moderate=True) if finite_only else None
    if name is not None:
        raise NonFinite(f"{call.uid}: the gradient of {name} holds NaN, Inf or a number above 1e18")
    return gradients, changes


def expect(layout: wire.Layout, rows: int) -> Callable[[ReplyHeader], None]:
    """Return the check of an answer that must have this layout and this many rows."""

    def check(answer: ReplyHeader) -> None:
        came = check_parts(answer.tensors, layout)
        if answer.tensors and came != rows:
            raise ProtocolError(f"{rows} rows were requested, but {came} were received")

    return check


def _expect_gradients(call: ExpertCall, inputs: Sequence[Tensor | None]) -> Callable[[ReplyHeader], None]:
    """Return the check of an answer that must hold gradients of ``inputs``."""
    specs = call.schema.inputs

    def check(answer: ReplyHeader) -> None:
        if answer.payload == wire.GONE and not answer.tensors:
            return
        present, _ = wire.read_gradients(answer.payload)
        came = check_parts(answer.tensors, wire.gradient_layout(specs, present, "input"))
        if answer.tensors and came != call.rows:
            raise ProtocolError(f"{call.rows} rows were sent, but gradients of {came} were received")
        parts = iter(answer.tensors)
        for spec, tensor, there in zip(specs, inputs, present, strict=True):
            if there and spec is not None and tensor is not None:
                for _, shape in wire_parts(spec, call.rows, spec.sizes_of(tuple(tensor.shape))):
                    if (its_shape := next(parts).shape) != shape:
                        raise ProtocolError(
                            f"received a gradient of shape {its_shape} for an input of {tuple(tensor.shape)}"
                        )

    return check
