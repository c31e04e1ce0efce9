"""One client's connection on the server: greeted, read, checked, served, answered, without ever waiting.

::

    shaking hands ──> greeting ──> [ header ──> admitted? ──> body ──> handler ──> answer ] ...
                                       │
                                       └── needs a thread of its own: its driver hands it over (``drivers.py``)

``step`` continues as far as the socket allows; its driver, a loop over many connections or a thread for this one, polls
in between. A connection carries one request at a time, so anything that arrives while a request is served means that
the client is leaving, and the request is cancelled. The thread that has an answer writes as much of it as the socket
takes at once; the driver sends the rest, so a slow reader never blocks a compute thread.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Protocol

from torch import Tensor

from anabranch.errors import BoundaryError, DeadlineExceeded, Overloaded, ProtocolError
from anabranch.record import spans
from anabranch.transport.failures import ends_the_program, failure_of
from anabranch.transport.frame import (
    FailureFrame,
    Frame,
    FrameReader,
    FrameWriter,
    Header,
    Hello,
    Limits,
    RequestHeader,
    encode,
)
from anabranch.transport.network.streams import Peer, Stream
from anabranch.transport.server.call import Call, CallServer, Verb

__all__ = ["Answer", "Connection", "ConnectionServer", "ConnectionState", "Driver"]

_GREETING = 10.0
# Seconds of silence after which an unknown peer is assumed not to want to connect.
_HANDSHAKE = 2.0
# Seconds without a byte sent or taken in the middle of a frame after which a peer is treated as gone.
_STALLED = 30.0
_LINGER = 1.0
# Requests of at most this many bytes are read by the shared loop.
_SMALL = 64 << 10


class ConnectionState(Enum):
    """The state of a connection after a step."""

    STAYS = auto()
    NEEDS_THREAD = auto()
    ENDED = auto()


class Driver(Protocol):
    """A loop or thread that polls a connection and calls its ``step``."""

    alone: bool

    def wake(self, connection: Connection) -> None:
        """Record that there is something to send or to end; from any thread."""


class ConnectionServer(CallServer, Protocol):
    """The interface of a server that a connection needs: it decides whether a request is admitted."""

    heartbeat: float
    limits: Limits
    max_connections: int

    def recognise(self, connection: Connection) -> bool:
        """Register ``connection``, which has greeted; false if there is no room for it."""

    def reserve_answer(self, nbytes: int) -> bool:
        """Reserves room for an answer of this many bytes that waits; false if there is none."""

    def release_answer(self, nbytes: int) -> None:
        """Free the memory of a response that was sent, or that will not be read."""

    def note_dropped(self, nbytes: int) -> None:
        """Record that an answer or a request of this many bytes was freed because its client has gone."""

    def may_wait(self, verb: str) -> bool:
        """Return True if serving ``verb`` may block a thread."""

    def admit(self, peer: Peer, header: RequestHeader, nbytes: int) -> Verb:
        """Return the verb that ``header`` requests, if ``peer`` may ask it now; reserves the bytes of its body."""

    def count_refusal(self, failure: FailureFrame) -> None:
        """Count a request or a connection that was rejected."""

    def gathered(self) -> list[Answer] | None:
        """Return the list in which this thread's answers are set aside, or ``None`` if they are sent at once."""

    def forget(self, connection: Connection) -> None:
        """Record that ``connection`` has ended."""


class _Phase(Enum):
    SHAKING = auto()
    GREETING = auto()
    SERVING = auto()


class Connection:
    """One client's connection; steps are taken by one thread at a time, answers come from any."""

    def __init__(self, server: ConnectionServer, stream: Stream, driver: Driver) -> None:
        self.stream = stream
        self.descriptor = stream.fileno()
        self.driver = driver
        self.registered = 0
        """The events that its driver polls for."""
        self._server = server
        # Held for every use of the stream but poll and abort: OpenSSL allows one thread at a time.
        self._lock = threading.RLock()
        self._writer = FrameWriter()
        self._reader = FrameReader(server.limits, self._accept)
        self._phase = _Phase.SHAKING
        self.closed = False
        self._verb: Verb | None = None
        self._reserved = 0
        self._call: Call | None = None
        self._last_sequence, self._last_epoch = -1, b""
        self._needs_thread = False
        self._last_words: FailureFrame | None = None
        self._waiting_bytes = 0
        self._promised_bytes = 0
        self._began = self._progress = time.monotonic()

    # --- called from any thread

    def answer(self, call: Call, frame: Sequence[memoryview]) -> None:
        """Write the answer to ``call`` as far as the socket takes it; the driver does the rest."""
        gathered = self._server.gathered()
        if gathered is not None and not self.driver.alone:
            gathered.append((self, call, frame))
            return
        self.write_answer(call, frame)

    def write_answer(self, call: Call, frame: Sequence[memoryview]) -> None:
        """``answer`` on the present thread."""
        with self._lock:
            if self._call is not call or self.closed:
                return
            # Before the first byte leaves: the client may send its next request as soon as it has the last one.
            self._call = None
            # The client's time to read begins now, however long the call took; set before other threads see the answer.
            self._progress = time.monotonic()
            whole = 0
            for buffer in frame:
                whole += len(buffer)
            # The header is not counted.
            nbytes = whole - len(frame[0])
            if (nbytes > _SMALL or self._promised_bytes) and not self._keep_promise(nbytes):
                frame = self._no_room(call, nbytes)
                whole = len(frame[0])
            self._write(frame, whole)
            if self._waiting_bytes and not self._writer.waiting:
                self._account()

    def make_room(self, call: Call, nbytes: int) -> None:
        """Reserve room for the answer to ``call``, which is about to be made.

        Raises:
            Overloaded: there is none.
        """
        with self._lock:
            if nbytes <= _SMALL or self._call is not call or self.closed:
                return
            if not self._server.reserve_answer(nbytes):
                raise _full(nbytes)
            self._promised_bytes += nbytes

    def _keep_promise(self, nbytes: int) -> bool:
        """Adjust the reservation for a response to its actual size; false if there is no room."""
        promised, self._promised_bytes = self._promised_bytes, 0
        counted = nbytes if nbytes > _SMALL else 0
        if counted < promised:
            self._server.release_answer(promised - counted)
        elif counted > promised and not self._server.reserve_answer(counted - promised):
            self._server.release_answer(promised)
            return False
        self._waiting_bytes = counted
        return True

    def stalled(self, now: float) -> float:
        """Seconds since the client took the last byte of an answer that was counted; 0 if none waits."""
        return now - self._progress if self._waiting_bytes else 0.0

    def give_answer_up(self) -> None:
        """Cuts the connection and frees its answer at once, unless it is just being written."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._waiting_bytes and not self.closed:
                self._drop_answer()
                self.abort()
        finally:
            self._lock.release()

    def _account(self) -> None:
        """Release the bytes reserved for an answer once it has been sent."""
        if self._waiting_bytes and not self._writer.waiting:
            self._server.release_answer(self._waiting_bytes)
            self._waiting_bytes = 0

    def _drop_answer(self) -> None:
        """Free a response that will not be read, and the reservation for the next one."""
        self._writer.waiting.clear()
        dropped = self._waiting_bytes
        self._account()
        if self._promised_bytes:
            self._server.release_answer(self._promised_bytes)
            self._promised_bytes = 0
        if dropped:
            self._server.note_dropped(dropped)

    def beat(self, frame: Sequence[memoryview]) -> None:
        """Send a beat to a client that waits within its deadline."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            call = self._call
            waits = call is not None and not call.deadline.expired()
            serving = self._phase is _Phase.SERVING and not self._writer.waiting and not self.closed
            if serving and (waits or not self._reader.idle()):
                self._write(frame)
        finally:
            self._lock.release()

    def abort(self) -> None:
        """Cuts the connection; its driver removes it."""
        with self._lock:
            if not self.closed:
                self.stream.abort()
                self.driver.wake(self)

    def _no_room(self, call: Call, nbytes: int) -> list[memoryview]:
        failure = failure_of(_full(nbytes), call.identity[1])
        self._server.count_error(failure)
        return encode(failure)

    def _write(self, frame: Sequence[memoryview], nbytes: int = -1) -> None:
        try:
            self._writer.send(frame, self.stream, nbytes)
        except (OSError, BoundaryError):
            self._drop_answer()
            self.stream.abort()
            return
        if self._writer.waiting:
            self.driver.wake(self)

    # --- called on the driver's thread

    def interest(self) -> int:
        """Return the events to poll for."""
        if self._phase is _Phase.SHAKING and self.stream.wants_write():
            return select.POLLOUT | select.POLLRDHUP
        return select.POLLIN | select.POLLRDHUP | (select.POLLOUT if self._writer.waiting else 0)

    def sending(self) -> bool:
        """Return True if bytes of an answer have not left yet."""
        return bool(self._writer.waiting) and not self.closed

    def resting(self) -> bool:
        """Return True if nothing is in flight in either direction, nor being served."""
        serving = self._phase is _Phase.SERVING and self._call is None
        return serving and not self._writer.waiting and self._reader.idle()

    def patience(self, now: float) -> float:
        """Seconds after which to call ``give_up`` if nothing happens."""
        if self._phase is not _Phase.SERVING:
            return min(self._progress + _HANDSHAKE, self._began + _GREETING) - now
        waiting, reader = self._writer.waiting, self._reader
        between = not waiting and reader.idle()
        return 3600.0 if between else self._progress + _STALLED - now

    def give_up(self) -> ConnectionState:
        """End a connection whose client has stalled in the middle of a frame, or never greeted."""
        return self.turn_away(DeadlineExceeded("no greeting arrived", peer="client", operation="greeting"))

    def turn_away(self, error: BoundaryError) -> ConnectionState:
        """End the connection at once; a client that could have greeted gets the reason, if the socket allows."""
        failure = failure_of(error)
        if self._phase is not _Phase.SERVING:
            self._server.count_refusal(failure)
        if self._phase is _Phase.GREETING:
            # None of its bytes are unread, so closing destroys nothing.
            self._say(failure)
        self.end()
        return ConnectionState.ENDED

    def quiet_for(self, now: float) -> float:
        """Seconds since the client last sent something."""
        return now - self._progress

    def step(self, events: int) -> ConnectionState:
        """Continue as far as the socket allows."""
        try:
            if events & select.POLLRDHUP:
                raise ConnectionResetError("the client has disconnected")
            if self._last_words is not None:
                return self._dismiss(self._last_words)
            return self._advance(readable=bool(events & ~select.POLLOUT))
        except (BoundaryError, ValueError) as error:
            return self._refuse(error)
        except OSError:
            self.end()
            return ConnectionState.ENDED

    def _advance(self, *, readable: bool) -> ConnectionState:
        if self._phase is _Phase.SHAKING:
            self._progress = time.monotonic()
            if not self.stream.handshake():
                return ConnectionState.STAYS
            # Bytes that came with the end of the handshake may be in the TLS layer already, invisible to poll.
            self._phase, readable = _Phase.GREETING, True
        while True:
            with self._lock:
                moved = 0
                if self._writer.waiting and (moved := self._writer.flush(self.stream)):
                    self._account()
                frame = None
                if readable:
                    before = self._reader.received
                    frame = self._reader.advance(self.stream)
                    moved += self._reader.received - before
            if moved:
                self._progress = time.monotonic()
            if self._needs_thread:
                self._needs_thread = False
                return ConnectionState.NEEDS_THREAD
            if frame is None:
                return ConnectionState.STAYS
            if self._phase is _Phase.GREETING:
                # A request may have arrived with the greeting.
                self._greet()
            else:
                # A frame without tensors was refused when its header arrived; its body has been skipped.
                if frame.tensors is not None:
                    self._take(frame)
                # The client waits for its answer, so the kernel has nothing more.
                if not self._reader.holds_more():
                    return ConnectionState.STAYS

    def _greet(self) -> None:
        if not self._server.recognise(self):
            raise Overloaded(f"the server already has {self._server.max_connections} connections; try later")
        with self._lock:
            self._phase = _Phase.SERVING
            self._write(encode(Hello(self._server.heartbeat, self._server.limits.body)))

    def _accept(self, header: Header) -> Sequence[Tensor] | None:
        if self._phase is not _Phase.SERVING:
            if not isinstance(header, Hello) or header.tensors:
                raise ProtocolError("a client's first frame must be a greeting without tensors")
            return ()
        if not isinstance(header, RequestHeader):
            raise ProtocolError(f"a client sends requests, not {type(header).__name__}")
        if header.sequence == self._last_sequence and header.epoch == self._last_epoch:
            # A duplicate: a client retries a request only on a fresh connection.
            spans.mark("transport.repeated_request", peer=self.stream.peer().name, operation=header.verb)
            return None
        if self._call is not None:
            raise ProtocolError("received a request while another is served; a connection carries one at a time")
        nbytes = 0
        for tensor in header.tensors:
            nbytes += tensor.nbytes
        if not self.driver.alone and (nbytes > _SMALL or self._server.may_wait(header.verb)):
            self._needs_thread = True
            self._reader.postpone()
            return None
        self._last_sequence, self._last_epoch = header.sequence, header.epoch
        try:
            self._verb = self._server.admit(self.stream.peer(), header, nbytes)
        except BaseException as error:
            if ends_the_program(error):
                raise
            failure = failure_of(error, header.sequence)
            self._server.count_refusal(failure)
            self._write(encode(failure))
            return None
        self._reserved = nbytes
        try:
            return self._verb.allocate(header.tensors)
        except (RuntimeError, MemoryError) as error:
            full = Overloaded(f"not enough memory for {self._reserved} bytes: {error}")
            self._write(encode(failure_of(full, header.sequence)))
            self._server.finished(self._reserved)
            self._verb = None
            return None

    def _take(self, frame: Frame) -> None:
        header, verb = frame.header, self._verb
        assert isinstance(header, RequestHeader)
        assert verb is not None
        assert frame.tensors is not None
        call = Call(self._server, verb, self.stream.peer(), header, frame.tensors, self._reserved)
        self._verb, self._reserved = None, 0
        call.recipients.append(self)
        self._call = call
        try:
            serve = self._choose(call, verb, header.settled) if call.once else verb.handler
            if serve is not None:
                call.deadline.check(peer="client", operation=header.verb)
                with spans.span(header.verb, "compute"):
                    serve(call)
        except BaseException as error:
            call.fail(error)
            if ends_the_program(error):
                raise

    def _choose(self, call: Call, verb: Verb, settled: int) -> Callable[[Call], None] | None:
        """Return the handler that serves the call; ``None`` if it is a retry that has already been handled."""
        once = self._server.once
        with once.lock:
            found = once.begin(call, settled)
            call.once = found is call
            if found is call:
                return verb.handler
            if isinstance(found, Call):
                call.recipients.clear()
                call.close(None)
                found.recipients.append(self)
                self._call = found
                return None
        if found is None:
            return verb.again or _say_done
        call.answer(found, done=False)
        return None

    def _refuse(self, error: Exception) -> ConnectionState:
        """End the connection with an error for the client; sending may take time, so a loop leaves it to a thread."""
        failure = failure_of(error)
        self._server.count_refusal(failure)
        if not self.driver.alone:
            self._last_words = failure
            return ConnectionState.NEEDS_THREAD
        return self._dismiss(failure)

    def _dismiss(self, failure: FailureFrame) -> ConnectionState:
        with self._lock:
            self._say(failure)
            self.stream.linger(_LINGER)
        self.end()
        return ConnectionState.ENDED

    def _say(self, failure: FailureFrame) -> None:
        with self._lock, suppress(OSError, BoundaryError):
            self._writer = FrameWriter()
            self._account()
            self._writer.put(encode(failure))
            self._writer.flush(self.stream)

    def end(self) -> None:
        """Close the connection; nobody waits for its call any more."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            call, self._call = self._call, None
            self.stream.close()
            self._drop_answer()
            self._reader.drop()
        if call is not None:
            call.leave(self)
        if self._verb is not None:
            self._server.finished(self._reserved)
            self._server.note_dropped(self._reserved)
        self._server.forget(self)


def _full(nbytes: int) -> Overloaded:
    return Overloaded(f"no memory for a response of {nbytes} bytes: other responses wait for clients that do not read")


def _say_done(call: Call) -> None:
    call.fail(RuntimeError("this request was executed, but its response is no longer kept"))


Answer = tuple[Connection, Call, Sequence[memoryview]]
"""A connection, the call to be answered on it, and the answer's frame."""
