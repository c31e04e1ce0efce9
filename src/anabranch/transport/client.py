"""A client: asks one server or many at once, on the calling thread, under one deadline.

::

    connect ──> greet ──> ask ──> wait ──────> answered         the connection returns to its pool
       ^                   │       │ ^ beats
       │                   v       v │
       └──── backoff <── lost ────────        a connection lost is a request asked again, under the same identity,
                                              until its retries or its deadline are used up

A connection carries one request at a time and a pool keeps the idle ones, so a request is cancelled by closing its
connection. A server that waits or computes sends beats; if it is silent for two beats, it is lost, and while it sends
beats, the client waits until the deadline.

The file is long because it is one state machine: a connection, an exchange on it, and the loop that drives many.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, ForkedClient, PeerLost, ProtocolError, Unauthorized
from anabranch.record import spans
from anabranch.record.process import process_record
from anabranch.transport.failures import error_of
from anabranch.transport.frame import (
    FailureFrame,
    FrameReader,
    FrameWriter,
    Header,
    Heartbeat,
    Hello,
    Limits,
    ReplyHeader,
    RequestHeader,
    TensorHeader,
    allocate,
    encode,
)
from anabranch.transport.network.sockets import SocketTransport
from anabranch.transport.network.streams import Stream, Transport

__all__ = ["Answer", "Client", "ClientOptions", "Outcome", "Request"]

_FIRST_BACKOFF = 0.01
_LONGEST_BACKOFF = 1.0
_FRESH = 1.0
# A client's first number is below; 2 ** 61 more fit the frame.
_FIRST_NUMBERS = 1 << 61
# Seconds between two checks for idle connections to servers that have gone.
_PRUNE = 5.0
# Requests prepared before the first of them is sent: sent one right after the other, they wake their server only once.
_SENT_TOGETHER = 8


class Request(msgspec.Struct, frozen=True, eq=False):
    """One request: the server, the verb, and the tensors to send.

    Attributes:
        endpoint: the server.
        verb: the operation requested.
        target: the name of the object that the verb acts on.
        tensors: sent without a copy; they must not change before the answer has arrived.
        payload: further fields, packed with ``pack``.
        schema: a hash of the schema that the client expects of the target; the verb's check may compare it.
        once: numbered, so that the server performs it exactly once however often it is retried.
        step: the step of the program, for error messages.
        allocate: called with the specs of the answer's tensors before memory is taken; returns the memory to fill.
        role: the role that the server's certificate must name; ``None`` for any. A server on a Unix socket has no
            certificate: it must run as this process's user.
    """

    endpoint: str
    verb: str
    target: str = ""
    tensors: Sequence[Tensor] = ()
    payload: bytes = b""
    schema: bytes = b""
    once: bool = False
    step: int | None = None
    allocate: Callable[[Sequence[TensorHeader]], Sequence[Tensor]] = allocate
    role: str | None = None


class Answer(msgspec.Struct, frozen=True, eq=False):
    """A server's answer to one request."""

    tensors: Sequence[Tensor]
    payload: bytes = b""


Outcome = Answer | Exception | None
"""The end of a request: its answer, the error to raise, or ``None`` if it was cancelled."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The arguments of a client over sockets; see ``Client``."""

    role: str
    keys: str | None
    insecure: bool
    heartbeat: float
    retries: int

    def make(self) -> Client:
        """Create another client with the same arguments."""
        return Client(
            role=self.role, keys=self.keys, insecure=self.insecure, heartbeat=self.heartbeat, retries=self.retries
        )


class Client:
    """Sends requests to servers; safe to share between threads, each of which sends and receives its own requests.

    >>> import torch
    >>> from anabranch.transport import Server, Verb
    >>> double = Verb("double", lambda call: call.reply([2 * tensor for tensor in call.tensors]))
    >>> with Server([double]) as server, Client() as client:
    ...     client.call(Request(server.endpoint, "double", tensors=[torch.ones(2)]), Deadline.after(60.0)).tensors
    [tensor([2., 2.])]

    Args:
        role: this process's role, which names its certificate.
        keys: the directory of certificates; without it, the one that ``ANABRANCH_KEYS`` names.
        insecure: allow TCP without certificates.
        heartbeat: seconds between expected beats, of a server that has not announced its own.
        transport: the network; sockets by default.
        retries: how often a request is sent again after a connection was lost or refused, with pauses that double from
            10 ms to 1 s. A connection that went stale in the pool is replaced without counting.
        limits: the sizes accepted from a server in one frame.
        idle: unused connections kept open to each peer.

    Raises:
        ValueError: keys that are missing or damaged.

    A client that has sent a request belongs to its process: in a forked child every request raises ``ForkedClient``.
    """

    def __init__(
        self,
        *,
        role: str = "worker",
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        transport: Transport | None = None,
        retries: int = 8,
        limits: Limits | None = None,
        idle: int = 16,
    ) -> None:
        self._transport = transport if transport is not None else SocketTransport(role, keys=keys, insecure=insecure)
        self._options = ClientOptions(role, None if keys is None else os.fspath(keys), insecure, heartbeat, retries)
        self._plain = transport is None and limits is None
        self._heartbeat = heartbeat
        self._retries = retries
        self._limits = limits or Limits()
        self._most_idle = idle
        self._lock = threading.Lock()
        self._idle: defaultdict[str, list[_Channel]] = defaultdict(list)
        self._busy: set[_Channel] = set()
        self._closed = False
        self._epoch = os.urandom(16)
        # Not from 0: with a relay's shared connections, another client's answer would have the same number.
        self._first = self._next = secrets.randbelow(_FIRST_NUMBERS)
        self._outstanding: set[int] = set()
        self._prune_at = 0.0
        self._process = os.getpid()
        self._forked = False
        _clients.add(self)
        process_record()  # tells of waits
        # A client that was never closed closes its idle connections when it is collected.
        weakref.finalize(self, _close_idle, self._idle)

    @property
    def options(self) -> ClientOptions:
        """The arguments to create an equal client in another process.

        Raises:
            TypeError: its transport or its limits belong to this process.
        """
        if not self._plain:
            raise TypeError(
                f"a Client with {type(self._transport).__name__} or with its own limits cannot leave its process, and "
                "so neither can a module that uses it; leave out client=, or give a client over sockets"
            )
        return self._options

    @property
    def forked(self) -> bool:
        """True in a forked child of the process that has used the client: every request raises ``ForkedClient``."""
        return self._forked

    @property
    def epoch(self) -> bytes:
        """The 16 bytes that name this client in the requests it numbers."""
        return self._epoch

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; requests in flight on other threads end with ``PeerLost``."""
        with self._lock:
            self._closed = True
            for channel in self._busy:
                channel.stream.abort()
            _close_idle(self._idle)

    def call(self, request: Request, deadline: Deadline) -> Answer:
        """Send a request and wait for the answer.

        Raises:
            DeadlineExceeded: no answer in time; the server may still be working.
            PeerLost: no server there, the connection lost more often than there are retries, or no beat for two
            intervals (one more if this process was itself held up). Overloaded: the server declined at once.
            Unauthorized: the server does not trust our certificate, or our role may not make this request.
            ProtocolError: the answer is not a frame, or breaks a limit. RemoteError: the verb's handler raised.
            NotFound, SchemaError, NonFinite: the server rejected the request as wrong. ForkedClient: the client was
            used before this process was forked.
        """
        outcome = self.gather([request], deadline)[0]
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    def gather(
        self,
        requests: Sequence[Request],
        deadline: Deadline,
        *,
        enough: Callable[[Sequence[Outcome]], bool] | None = None,
        grace: float = 0.0,
    ) -> list[Outcome]:
        """Send all requests at once and return the outcome of each, in their order; raises no error of a server.

        Raises ``ForkedClient`` if the client was used before this process was forked.

        Args:
            requests: to any servers, several to one allowed.
            deadline: for all of them together.
            enough: called with the outcomes so far after each that arrives; once it is true, the rest have ``grace``
                seconds left and are then cancelled, which closes their connections.
            grace: seconds.
        """
        if self._forked:
            raise ForkedClient(
                f"this client was made in process {self._process} before a fork, and its connections belong to that "
                f"process; make a new one in this process, {os.getpid()} (also a new ParameterClient, if it belongs "
                "to one)"
            )
        exchanges = [_Exchange(self, request, deadline) for request in requests]
        try:
            if len(exchanges) == 1 and enough is None:
                exchanges[0].run()
            else:
                self._drive(exchanges, deadline, enough, grace)
        finally:
            for exchange in exchanges:
                if not exchange.done:
                    exchange.cancel()
        return [exchange.outcome for exchange in exchanges]

    def _drive(
        self,
        exchanges: Sequence[_Exchange],
        deadline: Deadline,
        enough: Callable[[Sequence[Outcome]], bool] | None,
        grace: float,
    ) -> None:
        waits = _Waits()
        for first in range(0, len(exchanges), _SENT_TOGETHER):
            some = exchanges[first : first + _SENT_TOGETHER]
            for exchange in some:
                exchange.advance(readable=False, send=False)
            for exchange in some:
                exchange.advance(readable=False)
                waits.update(exchange)
        finished = 0
        last_call: Deadline | None = None
        if not waits.waiting:
            return
        span = spans.begin()
        spans.shown[waits] = None
        try:
            while waits.waiting:
                if deadline.expired():
                    for exchange in list(waits.waiting):
                        exchange.expire()
                    return
                if enough is not None and last_call is None and len(exchanges) - len(waits.waiting) > finished:
                    finished = len(exchanges) - len(waits.waiting)
                    if enough([exchange.outcome for exchange in exchanges]):
                        if grace <= 0:
                            return
                        last_call = deadline.sooner(grace)
                if last_call is not None and last_call.expired():
                    return
                waits.wait((last_call or deadline).remaining())
        finally:
            spans.shown.pop(waits, None)
            if span:
                spans.complete(span, "wait", "wait", facts=_wait_for(exchanges))

    def _after_fork(self) -> None:
        """Reset in a forked child: its requests on its parent's connections would be mistaken for the parent's."""
        # Another thread, which does not exist here, may have held it.
        self._lock = threading.Lock()
        if self._next == self._first:
            # Never used: no server knows it, so it becomes its own client.
            self._epoch, self._process = os.urandom(16), os.getpid()
            self._first = self._next = secrets.randbelow(_FIRST_NUMBERS)
            return
        self._forked = True
        for channel in self._busy:
            channel.close()
        self._busy.clear()
        _close_idle(self._idle)

    # Called by exchanges.

    def _channel(self, endpoint: str, *, fresh: bool) -> _Channel:
        with self._lock:
            if self._closed:
                raise PeerLost("this client is closed", peer=endpoint)
            idle = self._idle[endpoint]
            now = time.monotonic()
            while idle:
                channel = idle.pop()
                if not fresh and (now - channel.released < _FRESH or not channel.stale()):
                    channel.used = True
                    self._busy.add(channel)
                    return channel
                channel.close()
        stream = self._transport.connect(endpoint)
        channel = _Channel(stream, self._limits, self._heartbeat)
        with self._lock:
            self._busy.add(channel)
        return channel

    def _release(self, endpoint: str, channel: _Channel, *, reusable: bool) -> None:
        with self._lock:
            self._busy.discard(channel)
            now = time.monotonic()
            if now >= self._prune_at:
                self._prune(now)
            idle = self._idle[endpoint]
            if reusable and not self._closed and len(idle) < self._most_idle:
                channel.released = now
                channel.allocate = allocate
                idle.append(channel)
                return
        channel.close()

    def _prune(self, now: float) -> None:
        """Close idle connections to servers that have gone, in case no later request uses them."""
        self._prune_at = now + _PRUNE
        for endpoint, idle in list(self._idle.items()):
            gone = [channel for channel in idle if now - channel.released >= _FRESH and channel.stale()]
            for channel in gone:
                idle.remove(channel)
                channel.close()
            if not idle:
                del self._idle[endpoint]

    def _number(self, *, once: bool) -> int:
        with self._lock:
            sequence = self._next
            self._next += 1
            if once:
                self._outstanding.add(sequence)
            return sequence

    def _settled(self) -> int:
        with self._lock:
            return min(self._outstanding, default=self._next)

    def _settle(self, sequence: int) -> None:
        with self._lock:
            self._outstanding.discard(sequence)


def _close_idle(idle: dict[str, list[_Channel]]) -> None:
    while idle:
        _, channels = idle.popitem()
        for channel in channels:
            channel.close()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _reset_clients_after_fork() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_reset_clients_after_fork)


class _Waits:
    """The exchanges of one ``gather`` that wait, and the events that they wait for."""

    def __init__(self) -> None:
        self.waiting: dict[_Exchange, None] = {}
        self._poller = select.poll()
        self._by_descriptor: dict[int, tuple[_Exchange, int]] = {}
        # A lower bound of every ``wake_at``, not the exact minimum, because ``wake_at`` advances with every byte.
        self._wake = float("inf")

    def open_span(self) -> dict[str, object]:
        """Say whom the caller waits for, for ``anabranch status``."""
        waiting = list(self.waiting)
        return waiting[0].open_span() | _wait_for(waiting) if waiting else {"name": "wait", "since": float("inf")}

    def update(self, exchange: _Exchange) -> None:
        """Poll for the events that ``exchange`` waits for now."""
        if exchange.done:
            self.waiting.pop(exchange, None)
            if not self.waiting:
                return
        else:
            self.waiting[exchange] = None
            self._wake = min(self._wake, exchange.wake_at())
        events = exchange.interest()
        descriptor = exchange.fileno() if events else -1
        if exchange.polled >= 0 and exchange.polled != descriptor:
            # A closed descriptor's number may belong to another exchange by now.
            known = self._by_descriptor.get(exchange.polled)
            if known is not None and known[0] is exchange:
                self._poller.unregister(exchange.polled)
                del self._by_descriptor[exchange.polled]
        exchange.polled = descriptor
        if events and self._by_descriptor.get(descriptor) != (exchange, events):
            self._poller.register(descriptor, events)
            self._by_descriptor[descriptor] = exchange, events

    def wait(self, seconds: float) -> None:
        """Wait until one of the exchanges can continue, at most this many seconds, and let all that can proceed."""
        now = time.monotonic()
        if self._wake <= now:
            self._wake = min(exchange.wake_at() for exchange in self.waiting)
        wake = min(now + seconds, self._wake)
        # Rounded up, or the last millisecond would be spent spinning.
        for descriptor, events in self._poller.poll(max(0, int((wake - now) * 1000) + 1)):
            exchange, _ = self._by_descriptor.get(descriptor, (None, 0))
            if exchange is not None:
                exchange.advance(readable=bool(events & ~select.POLLOUT))
                self.update(exchange)
        if not self.waiting or (now := time.monotonic()) < wake:
            return
        for exchange in list(self.waiting):
            if exchange.wake_at() <= now:
                exchange.wake(now)
            self.update(exchange)
        self._wake = min((exchange.wake_at() for exchange in self.waiting), default=float("inf"))


class _Channel:
    """A connection, with the bytes in progress in both directions; owned by one exchange at a time, or by the pool."""

    def __init__(self, stream: Stream, limits: Limits, heartbeat: float) -> None:
        self.stream = stream
        self.writer = FrameWriter()
        self.reader = FrameReader(limits, self._accept)
        self.heartbeat = heartbeat
        self.connected = False
        self.used = False
        self.released = 0.0
        self.role: str | None = None
        """The role in the server's certificate, once connected."""
        self.expected = -1
        """The sequence of the request that waits for its answer."""
        self.allocate: Callable[[Sequence[TensorHeader]], Sequence[Tensor]] = allocate
        self._poller = select.poll()
        self._polled = -1, 0

    def poll(self, events: int, milliseconds: int) -> int:
        """Return the events that have occurred, 0 at the deadline; usually it polls for the same events as the last
        call.
        """
        polled = self.stream.fileno(), events
        if polled != self._polled:
            if self._polled[0] not in (-1, polled[0]):
                self._poller.unregister(self._polled[0])
            self._poller.register(polled[0], events)
            self._polled = polled
        found = self._poller.poll(milliseconds)
        return found[0][1] if found else 0

    def close(self) -> None:
        """Close the connection, and free its buffers."""
        self.stream.close()
        self.writer.waiting.clear()
        self.reader.drop()
        self.allocate = allocate

    def stale(self) -> bool:
        """Return True if a connection that was idle for long has become readable, which can only mean that it has
        ended.

        A recently used connection need not be checked: if it is stale, the request fails on it and is retried on a
        fresh one.
        """
        poller = select.poll()
        poller.register(self.stream.fileno(), select.POLLIN | select.POLLRDHUP)
        return bool(poller.poll(0))

    def _accept(self, header: Header) -> Sequence[Tensor] | None:
        if isinstance(header, ReplyHeader):
            # A duplicate of an earlier answer is skipped.
            return self.allocate(header.tensors) if header.sequence == self.expected else None
        if isinstance(header, RequestHeader) or header.tensors:
            raise ProtocolError(f"a server sends no {type(header).__name__} with {len(header.tensors)} tensors")
        return ()


class _Phase(Enum):
    RESTING = auto()
    CONNECTING = auto()
    ASKING = auto()
    DONE = auto()


class _Exchange(msgspec.Struct, eq=False):
    """One request, from the first attempt to its outcome."""

    client: Client
    request: Request
    deadline: Deadline
    outcome: Outcome = None
    phase: _Phase = _Phase.RESTING
    channel: _Channel | None = None
    sequence: int = -1
    attempts: int = 0
    retry_at: float = 0.0
    progress: float = 0.0
    excused: float = 0.0
    """Seconds since ``progress`` that do not count as silence: this process slept, and its server may have too."""
    fresh: bool = False
    heard: bool = False
    answered: bool = False
    polled: int = -1
    last_error: Exception | None = None
    span: int = 0
    """When it began, if somebody records."""
    done: bool = False
    """True once there is an outcome, or there will never be one."""

    def fileno(self) -> int:
        """Return the descriptor to poll; only valid while ``interest`` is not 0."""
        assert self.channel is not None
        return self.channel.stream.fileno()

    def interest(self) -> int:
        """Return the events to poll for, 0 while only waiting can help."""
        if self.channel is None or self.done:
            return 0
        ready = self.channel.stream.ready_at()
        if ready and ready > time.monotonic():
            return 0
        if self.phase is _Phase.CONNECTING:
            return select.POLLOUT if self.channel.stream.wants_write() else select.POLLIN
        return select.POLLIN | (select.POLLOUT if self.channel.writer.waiting else 0)

    def wake_at(self) -> float:
        """Return the moment at which to act even without an event."""
        if self.channel is None:
            return self.retry_at
        silent = self.progress + self.excused + 2 * self.channel.heartbeat
        ready = self.channel.stream.ready_at()
        return min(silent, ready) if ready else silent

    def wake(self, now: float) -> None:
        """Retry at ``wake_at``, continue, or give up on a silent server."""
        if self.channel is None or now < (silent := self.progress + self.excused + 2 * self.channel.heartbeat):
            self.advance()
        elif not self.excused and now - silent > self.channel.heartbeat / 10:
            # Nobody woke this process in time: all of this machine may have stood still. One more beat is waited for.
            self.excused = now - self.channel.heartbeat - self.progress
        else:
            silence = now - self.progress
            self._finish(
                self._error(PeerLost, f"no beat for {silence:.2f} s: the server is frozen, or not an anabranch server")
            )

    def advance(self, *, readable: bool = True, send: bool = True) -> None:
        """Continue as far as the connection allows; skip reading if ``readable`` is false.

        Without ``send`` the request is only prepared for leaving, if it has a connection.
        """
        try:
            if self.phase is _Phase.RESTING:
                self._begin()
            if self.phase is _Phase.CONNECTING:
                self._connect()
                readable = False
            if self.phase is _Phase.ASKING and send:
                self._transfer(readable=readable)
        except OSError as error:
            self._handle_lost_connection(error)
        except BoundaryError as error:
            self._finish(self._named(error))
        except (ValueError, TypeError) as error:
            self._finish(error)

    def run(self) -> None:
        """Continue until there is an outcome; for a request that waits alone."""
        self.advance(readable=False)
        if self.done:
            return
        span = spans.begin()
        spans.shown[self] = None
        try:
            self._run()
        finally:
            spans.shown.pop(self, None)
            if span:
                spans.complete(span, "wait", "wait", facts=_wait_for([self]))

    def open_span(self) -> dict[str, object]:
        """Say whom its thread waits for, for ``anabranch status``."""
        since = round(time.monotonic() - self.deadline.elapsed(), 3)
        return {"name": "wait", "since": since, **_wait_for([self])}

    def _run(self) -> None:
        while not self.done:
            now = time.monotonic()
            left = self.deadline.remaining()
            if left <= 0:
                self.expire()
                return
            wake = min(now + left, self.wake_at())
            # Rounded up, or the last millisecond would be spent spinning.
            milliseconds = max(0, int((wake - now) * 1000) + 1)
            events = self.interest()
            if events and self.channel is not None:
                happened = self.channel.poll(events, milliseconds)
                if happened:
                    self.advance(readable=bool(happened & ~select.POLLOUT))
            else:
                select.poll().poll(milliseconds)
            if not self.done and (now := time.monotonic()) >= wake and self.wake_at() <= now:
                self.wake(now)

    def cancel(self) -> None:
        """Close the connection before the response has arrived."""
        self._finish(None)

    def expire(self) -> None:
        """End the exchange at its deadline."""
        lost = self.last_error
        why = f"{getattr(lost, 'strerror', None) or lost}, at attempt {self.attempts}" if lost is not None else ""
        request = self.request
        error = self.deadline.error(peer=request.endpoint, operation=self._operation(), step=request.step, why=why)
        error.__cause__ = lost
        self._finish(error)

    def _begin(self) -> None:
        if self.sequence < 0:
            self.sequence = self.client._number(once=self.request.once)
            self.span = spans.begin()
        self._advanced()
        self.channel = self.client._channel(self.request.endpoint, fresh=self.fresh)
        self.channel.allocate = self.request.allocate
        self.heard = False
        if self.channel.connected:
            self._put_request(self.channel)
        else:
            self.phase = _Phase.CONNECTING

    def _advanced(self) -> None:
        self.progress, self.excused = time.monotonic(), 0.0

    def _connect(self) -> None:
        assert self.channel is not None
        if self.channel.stream.handshake():
            self.channel.connected = True
            peer = self.channel.stream.peer()
            self.channel.role = peer.role
            # The request follows the greeting at once: an unauthorized client is refused anyway.
            self.channel.writer.put(encode(Hello(0.0, self.client._limits.body)))
            self._put_request(self.channel)

    def _put_request(self, channel: _Channel) -> None:
        request = self.request
        if request.role is not None and channel.role not in (None, request.role):
            raise Unauthorized(
                f"the server's certificate has role {channel.role!r}, but role {request.role!r} was requested"
            )
        header = RequestHeader(
            request.verb,
            request.target,
            epoch=self.client.epoch if request.once else b"",
            sequence=self.sequence,
            settled=self.client._settled() if request.once else 0,
            seconds=self.deadline.remaining(),
            schema=request.schema,
            payload=request.payload,
        )
        channel.expected = self.sequence
        channel.writer.put(encode(header, request.tensors))
        self.phase = _Phase.ASKING

    def _transfer(self, *, readable: bool) -> None:
        channel = self.channel
        assert channel is not None
        before = channel.reader.received
        sent = 0
        broken: OSError | None = None
        try:
            if channel.writer.waiting:
                sent = channel.writer.flush(channel.stream)
        except OSError as error:
            # An error that the server sent before it closed may still be readable, and is more specific.
            broken = error.with_traceback(None)
        while (
            (readable or broken is not None)
            and not self.done
            and self.channel is channel
            and (frame := channel.reader.advance(channel.stream)) is not None
        ):
            self._receive(channel, frame.header, frame.tensors or ())
        if not self.done and (sent or channel.reader.received != before):
            self._advanced()
        if broken is not None and not self.done:
            raise broken

    def _receive(self, channel: _Channel, header: Header, tensors: Sequence[Tensor]) -> None:
        if isinstance(header, (ReplyHeader, FailureFrame)) and header.sequence not in (self.sequence, None):
            spans.mark("transport.repeated_answer", peer=self.request.endpoint, operation=self._operation())
            return
        if isinstance(header, ReplyHeader):
            self.heard = self.answered = True
            self._finish(Answer(tensors, header.payload))
            return
        self.heard = self.heard or not isinstance(header, Hello)
        self.answered = isinstance(header, FailureFrame)
        if isinstance(header, Hello):
            channel.heartbeat = min(max(header.heartbeat, 1e-3), 3600.0)
        elif isinstance(header, FailureFrame):
            self._handle_failure(header)
        elif not isinstance(header, Heartbeat):
            raise ProtocolError(f"a server sends no {type(header).__name__}")

    def _handle_failure(self, failure: FailureFrame) -> None:
        if failure.code == "leaving":
            self._handle_lost_connection(ConnectionAbortedError(failure.message))
            return
        error = error_of(
            failure,
            peer=self.request.endpoint,
            operation=self._operation(),
            step=self.request.step,
            elapsed=self.deadline.elapsed(),
        )
        self._finish(error)

    def _handle_lost_connection(self, error: OSError) -> None:
        """Handle a lost or refused connection: retry, or give up."""
        stale = self.channel is not None and self.channel.used and not self.heard
        # Without this the error's traceback would hold this exchange, which holds the error: a cycle for every retry.
        self.last_error = error.with_traceback(None)
        self._release_channel(reusable=False)
        self.fresh = True
        if stale:
            self.phase, self.retry_at = _Phase.RESTING, time.monotonic()
            return
        self.attempts += 1
        if self.attempts > self.client._retries or self.client._closed:
            lost = self._error(PeerLost, f"{error.strerror or error}, at attempt {self.attempts}")
            lost.__cause__ = error
            self._finish(lost)
            return
        pause = min(_FIRST_BACKOFF * 2 ** (self.attempts - 1), _LONGEST_BACKOFF)
        self.phase, self.retry_at = _Phase.RESTING, time.monotonic() + pause
        spans.mark("transport.retry", peer=self.request.endpoint, operation=self._operation(), error=str(error))

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        channel = self.channel
        # A connection is reusable only if its request was sent in full and answered.
        self._release_channel(
            reusable=self.answered and channel is not None and not channel.writer.waiting and channel.reader.idle()
        )
        self.phase, self.done = _Phase.DONE, True
        if self.request.once and self.sequence >= 0:
            self.client._settle(self.sequence)
        if self.span:
            self._record()

    def _record(self) -> None:
        """Record its time for a trace."""
        request, outcome = self.request, self.outcome
        facts: dict[str, object] = {"peer": request.endpoint, "sent_bytes": _nbytes(request.tensors, request.payload)}
        if isinstance(outcome, Answer):
            facts["received_bytes"] = _nbytes(outcome.tensors, outcome.payload)
        else:
            facts["error"] = "cancelled" if outcome is None else type(outcome).__name__
        if request.step is not None:
            facts["step"] = request.step
        flow: spans.Flow = "ask", str(self.sequence)
        spans.complete(self.span, self._operation(), "crossing", track="requests", flow=flow, facts=facts)

    def _release_channel(self, *, reusable: bool) -> None:
        if self.channel is not None:
            self.client._release(self.request.endpoint, self.channel, reusable=reusable)
            self.channel = None

    def _operation(self) -> str:
        return f"{self.request.verb} {self.request.target}".rstrip()

    def _error(self, kind: type[BoundaryError], message: str) -> BoundaryError:
        return kind(
            message,
            peer=self.request.endpoint,
            operation=self._operation(),
            step=self.request.step,
            elapsed=self.deadline.elapsed(),
        )

    def _named(self, error: BoundaryError) -> BoundaryError:
        """Return the same error, with its peer and operation filled in where they were missing."""
        error.peer = self.request.endpoint
        error.operation = error.operation or self._operation()
        error.step = error.step if error.step is not None else self.request.step
        error.elapsed = error.elapsed if error.elapsed is not None else self.deadline.elapsed()
        return error


def _nbytes(tensors: Sequence[Tensor], payload: bytes) -> int:
    return sum(tensor.nbytes for tensor in tensors) + len(payload)


def _wait_for(exchanges: Sequence[_Exchange]) -> dict[str, object]:
    peer = ", ".join(sorted({exchange.request.endpoint for exchange in exchanges}))
    return {"peer": peer, "operation": exchanges[0]._operation()}
