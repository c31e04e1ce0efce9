"""The boundary operation: any number of expert calls, made at once, as one node of autograd's graph.

::

      inputs of all calls ──┐
      entry token ──────────┴──> [ forward ╌╌ state ╌╌ backward ] ──> outputs of the calls that were answered

             forward: all requests at once, one deadline, stragglers cancelled
             backward: all gradients at once, to those that answered; each expert updates itself

``anabranch.autodiff.boundary`` makes the node; the entry token makes the outputs require grad where no input does, so
that the experts still learn.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import torch
from torch import Tensor

from anabranch.autodiff.boundary.crossing import Crossed, Form, cross
from anabranch.deadline import Deadline
from anabranch.errors import ActivationsGone, BoundaryError, NonFinite, PeerLost, ProtocolError
from anabranch.experts import wire
from anabranch.experts.client.expert_call import CallCounts, ExpertCall, changed_by_us
from anabranch.experts.compression import check_parts, wire_parts
from anabranch.experts.schema import Schema, first_not_finite
from anabranch.transport import Answer, Client, Outcome, Request
from anabranch.transport.frame import ReplyHeader

__all__ = ["Calls", "ExpertCall", "ask", "ask_gradients", "call_experts", "expect", "output_forms", "sample_forms"]

_TICKET_BYTES = 16


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
        finite_only: treats an answer that holds NaN or Inf as missing.
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


class _CallsBoundary:
    """The boundary of the calls of one forward; see the module's drawing."""

    kind = "experts"

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    @property
    def name(self) -> str:
        return ", ".join(call.uid for call in self._calls.calls[:3])

    def forms(self, inputs: Sequence[Tensor | None]) -> Sequence[Form]:
        raise AssertionError(
            "the experts that answer are known only at run time; a mixture is captured around its calls"
        )

    def forward(self, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        return ask(self._calls, keep=wants is not None)

    def backward(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
    ) -> list[Tensor | None]:
        return ask_gradients(self._calls, inputs, gradients, updates=updates)


def call_experts(calls: Calls, entry: Tensor | None = None) -> list[list[Tensor | None] | None]:
    """Make the calls; returns the outputs of the answered ones, which in grad mode require grad where they can.

    Raises no error of an expert: it is in ``call.error``, and the caller decides which answers it needs.

    Args:
        calls: the calls to make.
        entry: a leaf towards which the caller's sweep goes, as for ``cross``.
    """
    flat = [tensor for call in calls.calls for tensor in call.inputs]
    outputs = iter(cross(_CallsBoundary(calls), *flat, entry=entry))
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
    name = first_not_finite(outputs, [f"output {index}" for index in range(len(outputs))]) if finite_only else None
    if name is not None:
        call.error = NonFinite(f"{call.uid}: the module's {name} holds NaN or Inf")
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
    asked: list[tuple[ExpertCall, int]] = []
    wanted: list[list[Tensor | None]] = []
    position = first_input = 0
    for call in calls.calls:
        width = len(call.schema.inputs)
        mine: list[Tensor | None] = []
        for spec in call.schema.output_specs if call.answered else ():
            gradient = None if spec is None else gradients[position]
            position += spec is not None
            mine.append(gradient if spec is not None and spec.requires_grad else None)
        if any(gradient is not None for gradient in mine):
            asked.append((call, first_input))
            wanted.append(mine)
        first_input += width
    outcomes = _gather_gradients(calls, asked, wanted, inputs, updates=updates)
    for (call, first), outcome in zip(asked, outcomes, strict=True):
        assert outcome is not None
        try:
            sent = inputs[first : first + len(call.schema.inputs)]
            found, changes = _read_gradients(call, outcome, sent, finite_only=calls.finite_only)
        except (BoundaryError, ValueError) as error:
            calls.counts.failure(error)
            call.gradient_error = _with_cause(call, error) if isinstance(error, NonFinite) else error
            continue
        calls.counts.backward(call, changes, updates=updates)
        for offset, gradient in enumerate(found):
            like = inputs[first + offset]
            answers[first + offset] = None if gradient is None or like is None else gradient.to(like.device)
    try:
        if calls.check_backward is not None:
            calls.check_backward([call for call, _ in asked])
    finally:
        # Otherwise a cycle: the graph holds the error, and its traceback the graph.
        for call, _ in asked:
            call.gradient_error = None
    return answers


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


def _gather_gradients(
    calls: Calls,
    asked: Sequence[tuple[ExpertCall, int]],
    gradients: Sequence[Sequence[Tensor | None]],
    inputs: Sequence[Tensor | None],
    *,
    updates: bool,
) -> list[Outcome]:
    """Request gradients; inputs are sent to experts that did not keep the activations, or no longer have them."""
    if not asked:
        return []
    deadline = Deadline.after(calls.backward_timeout)

    def requests(which: Sequence[int]) -> list[Request]:
        made = []
        for index in which:
            call, first = asked[index]
            sent = inputs[first : first + len(call.schema.inputs)]
            made.append(_backward_request(call, sent, gradients[index], updates=updates))
        return made

    outcomes = calls.client.gather(requests(range(len(asked))), deadline)
    forgotten = [
        index
        for index, outcome in enumerate(outcomes)
        if asked[index][0].ticket and isinstance(outcome, ActivationsGone)
    ]
    if forgotten and not deadline.expired():
        for index in forgotten:
            asked[index][0].ticket = b""
        for index, outcome in zip(forgotten, calls.client.gather(requests(forgotten), deadline), strict=True):
            outcomes[index] = outcome
    return outcomes


def _backward_request(
    call: ExpertCall, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
) -> Request:
    schema = call.schema
    sent = [] if call.ticket else wire.to_wire(inputs, schema.inputs)
    return Request(
        call.endpoint,
        wire.BACKWARD_EVAL if call.evaluating else wire.BACKWARD,
        call.uid,
        [*sent, *wire.to_wire(gradients, schema.output_specs)],
        payload=wire.pack_backward(gradients, call.ticket, updates=updates),
        schema=schema.hash,
        once=True,
        check=_expect_gradients(call, inputs),
        role="experts",
    )


def _read_gradients(
    call: ExpertCall, outcome: Answer | Exception, inputs: Sequence[Tensor | None], *, finite_only: bool
) -> tuple[list[Tensor | None], int]:
    """Return the received gradients, and after how many changes of the expert they are its; raise the error received
    instead.
    """
    if isinstance(outcome, Exception):
        raise outcome
    if outcome.payload == wire.GONE:
        raise PeerLost(
            f"{call.uid} has executed this backward once, but its gradients are lost: the connection broke before they "
            "arrived, and the server no longer has them, because it restarted or has since answered others",
            peer=call.endpoint,
        )
    present, changes = wire.read_gradients(outcome.payload)
    gradients = wire.from_wire(outcome.tensors, call.schema.inputs, present)
    name = first_not_finite(gradients, call.schema.input_names) if finite_only else None
    if name is not None:
        raise NonFinite(f"{call.uid}: the gradient of {name} holds NaN or Inf")
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
