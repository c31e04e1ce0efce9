"""A server: verbs with handlers behind a listening endpoint, a thread a connection, and an end to everything.

::

    accept thread ──> connection thread: greet, read, check, hand to the verb's handler ──┬──> reply (this thread)
                                │   ^                                                     └──> queue ──> compute thread
                                │   └── rest of a long reply <── call.reply() <── (any thread) <───────────┘
    beat thread ── a beat on every connection whose request waits or runs

A connection carries one request at a time, so whatever arrives while one is being served is the far side leaving, and
its request is cancelled. A reply is written by the thread that has it, as far as the socket takes it at once; the
connection's own thread sends the rest, so that a slow reader never holds up a compute thread.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

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
from anabranch.events import fault_point, report
from anabranch.transport.failures import failure_of
from anabranch.transport.frame import (
    Beat,
    Frame,
    FrameReader,
    FrameWriter,
    Header,
    Hello,
    Limits,
    ReplyHeader,
    RequestHeader,
    TensorHeader,
    allocate,
    encode,
)
from anabranch.transport.once import Identity, OnceTable
from anabranch.transport.sockets import SocketTransport
from anabranch.transport.streams import Listener, Peer, Stream, Transport

__all__ = ["Call", "Server", "ServerStatistics", "Verb"]

# The longest deadline that is taken from a client, in seconds.
_LONGEST = 24 * 3600.0
_GREETING = 10.0
# A peer that neither sends nor takes a byte for so long in the middle of a frame is gone.
_STALLED = 30.0
_LINGER = 1.0
# Threads above the cap that only tell a newcomer that there is no room.
_USHERS = 16
# Python's default lets a busy thread keep the interpreter for 5 ms; answers would wait that long.
_SWITCH_INTERVAL = 5e-4


@dataclass(frozen=True, slots=True)
class Verb:
    """One thing a server can be asked to do.

    >>> Verb("echo", lambda call: call.reply(call.tensors)).once
    False

    Attributes:
        name: what clients call it.
        handler: serves a call on the connection's thread: replies there, or hands the call to a thread that will.
            What it raises is the answer.
        check: sees the header, with each tensor's dtype and shape, before any memory is taken for the tensors; raises
            ``SchemaError``, ``NotFound`` or ``Overloaded`` to refuse.
        once: done exactly once however often it is retried; the client must number such requests.
        again: answers the retry of a request that was done and whose answer is not kept any more.
        roles: who may ask; ``None`` for every peer that was let in.
        body: bytes that its tensors may have together, below the server's own limit.
        allocate: makes the tensors that a request is received into; pinned memory, for instance.
    """

    name: str
    handler: Callable[[Call], None]
    check: Callable[[RequestHeader], None] | None = None
    once: bool = False
    again: Callable[[Call], None] | None = None
    roles: frozenset[str] | None = None
    body: int | None = None
    allocate: Callable[[Sequence[TensorHeader]], Sequence[Tensor]] = allocate


class Call:
    """One request being served: what was asked, by whom, until when; and the way to answer.

    ``reply`` and ``fail`` may be called from any thread, the first one counts. A call whose client has gone is
    ``cancelled``; whoever finds it so may ``drop`` it.
    """

    def __init__(
        self, server: Server, verb: Verb, peer: Peer, header: RequestHeader, tensors: Sequence[Tensor], nbytes: int
    ) -> None:
        self.verb = header.verb
        self.target = header.target
        self.payload = header.payload
        self.schema = header.schema
        self.tensors = tensors
        self.peer = peer
        self.deadline = Deadline.after(min(max(header.seconds, 1e-3), _LONGEST))
        self.identity: Identity = (header.epoch, header.sequence)
        self.settled = header.settled
        self._server = server
        self._nbytes = nbytes
        self._once = verb.once and bool(header.epoch)
        self._lock = server.once.lock if self._once else threading.RLock()
        self._recipients: list[_Connection] = []
        self._answered = False

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return not self._recipients

    def reply(self, tensors: Sequence[Tensor] = (), payload: bytes = b"") -> None:
        """Answers; the tensors must not change until they have been sent."""
        try:
            frame = encode(ReplyHeader(payload), tensors)
        except (ValueError, TypeError) as error:
            self.fail(error)
        else:
            self._answer(frame, done=True)

    def fail(self, error: BaseException) -> None:
        """Answers with an error, which the client raises."""
        # What was declined was not done: a retry may find room, or a server that stays.
        declined = isinstance(error, (DeadlineExceeded, Overloaded, PeerLost, Unauthorized))
        self._answer(encode(failure_of(error)), done=not declined)

    def drop(self) -> bool:
        """Gives the call up unanswered if nobody waits for it any more; whether it did."""
        with self._lock:
            if self._recipients or self._answered:
                return False
            self._close(None)
            return True

    def _answer(self, frame: Sequence[memoryview], *, done: bool) -> None:
        with self._lock:
            if self._answered:
                return
            recipients, self._recipients = self._recipients, []
            self._close(frame if done else None)
        fault_point("transport.before_reply")
        for connection in recipients:
            connection.answer(self, frame)

    def _close(self, frame: Sequence[memoryview] | None) -> None:
        self._answered = True
        if self._once and frame is not None:
            self._server.once.finish(self.identity, frame)
        elif self._once:
            self._server.once.abandon(self.identity)
        self._server._finished(self._nbytes)

    def _leave(self, connection: _Connection) -> None:
        with self._lock:
            if connection in self._recipients:
                self._recipients.remove(connection)


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """What a server has done since it started, and holds now."""

    connections: int
    calls: int
    bytes_in_flight: int
    served: int
    refused: int


class Server:
    """Serves verbs at an endpoint while its ``with`` block runs.

    >>> import torch
    >>> from anabranch.transport import Client, Request
    >>> double = Verb("double", lambda call: call.reply([2 * tensor for tensor in call.tensors]))
    >>> with Server([double]) as server, Client() as client:
    ...     answer = client.call(Request(server.endpoint, "double", tensors=[torch.ones(2)]), Deadline.after(5.0))
    >>> answer.tensors
    [tensor([2., 2.])]

    Args:
        verbs: what may be asked.
        listen: ``unix:PATH``, ``tcp://HOST:PORT`` (port 0: any), or ``None`` for a new Unix socket.
        role: this server's role, which names its certificate.
        keys: the directory of certificates; without it, the one that ``ANABRANCH_KEYS`` names.
        insecure: allow TCP without certificates.
        heartbeat: seconds between the beats that tell a waiting client that the server lives.
        transport: the network; sockets by default.
        limits: what a client may send in one frame.
        max_connections: connections, each a thread; a client above it is told ``Overloaded``.
        max_bytes_in_flight: bytes of requests received and not answered; above it requests are ``Overloaded``.
        healthy: whether whoever serves calls is alive; beats stop when it says no, and clients take the server as lost.

    Raises:
        ValueError: an endpoint that is none, is taken or is open to others; TCP without keys; two verbs of one name.

    The endpoint listens from construction on; calls are served inside the block. Leaving it lets calls in flight
    finish for up to ``drain_seconds``, then cuts the connections.
    """

    def __init__(
        self,
        verbs: Iterable[Verb],
        *,
        listen: str | None = None,
        role: str = "experts",
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        transport: Transport | None = None,
        limits: Limits | None = None,
        max_connections: int = 512,
        max_bytes_in_flight: int = 4 << 30,
        drain_seconds: float = 5.0,
        healthy: Callable[[], bool] | None = None,
    ) -> None:
        if not 0 < heartbeat < float("inf"):
            raise ValueError(f"heartbeat is a finite number of seconds above 0, got {heartbeat!r}")
        self._verbs: dict[str, Verb] = {}
        for verb in verbs:
            if verb.name in self._verbs:
                raise ValueError(f"two verbs are called {verb.name!r}")
            self._verbs[verb.name] = verb
        self.once = OnceTable()
        self.heartbeat = heartbeat
        self.limits = limits or Limits()
        self.healthy = healthy or (lambda: True)
        self.drain_seconds = drain_seconds
        self._max_connections = max_connections
        self._max_bytes = max_bytes_in_flight
        self._state = threading.Condition()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._calls = self._bytes = self._served = self._refused = 0
        self._draining = False
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        network = transport if transport is not None else SocketTransport(role, keys=keys, insecure=insecure)
        self._listener: Listener = network.listen(listen)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    @property
    def endpoint(self) -> str:
        """Where clients find this server."""
        return self._listener.endpoint

    def __enter__(self) -> Server:
        if self._threads or self._closed:
            raise RuntimeError("a server is entered once; make another")
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL))
        for name, body in (("accept", self._accept_all), ("beat", self._beat_all)):
            thread = threading.Thread(target=body, name=f"anabranch-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.drain(self.drain_seconds)
        self.close()

    def drain(self, seconds: float) -> bool:
        """Declines new calls and waits, at most so long, for those in flight; whether all have ended."""
        with self._state:
            self._draining = True
            return self._state.wait_for(lambda: self._calls == 0, timeout=seconds)

    def close(self) -> None:
        """Cuts all connections and ends all threads; calls in flight are cancelled."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        patience = Deadline.after(10.0)
        for thread in self._threads:
            thread.join(timeout=patience.remaining())
        with self._state:
            connections = list(self._connections.items())
        for connection, _ in connections:
            connection.abort()
        for _, thread in connections:
            thread.join(timeout=patience.remaining())
            if thread.is_alive():
                report("transport.thread_left_behind", thread=thread.name)
        self._listener.close()
        os.close(self._wake)

    def statistics(self) -> ServerStatistics:
        """Counts since the start, and what is in flight."""
        with self._state:
            return ServerStatistics(len(self._connections), self._calls, self._bytes, self._served, self._refused)

    # What connections ask of their server.

    def _admit(self, peer: Peer, header: RequestHeader) -> Verb:
        """The verb that ``header`` asks for, if ``peer`` may ask it now; reserves the bytes of its body."""
        verb = self._verbs.get(header.verb)
        if verb is None:
            raise NotFound(f"no verb {header.verb!r}; there are: {', '.join(sorted(self._verbs))}")
        if not peer.may(verb.roles):
            raise Unauthorized(f"role {peer.role!r} may not ask {verb.name!r}; roles {sorted(verb.roles or ())} may")
        nbytes = _nbytes(header)
        if verb.body is not None and nbytes > verb.body:
            raise ProtocolError(f"{verb.name} takes at most {verb.body} bytes of tensors, got {nbytes}")
        if verb.once and len(header.epoch) != 16:
            raise ProtocolError(f"{verb.name} is done exactly once: number its requests (once=True)")
        with self._state:
            if self._draining or self._closed:
                raise PeerLost("the server is leaving")
            if self._bytes + nbytes > self._max_bytes:
                raise Overloaded(
                    f"{self._bytes} bytes of requests are in flight; {nbytes} more exceed {self._max_bytes}"
                )
        if verb.check is not None:
            verb.check(header)
        with self._state:
            self._calls += 1
            self._bytes += nbytes
        return verb

    def _finished(self, nbytes: int) -> None:
        with self._state:
            self._calls -= 1
            self._bytes -= nbytes
            self._served += 1
            if not self._calls:
                self._state.notify_all()

    def _refuse(self) -> None:
        with self._state:
            self._refused += 1

    def _left(self, connection: _Connection) -> None:
        with self._state:
            self._connections.pop(connection, None)

    # The threads.

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._listener.fileno(), select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while not self._stop.is_set():
            poller.poll(60_000)
            while not self._stop.is_set() and (stream := self._next_stream()) is not None:
                self._welcome(stream)

    def _next_stream(self) -> Stream | None:
        try:
            return self._listener.accept()
        except OSError as error:
            # Out of descriptors, most likely: let some connections end rather than spin.
            report("transport.accept_failed", error=str(error))
            self._stop.wait(timeout=0.05)
            return None

    def _welcome(self, stream: Stream) -> None:
        with self._state:
            present = len(self._connections)
            if present >= self._max_connections + _USHERS:
                stream.close()
                return
            connection = _Connection(self, stream, full=present >= self._max_connections)
            thread = threading.Thread(target=connection.run, name="anabranch-connection", daemon=True)
            self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:
            # No thread is left in the system: this client finds the connection lost, the others are served on.
            report("transport.accept_failed", error=str(error))
            connection.discard()

    def _beat_all(self) -> None:
        frame = encode(Beat())
        # Twice as often as promised: a beat that comes late on a busy machine is not yet a lost server.
        while not self._stop.wait(timeout=self.heartbeat / 2):
            if self.healthy():
                with self._state:
                    connections = list(self._connections)
                for connection in connections:
                    connection.beat(frame)


class _Connection:
    """One client's connection, and the thread that serves it."""

    def __init__(self, server: Server, stream: Stream, *, full: bool) -> None:
        self._server = server
        self._stream = stream
        self._full = full
        # Held for every use of the stream but poll and abort: OpenSSL allows one thread at a time.
        self._lock = threading.RLock()
        self._writer = FrameWriter()
        self._reader = FrameReader(server.limits, self._accept)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._greeted = False
        self._closed = False
        self._verb: Verb | None = None
        self._reserved = 0
        self._call: Call | None = None
        self._thread = 0

    # From any thread.

    def answer(self, call: Call, frame: Sequence[memoryview]) -> None:
        """Writes the answer to ``call`` as far as the socket takes it; the connection's thread does the rest."""
        with self._lock:
            if self._call is not call or self._closed:
                return
            # Before the first byte leaves: the client may ask its next question as soon as it has the last one.
            self._call = None
            self._write(frame)

    def beat(self, frame: Sequence[memoryview]) -> None:
        """Tells a client that waits, within its deadline, that the server lives."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            call = self._call
            waits = call is not None and not call.deadline.expired()
            if (waits or not self._reader.idle()) and self._greeted and not self._writer and not self._closed:
                self._write(frame)
        finally:
            self._lock.release()

    def abort(self) -> None:
        """Cuts the connection; its thread ends."""
        with self._lock:
            if not self._closed:
                self._stream.abort()
                os.eventfd_write(self._wake, 1)

    def discard(self) -> None:
        """Lets the connection go without having served it."""
        self._end()

    def _write(self, frame: Sequence[memoryview]) -> None:
        self._writer.put(frame)
        try:
            self._writer.flush(self._stream)
        except (OSError, BoundaryError):
            self._stream.abort()
            return
        if self._writer and threading.get_ident() != self._thread:
            os.eventfd_write(self._wake, 1)

    # On the connection's own thread.

    def run(self) -> None:
        """Greets the client and serves it until it leaves."""
        self._thread = threading.get_ident()
        try:
            self._greet()
            self._serve()
        except (BoundaryError, ValueError) as error:
            self._server._refuse()
            self._dismiss(error)
        except OSError:
            pass
        finally:
            self._end()

    def _greet(self) -> None:
        deadline = Deadline.after(_GREETING)
        while not self._stream.handshake():
            deadline.check(peer="client", operation="handshake")
            self._poll(select.POLLOUT if self._stream.wants_write() else select.POLLIN, deadline.remaining())
        while not self._greeted:
            deadline.check(peer="client", operation="greeting")
            with self._lock:
                self._greeted = self._reader.advance(self._stream) is not None
            if not self._greeted:
                self._poll(select.POLLIN, deadline.remaining())
        if self._full:
            raise Overloaded(f"the server has its {self._server._max_connections} connections; try later")
        with self._lock:
            self._write(encode(Hello(self._server.heartbeat, self._server.limits.body)))

    def _serve(self) -> None:
        progress = time.monotonic()
        # A request may have come with the greeting and lie in the TLS layer already, where poll does not see it.
        readable = True
        while not self._server._closed:
            with self._lock:
                moved = self._writer.flush(self._stream) if self._writer else 0
                before = self._reader.received
                frame = self._read() if readable else None
                moved += self._reader.received - before
            if moved:
                progress = time.monotonic()
            if frame is not None:
                self._take(frame)
                # The client waits for its answer, so the kernel has nothing more, except right after the greeting.
                readable = self._reader.holds_more()
                continue
            resting = not self._writer and self._reader.idle()
            patience = 3600.0 if resting else progress + _STALLED - time.monotonic()
            if patience <= 0:
                raise ConnectionAbortedError("the client has stalled in the middle of a frame")
            events = self._poll(select.POLLIN | (select.POLLOUT if self._writer else 0), patience)
            readable = bool(events & ~select.POLLOUT)

    def _poll(self, events: int, seconds: float) -> int:
        """The stream's events, 0 if something else woke the thread."""
        poller = select.poll()
        poller.register(self._stream.fileno(), events | select.POLLRDHUP)
        poller.register(self._wake, select.POLLIN)
        found = 0
        for descriptor, happened in poller.poll(max(1, int(seconds * 1000))):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            else:
                found = happened
        if found & select.POLLRDHUP:
            raise ConnectionResetError("the client has left")
        return found

    def _read(self) -> Frame | None:
        frame = self._reader.advance(self._stream)
        if frame is not None and frame.tensors is None:
            # Its body has passed by; the refusal was sent when its header came.
            return None
        return frame

    def _accept(self, header: Header) -> Sequence[Tensor] | None:
        if not self._greeted:
            if not isinstance(header, Hello) or header.tensors:
                raise ProtocolError("a client's first frame is a greeting without tensors")
            return ()
        if not isinstance(header, RequestHeader):
            raise ProtocolError(f"a client sends requests, not {type(header).__name__}")
        if self._call is not None:
            raise ProtocolError("a request came while another is served; a connection carries one at a time")
        try:
            self._verb = self._server._admit(self._stream.peer(), header)
        except Exception as error:  # noqa: BLE001 - whatever the check raises is the client's answer
            self._server._refuse()
            self._write(encode(failure_of(error)))
            return None
        self._reserved = _nbytes(header)
        try:
            return self._verb.allocate(header.tensors)
        except (RuntimeError, MemoryError) as error:
            self._write(encode(failure_of(Overloaded(f"no memory for {self._reserved} bytes: {error}"))))
            self._server._finished(self._reserved)
            self._verb = None
            return None

    def _take(self, frame: Frame) -> None:
        header, verb = frame.header, self._verb
        assert isinstance(header, RequestHeader)
        assert verb is not None
        assert frame.tensors is not None
        call = Call(self._server, verb, self._stream.peer(), header, frame.tensors, self._reserved)
        self._verb, self._reserved = None, 0
        call._recipients.append(self)
        self._call = call
        try:
            serve = self._choose(call, verb, header.settled)
            if serve is not None:
                call.deadline.check(peer="client", operation=header.verb)
                serve(call)
        except Exception as error:  # noqa: BLE001 - whatever the handler raises is the client's answer
            call.fail(error)

    def _choose(self, call: Call, verb: Verb, settled: int) -> Callable[[Call], None] | None:
        """What serves the call: its verb's handler, or nothing if the same was asked before and is taken care of."""
        if not call._once:
            return verb.handler
        once = self._server.once
        with once.lock:
            found = once.begin(call, settled)
            call._once = found is call
            if found is call:
                return verb.handler
            if isinstance(found, Call):
                call._recipients.clear()
                call._close(None)
                found._recipients.append(self)
                self._call = found
                return None
        if found is None:
            return verb.again or _say_done
        call._answer(found, done=False)
        return None

    def _dismiss(self, error: Exception) -> None:
        """Tells the client why it has to go."""
        with self._lock:
            self._writer = FrameWriter()
            self._writer.put(encode(failure_of(error)))
            with suppress(OSError, BoundaryError):
                self._writer.flush(self._stream)
            self._stream.linger(_LINGER)

    def _end(self) -> None:
        with self._lock:
            self._closed = True
            call, self._call = self._call, None
            self._stream.close()
            os.close(self._wake)
        if call is not None:
            call._leave(self)
        if self._verb is not None:
            self._server._finished(self._reserved)
        self._server._left(self)


def _say_done(call: Call) -> None:
    call.fail(RuntimeError("this request was done, but its answer is not kept any more"))


def _nbytes(header: RequestHeader) -> int:
    return sum(tensor.nbytes for tensor in header.tensors)
