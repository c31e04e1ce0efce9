"""A server: verbs with handlers behind a listening endpoint, from start to an orderly end.

::

    loop: accept, greet, read, check ──┬──> handler of a quick verb ──┬──> reply
                                       │                              └──> queue ──> compute thread ──> reply
                                       └──> a thread for the connection: large requests, handlers that wait
    beat thread ── a beat on every connection whose request waits or runs

``call.py`` is the handler's view, ``connection.py`` shows how a request is read and answered, ``drivers.py`` on
which thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from anabranch.deadline import Deadline
from anabranch.errors import NotFound, Overloaded, PeerLost, ProtocolError, SchemaError, Unauthorized
from anabranch.record.process import process_record
from anabranch.record.spans import open_spans
from anabranch.transport.failures import note_failure
from anabranch.transport.frame import FailureFrame, Heartbeat, Limits, RequestHeader, encode
from anabranch.transport.heap import give_memory_back
from anabranch.transport.network.sockets import SocketTransport
from anabranch.transport.network.streams import Peer, Stream, Transport
from anabranch.transport.server.call import Call, Verb
from anabranch.transport.server.connection import Answer, Connection
from anabranch.transport.server.drivers import AcceptLoop
from anabranch.transport.server.once import OnceTable

__all__ = ["Call", "STATUS", "Server", "ServerStatistics", "Verb"]

STATUS = "status"
"""The verb that every server has: its facts as JSON, for ``anabranch status --address``."""

# Seconds after which a client that reads no byte of its answer loses it if other answers need the room.
_UNREAD = 2.0
# Bytes of answers and requests freed for clients that have gone, after which free memory is returned to the system.
_GIVEN_BACK = 32 << 20
# By default Python lets a busy thread keep the interpreter for 5 ms; answers would wait that long.
_SWITCH_INTERVAL = 5e-4
# Seconds between two checks whether the last bytes have left.
_GLANCE = 0.002


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Counters of a server since it started, and its present load.

    Attributes:
        connections: open now.
        calls: being served now.
        bytes_in_flight: of the tensors of those calls.
        served: accepted requests that have ended.
        refused: requests and connections that were rejected.
        requests: accepted requests, by verb.
        errors: answers that were errors, by kind.
        bytes_received: of tensors.
        bytes_sent: of tensors.
    """

    connections: int
    calls: int
    bytes_in_flight: int
    served: int
    refused: int
    requests: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    bytes_received: int = 0
    bytes_sent: int = 0


class Server:
    """Serves verbs at an endpoint while its ``with`` block runs.

    >>> import torch
    >>> from anabranch.transport import Client, Request
    >>> double = Verb("double", lambda call: call.reply([2 * tensor for tensor in call.tensors]))
    >>> with Server([double]) as server, Client() as client:
    ...     answer = client.call(Request(server.endpoint, "double", tensors=[torch.ones(2)]), Deadline.after(60.0))
    >>> answer.tensors
    [tensor([2., 2.])]

    Args:
        verbs: the operations that clients may request.
        listen: ``unix:PATH``, ``tcp://HOST:PORT`` (port 0: any), or ``None`` for a new Unix socket.
        role: this server's role, which names its certificate.
        keys: the directory of certificates; without it, the one that ``ANABRANCH_KEYS`` names.
        insecure: allow TCP without certificates.
        heartbeat: seconds between the beats that tell a waiting client that the server lives.
        transport: the network; sockets by default.
        limits: the sizes accepted from a client in one frame.
        max_connections: a client beyond it gets ``Overloaded``.
        max_strangers: connections that have neither identified themselves nor greeted. Beyond it the oldest silent one
            is closed; one that is silent for 2 seconds is closed anyway.
        max_bytes_in_flight: bytes of requests received and not answered; beyond it requests get ``Overloaded``.
        max_bytes_of_answers: bytes of answers that clients have not read yet, those up to 64 KiB not counted; beyond it
            a client that has not read for 2 seconds is cut off, and an answer without room is ``Overloaded``
            instead. A single answer may be larger.
        healthy: returns true while the code that serves calls is alive; when it returns false, beats stop, and clients
            take the server as lost.
        one_job: serve the certificate's job alone: where that is every job, peers whose certificates name one are
            refused, because the objects they ask about would be shared with other jobs.
        after_round: called on the thread that has read requests, when all that had come were handed to their handlers:
            work that handlers set aside can then run together.
        facts: returns what ``anabranch status`` shows of this server, as plain values.

    Raises:
        ValueError: an endpoint that is malformed, taken or open to others; TCP without keys; two verbs of one name.

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
        max_strangers: int = 128,
        max_bytes_in_flight: int = 4 << 30,
        max_bytes_of_answers: int = 512 << 20,
        drain_seconds: float = 5.0,
        healthy: Callable[[], bool] | None = None,
        one_job: bool = False,
        after_round: Callable[[], None] | None = None,
        facts: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        if not 0 < heartbeat < float("inf"):
            raise ValueError(f"heartbeat is a finite number of seconds above 0, got {heartbeat!r}")
        self._verbs: dict[str, Verb] = {}
        for verb in (*verbs, Verb(STATUS, self._tell_status, check=_no_tensors)):
            if verb.name in self._verbs:
                raise ValueError(f"two verbs are called {verb.name!r}")
            self._verbs[verb.name] = verb
        self.once: OnceTable[Call] = OnceTable()
        self.heartbeat = heartbeat
        self.limits = limits or Limits()
        self.healthy = healthy or (lambda: True)
        self.drain_seconds = drain_seconds
        self.max_connections = max_connections
        self._after_round = after_round
        self._role = role
        self._facts = facts
        self._started = time.monotonic()
        self._stack = ExitStack()
        self.threads_of: dict[Connection, threading.Thread] = {}
        """The threads of connections that have one of their own."""
        self._max_strangers = max_strangers
        self._max_bytes = max_bytes_in_flight
        self._max_answers = max_bytes_of_answers
        self._answers = 0
        self._dropped = 0
        # Condition's own `with` takes the same lock by way of two more Python functions.
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)
        self._connections: dict[Connection, None] = {}
        self._strangers: dict[Connection, None] = {}
        self._calls = self._bytes = self._served = self._refused = self._received = self._sent = 0
        self._requests: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._gathering = threading.local()
        self._gatherings = 0
        self._draining = False
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        network = transport if transport is not None else SocketTransport(role, keys=keys, insecure=insecure)
        self._listener = network.listen(listen)
        self._only_job = self._listener.job if one_job else None
        self._loop = AcceptLoop(self, self._listener)
        self._closed = False

    @property
    def endpoint(self) -> str:
        """The address at which clients find this server."""
        return self._listener.endpoint

    def __enter__(self) -> Server:
        if self._threads or self._closed:
            raise RuntimeError("a server can be entered only once; make another")
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL))
        beat = threading.Thread(target=self._beat_all, name="anabranch-beat", daemon=True)
        self._threads += [self._loop.start(), beat]
        beat.start()
        record, status = process_record(), {self._role: self._status}
        if record is not None:
            record.put(**status)
            self._stack.callback(record.settle, **status)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.drain(self.drain_seconds)
        self.close()

    def drain(self, seconds: float) -> bool:
        """Decline new calls and wait, at most this many seconds, for those in flight; true if all were answered."""
        until = Deadline.after(max(seconds, 1e-3))
        with self._state:
            self._draining = True
            done = self._state.wait_for(lambda: self._calls == 0 and not self._gatherings, timeout=seconds)
        # Long answers are sent as fast as their clients read.
        while done and (self._loop.has_answers() or any(map(Connection.sending, list(self._connections)))):
            if until.expired() or self._closed:
                return False
            self._stop.wait(timeout=_GLANCE)
        return done

    def close(self) -> None:
        """Close all connections and end all threads; calls in flight are cancelled."""
        if self._closed:
            return
        self._stack.close()
        self._closed = True
        self._stop.set()
        self._loop.stop()
        patience = Deadline.after(10.0)
        for thread in self._threads:
            thread.join(timeout=patience.remaining())
        # The loop starts no more threads now; the running ones see that the server stops.
        for connection in list(self._connections):
            connection.abort()
        for thread in list(self.threads_of.values()):
            thread.join(timeout=patience.remaining())
        for connection in list(self._connections):
            if connection not in self.threads_of:
                connection.end()
        self._loop.close()
        self._listener.close()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Send the answers given on this thread in the block together, by the server's loop.

        For a thread that answers many calls and has more to do: each answer would cost it a system call, and a thread
        switch whenever a client is quick to send its next request.
        """
        answers: list[Answer] = []
        self._gathering.answers = answers
        with self._state:
            self._gatherings += 1
        try:
            yield
        finally:
            self._gathering.answers = None
            if answers:
                self._loop.send(answers)
            with self._state:
                self._gatherings -= 1
                if self._draining:
                    self._state.notify_all()

    def statistics(self) -> ServerStatistics:
        """Counters since the start, and the present load."""
        with self._state:
            return ServerStatistics(
                len(self._connections),
                self._calls,
                self._bytes,
                self._served,
                self._refused,
                dict(self._requests),
                dict(self._errors),
                self._received,
                self._sent,
            )

    def _status(self) -> dict[str, object]:
        found = self.statistics()
        return {
            "uptime": time.monotonic() - self._started,
            "connections": found.connections,
            "calls": found.calls,
            "requests": sum(found.requests.values()),
            "bytes": found.bytes_received + found.bytes_sent,
            **self._facts(),
        }

    def _tell_status(self, call: Call) -> None:
        facts = {"pid": os.getpid(), "now": time.monotonic(), "open": open_spans(), self._role: self._status()}
        call.reply(payload=json.dumps(facts).encode())

    # --- called by connections and calls

    def gathered(self) -> list[Answer] | None:
        """Return the list in which this thread's answers are set aside, or ``None`` if they are sent at once."""
        return getattr(self._gathering, "answers", None)

    def round_over(self) -> None:
        """Record that all received requests were passed to their handlers."""
        if self._after_round is not None:
            self._after_round()

    def on_loop(self) -> bool:
        """Return True on the one thread that reads all connections without their own thread."""
        return self._loop.is_here()

    def stopping(self) -> bool:
        """Return True if connections are to end."""
        return self._closed

    def may_wait(self, verb: str) -> bool:
        """Return True if serving ``verb`` may block a thread."""
        known = self._verbs.get(verb)
        return known is not None and not known.quick

    def connect(self, stream: Stream, loop: AcceptLoop) -> Connection:
        """Register a new connection, unknown until it has greeted."""
        connection = Connection(self, stream, loop)
        with self._state:
            self._connections[connection] = self._strangers[connection] = None
        return connection

    def crowd(self) -> list[Connection]:
        """Return the connections that have not greeted, the oldest first, if they are too many."""
        with self._state:
            return list(self._strangers) if len(self._strangers) > self._max_strangers else []

    def recognise(self, connection: Connection) -> bool:
        """Register ``connection``, which has greeted; false if there is no room."""
        with self._state:
            if len(self._connections) - len(self._strangers) >= self.max_connections:
                return False
            self._strangers.pop(connection, None)
            return True

    def forget(self, connection: Connection) -> None:
        """Forgets ``connection``, which has ended."""
        with self._state:
            self._connections.pop(connection, None)
            self._strangers.pop(connection, None)

    def reserve_answer(self, nbytes: int) -> bool:
        """Reserves ``nbytes`` for an answer that waits; clients that do not read lose theirs. False without room."""
        if self._take_room(nbytes):
            return True
        with self._lock:
            connections = list(self._connections)
        now = time.monotonic()
        unread = [connection for connection in connections if connection.stalled(now) >= _UNREAD]
        for connection in sorted(unread, key=lambda each: -each.stalled(now)):
            connection.give_answer_up()
            if self._take_room(nbytes):
                return True
        return False

    def _take_room(self, nbytes: int) -> bool:
        with self._lock:
            # A single answer may be larger than the budget: any answer that fits a frame can be requested.
            if self._answers and self._answers + nbytes > self._max_answers:
                return False
            self._answers += nbytes
            return True

    def release_answer(self, nbytes: int) -> None:
        """Free the memory of a response that was sent, or that will not be read."""
        with self._lock:
            self._answers -= nbytes

    def note_dropped(self, nbytes: int) -> None:
        """Record that an answer or a request of this many bytes was freed because its client has gone."""
        with self._lock:
            self._dropped += nbytes

    def _give_back(self) -> None:
        """Return the memory of dropped answers to the system, once it is worthwhile."""
        with self._lock:
            if self._dropped < _GIVEN_BACK:
                return
            self._dropped = 0
        give_memory_back()

    def admit(self, peer: Peer, header: RequestHeader, nbytes: int) -> Verb:
        """Return the verb that ``header`` requests, if ``peer`` may ask it now; reserves the bytes of its body."""
        verb = self._verbs.get(header.verb)
        if verb is None:
            raise NotFound(f"no verb {header.verb!r}; there are: {', '.join(sorted(self._verbs))}")
        if verb.roles is not None and not peer.may(verb.roles):
            raise Unauthorized(f"role {peer.role!r} may not call {verb.name!r}; roles {sorted(verb.roles or ())} may")
        if self._only_job is not None and peer.job not in (None, self._only_job):
            raise Unauthorized(
                f"this server's certificate is for every job, but job {peer.job!r} needs its own: give the "
                f"server keys of that job (anabranch keys DIR --job {peer.job})"
            )
        if verb.once and len(header.epoch) != 16:
            raise ProtocolError(f"{verb.name} is executed exactly once: number its requests (once=True)")
        with self._lock:
            if self._draining or self._closed:
                raise PeerLost("the server is shutting down")
            if self._bytes + nbytes > self._max_bytes:
                raise Overloaded(
                    f"{self._bytes} bytes of requests are in flight; {nbytes} more exceed {self._max_bytes}"
                )
            self._calls += 1
            self._bytes += nbytes
        if verb.check is not None:
            try:
                verb.check(header)
            except BaseException:
                with self._lock:
                    self._calls -= 1
                    self._bytes -= nbytes
                    if self._draining:
                        self._state.notify_all()
                raise
        self._requests[verb.name] += 1
        return verb

    def finished(self, nbytes: int, answered: int = 0) -> None:
        """Record that a request of ``nbytes`` has ended, with an answer of this many bytes of tensors."""
        with self._lock:
            self._served += 1
            self._received += nbytes
            self._sent += answered
            self._calls -= 1
            self._bytes -= nbytes
            if self._draining:
                self._state.notify_all()

    def count_refusal(self, failure: FailureFrame) -> None:
        """Count a request or a connection that was rejected."""
        with self._lock:
            self._refused += 1
        self.count_error(failure)

    def count_error(self, failure: FailureFrame) -> None:
        """Count an answer that was an error."""
        with self._lock:
            self._errors[failure.code] += 1

    def _beat_all(self) -> None:
        frame = encode(Heartbeat())
        # Twice as often as promised: a late beat on a busy machine must not look like a lost server.
        while not self._stop.wait(timeout=self.heartbeat / 2):
            try:
                if self._loop.away(time.monotonic()):
                    # However long its handler takes, the other connections are read and answered.
                    self._threads.append(self._loop.start())
                self._beat_once(frame)
                self._give_back()
            except BaseException as error:  # noqa: BLE001 - without beats every client would consider the server lost
                note_failure("transport.beat_failed", error)

    def _beat_once(self, frame: Sequence[memoryview]) -> None:
        if self.healthy():
            with self._lock:
                connections = list(self._connections)
            for connection in connections:
                connection.beat(frame)


def _no_tensors(header: RequestHeader) -> None:
    if header.tensors:
        raise SchemaError(f"{header.verb} takes no tensors, got {len(header.tensors)}")
