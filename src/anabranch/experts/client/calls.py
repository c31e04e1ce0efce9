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

import copy
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import cast

import msgspec
import torch
from torch import Tensor

from anabranch.autodiff.boundary.crossing import Crossed, Form, cross
from anabranch.deadline import LONGEST_SLEEP, Deadline
from anabranch.errors import ActivationsGone, BoundaryError, NonFinite, Overloaded, PeerLost, ProtocolError
from anabranch.experts import wire
from anabranch.experts.wire import Schema, first_not_finite
from anabranch.transport import Answer, Client, Outcome, Request, pack, unpack
from anabranch.transport.frame import ReplyHeader

_TICKET_BYTES = 16
# Requests of more bytes travel alone, and no more than so many together: copying them costs more than sending them.
_SMALL, _MOST_BYTES = 32 << 10, 1 << 20
# Seconds for which a request waits for those under way, which may themselves wait for it: a batch may have a minimum.
# Mostly nothing is lost: a device that computes for longer would not have begun with it earlier.
_MOMENT = 0.01
# Seconds by which the deadlines of requests that travel together may differ.
_LATE = 0.05
_log = logging.getLogger("anabranch")

_changes_by_us = Counter[tuple[str, str]]()
"""This process's changes of the expert of an endpoint and a uid: several modules may call one expert."""
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()
"""Of these, of all counters, and of the requests that wait: several threads may call one expert, too."""
_OWN_CHANGE = (
    "%s: an output is that of the expert after %d changes, but its gradient that of the expert after %d: %s. Give its "
    "server keep_activations=, a number of rows, and backwards use the forward's own weights and buffers; "
    "statistics().stale_backwards counts those that did not"
)
_BACK = "its server has gone back to an earlier state"
_BY_US = (
    "this process has changed it in between, by the backward of another call or a forward that writes to the expert"
)


class CallStatistics(msgspec.Struct):
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

    calls: int = 0
    answered: int = 0
    failed: dict[str, int] = {}
    cancelled: int = 0
    rows: dict[str, int] = {}
    stale_backwards: int = 0
    avoided: frozenset[str] = frozenset()


class CallCounts:
    """The counters behind ``CallStatistics``; a copy of their module begins its own."""

    def __init__(self) -> None:
        self._failed, self._rows = Counter[str](), Counter[str]()
        self._so_far = CallStatistics()

    def __reduce__(self) -> tuple[type[CallCounts], tuple[()]]:
        return CallCounts, ()

    def read(self, avoided: frozenset[str] = frozenset()) -> CallStatistics:
        """Return the counters so far."""
        with _lock:
            more = {"failed": dict(self._failed), "rows": dict(self._rows), "avoided": avoided}
            return msgspec.structs.replace(self._so_far, **more)

    def forward(self, call: ExpertCall) -> None:
        """Count a call whose forward has ended."""
        with _lock:
            self._so_far.calls += 1
            self._rows[call.uid] += call.rows
            self._so_far.answered += call.answered
            self._so_far.cancelled += not call.answered and call.error is None
        if call.error is not None:
            self.failure(call.error)

    def failure(self, error: Exception) -> None:
        """Count a call, or a backward, that failed."""
        with _lock:
            self._failed[type(error).__name__] += 1

    def backward(self, call: ExpertCall, changes: int, *, updates: bool) -> None:
        """Count a backward whose gradients are those of the expert as it was after so many changes, and which
        ``updates`` it.
        """
        expert = call.endpoint, call.uid
        with _lock:
            stale, back = changes != call.changes and call.rows > 0, changes < call.changes
            warns = stale and (back or _changes_by_us[expert] > call.changed_by_us) and expert not in _warned
            _changes_by_us[expert] += updates
            self._so_far.stale_backwards += stale
            if warns:
                _warned.add(expert)
        if warns:
            _log.warning(_OWN_CHANGE, call.uid, call.changes, changes, _BACK if back else _BY_US)


class ExpertCall(msgspec.Struct, eq=False):
    """One call of an expert: its inputs and its outcome.

    Attributes:
        uid: the expert.
        endpoint: its server.
        schema: the expert's schema.
        inputs: the inputs, flat, in the schema's order; freed once sent.
        rows: of the inputs.
        evaluating: the caller is in eval mode, so the expert runs in eval mode too.
        outputs: the answer; freed once passed on, because the graph must not hold its own outputs.
        answered: true if there was an answer.
        error: the reason for a missing answer; ``None`` without an answer means that the call was cancelled.
        gradient_error: the reason for a missing gradient.
        ticket: names the activations that the server keeps for the backward; empty if it keeps none.
        changes: how often the expert had changed before its forward, and ``changed_by_us`` by this process.
    """

    uid: str
    endpoint: str
    schema: Schema
    inputs: Sequence[Tensor | None]
    rows: int
    evaluating: bool = False
    outputs: list[Tensor | None] | None = None
    answered: bool = False
    error: Exception | None = None
    gradient_error: Exception | None = None
    ticket: bytes = b""
    changes: int = 0
    changed_by_us: int = 0


class Calls(msgspec.Struct, eq=False):
    """Calls that are made together, and their limits.

    Attributes:
        client: sends the requests.
        calls: the calls.
        deadline: of the forward.
        backward_timeout: seconds for all of the backward together.
        enough: called with the calls after each answer; once it returns true, the others have ``grace`` seconds left.
        grace: seconds.
        check_backward: called with the calls after the backward; raises if too few gradients arrived. ``None``: the
            first error is raised.
        finite_only: treats an answer that holds NaN, Inf or a number above 1e18 as missing.
        counts: where they are counted.
    """

    client: Client
    calls: Sequence[ExpertCall]
    deadline: Deadline
    backward_timeout: float
    enough: Callable[[Sequence[ExpertCall]], bool] | None = None
    grace: float = 0.0
    check_backward: Callable[[Sequence[ExpertCall]], None] | None = None
    finite_only: bool = False
    counts: CallCounts = msgspec.field(default_factory=CallCounts)


@dataclass(frozen=True, slots=True)
class ExpertBoundary:
    """The boundary of the calls of one forward; see the module's drawing.

    Attributes:
        kind: ``expert``, or ``experts`` for those of a mixture.
        name: of the expert, or of some.
        forward: as ``Boundary``; the state that it leaves are the ``Calls``.
        forms: as ``Boundary``. Of a mixture's calls these are known only at run time, so it is captured around them.
    """

    kind: str
    name: str
    forward: Callable[[Sequence[Tensor | None], Sequence[bool] | None], Crossed]
    forms: Callable[[Sequence[Tensor | None]], Sequence[Form]]

    def backward(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
    ) -> list[Tensor | None]:
        return ask_gradients(cast("Calls", state), inputs, gradients, updates=updates)


def call_experts(calls: Calls, entry: Tensor | None = None) -> list[list[Tensor | None] | None]:
    """Make the calls; returns the outputs of the answered ones, which in grad mode require grad where they can.

    Raises no error of an expert: it is in ``call.error``, and the caller decides which answers it needs.

    Args:
        calls: the calls to make.
        entry: a leaf towards which the caller's sweep goes, as for ``cross``.
    """
    flat = [tensor for call in calls.calls for tensor in call.inputs]
    name = ", ".join(call.uid for call in calls.calls[:3])
    boundary = ExpertBoundary(
        "experts", name, lambda inputs, wants: ask(calls, keep=wants is not None), lambda inputs: ()
    )
    outputs = iter(cross(boundary, *flat, entry=entry))
    return [
        [None if spec is None else next(outputs) for spec in call.schema.output_specs] if call.answered else None
        for call in calls.calls
    ]


def ask(calls: Calls, *, keep: bool) -> Crossed:
    """Return the answers to all calls, flat; with ``keep``, servers that can keep activations for a backward do so."""
    requests: list[CallRequest] = []
    for call in calls.calls:
        schema = call.schema
        call.ticket = os.urandom(_TICKET_BYTES) if keep else b""
        tensors = call.inputs if schema.takes_as_is else wire.to_wire(call.inputs, schema.inputs)
        header = wire.ForwardHeader([wire.RequestPart(call.rows, call.ticket)], call.evaluating)
        check = partial(wire.check_parts, schema.output_layout)
        requests.append(CallRequest(call, header, cast("Sequence[Tensor]", tensors), calls.deadline, check))

    def enough_came(outcomes: Sequence[Outcome]) -> bool:
        assert calls.enough is not None
        _take_answers(calls, outcomes)
        return calls.enough(calls.calls)

    if calls.enough is None:
        outcomes = gather(calls.client, requests, calls.deadline) if requests else []
    else:  # those that are too slow are cut off, so each has its own connection
        alone = [request_of([request]) for request in requests]
        outcomes = calls.client.gather(alone, calls.deadline, enough=enough_came, grace=calls.grace)
    _take_answers(calls, outcomes)
    outputs: list[Tensor] = []
    no_gradient: list[int] = []
    for call in calls.calls:
        calls.counts.forward(call)
        for output, spec in zip(call.outputs or (), call.schema.output_specs, strict=call.answered):
            if output is not None and spec is not None:
                if not spec.requires_grad:
                    no_gradient.append(len(outputs))
                outputs.append(output)
        call.outputs, call.inputs = None, ()
    # Received into memory made for them, or copied from there to a device.
    return Crossed(outputs, calls, no_gradient, fresh=True)


def output_forms(
    schema: Schema, rows: int, device: torch.device, sizes: Iterable[Sequence[int]] = repeat(())
) -> list[Form]:
    """Return the forms of the outputs of an expert of this schema for ``rows`` rows; ``sizes`` are those that vary."""
    return [
        Form((rows, *spec.with_sizes(its)), spec.dtype, device, spec.requires_grad)
        for (_, spec), its in zip(schema.output_layout, sizes, strict=False)
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
    call = ExpertCall(uid, endpoint, schema, schema.row_of_zeros(inputs), 1, evaluating=True)
    outputs = ask(Calls(client, [call], deadline, 0.0), keep=False).outputs
    if call.error is not None:
        raise call.error
    device = next(tensor.device for tensor in inputs if tensor is not None)
    pairs = zip(schema.output_layout, outputs, strict=True)
    return output_forms(schema, rows, device, [spec.sizes_of(output.shape) for (_, spec), output in pairs])


def _take_answers(calls: Calls, outcomes: Sequence[Outcome]) -> None:
    """Take the outcomes that are new."""
    payload, header = b"", None  # those that came together have one
    for call, outcome in zip(calls.calls, outcomes, strict=True):
        if outcome is None or call.answered or call.error is not None:
            continue
        if isinstance(outcome, Exception):
            call.error = outcome
            continue
        try:
            if header is None or outcome.payload is not payload:
                payload, header = outcome.payload, unpack(outcome.payload, wire.OutputsHeader)
        except ProtocolError as error:
            # Another one: the traceback of ``error``, and of what it is from, holds this call, a cycle.
            call.error = ProtocolError(str(error), peer=call.endpoint)
            continue
        call.ticket, call.changes = call.ticket if call.ticket in header.tickets else b"", header.changes
        with _lock:
            call.changed_by_us = _changes_by_us[call.endpoint, call.uid]
            _changes_by_us[call.endpoint, call.uid] += header.changed
        schema = call.schema
        outputs: list[Tensor | None] = [*outcome.tensors]
        if not schema.gives_as_is:
            outputs = wire.from_wire(outcome.tensors, schema.output_specs)
        if calls.finite_only:
            name = first_not_finite(outputs, schema.output_names, moderate=True)
            if name is not None:
                call.error = NonFinite(f"{call.uid}: the module's {name} holds NaN, Inf or a number above 1e18")
                continue
        for tensor in call.inputs:
            if tensor is not None:
                if not tensor.is_cpu:
                    outputs = [None if output is None else output.to(tensor.device) for output in outputs]
                break
        call.outputs, call.answered = outputs, True


# --- backward


class _Backward(msgspec.Struct, eq=False):
    """One expert's part of a backward.

    Attributes:
        call: its call.
        first: the place of its first input.
        inputs: of the call.
        gradients: of its outputs.
        answer: the header of the answer, once that has been read.
    """

    call: ExpertCall
    first: int
    inputs: Sequence[Tensor | None]
    gradients: Sequence[Tensor | None]
    answer: wire.GradientsHeader | None = None

    def request(self, deadline: Deadline, *, updates: bool) -> CallRequest:
        """Return the request; it has the inputs for experts that do not have the activations."""
        call, schema = self.call, self.call.schema
        tensors, specs = self.gradients, schema.output_specs
        if not call.ticket:
            tensors, specs = [*self.inputs, *tensors], [*schema.inputs, *specs]
        present = [gradient is not None for gradient in self.gradients]
        sent = cast("list[Tensor]", tensors)
        if not (schema.takes_as_is and schema.gives_as_is and all(present)):
            sent = wire.to_wire(tensors, specs)
        header = wire.BackwardHeader(present, [wire.RequestPart(call.rows, call.ticket)], call.evaluating, updates)
        return CallRequest(call, header, sent, deadline, self.check, wire.BACKWARD)

    def check(self, answer: ReplyHeader, sent: int) -> None:
        """Check the header of an answer: of gradients of the inputs, or of none."""
        layout: wire.Layout = []
        if answer.payload != wire.GONE:
            self.answer = unpack(answer.payload, wire.GradientsHeader)
            layout = wire.gradient_layout(self.call.schema.inputs, self.answer.present, "input", self.inputs)
        wire.check_parts(layout, answer, sent)

    def read(self, outcome: Answer, *, finite_only: bool) -> list[Tensor | None]:
        """Return the received gradients."""
        call = self.call
        if outcome.payload == wire.GONE:
            raise PeerLost(
                f"{call.uid} has executed this backward once, but its gradients are lost: the connection broke before "
                "they arrived, and the server no longer has them, because it restarted or has since answered others",
                peer=call.endpoint,
            )
        if self.answer is None:  # it came together with that of another one, which was looked at
            self.answer = unpack(outcome.payload, wire.GradientsHeader)
        gradients: list[Tensor | None] = [*outcome.tensors]
        if not (call.schema.takes_as_is and all(self.answer.present)):
            gradients = wire.from_wire(outcome.tensors, call.schema.inputs, self.answer.present)
        name = first_not_finite(gradients, call.schema.input_names, moderate=True) if finite_only else None
        if name is not None:
            raise NonFinite(f"{call.uid}: the gradient of {name} holds NaN, Inf or a number above 1e18")
        return gradients


def ask_gradients(
    calls: Calls, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
) -> list[Tensor | None]:
    """Return the gradients of all inputs, from the experts whose outputs have one; with ``updates`` these update
    themselves.
    """
    answers: list[Tensor | None] = [None] * len(inputs)
    backwards: list[_Backward] = []
    position = first = 0
    for call in calls.calls:
        end = first + len(call.schema.inputs)
        if call.answered:
            mine: list[Tensor | None] = []
            for spec in call.schema.output_specs:
                mine.append(None if spec is None or not spec.requires_grad else gradients[position])
                position += spec is not None
            if mine.count(None) < len(mine):
                backwards.append(_Backward(call, first, inputs[first:end], mine))
        first = end
    if not backwards:
        return answers
    deadline = Deadline(calls.backward_timeout)
    outcomes = gather(calls.client, [one.request(deadline, updates=updates) for one in backwards], deadline)
    gone: list[int] = []
    for index, (backward, outcome) in enumerate(zip(backwards, outcomes, strict=True)):
        if backward.call.ticket and isinstance(outcome, ActivationsGone):
            backward.call.ticket = b""
            gone.append(index)
    if gone:  # once more, with the inputs
        again = [backwards[index].request(deadline, updates=updates) for index in gone]
        for index, outcome in zip(gone, gather(calls.client, again, deadline), strict=True):
            outcomes[index] = outcome
    try:
        for backward, outcome in zip(backwards, outcomes, strict=True):
            call = backward.call
            try:
                if isinstance(outcome, Answer):
                    received = backward.read(outcome, finite_only=calls.finite_only)
                else:
                    assert outcome is not None, "a backward is never cut off"
                    call.gradient_error = outcome
            except (BoundaryError, ValueError) as error:
                call.gradient_error = error
            if call.gradient_error is not None:
                calls.counts.failure(call.gradient_error)
                continue
            assert backward.answer is not None
            calls.counts.backward(call, backward.answer.changes, updates=updates)
            for index, (gradient, like) in enumerate(zip(received, backward.inputs, strict=True)):
                if gradient is not None and like is not None:
                    answers[backward.first + index] = gradient.to(like.device)
        if calls.check_backward is not None:
            calls.check_backward([backward.call for backward in backwards])
        else:
            for backward in backwards:
                if (outcome := backward.call.gradient_error) is not None:
                    raise outcome
    finally:
        # Otherwise a cycle: the graph holds the error, and its traceback the graph.
        outcome = None
        outcomes.clear()
        for backward in backwards:
            backward.call.gradient_error = None
    return answers


# --- requests of this process for one expert that wait at the same time leave as one, and come back as one
#
#     request ── none of its kind is under way ──────────────────────> leaves
#       │
#       └────> waits for its turn: until those under way are back, a moment at most ──> leaves, with all that wait
#
# A thread whose turn it is takes the others' requests along: it sends their rows as those of one request, and gives
# each its part of the answer, or the error. Where one of them cannot be executed with the others, which a server finds
# before it has changed anything, each is sent alone, so that only the faulty one fails. A caller gives up at its own
# deadline.


class CallRequest(msgspec.Struct, eq=False):
    """The request of one call, forward or backward.

    Attributes:
        call: the call.
        header: of this request alone.
        tensors: to send.
        deadline: of the caller.
        check: refuses the header of an answer that is not of as many rows as were ``sent``.
        nbytes: of the tensors.
        kind: what it shares with those that it may travel with; ``None``: it travels alone.
        done: set once it has an outcome, or the thread that took it along was interrupted.
    """

    call: ExpertCall
    header: wire.ForwardHeader | wire.BackwardHeader
    tensors: Sequence[Tensor]
    deadline: Deadline
    check: Callable[..., object]
    verb: str = wire.FORWARD
    nbytes: int = 0
    kind: tuple[object, ...] | None = None
    done: threading.Event | None = None
    outcome: Outcome = None

    def classify(self) -> None:
        """Set what it shares with those that it may travel with, if it is small enough for that."""
        call, header = self.call, self.header
        if not 0 < call.rows < call.schema.joint_rows:
            return
        for tensor in self.tensors:
            if tensor.layout is not torch.strided:
                return
            self.nbytes += tensor.nbytes
        if self.nbytes > _SMALL:
            return
        mode: tuple[object, ...] = header.evaluating, bool(call.ticket), torch.is_inference_mode_enabled()
        if isinstance(header, wire.BackwardHeader):
            # One answer says how often the expert had changed before the forwards of all.
            mode += (header.updates, call.ticket and call.changes, *header.present)
        self.kind = (self.verb, call.endpoint, call.uid, call.schema.hash, *mode)


class _Line(msgspec.Struct, eq=False, weakref=True):
    """The requests of one kind: those that wait, and the turn of the thread that has some under way."""

    turn: threading.Lock = msgspec.field(default_factory=threading.Lock)
    waiting: list[CallRequest] = []


_lines = weakref.WeakValueDictionary[tuple[object, ...], _Line]()
"""As long as a thread has a request in them, so a turn that an interrupt has left taken is soon forgotten."""


def gather(client: Client, requests: Sequence[CallRequest], deadline: Deadline) -> list[Outcome]:
    """Send requests at once, with others of this process, and return the outcome of each, as ``client.gather`` does."""
    first = requests[0]
    for one in requests:
        one.classify()
        if one.kind is None or one.kind != first.kind:
            return client.gather([request_of([each]) for each in requests], deadline)
    assert first.kind is not None
    key = (client, *first.kind)
    with _lock:
        line = _lines.get(key)
        if line is None:
            line = _lines[key] = _Line()
    my_turn = line.turn.acquire(blocking=False)
    batch: list[CallRequest] = []
    try:
        if not my_turn:
            first.done = threading.Event()
            for one in requests:
                # Copied by its own thread: another's CUDA stream would not wait for what this one's computes.
                one.tensors, one.done = [tensor.cpu() for tensor in one.tensors], first.done
        with _lock:
            if my_turn and not line.waiting:
                batch = [*requests]
            else:
                line.waiting += requests
                if my_turn:  # at once: another whose patience has ended would take these along, and nobody waits for it
                    batch = _take(line, first)
        if not my_turn:
            my_turn = line.turn.acquire(timeout=min(_MOMENT, deadline.remaining()))
            with _lock:
                batch = _take(line, first)
        if len(batch) == 1:
            (first.outcome,) = client.gather([request_of(batch)], first.deadline)
        elif batch:
            last = max((one.deadline for one in batch), key=Deadline.remaining)
            _send(client, _messages(batch), last)
    except BaseException:
        with _lock:  # an interrupted thread gives its own up
            line.waiting = [one for one in line.waiting if one not in requests]
        raise
    finally:
        if my_turn:
            line.turn.release()
        for one in batch:
            if one.done is not None:
                one.done.set()
    return [one.outcome or _taken_along(client, one) for one in requests]


def _take(line: _Line, mine: CallRequest) -> list[CallRequest]:
    """Take those that wait as long as ``mine``, unless that has left: what is sent for a caller ends with its wait."""
    if mine not in line.waiting:
        return []
    left = mine.deadline.remaining()
    batch: list[CallRequest] = []
    others: list[CallRequest] = []
    for one in line.waiting:
        alike = one.deadline is mine.deadline or abs(one.deadline.remaining() - left) <= _LATE
        (batch if alike else others).append(one)
    line.waiting = others
    return batch


def _taken_along(client: Client, one: CallRequest) -> Outcome:
    """Return the outcome of a request that left with those of another thread."""
    assert one.done is not None
    peer, operation = one.call.endpoint, f"{one.verb} {one.call.uid}"
    while not one.done.wait(timeout=min(LONGEST_SLEEP, one.deadline.remaining())) and one.outcome is None:
        if one.deadline.expired():
            return one.deadline.error(peer=peer, operation=operation)
    if one.outcome is None and one.verb == wire.FORWARD:  # that thread was interrupted, and this may be done twice
        return client.gather([request_of([one])], one.deadline)[0]
    lost = "the thread that had sent this request with its own was interrupted"
    return one.outcome or PeerLost(lost, peer=peer, operation=operation)


def _messages(batch: Sequence[CallRequest]) -> list[list[CallRequest]]:
    """Divide requests into those that fit one message."""
    messages: list[list[CallRequest]] = []
    rows = nbytes = 0
    for one in batch:
        rows, nbytes = rows + one.call.rows, nbytes + one.nbytes
        full = rows > one.call.schema.joint_rows or nbytes > _MOST_BYTES
        if not messages or full or len(messages[-1]) == wire.MOST_PARTS:
            messages.append([])
            rows, nbytes = one.call.rows, one.nbytes
        messages[-1].append(one)
    return messages


def _send(client: Client, messages: Sequence[Sequence[CallRequest]], deadline: Deadline) -> None:
    """Send each message, and give its requests their outcomes; once more, each alone, where they cannot be together."""
    alone: list[list[CallRequest]] = []
    outcomes = client.gather(list(map(request_of, messages)), deadline)
    for message, outcome in zip(messages, outcomes, strict=True):
        if len(message) == 1:
            message[0].outcome = outcome
        elif isinstance(outcome, Overloaded):  # some may find room
            alone += [[one] for one in message]
        elif isinstance(outcome, Answer) and outcome.payload == wire.APART:
            for one in message:
                one.header = msgspec.structs.replace(one.header, at_once=True)
                alone.append([one])
        elif isinstance(outcome, Answer):
            rows = [one.call.rows for one in message]
            columns = [torch.split(tensor, rows) for tensor in outcome.tensors]
            for index, one in enumerate(message):
                # In its own memory, which its caller may write to.
                one.outcome = Answer([column[index].clone() for column in columns], outcome.payload)
        else:
            for one in message:
                one.outcome = outcome if one is message[0] else copy.copy(outcome)  # each caller raises its own
    if alone:
        _send(client, alone, deadline)


def request_of(message: Sequence[CallRequest]) -> Request:
    """Return the message that carries some requests."""
    first = message[0]
    call, header, tensors = first.call, first.header, first.tensors
    rows = call.rows
    if len(message) > 1:
        rows = sum(one.call.rows for one in message)
        header = msgspec.structs.replace(header, parts=[part for one in message for part in one.header.parts])
        columns = zip(*(one.tensors for one in message), strict=True)
        tensors = [torch.cat([tensor.cpu() for tensor in column]) for column in columns]

    check: Callable[[ReplyHeader], object] = partial(first.check, sent=rows)
    if len(message) > 1:
        check = partial(_check_together, check)
    return Request(
        call.endpoint, first.verb, call.uid, tensors, payload=pack(header),
        schema=call.schema.hash, once=first.verb == wire.BACKWARD, check=check, role="experts",
    )  # fmt: skip


def _check_together(check: Callable[[ReplyHeader], object], answer: ReplyHeader) -> None:
    if answer.payload == wire.APART:
        wire.check_parts([], answer)
    else:
        check(answer)


def _forget_in_child() -> None:
    """Forget the parent's requests in a forked child, and a lock that one of its threads may have held."""
    global _lock
    _lock = threading.Lock()
    _lines.clear()


os.register_at_fork(after_in_child=_forget_in_child)
