"""One client's connection on the server: greeted, read, checked, served, answered, without ever waiting.

::

    shaking hands ──> greeting ──> [ header ──> admitted? ──> body ──> handler ──> answer ] ...
          │              │             │
          └──────────────┴─────────────┴── refused ──> leaving: told the reason, until it has read it

``Verb`` is an operation that a server offers, ``Call`` one request being served, ``Admission`` decides which requests
are served, and counts them. ``Connection.step`` continues as far as the socket allows; a loop polls in between
(``server.py``). A connection carries one request at a time, so anything that arrives while a request is served means
that the client is leaving, and the request is cancelled. The thread that has an answer writes as much of it as the
socket takes at once; the loop sends the rest, so a slow reader never blocks a compute thread.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import (
    BoundaryError,
    DeadlineExceeded,
    NotFound,
    Overloaded,
    PeerLost,
    ProtocolError,
    Unauthorized,
)
from anabranch.record import spans
from anabranch.record.spans import fault_point
from anabranch.transport.failures import ends_the_program, failure_of
from anabranch.transport.frame import (
    FailureFrame,
    Header,
    Hello,
    ReplyHeader,
    RequestHeader,
    TensorHeader,
    Wire,
    allocate,
    encode,
)
from anabranch.transport.streams import Stream

# The longest deadline accepted from a client, in seconds.
_LONGEST = 24 * 3600.0
# Seconds in which a peer must have greeted.
_GREETING = 10.0
# Seconds without a byte sent or taken in the middle of a frame after which a peer is treated as gone.
_STALLED = 30.0
# Seconds that a refused client has to read why.
_LINGER = 1.0
# Requests of at most this many bytes are read by the shared loop; answers up to it are not counted.
_SMALL = 64 << 10
_READS = select.POLLIN | select.POLLRDHUP
_SENDS = _READS | select.POLLOUT
ALONE = -1
"""What ``Connection.step`` returns in place of events if the request needs a loop with this connection alone."""


@dataclass(slots=True)
class Checked:
    """A request as a verb's check sees it in its header, for the handler.

    Attributes:
        message: the payload, decoded.
        answer_bytes: of the answer's tensors, which count in the server's budget from here on; those of a larger answer
            when it is sent.
    """

    message: Any = None
    answer_bytes: int = 0


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
            ``SchemaError``, ``NotFound`` or ``Overloaded`` to refuse. What it returns is ``Call.checked``.
        once: executed exactly once however often it is retried; the client must number these requests.
        again: answers the retry of a request that was done but whose answer is no longer kept.
        roles: the roles that may ask; ``None`` for every peer that was let in.
        allocate: makes the tensors that a request is received into; pinned memory, for instance.
        quick: handler and check never block: small requests are served on the thread that reads them for all
            connections. Others are served on a thread for their connection.
    """

    name: str
    handler: Callable[[Call], None]
    check: Callable[[RequestHeader], Checked | None] | None = None
    once: bool = False
    again: Callable[[Call], None] | None = None
    roles: frozenset[str] | None = None
    allocate: Callable[[Sequence[TensorHeader]], Sequence[Tensor]] = allocate
    quick: bool = False


@dataclass(slots=True)
class ServerStatistics:
    """Counters of a server since it started, and its present load.

    Attributes:
        connections: open now.
        calls: being served now.
        bytes_in_flight: of those calls' requests, and of answers that clients have not read.
        served: accepted requests that have ended.
        refused: requests and connections that were rejected.
        requests: accepted requests, by verb.
        errors: answers that were errors, by kind.
        bytes_received: of tensors.
        bytes_sent: of tensors.
    """

    connections: int = 0
    calls: int = 0
    bytes_in_flight: int = 0
    served: int = 0
    refused: int = 0
    requests: dict[str, int] = field(default_factory=Counter)
    errors: dict[str, int] = field(default_factory=Counter)
    bytes_received: int = 0
    bytes_sent: int = 0


class Admission:
    """The requests that a server serves: who may ask, the bytes that they take, and their counts.

    One budget bounds the bytes of requests that are being served and of answers that clients have not read.

    Args:
        verbs: the operations that clients may request.
        max_body: bytes of tensors accepted from a client in one frame.
        heartbeat: seconds between beats.
        max_connections: of clients that have greeted.
        max_bytes: the budget.

    Attributes:
        only_job: the job whose peers alone are served; ``None``: those of every job.
        lock: of everything that is counted here.
        connections: all that are open.
        unknown: those that have not greeted.
        counts: all but the number of connections; ``bytes_in_flight`` are those of the budget that are taken.
    """

    def __init__(
        self, verbs: Iterable[Verb], role: str, *, max_body: int, heartbeat: float, max_connections: int, max_bytes: int
    ) -> None:
        self._role = role
        self.verbs: dict[str, Verb] = {}
        for verb in verbs:
            if verb.name in self.verbs:
                raise ValueError(f"two verbs are called {verb.name!r}")
            self.verbs[verb.name] = verb
        self.max_body = max_body
        self.heartbeat = heartbeat
        self.max_connections = max_connections
        self._max_bytes = max_bytes
        self.only_job: str | None = None
        self.once = OnceTable()
        self.lock = threading.RLock()
        self.connections: dict[Connection, None] = {}
        self.unknown: dict[Connection, None] = {}
        self.draining = False
        self.counts = ServerStatistics()

    def admit(self, connection: Connection, header: RequestHeader, nbytes: int) -> Call:
        """Admit a request with ``nbytes`` of tensors, if its client may ask it now, and give them their memory."""
        peer, verb = connection.wire.stream.peer, self.verbs.get(header.verb)
        if verb is None:
            raise NotFound(
                f"no verb {header.verb!r} on this server, whose role is {self._role!r}; give the endpoint of one that "
                f"has it. Here there are: {', '.join(sorted(self.verbs))}"
            )
        if verb.roles is not None and peer.role is not None and peer.role not in verb.roles:
            raise Unauthorized(f"role {peer.role!r} may not call {verb.name!r}; roles {sorted(verb.roles)} may")
        if self.only_job is not None and peer.job not in (None, self.only_job):
            raise Unauthorized(
                f"this server's certificate is for every job, but job {peer.job!r} needs its own: give the "
                f"server keys of that job (anabranch keys DIR --job {peer.job})"
            )
        if verb.once and len(header.epoch) != 16:
            raise ProtocolError(f"{verb.name} is executed exactly once: number its requests (once=True)")
        with self.lock:
            if self.draining:
                raise PeerLost("the server is shutting down")
            self.reserve(nbytes)
            self.counts.calls += 1
        call = Call(self, verb, connection, header, nbytes)
        try:
            if verb.check is not None:
                call.checked = checked = verb.check(header)
                if checked is not None and checked.answer_bytes > _SMALL:
                    self.reserve(checked.answer_bytes)
                    call.room = checked.answer_bytes
            try:
                call.tensors = verb.allocate(header.tensors)
            except (RuntimeError, MemoryError) as error:
                raise Overloaded(f"not enough memory for {nbytes} bytes: {error}") from None
        except BaseException:
            self.end_call(nbytes + call.room)
            raise
        self.counts.requests[verb.name] += 1
        return call

    def end_call(self, nbytes: int) -> None:
        """Record that a call which has ``nbytes`` of the budget is over."""
        with self.lock:
            self.counts.calls -= 1
            self.counts.bytes_in_flight -= nbytes

    def reserve(self, nbytes: int) -> None:
        """Reserve ``nbytes`` for a request or an answer; ``Overloaded`` without room."""
        with self.lock:
            if self.counts.bytes_in_flight + nbytes > self._max_bytes:
                taken = self.counts.bytes_in_flight
                raise Overloaded(
                    f"no memory for a request or response of {nbytes} bytes: {taken} bytes of others are in flight, "
                    f"also of responses to clients that do not read, and {self._max_bytes} are allowed"
                )
            self.counts.bytes_in_flight += nbytes

    def release(self, nbytes: int) -> None:
        """Free the bytes of an answer that was sent, or that will not be read."""
        with self.lock:
            self.counts.bytes_in_flight -= nbytes

    def count(self, failure: FailureFrame, *, refused: bool = False) -> None:
        """Count an answer that was an error, or a request or connection that was refused."""
        with self.lock:
            self.counts.refused += refused
            self.counts.errors[failure.code] += 1

    def greeted(self, connection: Connection) -> None:
        """Register that ``connection`` has greeted, if there is room."""
        with self.lock:
            if len(self.connections) - len(self.unknown) >= self.max_connections:
                raise Overloaded(f"the server already has {self.max_connections} connections; try later")
            self.unknown.pop(connection, None)


class Call:
    """One request being served: its contents, its client, its deadline; and the way to answer.

    ``reply`` and ``fail`` may be called from any thread; only the first call counts. A call whose client has gone is
    ``cancelled``; any code that notices may ``drop`` it.
    """

    def __init__(
        self, admission: Admission, verb: Verb, connection: Connection, header: RequestHeader, nbytes: int
    ) -> None:
        self._span = spans.begin()
        self.verb = header.verb
        self.target = header.target
        self.payload = header.payload
        self.schema = header.schema
        self.checked: Checked | None = None
        self.tensors: Sequence[Tensor] = ()
        self.peer = connection.wire.stream.peer
        self.deadline = Deadline(min(max(header.seconds, 1e-3), _LONGEST))
        self.identity: RequestIdentity = (header.epoch, header.sequence)
        self.settled = header.settled
        self.once = verb.once
        self.recipients = [connection]
        """The connections that wait for the answer: more than one where a retry has joined."""
        self.handling = verb
        self.nbytes, self.room = nbytes, 0
        """Bytes of the budget that its tensors have, and those that are reserved for its answer."""
        self._admission = admission
        self._lock = admission.once.lock if self.once else threading.Lock()
        self._answered = False

    @property
    def cancelled(self) -> bool:
        """True if the client no longer waits for the response."""
        return not self.recipients

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
        self._admission.count(failure)
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

    def answer(self, frame: list[memoryview], *, done: bool) -> None:
        """Send ``frame`` to the waiting connections; with ``done`` a retry gets the same frame."""
        with self._lock:
            if self._answered:
                return
            recipients, self.recipients = self.recipients, []
            room = self.room if recipients else 0  # which the answer keeps until it has been sent
            self.room -= room
            self.close(frame if done else None)
        fault_point("transport.before_reply")
        for connection in recipients:
            connection.answer(self, frame, room)
            room = 0

    def close(self, frame: list[memoryview] | None) -> None:
        """Mark the request as finished, with or without an answer to keep for retries; its lock is held."""
        self._answered = True
        admission, answered = self._admission, 0
        if frame is not None:
            answered = sum(map(len, frame)) - len(frame[0])
        if self.once and frame is not None:
            admission.once.finish(self.identity, frame)
        elif self.once:
            admission.once.abandon(self.identity)
        with admission.lock:
            admission.counts.served += 1
            admission.counts.bytes_received += self.nbytes
            admission.counts.bytes_sent += answered
            admission.end_call(self.nbytes + self.room)
        if self._span:
            facts: dict[str, object] = {"peer": self.peer.name, "received_bytes": self.nbytes, "sent_bytes": answered}
            flow: spans.Flow = "serve", str(self.identity[1])
            name = f"{self.verb} {self.target}".rstrip()
            spans.complete(self._span, name, "serve", track="served", flow=flow, facts=facts)

    def leave(self, connection: Connection) -> None:
        """Record that the client of ``connection`` has gone."""
        with self._lock:
            if connection in self.recipients:
                self.recipients.remove(connection)


class _Phase(Enum):
    SHAKING = auto()
    GREETING = auto()
    SERVING = auto()
    LEAVING = auto()


class Connection:
    """One client's connection; steps are taken by one thread at a time, answers come from any."""

    def __init__(self, admission: Admission, stream: Stream) -> None:
        self.wire = Wire(stream, admission.max_body)
        self.loop: object = None
        """The loop that drives it."""
        self.watch: Callable[[Connection], None] = lambda connection: None
        """Has that loop poll for the events that are of interest now; from any thread."""
        self.alone = False
        """True if that loop drives no other connection, so that this one may block it."""
        self.registered = 0
        """The events that the loop polls for."""
        self.closed = False
        self._admission = admission
        # For every use of the stream but poll and abort: OpenSSL allows one thread at a time.
        self.lock = threading.RLock()
        self._phase = _Phase.SHAKING
        # The frame that is being received, whether it was accepted, and the call it makes if it is not skipped.
        self._header: Header | None = None
        self._accepted = False
        self._receiving: Call | None = None
        self._call: Call | None = None
        self._left = False
        self._room = 0  # bytes of the budget that answers have which have not been read
        self._began = time.monotonic()
        self.progress = self._began
        """When a byte was last sent or received."""
        with admission.lock:
            admission.connections[self] = admission.unknown[self] = None

    # --- called from any thread

    def answer(self, call: Call, frame: Sequence[memoryview], room: int) -> None:
        """Write the answer, for which ``room`` is reserved, as far as the socket takes it; the loop does the rest."""
        with self.lock:
            if self._call is not call or self.closed:
                self._admission.release(room)
                return
            # Before the first byte leaves: the client may send its next request as soon as it has the last one.
            self._call = None
            # The client's time to read begins now, however long the call took; set before other threads see the answer.
            self.progress = time.monotonic()
            # The header is not counted.
            nbytes = sum(map(len, frame)) - len(frame[0])
            if nbytes <= _SMALL:
                nbytes = 0
            try:
                if nbytes != room:
                    self._admission.reserve(nbytes - room)
            except Overloaded as error:
                failure = failure_of(error, call.identity[1])
                self._admission.count(failure)
                frame, nbytes = encode(failure), 0
                self._admission.release(room)
            self._room += nbytes
            self._write(frame)

    def beat(self, frame: Sequence[memoryview]) -> None:
        """Send a beat to a client that waits within its deadline."""
        if not self.lock.acquire(blocking=False):
            return
        try:
            call = self._call
            waits = call is not None and not call.deadline.expired()
            serving = self._phase is _Phase.SERVING and not self.wire.waiting and not self.closed
            if serving and (waits or not self.wire.idle()):
                self._write(frame)
        finally:
            self.lock.release()

    def abort(self) -> None:
        """Cuts the connection, which its loop notices and removes."""
        with self.lock:
            if not self.closed:
                self.wire.stream.abort()

    def busy(self) -> bool:
        """Return True if a request is being served, or bytes of an answer have not left yet."""
        with self.lock:
            return not self.closed and (self._call is not None or bool(self.wire.waiting))

    def _write(self, frame: Sequence[memoryview]) -> None:
        try:
            self.wire.send(frame)
        except (OSError, BoundaryError):
            self._drop_answer()
            self.wire.stream.abort()
            return
        if self.wire.waiting:
            self.watch(self)
        elif self._room:
            self._free_room()

    def _free_room(self) -> None:
        """Release the bytes reserved for an answer once it has been sent, or given up."""
        if self._room and not self.wire.waiting:
            self._admission.release(self._room)
            self._room = 0

    def _drop_answer(self) -> None:
        """Free an answer that will not be read, and the room reserved for one."""
        self.wire.waiting.clear()
        self._free_room()

    # --- called on the loop's thread

    def interest(self) -> int:
        """Return the events to poll for; none of a connection that has ended."""
        if self.closed:
            return 0
        if self._phase is _Phase.SHAKING and self.wire.stream.wants_write():
            return select.POLLOUT | select.POLLRDHUP
        return _SENDS if self.wire.waiting else _READS

    def rests_since(self) -> float:
        """Return since when nothing is in flight in either direction, nor being served; infinity if something is."""
        serving = self._phase is _Phase.SERVING and self._call is None and not self.wire.waiting
        return self.progress if serving and self.wire.idle() else float("inf")

    def overdue(self, now: float) -> bool:
        """Return True if its client has stalled in the middle of a frame, has not greeted, or was told to leave."""
        if self._phase is _Phase.LEAVING:
            return now > self.progress + _LINGER
        if self._phase is not _Phase.SERVING:
            return now > self._began + _GREETING
        return now > self.progress + _STALLED and (bool(self.wire.waiting) or not self.wire.idle())

    def turn_away(self, error: BoundaryError) -> None:
        """End the connection at once; a client that could have greeted gets the reason, if the socket allows."""
        if self._phase in (_Phase.SHAKING, _Phase.GREETING):
            self._dismiss(error)
        # None of its bytes are unread, so closing destroys nothing.
        self.end()

    def step(self, events: int) -> int:
        """Continue as far as the socket allows.

        Returns:
            The events to poll for; 0 if it has ended, ``ALONE`` if its request needs a loop of its own.
        """
        wire = self.wire
        try:
            if events & select.POLLRDHUP:
                self._note_end()
            readable = events & ~select.POLLOUT
            if self._phase is _Phase.LEAVING:
                if not os.read(wire.stream.descriptor, _SMALL):
                    self.end()
                return self.interest()
            if self._phase is _Phase.SHAKING:
                self.progress = time.monotonic()
                if not wire.stream.handshake():
                    return self.interest()
                # Bytes that came with the end of the handshake may be in the TLS layer already, invisible to poll.
                self._phase, readable = _Phase.GREETING, select.POLLIN
            more = True
            while more:
                with self.lock:
                    received, sent, whole = wire.received, 0, False
                    if wire.waiting:
                        sent = wire.send()
                        self._free_room()
                    if readable:
                        if self._header is None:
                            self._header, self._accepted = wire.header(), False
                        if self._header is not None:
                            if not self._accepted and not self._accept(self._header):
                                return ALONE
                            whole = wire.receive(None if self._receiving is None else self._receiving.tensors)
                    if sent or wire.received != received:
                        self.progress = time.monotonic()
                if not whole and self._left:
                    raise ConnectionResetError("the client has disconnected")
                if not whole:
                    break
                header, call = self._header, self._receiving
                self._header = self._receiving = None
                # The client waits for its answer, so the kernel has nothing more.
                more = wire.more
                if isinstance(header, Hello):
                    # A request may have arrived with the greeting.
                    self._greet()
                    more = True
                elif call is not None:  # else it was refused when its header arrived
                    self._serve(call)
            return _SENDS if wire.waiting else _READS
        except (BoundaryError, ValueError) as error:
            self._dismiss(error)
        except BlockingIOError:
            pass
        except OSError:
            self.end()
        return self.interest()

    def _note_end(self) -> None:
        """Take note that the client has disconnected: what it has sent whole is done, as what it posted must be."""
        receiving = self._header is not None and self._accepted
        if self._phase is not _Phase.SERVING or self._call is not None or receiving:
            raise ConnectionResetError("the client has disconnected")
        self._left = True

    def _greet(self) -> None:
        admission = self._admission
        admission.greeted(self)
        with self.lock:
            self._phase = _Phase.SERVING
            self._write(encode(Hello(admission.heartbeat)))

    def _accept(self, header: Header) -> bool:
        """Give the body of a frame its memory; false if the request needs a loop of its own first."""
        if self._phase is _Phase.GREETING:
            if not isinstance(header, Hello) or header.tensors:
                raise ProtocolError("a client's first frame must be a greeting without tensors")
        elif not isinstance(header, RequestHeader):
            raise ProtocolError(f"a client sends requests, not {type(header).__name__}")
        elif self._call is not None:
            raise ProtocolError("received a request while another is served; a connection carries one at a time")
        else:
            nbytes = 0
            for tensor in header.tensors:
                nbytes += tensor.nbytes
            verb = self._admission.verbs.get(header.verb)
            if not self.alone and (nbytes > _SMALL or (verb is not None and not verb.quick)):
                return False
            try:
                self._receiving = self._admission.admit(self, header, nbytes)
            except BaseException as error:
                if ends_the_program(error):
                    raise
                failure = failure_of(error, header.sequence)
                self._admission.count(failure, refused=True)
                self._write(encode(failure))
        self._accepted = True
        return True

    def _serve(self, call: Call) -> None:
        self._call = call
        try:
            serve = self._choose(call) if call.once else call.handling.handler
            if serve is not None:
                if call.deadline.expired():
                    raise call.deadline.error(peer="client", operation=call.verb)
                with spans.span(call.verb, "compute"):
                    serve(call)
        except BaseException as error:
            call.fail(error)
            if ends_the_program(error):
                raise

    def _choose(self, call: Call) -> Callable[[Call], None] | None:
        """Return the handler that serves the call; ``None`` if it is a retry that has already been handled."""
        once = self._admission.once
        with once.lock:
            known = once.begin(call.identity, call, call.settled)
            call.once = known is call
            if known is call:
                return call.handling.handler
            if isinstance(known, Call):
                call.recipients.clear()
                call.close(None)
                known.recipients.append(self)
                self._call = known
                return None
        if known is None:
            return call.handling.again or _say_done
        call.answer(known, done=False)
        return None

    def _dismiss(self, error: Exception) -> None:
        """Tell the client why it is refused; the connection ends once it has read that, or soon."""
        failure = failure_of(error)
        self._admission.count(failure, refused=True)
        with self.lock:
            call, self._call = self._call, None
            self._drop_answer()
            self._phase, self.progress = _Phase.LEAVING, time.monotonic()
            with suppress(OSError, BoundaryError):
                self.wire.send(encode(failure))
            self.wire.drop()
            # Its end is waited for: bytes of it that are not read would make the kernel discard ours.
            self.wire.stream.finish()
        if call is not None:
            call.leave(self)

    def end(self) -> None:
        """Close the connection; nobody waits for its call any more."""
        admission = self._admission
        with self.lock:
            if self.closed:
                return
            self.closed = True
            call, receiving = self._call, self._receiving
            self._call = self._receiving = self._header = None
            self.wire.stream.close()
            self._drop_answer()
            self.wire.drop()
        if call is not None:
            call.leave(self)
        with admission.lock:
            if receiving is not None:
                admission.end_call(receiving.nbytes + receiving.room)
            admission.connections.pop(self, None)
            admission.unknown.pop(self, None)


def _say_done(call: Call) -> None:
    call.fail(RuntimeError("this request was executed, but its response is no longer kept"))


# --- requests that are executed once ----------------------------------------------------------------------------------
# A client numbers the requests that must happen exactly once (its epoch, and a sequence that never repeats) and sends
# with each one the number below which it will never retry. The table has those above: requests being served, to which a
# retry is joined, and past answers, which a retry gets again. Answers stay within a budget of bytes, and the newest
# however large it is; of others only the fact that the request was executed is known, and the verb's own ``again``
# answers the retry.


RequestIdentity = tuple[bytes, int]
"""A request's name for ever: the epoch of its client, and its sequence."""

_DAY = 86_400.0  # seconds


@dataclass(slots=True)
class _Epoch:
    """One client: requests below ``settled`` will never be retried; others run, or have an answer, lost or not."""

    settled: int = 0
    heard: float = 0.0
    requests: dict[int, Call | list[memoryview] | None] = field(default_factory=dict)


class OnceTable:
    """The requests of all clients that were or are being executed.

    A client is forgotten once it has sent none for a day, for which nobody repeats a request: those of a year, a
    minute each, would take half a gigabyte.

    Args:
        budget_bytes: bytes of answers kept for retries; the newest is kept in any case.
    """

    def __init__(self, budget_bytes: int = 64 << 20) -> None:
        self.lock = threading.RLock()
        self._budget = budget_bytes
        self._epochs: OrderedDict[bytes, _Epoch] = OrderedDict()  # the one heard last at the end
        self._kept: OrderedDict[RequestIdentity, int] = OrderedDict()
        self._kept_bytes = 0

    def begin(self, identity: RequestIdentity, call: Call, settled: int) -> Call | list[memoryview] | None:
        """Classify a request: return the call itself if it is new, the call it joins, or its old answer.

        ``None`` means that it was executed and its answer is not kept.

        Raises:
            ProtocolError: the client had declared that it would never retry this.
        """
        key, sequence = identity
        with self.lock:
            epoch = self._epochs.setdefault(key, _Epoch())
            self._epochs.move_to_end(key)
            epoch.heard, epoch.settled = time.monotonic(), max(epoch.settled, settled)
            while (silent := next(iter(self._epochs))) != key and epoch.heard - self._epochs[silent].heard > _DAY:
                for old in self._epochs.pop(silent).requests:
                    self._kept_bytes -= self._kept.pop((silent, old), 0)
            while epoch.requests and (oldest := min(epoch.requests)) < settled:
                del epoch.requests[oldest]
                self._kept_bytes -= self._kept.pop((key, oldest), 0)
            if sequence < epoch.settled:
                raise ProtocolError(f"request {sequence} is settled: this client promised not to send it again")
            return epoch.requests.setdefault(sequence, call)

    def finish(self, identity: RequestIdentity, answer: list[memoryview]) -> None:
        """Record that the request was executed and answered."""
        key, sequence = identity
        with self.lock:
            epoch = self._epochs.get(key)
            if epoch is None or sequence not in epoch.requests:  # forgotten, or settled
                return
            epoch.requests[sequence] = answer
            nbytes = sum(map(len, answer))
            self._kept[identity] = nbytes
            self._kept_bytes += nbytes
            while self._kept_bytes > self._budget and len(self._kept) > 1:
                (key, sequence), freed = self._kept.popitem(last=False)
                self._kept_bytes -= freed
                self._epochs[key].requests[sequence] = None

    def abandon(self, identity: RequestIdentity) -> None:
        """Record that the request was not executed: a retry will execute it."""
        with self.lock:
            if (epoch := self._epochs.get(identity[0])) is not None:
                epoch.requests.pop(identity[1], None)

    def restore(self, identities: Iterable[RequestIdentity]) -> None:
        """Record requests that were executed before this server started."""
        with self.lock:
            now = time.monotonic()
            for key, sequence in identities:
                self._epochs.setdefault(key, _Epoch(heard=now)).requests.setdefault(sequence, None)
