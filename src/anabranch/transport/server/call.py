"""A kind of request that a server accepts (``Verb``), and one request being served (``Call``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, Overloaded, PeerLost, Unauthorized
from anabranch.record import spans
from anabranch.record.fault_points import fault_point
from anabranch.transport.failures import failure_of
from anabranch.transport.frame import FailureFrame, ReplyHeader, RequestHeader, TensorHeader, allocate, encode
from anabranch.transport.network.streams import Peer
from anabranch.transport.server.once import OnceTable, RequestIdentity

__all__ = ["Call", "CallServer", "Recipient", "Verb"]

# The longest deadline accepted from a client, in seconds.
_LONGEST = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Verb:
    """One operation that a server offers.

    >>> Verb("echo", lambda call: call.reply(call.tensors)).once
    False

    Attributes:
        name: what clients call it.
        handler: serves a call: replies, or passes the call to a thread that will. An exception it raises is the
            response.
        check: sees the header, with each tensor's dtype and shape, before any memory is treated as the tensors; raises
            ``SchemaError``, ``NotFound`` or ``Overloaded`` to refuse.
        once: executed exactly once however often it is retried; the client must number these requests.
        again: answers the retry of a request that was done but whose answer is no longer kept.
        roles: the roles that may ask; ``None`` for every peer that was let in.
        allocate: makes the tensors that a request is received into; pinned memory, for instance.
        quick: handler and check never block: small requests are served on the thread that reads them for all
            connections. Others are served on a thread for their connection.
    """

    name: str
    handler: Callable[[Call], None]
    check: Callable[[RequestHeader], None] | None = None
    once: bool = False
    again: Callable[[Call], None] | None = None
    roles: frozenset[str] | None = None
    allocate: Callable[[Sequence[TensorHeader]], Sequence[Tensor]] = allocate
    quick: bool = False


class Recipient(Protocol):
    """The connection that waits for an answer."""

    def answer(self, call: Call, frame: Sequence[memoryview]) -> None:
        """Take the answer to ``call``."""

    def make_room(self, call: Call, nbytes: int) -> None:
        """Reserve room for the answer to ``call`` before it is made; raises ``Overloaded`` if there is none."""


class CallServer(Protocol):
    """The interface of a server that a call needs: requests already answered, and bytes in flight."""

    once: OnceTable[Call]

    def finished(self, nbytes: int, answered: int = 0) -> None:
        """Record that a request of ``nbytes`` has ended, with an answer of this many bytes of tensors."""

    def count_error(self, failure: FailureFrame) -> None:
        """Count an answer that was an error."""


class Call:
    """One request being served: its contents, its client, its deadline; and the way to answer.

    ``reply`` and ``fail`` may be called from any thread; only the first call counts. A call whose client has gone is
    ``cancelled``; any code that notices may ``drop`` it.
    """

    __slots__ = (
        "_answered",
        "_lock",
        "_nbytes",
        "_server",
        "_span",
        "deadline",
        "identity",
        "once",
        "payload",
        "peer",
        "recipients",
        "schema",
        "settled",
        "target",
        "tensors",
        "verb",
    )

    def __init__(
        self, server: CallServer, verb: Verb, peer: Peer, header: RequestHeader, tensors: Sequence[Tensor], nbytes: int
    ) -> None:
        self._span = spans.begin()
        self.verb = header.verb
        self.target = header.target
        self.payload = header.payload
        self.schema = header.schema
        self.tensors = tensors
        self.peer = peer
        self.deadline = Deadline(min(max(header.seconds, 1e-3), _LONGEST))
        self.identity: RequestIdentity = (header.epoch, header.sequence)
        self.settled = header.settled
        self.once = verb.once and bool(header.epoch)
        self.recipients: list[Recipient] = []
        """The connections that wait for the answer: more than one where a retry has joined."""
        self._server = server
        self._nbytes = nbytes
        self._lock = server.once.lock if self.once else threading.Lock()
        self._answered = False

    @property
    def cancelled(self) -> bool:
        """True if the client no longer waits for the response."""
        return not self.recipients

    def make_room(self, nbytes: int) -> None:
        """Reserve room for an answer of about this many bytes of tensors, before their memory is allocated.

        The answers that clients have not read are bounded in total (``max_bytes_of_answers``); without this call a
        large answer is counted when it is sent, and many made at the same time exceed the bound for a moment.

        Raises:
            Overloaded: there is no room: others wait for clients that do not read.
        """
        for connection in self.recipients[:1]:
            connection.make_room(self, nbytes)

    def reply(self, tensors: Sequence[Tensor] = (), payload: bytes = b"") -> None:
        """Answers; the tensors must not change until they have been sent."""
        try:
            frame = encode(ReplyHeader(payload, self.identity[1]), tensors)
        except (ValueError, TypeError) as error:
            self.fail(error)
        else:
            self.answer(frame, done=True)

    def fail(self, error: BaseException) -> None:
        """Answers with an error, which the client raises."""
        # A declined request was not executed: a retry may find room, or another server.
        declined = isinstance(error, (DeadlineExceeded, Overloaded, PeerLost, Unauthorized))
        failure = failure_of(error, self.identity[1])
        self._server.count_error(failure)
        self.answer(encode(failure), done=not declined)

    def drop(self) -> bool:
        """Drop the call unanswered if the client no longer waits for it; return true if it was dropped."""
        if self.recipients:
            return False
        with self._lock:
            if self.recipients or self._answered:
                return False
            self.close(None)
            return True

    def answer(self, frame: Sequence[memoryview], *, done: bool) -> None:
        """Send ``frame`` to the waiting connections; with ``done`` a retry gets the same frame."""
        with self._lock:
            if self._answered:
                return
            recipients, self.recipients = self.recipients, []
            self.close(frame if done else None)
        fault_point("transport.before_reply")
        for connection in recipients:
            connection.answer(self, frame)

    def close(self, frame: Sequence[memoryview] | None) -> None:
        """Mark the request as finished, with or without an answer to keep for retries; its lock is held."""
        self._answered = True
        if self.once and frame is not None:
            self._server.once.finish(self.identity, frame)
        elif self.once:
            self._server.once.abandon(self.identity)
        answered = 0
        if frame is not None:
            for buffer in frame:
                answered += len(buffer)
            answered -= len(frame[0])
        self._server.finished(self._nbytes, answered)
        if self._span:
            self._record(answered)

    def _record(self, answered: int) -> None:
        """Record its time for a trace."""
        facts: dict[str, object] = {"peer": self.peer.name, "received_bytes": self._nbytes, "sent_bytes": answered}
        flow: spans.Flow = "serve", str(self.identity[1])
        name = f"{self.verb} {self.target}".rstrip()
        spans.complete(self._span, name, "serve", track="served", flow=flow, facts=facts)

    def leave(self, connection: Recipient) -> None:
        """Record that the client of ``connection`` has gone."""
        with self._lock:
            if connection in self.recipients:
                self.recipients.remove(connection)
