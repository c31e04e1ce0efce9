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

An exchange is a generator: it reads like blocking code, and yields whenever it has to wait. Those that are asked
together are waited for together, and each continues as soon as its server answers.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import filterfalse
from operator import attrgetter
from typing import TypeAlias

import msgspec
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, ForkedClient, PeerLost, ProtocolError, Unauthorized
from anabranch.record import spans
from anabranch.record.process import process_record
from anabranch.transport.failures import error_of
from anabranch.transport.frame import (
    FailureFrame,
    Header,
    Heartbeat,
    Hello,
    ReplyHeader,
    RequestHeader,
    Wire,
    allocate,
    encode,
)
from anabranch.transport.sockets import SocketTransport
from anabranch.transport.streams import Transport

_FIRST_BACKOFF = 0.01
_LONGEST_BACKOFF = 1.0
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
        check: sees the answer's header, with each tensor's dtype and shape, before memory is taken for it; raises
            ``ProtocolError`` or ``SchemaError`` to refuse it.
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
    check: Callable[[ReplyHeader], object] | None = None
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


class Client:
    """Sends requests to servers; safe to share between threads, each of which sends and receives its own requests.

    >>> import torch
    >>> from anabranch.transport import Server, Verb
    >>> double = Verb("double", lambda call: call.reply([2 * call.tensors[0]]))
    >>> with Server([double]) as server, Client() as client:
    ...     request = Request(server.endpoint, "double", tensors=[torch.ones(2)])
    ...     client.call(request, Deadline.after(60.0)).tensors
    [tensor([2., 2.])]

    Args:
        role: this process's role, which names its certificate.
        keys: the directory of certificates; without it, the one that ``ANABRANCH_KEYS`` names.
        insecure: allow TCP without certificates.
        heartbeat: seconds between expected beats, of a server that has not announced its own.
        transport: the network; sockets by default.
        retries: how often a request is sent again after a connection was lost or refused, with pauses that double from
            10 ms to 1 s. A connection that went stale in the pool is replaced without counting.

    Raises:
        ValueError: keys that are missing or damaged.

    Attributes:
        epoch: the 16 bytes that name this client in the requests it numbers.
        forked: true in a forked child of the process that has used the client: every request raises ``ForkedClient``.
        most_idle: unused connections kept open to each peer.
        patience: seconds; until a server was silent for so long, a request is sent again after two beats of silence, as
            after a lost connection: somebody may be about to kill and restart a frozen one.
    """

    most_idle = 16
    patience = 0.0

    def __init__(
        self,
        *,
        role: str = "worker",
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        transport: Transport | None = None,
        retries: int = 8,
    ) -> None:
        self._transport = transport if transport is not None else SocketTransport(role, keys=keys, insecure=insecure)
        self._options: ClientOptions | None = None
        if transport is None:
            self._options = ClientOptions(role, None if keys is None else os.fspath(keys), insecure, heartbeat, retries)
        self._heartbeat = heartbeat
        self._retries = retries
        self._lock = threading.Lock()
        self._idle: defaultdict[str, list[_Channel]] = defaultdict(list)
        self._busy: set[_Channel] = set()
        self._closed = False
        self.epoch = os.urandom(16)
        # Not from 0: a trace tells requests of several clients apart by their numbers.
        self._first = self._next = secrets.randbelow(_FIRST_NUMBERS)
        self._outstanding: set[int] = set()
        self._prune_at = 0.0
        self._process = os.getpid()
        self.forked = False
        _clients.add(self)
        process_record()  # tells of waits
        # A client that was never closed closes its idle connections when it is collected.
        weakref.finalize(self, _close_idle, self._idle)

    @property
    def options(self) -> ClientOptions:
        """The arguments to create an equal client in another process.

        Raises:
            TypeError: its transport belongs to this process.
        """
        if self._options is None:
            raise TypeError(
                f"a Client with {type(self._transport).__name__} cannot leave its process, and so "
                "neither can a module that uses it; leave out client=, or give a client over sockets"
            )
        return self._options

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; requests in flight on other threads end with ``PeerLost``."""
        with self._lock:
            self._closed = True
            for channel in self._busy:
                channel.wire.stream.abort()
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
            try:
                raise outcome
            finally:
                del outcome  # held by the traceback: a cycle
        assert outcome is not None
        return outcome

    def gather(
        self,
        requests: Sequence[Request],
        deadline: Deadline,
        *,
        enough: Callable[[Sequence[Outcome]], bool] | None = None,
        grace: float = 0.0,
        watch: Callable[[], None] | None = None,
        every: float = 1.0,
    ) -> list[Outcome]:
        """Send all requests at once and return the outcome of each, in their order; raises no error of a server.

        Raises ``ForkedClient`` if the client was used before this process was forked.

        Args:
            requests: to any servers, several to one allowed.
            deadline: for all of them together.
            enough: called with the outcomes so far after each that arrives; once it is true, the rest have ``grace``
                seconds left and are then cancelled, which closes their connections.
            grace: seconds.
            watch: called each time that ``every`` seconds have passed; its error ends the wait, and all requests.
            every: seconds.
        """
        if self.forked:
            raise ForkedClient(
                f"this client was made in process {self._process} before a fork, and its connections belong to that "
                f"process; make a new one in this process, {os.getpid()} (also a new ParameterClient, if it belongs "
                "to one)"
            )
        exchanges = [_Exchange(self, request, deadline, together=len(requests) > 1) for request in requests]
        waiting = exchanges
        try:
            if exchanges:
                _start(exchanges)
                with spans.Lasting("wait", "wait", lambda: _wait_for(waiting or exchanges)):
                    finished, left = 0, deadline
                    look_at = float("inf") if watch is None else time.monotonic() + every
                    while waiting := list(filterfalse(_done, exchanges)):
                        if enough is not None and len(exchanges) - len(waiting) > finished:
                            finished = len(exchanges) - len(waiting)
                            if enough(list(map(_outcome, exchanges))):
                                if grace <= 0:
                                    break
                                enough, left = None, left.sooner(grace)
                        now = time.monotonic()
                        if watch is not None and now >= look_at:
                            watch()
                            look_at = now + every
                        if not (seconds := left.remaining()):
                            for exchange in waiting if deadline.expired() else ():
                                exchange.expire()
                            break
                        _continue(waiting, min(now + seconds, look_at))
        finally:
            for exchange in exchanges:
                if not exchange.done:
                    exchange.end(None)
        return list(map(_outcome, exchanges))

    def post(self, request: Request, seconds: float) -> bool:
        """Send a request whose answer nobody needs, on an idle connection; return False if there is none.

        It is not repeated, so it may be lost. The server takes it before what follows on the connection, which the
        next request to this endpoint is; whoever sends that skips the answer.
        """
        with self._lock:
            idle = self._idle.get(request.endpoint)
            if not idle:
                return False
            channel = idle.pop()
            self._busy.add(channel)
            sequence = self._next
            self._next += 1
        channel.posted.add(sequence)
        header = RequestHeader(
            request.verb, request.target, sequence=sequence, seconds=seconds, schema=request.schema,
            payload=request.payload,
        )  # fmt: skip
        wire = channel.wire
        wire.waiting += encode(header, request.tensors)
        with suppress(OSError):  # if the server has gone, what is left in ``waiting`` closes the connection
            wire.send()
        sent = not wire.waiting
        self._release(request.endpoint, channel, reusable=sent)
        return sent

    def _after_fork(self) -> None:
        """Reset in a forked child: its requests on its parent's connections would be mistaken for the parent's."""
        # Another thread, which does not exist here, may have held it.
        self._lock = threading.Lock()
        if self._next == self._first:
            # Never used: no server knows it, so it becomes its own client.
            self.epoch, self._process = os.urandom(16), os.getpid()
            self._first = self._next = secrets.randbelow(_FIRST_NUMBERS)
            return
        self.forked = True
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
            while idle:
                channel = idle.pop()
                if not fresh:
                    self._busy.add(channel)
                    return channel
                channel.close()
        channel = _Channel(Wire(self._transport.connect(endpoint)), self._heartbeat)
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
            if reusable and not self._closed and len(idle) < self.most_idle:
                idle.append(channel)
                return
        channel.close()

    def _prune(self, now: float) -> None:
        """Close idle connections to servers that have gone, in case no later request uses them."""
        self._prune_at = now + _PRUNE
        for endpoint, idle in list(self._idle.items()):
            for channel in [channel for channel in idle if channel.stale()]:
                idle.remove(channel)
                channel.close()
            if not idle:
                del self._idle[endpoint]

    def _number(self, *, once: bool) -> tuple[int, int]:
        """Return the number of a request, and the one below which none will be retried."""
        with self._lock:
            sequence = self._next
            self._next += 1
            if not once:
                return sequence, 0
            self._outstanding.add(sequence)
            return sequence, min(self._outstanding)

    def _settle(self, sequence: int) -> None:
        with self._lock:
            self._outstanding.discard(sequence)


def _close_idle(idle: dict[str, list[_Channel]]) -> None:
    while idle:
        _, channels = idle.popitem()
        for channel in channels:
            channel.close()


_clients: weakref.WeakSet[Client] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[ClientOptions, Client] = weakref.WeakValueDictionary()
_making = threading.Lock()


def _reset_clients_after_fork() -> None:
    """Reset those of the parent; a module made in the child gets a client of the child."""
    global _making
    _making = threading.Lock()
    _shared.clear()
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_reset_clients_after_fork)


class _Channel:
    """A connection to a server; owned by one exchange at a time, or by the pool."""

    def __init__(self, wire: Wire, heartbeat: float) -> None:
        self.wire = wire
        self.heartbeat = heartbeat
        self.connected = False
        self.posted: set[int] = set()
        """The requests whose answers are to be skipped."""

    def close(self) -> None:
        """Close the connection, and free its buffers."""
        self.wire.stream.close()
        self.wire.drop()

    def stale(self) -> bool:
        """Return True if an idle connection has ended: if no answer is to be skipped, that is when it is readable.

        Before a request this need not be checked: it fails on the stale connection, and is retried on a fresh one.
        """
        poller = select.poll()
        answers = 0 if self.posted else select.POLLIN
        poller.register(self.wire.stream.descriptor, answers | select.POLLRDHUP)
        return bool(poller.poll(0))


_Wait: TypeAlias = tuple[int, int, float]
"""What an exchange waits for: events of a descriptor (-1: of none), until a moment."""
_READY: _Wait = (-1, 0, 0.0)


class _Exchange:
    """One request, from the first attempt to its outcome.

    Args:
        together: it is asked with others, and waits once, ready, before its request leaves.

    Attributes:
        done: true once there is an outcome, or there will never be one.
        wait: what it waits for.
    """

    def __init__(self, client: Client, request: Request, deadline: Deadline, *, together: bool) -> None:
        self.client, self.request, self.deadline = client, request, deadline
        self.outcome: Outcome = None
        self.done = False
        self.wait = _READY
        self._sequence = -1
        self._attempts = 0
        self._lost: Exception | None = None
        self._heard = False
        # Of the connection: when bytes last moved, the seconds since then that do not count as silence because this
        # process slept, and its server may have too, and the seconds of the silences before.
        self._progress = self._excused = self._silent = 0.0
        self._span = 0
        self._steps = self._ask(together)

    def go_on(self, events: int = 0) -> None:
        """Continue, now that ``events`` have come, until it has to wait again or has an outcome."""
        try:
            self.wait = self._steps.send(events or None)
        except StopIteration as ended:
            self.end(ended.value)

    def expire(self) -> None:
        """End the exchange at its deadline."""
        request, lost = self.request, self._lost
        why = self._why() if lost is not None else ""
        error = self.deadline.error(peer=request.endpoint, operation=self.operation(), step=request.step, why=why)
        error.__cause__ = lost
        self.end(error)

    def end(self, outcome: Outcome) -> None:
        """End it wherever it waits; its connection is closed, because the response may still come."""
        self._steps.close()
        self.outcome, self.done = outcome, True
        if self.request.once and self._sequence >= 0:
            self.client._settle(self._sequence)
        if self._span:
            self._record()

    def _ask(self, together: bool) -> Generator[_Wait, int | None, Outcome]:
        """Ask until there is an outcome, and retry."""
        client, request = self.client, self.request
        self._sequence, settled = client._number(once=request.once)
        self._span = spans.begin()
        fresh = False
        while True:
            channel: _Channel | None = None
            used = reusable = self._heard = False
            try:
                channel = client._channel(request.endpoint, fresh=fresh)
                used = channel.connected
                outcome = yield from self._converse(channel, settled, together)
                reusable = not channel.wire.waiting and not channel.wire.more
                return outcome
            except OSError as error:
                # Without this the error's traceback would hold this exchange, which holds the error: a cycle.
                self._lost = error.with_traceback(None)
            except BoundaryError as error:
                return self._named(error)
            except (ValueError, TypeError) as error:
                return error
            finally:
                if channel is not None:
                    client._release(request.endpoint, channel, reusable=reusable)
            fresh = True
            if used and not self._heard:
                continue  # the connection had gone stale in the pool
            self._attempts += 1
            if self._attempts > client._retries or client._closed:
                gone = self._named(PeerLost(self._why()))
                gone.__cause__ = self._lost
                return gone
            pause = min(_FIRST_BACKOFF * 2 ** (self._attempts - 1), _LONGEST_BACKOFF)
            spans.mark("transport.retry", peer=request.endpoint, operation=self.operation(), error=str(self._lost))
            yield -1, 0, time.monotonic() + pause

    def _converse(self, channel: _Channel, settled: int, together: bool) -> Generator[_Wait, int | None, Outcome]:
        """Send the request, and receive until its answer has come."""
        request, wire = self.request, channel.wire
        stream, used = wire.stream, channel.connected
        self._progress, self._excused = time.monotonic(), 0.0
        if not used:
            while not stream.handshake():
                yield from self._wait(channel, select.POLLOUT if stream.wants_write() else select.POLLIN)
            channel.connected = True
            # The request follows the greeting at once: an unauthorized client is refused anyway.
            wire.waiting += encode(Hello())
        if request.role is not None and stream.peer.role not in (None, request.role):
            raise Unauthorized(
                f"the server's certificate has role {stream.peer.role!r}, but role {request.role!r} was requested"
            )
        epoch = self.client.epoch if request.once else b""
        header = RequestHeader(
            request.verb, request.target, epoch, self._sequence, settled, self.deadline.remaining(), request.schema,
            request.payload,
        )  # fmt: skip
        wire.waiting += encode(header, request.tensors)
        if used and together:
            yield _READY
        answer: Header | None = None
        tensors: Sequence[Tensor] | None = None
        readable = False
        while True:
            received, sent, broken = wire.received, 0, None
            if wire.waiting:
                try:
                    sent = wire.send()
                except OSError as error:
                    # An error that the server sent before it closed may still be readable, and says more.
                    broken = error.with_traceback(None)
            while readable or broken is not None:
                if answer is None:
                    answer = wire.header()
                    if answer is None:
                        break
                    tensors = ()
                    if isinstance(answer, ReplyHeader):
                        tensors = None  # the answer to a post is skipped
                        if answer.sequence == self._sequence:
                            if request.check is not None:
                                request.check(answer)
                            tensors = allocate(answer.tensors)
                    elif answer.tensors:
                        raise ProtocolError(f"a server sends no {type(answer).__name__} with tensors")
                if not wire.receive(tensors):
                    break
                self._heard = self._heard or not isinstance(answer, Hello)
                if isinstance(answer, ReplyHeader) and tensors is not None:
                    return Answer(tensors, answer.payload)
                failure = self._note(answer, channel)
                if failure is not None:
                    return failure
                answer = None
            if broken is not None:
                raise broken
            if sent or wire.received != received:
                self._progress, self._excused = time.monotonic(), 0.0
            readable = yield from self._wait(channel, select.POLLIN | (select.POLLOUT if wire.waiting else 0))

    def _wait(self, channel: _Channel, events: int) -> Generator[_Wait, int | None, bool]:
        """Wait for these events; return True if there may be something to read.

        Raises:
            PeerLost, TimeoutError: the server was silent for two beats.
        """
        stream, heartbeat = channel.wire.stream, channel.heartbeat
        silent = self._progress + self._excused + 2 * heartbeat
        if stream.ready_at > time.monotonic():
            happened = yield -1, 0, min(stream.ready_at, silent)
        else:
            happened = yield stream.descriptor, events, silent
        if happened:
            return bool(happened & ~select.POLLOUT)
        now = time.monotonic()
        if now >= silent:
            if not self._excused and now - silent > heartbeat / 10:
                # Nobody woke this process in time: all of this machine may have stood still. One more beat is waited
                # for.
                self._excused = now - heartbeat - self._progress
            else:
                self._silent += now - self._progress
                why = f"no beat for {self._silent:.2f} s: the server is frozen, or not an anabranch server"
                raise TimeoutError(why) if self._silent < self.client.patience else PeerLost(why)
        return bool(stream.ready_at)

    def _note(self, header: Header, channel: _Channel) -> Exception | None:
        """Take a frame that is no answer; returns the error to raise if it is a failure."""
        if isinstance(header, (ReplyHeader, FailureFrame)) and header.sequence not in (self._sequence, None):
            if header.sequence not in channel.posted:
                raise ProtocolError(f"the server answered request {header.sequence}, not {self._sequence}")
            channel.posted.remove(header.sequence)
        elif isinstance(header, FailureFrame):
            if header.code == "leaving":
                raise ConnectionAbortedError(header.message)
            request = self.request
            return error_of(
                header, peer=request.endpoint, operation=self.operation(), step=request.step,
                elapsed=self.deadline.elapsed(),
            )  # fmt: skip
        elif isinstance(header, Hello):
            channel.heartbeat = min(max(header.heartbeat, 1e-3), 3600.0)
        elif not isinstance(header, Heartbeat):
            raise ProtocolError(f"a server sends no {type(header).__name__}")
        return None

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
        flow: spans.Flow = "ask", str(self._sequence)
        spans.complete(self._span, self.operation(), "crossing", track="requests", flow=flow, facts=facts)

    def operation(self) -> str:
        """Return the verb and its target, for errors."""
        return f"{self.request.verb} {self.request.target}".rstrip()

    def _why(self) -> str:
        return f"{getattr(self._lost, 'strerror', None) or self._lost}, at attempt {self._attempts}"

    def _named(self, error: BoundaryError) -> BoundaryError:
        """Return the same error, with its peer and operation filled in where they were missing."""
        error.peer = self.request.endpoint
        error.operation = error.operation or self.operation()
        error.step = error.step if error.step is not None else self.request.step
        error.elapsed = error.elapsed if error.elapsed is not None else self.deadline.elapsed()
        return error


_done, _outcome = attrgetter("done"), attrgetter("outcome")


def _start(exchanges: Sequence[_Exchange]) -> None:
    for first in range(0, len(exchanges), _SENT_TOGETHER):
        some = exchanges[first : first + _SENT_TOGETHER]
        for exchange in some:
            exchange.go_on()
        for exchange in some:
            if exchange.wait is _READY and not exchange.done:
                exchange.go_on()


def _continue(waiting: Sequence[_Exchange], wake: float) -> None:
    """Wait until ``wake`` for something that one of them waits for, and let those continue for which it has come."""
    poller = select.poll()
    for exchange in waiting:
        descriptor, events, until = exchange.wait
        if descriptor >= 0:
            poller.register(descriptor, events)
        wake = min(wake, until)
    # Rounded up, or the last millisecond would be spent spinning.
    happened = dict(poller.poll(max(0, int((wake - time.monotonic()) * 1000) + 1)))
    now = time.monotonic()
    for exchange in waiting:
        descriptor, _, until = exchange.wait
        events = happened.get(descriptor, 0)
        if events or until <= now:
            exchange.go_on(events)


def _nbytes(tensors: Sequence[Tensor], payload: bytes) -> int:
    return sum(tensor.nbytes for tensor in tensors) + len(payload)


def _wait_for(exchanges: Sequence[_Exchange]) -> dict[str, object]:
    peer = ", ".join(sorted({exchange.request.endpoint for exchange in exchanges}))
    return {"peer": peer, "operation": exchanges[0].operation()}


# --- one client for all modules of a process with the same role, so that they share connections
#
# A module holds a ``ModuleClient``, not a client: it pickles as the arguments of the client, and creates it at the
# first use, also in a forked child, which must not use its parent's connections.


def shared_client(options: ClientOptions) -> Client:
    """Return this process's client of these options; its connections close when its last user closes it."""
    with _making:
        client = _shared.get(options)
        if client is None:
            client = _shared[options] = Client(**asdict(options))
        return client


class ModuleClient:
    """The client of a module, recreated in another process.

    Args:
        client: the client that the user gave, if any; a pickled module gets this process's shared one of its options.
        role: of the shared client used otherwise, with ``keys``, ``insecure`` and ``retries``.

    Raises:
        ValueError: keys that are missing or damaged.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        role: str = "worker",
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        retries: int = 8,
    ) -> None:
        self._options: ClientOptions | None = None  # of the user's own, once it is pickled
        if client is None:
            folder = None if keys is None else os.fspath(keys)
            self._options = ClientOptions(role, folder, insecure, heartbeat=1.0, retries=retries)
            client = shared_client(self._options)
        self._client: Client | None = client

    @property
    def client(self) -> Client:
        """The client of this process."""
        client = self._client
        if client is None or client.forked:
            # Without a lock that a thread of the parent may have held.
            client = self._client = shared_client(self._its_options())
        return client

    def _its_options(self) -> ClientOptions:
        if self._options is None:
            assert self._client is not None
            return self._client.options
        return self._options

    def __deepcopy__(self, memo: dict[int, object]) -> ModuleClient:
        # Copying a model copies no connection.
        return self

    def __getstate__(self) -> dict[str, object]:
        # Created at the first use: where a model is only loaded, there may be no keys.
        return {"_options": self._its_options(), "_client": None}
