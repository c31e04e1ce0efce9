"""Requests of this process for one expert that wait at the same time: they leave as one, and come back as one.

::

    request ── none of its kind is under way ────────────────────> leaves
      │
      └────> waits: until those under way are back, a moment at most ──> leaves, with all that wait

A caller that waits and goes takes the others along: its thread sends their rows as those of one request, and gives each
its part of the answer, or the error. Where one of them cannot be executed with the others, which a server finds before
it has changed anything, each is sent alone, so that only the faulty one fails. A caller gives up at its own deadline.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec
import torch
from torch import Tensor

from anabranch.deadline import LONGEST_SLEEP, Deadline
from anabranch.errors import Overloaded, PeerLost
from anabranch.experts import wire
from anabranch.transport import Answer, Client, Outcome, Request, pack
from anabranch.transport.frame import ReplyHeader

# Requests of more bytes travel alone, and no more than so many together: copying them costs more than sending them.
_SMALL, _MOST_BYTES = 32 << 10, 1 << 20
# Seconds for which a request waits for those under way; longer than a small call takes, shorter than is noticed.
_MOMENT = 0.001
# Seconds by which the deadlines of requests that travel together may differ.
_LATE = 0.05


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
    schema: wire.Schema
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


class CallRequest(msgspec.Struct, eq=False):
    """The request of one call, forward or backward.

    Attributes:
        call: the call.
        header: of this request alone.
        tensors: to send.
        deadline: of the caller.
        layout: of the answer with this header, for a backward.
        kind: what it shares with those that it may travel with; ``None``: it travels alone.
        turn: wakes its thread, if that waits.
        leaves: it is under way.
        done: it has its outcome.
    """

    call: ExpertCall
    header: wire.ForwardHeader | wire.BackwardHeader
    tensors: Sequence[Tensor]
    deadline: Deadline
    layout: Callable[[ReplyHeader], wire.Layout] | None = None
    verb: str = wire.FORWARD
    nbytes: int = 0
    kind: tuple[object, ...] | None = None
    turn: threading.Event | None = None
    leaves: bool = False
    done: bool = False
    outcome: Outcome = None

    def __post_init__(self) -> None:
        call, header = self.call, self.header
        how: tuple[object, ...] = ()
        if isinstance(header, wire.BackwardHeader):
            # One answer says how often the expert had changed before the forwards of all.
            self.verb, how = wire.BACKWARD, (header.updates, call.ticket and call.changes, *header.present)
        if 0 < call.rows < call.schema.joint_rows and all(one.layout is torch.strided for one in self.tensors):
            for tensor in self.tensors:
                self.nbytes += tensor.nbytes
            if self.nbytes <= _SMALL:
                # Copied by its own thread: another's CUDA stream would not wait for what this one's computes.
                self.tensors = [tensor.cpu() for tensor in self.tensors]
                how = (*how, header.evaluating, bool(call.ticket), torch.is_inference_mode_enabled())
                self.kind = (self.verb, call.endpoint, call.uid, call.schema.hash, *how)


class _Line(msgspec.Struct, eq=False):
    """The requests of one kind.

    Attributes:
        waiting: those that have not left, in order.
        under_way: how often some have left and are not back.
    """

    waiting: list[CallRequest] = []
    under_way: int = 0

    def leave(self, deadline: Deadline) -> list[CallRequest]:
        """Take those that wait as long as ``deadline``: what is sent for a caller ends when its own wait ends."""
        mine = deadline.remaining()
        batch: list[CallRequest] = []
        waiting: list[CallRequest] = []
        for one in self.waiting:
            one.leaves = one.deadline is deadline or abs(one.deadline.remaining() - mine) <= _LATE
            (batch if one.leaves else waiting).append(one)
        self.waiting = waiting
        self.under_way += 1
        return batch


_Key = tuple[object, ...]
_lines: dict[_Key, _Line] = {}
_lock = threading.Lock()


def gather(client: Client, requests: Sequence[CallRequest], deadline: Deadline) -> list[Outcome]:
    """Send requests at once, with others of this process, and return the outcome of each, as ``client.gather`` does."""
    kind = requests[0].kind
    if kind is None or (len(requests) > 1 and any(one.kind != kind for one in requests)):
        _send(client, [[one] for one in requests], deadline)
        return [one.outcome for one in requests]
    key = (client, *kind)
    with _lock:
        line = _lines.get(key)
        first = line is None
        if line is None:
            line = _lines[key] = _Line(under_way=1)
        else:
            turn = threading.Event()
            for one in requests:
                one.turn = turn
            line.waiting += requests
    if first:
        _lead(client, key, line, requests)
    else:
        _wait(client, key, line, requests, turn, deadline)
    return list(map(attrgetter("outcome"), requests))


def _wait(
    client: Client, key: _Key, line: _Line, requests: Sequence[CallRequest], turn: threading.Event, deadline: Deadline
) -> None:
    """Wait for those under way, and leave with all that wait unless another thread has taken these requests along."""
    patience = _MOMENT
    try:
        while not all(one.done for one in requests) and not deadline.expired():
            turn.wait(timeout=min(patience, deadline.remaining()))
            turn.clear()
            patience = LONGEST_SLEEP
            with _lock:
                batch = [] if all(one.leaves for one in requests) else line.leave(deadline)
            if batch:
                _lead(client, key, line, batch)
    finally:
        with _lock:
            line.waiting = [one for one in line.waiting if one.turn is not turn]  # of a caller that gives up
            _end(key, line)
    for one in requests:
        if not one.done:
            call = one.call
            one.outcome = deadline.error(peer=call.endpoint, operation=f"{one.verb} {call.uid}")


def _lead(client: Client, key: _Key, line: _Line, batch: Sequence[CallRequest]) -> None:
    """Send requests that leave together, and wake their threads."""
    try:
        if len(batch) == 1:
            _send(client, [batch], batch[0].deadline)
        else:
            _send(client, _messages(batch), max(map(attrgetter("deadline"), batch), key=Deadline.remaining))
    finally:
        turns: set[threading.Event] = set()
        with _lock:
            for one in batch:
                if one.turn is not None:
                    turns.add(one.turn)
                if one.outcome is None:
                    lost = "the thread that had sent this request with its own was interrupted"
                    one.outcome = PeerLost(lost, peer=one.call.endpoint, operation=f"{one.verb} {one.call.uid}")
                one.done = True
            line.under_way -= 1
            if line.waiting and line.waiting[0].turn is not None:
                turns.add(line.waiting[0].turn)
            elif not line.under_way:
                _end(key, line)
        for turn in turns:
            turn.set()


def _end(key: _Key, line: _Line) -> None:
    if not line.waiting and not line.under_way and _lines.get(key) is line:
        del _lines[key]


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
        tensors = [torch.cat(column) for column in zip(*(one.tensors for one in message), strict=True)]

    def check(answer: ReplyHeader) -> None:
        layout = call.schema.output_layout if first.layout is None else first.layout(answer)
        apart = len(message) > 1 and answer.payload == wire.APART
        wire.check_parts([] if apart else layout, answer, rows)

    return Request(
        call.endpoint, first.verb, call.uid, tensors, payload=pack(header),
        schema=call.schema.hash, once=first.verb == wire.BACKWARD, check=check, role="experts",
    )  # fmt: skip


def _forget_in_child() -> None:
    """Forget the parent's requests in a forked child, and a lock that one of its threads may have held."""
    global _lock
    _lock = threading.Lock()
    _lines.clear()


os.register_at_fork(after_in_child=_forget_in_child)
