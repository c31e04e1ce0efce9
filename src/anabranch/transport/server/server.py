"""A server: verbs with handlers behind a listening endpoint, from start to an orderly end.

::

    loop: accept, greet, read, check ──┬──> handler of a quick verb ──┬──> reply
     │ ^                               │                              └──> queue ──> compute thread ──> reply
     │ │ rests                         └──> needs a loop of its own: large requests, handlers that wait
     v └──────────────────────────────────────── a second loop with this one connection, on a thread
    beat thread ── a beat on every connection whose request waits or runs

A thread for every connection costs a thread switch for each request, and as many threads compete for the interpreter as
there are clients; on one loop, 64 clients' requests are read in a few wake-ups and reach the queue of their expert
together. A separate thread is right for requests that take long anyway: large bodies are then copied, and decrypted, in
parallel. A server has at most as many threads as connections, and that of an idle connection ends.

``connection.py`` shows how a request is read, admitted and answered.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, Overloaded, SchemaError
from anabranch.record.process import process_record
from anabranch.record.spans import mark, open_spans
from anabranch.transport.failures import note_failure
from anabranch.transport.frame import MOST_BODY, Heartbeat, RequestHeader, encode
from anabranch.transport.server.connection import ALONE, Admission, Call, Connection, OnceTable, ServerStatistics, Verb
from anabranch.transport.sockets import SocketTransport
from anabranch.transport.streams import Listener, Transport

STATUS = "status"
"""The verb that every server has: its facts as JSON, for ``anabranch status ENDPOINT``."""

_log = logging.getLogger("anabranch.transport")

# By default Python lets a busy thread keep the interpreter for 5 ms; answers would wait that long.
_SWITCH_INTERVAL = 5e-4
# Seconds between two checks whether the last bytes have left.
_GLANCE = 0.002
# Seconds between two checks for stalled connections.
_SWEEP = 1.0
# Seconds to wait, rather than spin, when accepting fails, mostly for lack of descriptors or room.
_ACCEPT_PAUSE = 0.05
# Seconds between two lines of the log about clients for which there is no descriptor or thread.
_LOG_AGAIN = 60.0
# Seconds of silence after which a connection that has not greeted is closed for another; handshakes are slow on a busy
# machine.
_QUIET = 0.25
# Seconds for which new requests are read before the received ones are served.
_ROUND = 0.002
# Seconds after which a thread that has not returned from its handlers is replaced.
_AWAY = 0.1
# Idle seconds after which a connection returns to the first loop and its thread ends.
_REST = 10.0


class Server:
    """Serves verbs at an endpoint while its ``with`` block runs.

    >>> import torch
    >>> from anabranch.transport import Client, Request
    >>> double = Verb("double", lambda call: call.reply([2 * call.tensors[0]]))
    >>> with Server([double]) as server, Client() as client:
    ...     request = Request(server.endpoint, "double", tensors=[torch.ones(2)])
    ...     answer = client.call(request, Deadline.after(60.0))
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
        max_body: bytes of tensors accepted from a client in one frame.
        max_connections: a client beyond it gets ``Overloaded``.
        max_unknown: connections that have neither identified themselves nor greeted. Beyond it the oldest silent one
            is closed; one that has not greeted after 10 seconds is closed anyway.
        max_bytes_in_flight: bytes of requests received and not answered, and of answers that clients have not read yet,
            those up to 64 KiB not counted. Beyond it requests and answers are ``Overloaded`` instead; a client that
            reads no byte for 30 seconds is cut off.
        healthy: returns true while the code that serves calls is alive; when it returns false, beats stop, and clients
            take the server as lost.
        one_job: serve the certificate's job alone: where that is every job, peers whose certificates name one are
            refused, because the objects they ask about would be shared with other jobs.
        after_round: called on the thread that has read requests, when all that had come were handed to their handlers:
            work that handlers set aside can then run together. ``one_of_many``: it reads one connection alone.
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
        max_body: int = MOST_BODY,
        max_connections: int = 512,
        max_unknown: int = 128,
        max_bytes_in_flight: int = 4 << 30,
        drain_seconds: float = 5.0,
        healthy: Callable[[], bool] | None = None,
        one_job: bool = False,
        after_round: Callable[..., None] | None = None,
        facts: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        if not 0 < heartbeat < float("inf"):
            raise ValueError(f"heartbeat is a finite number of seconds above 0, got {heartbeat!r}")
        self._admission = Admission(
            # By a weak reference, and the loop is made when the server is entered: one that never is has no cycle.
            [*verbs, Verb(STATUS, partial(Server._tell_status, weakref.proxy(self)), check=_no_tensors)],
            role,
            max_body=max_body,
            heartbeat=heartbeat,
            max_connections=max_connections,
            max_bytes=max_bytes_in_flight,
        )
        network = transport if transport is not None else SocketTransport(role, keys=keys, insecure=insecure)
        self._listener = network.listen(listen)
        self._admission.only_job = self._listener.job if one_job else None
        self.heartbeat = heartbeat
        self.healthy = healthy or (lambda: True)
        self.drain_seconds = drain_seconds
        self.max_unknown = max_unknown
        self.after_round = after_round
        self.threads_of: dict[Connection, threading.Thread] = {}
        """The threads of connections that have a loop of their own."""
        self._role = role
        self._facts = facts
        self._started = time.monotonic()
        self._stack = ExitStack()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.loop: Loop | None = None
        self.closed = False

    @property
    def once(self) -> OnceTable:
        """The requests that were or are being executed exactly once."""
        return self._admission.once

    @property
    def endpoint(self) -> str:
        """The address at which clients find this server."""
        return self._listener.endpoint

    def __enter__(self) -> Server:
        if self._threads or self.closed:
            raise RuntimeError("a server can be entered only once; make another")
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL))
        self.loop = Loop(self, self._listener)
        beat = threading.Thread(target=self._beat_all, name="anabranch-beat", daemon=True)
        self._threads += [self.loop.start(), beat]
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
        admission, until = self._admission, Deadline.after(max(seconds, 1e-3))
        with admission.lock:
            admission.draining = True
        # Long answers are sent as fast as their clients read.
        while admission.counts.calls or any(map(Connection.busy, list(admission.connections))):
            if until.expired() or self.closed:
                return False
            self._stop.wait(timeout=_GLANCE)
        return True

    def close(self) -> None:
        """Close all connections and end all threads; calls in flight are cancelled."""
        if self.closed:
            return
        self._stack.close()
        admission = self._admission
        with admission.lock:
            self.closed = admission.draining = True
        self._stop.set()
        if self.loop is not None:
            self.loop.stop()
        patience = Deadline.after(10.0)
        # Looked up anew each time: while the beat lives, it may replace the thread of the loop.
        while (thread := next(filter(threading.Thread.is_alive, self._threads), None)) and not patience.expired():
            thread.join(timeout=patience.remaining())
        # The loop starts no more threads now; the running ones see that the server stops.
        for connection in list(admission.connections):
            connection.abort()
        for thread in list(self.threads_of.values()):
            thread.join(timeout=patience.remaining())
        for connection in list(admission.connections):
            if connection not in self.threads_of:
                connection.end()
        if self.loop is not None:
            self.loop.close()
        self._listener.close()

    def statistics(self) -> ServerStatistics:
        """Counters since the start, and the present load."""
        admission = self._admission
        with admission.lock:
            now = admission.counts
            requests, errors = dict(now.requests), dict(now.errors)
            return replace(now, connections=len(admission.connections), requests=requests, errors=errors)

    def _status(self) -> dict[str, object]:
        counts = self.statistics()
        return {
            "uptime": time.monotonic() - self._started,
            "connections": counts.connections,
            "calls": counts.calls,
            "requests": sum(counts.requests.values()),
            "bytes": counts.bytes_received + counts.bytes_sent,
            **self._facts(),
        }

    def _tell_status(self, call: Call) -> None:
        facts = {"pid": os.getpid(), "now": time.monotonic(), "open": open_spans(), self._role: self._status()}
        call.reply(payload=json.dumps(facts).encode())

    def _beat_all(self) -> None:
        frame = encode(Heartbeat())
        admission, loop = self._admission, self.loop
        assert loop is not None
        # Twice as often as promised: a late beat on a busy machine must not look like a lost server.
        while not self._stop.wait(timeout=self.heartbeat / 2):
            try:
                if loop.away(time.monotonic()):
                    # However long its handler takes, the other connections are read and answered.
                    self._threads = [*filter(threading.Thread.is_alive, self._threads), loop.start()]
                if self.healthy():
                    with admission.lock:
                        connections = list(admission.connections)
                    for connection in connections:
                        connection.beat(frame)
            except BaseException as error:  # noqa: BLE001 - without beats every client would consider the server lost
                note_failure("transport.beat_failed", error)


class Loop:
    """Polls connections, and lets each that has something continue.

    The first loop of a server accepts connections and has all those that need no loop of their own. Others have one
    connection, on a thread that ends with it.

    Args:
        server: whose connections they are.
        listener: accepts them; ``None`` for a loop with one connection.
    """

    def __init__(self, server: Server, listener: Listener | None = None) -> None:
        self._server = server
        self._listener = listener
        self._poller = select.epoll()
        self._bell = -1
        if listener is not None:
            try:
                self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            except OSError:
                self._poller.close()
                raise
            self._poller.register(self._bell, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._stopped = False
        self._accept_at = 0.0 if listener is not None else float("inf")
        self._log_at = 0.0
        # The thread that drives the connections; one that is busy too long is replaced, and ends when it returns.
        self.ident: int | None = None
        self._away_since = float("inf")

    # --- called from any thread

    def watch(self, connection: Connection) -> None:
        """Poll for the events that ``connection``, which this loop drives, waits for now."""
        with connection.lock:
            events = connection.interest()
            if connection.registered not in (0, events) and events:  # 0: on its way to another loop
                self._poller.modify(connection.wire.stream.descriptor, events)
                connection.registered = events

    def add(self, connection: Connection) -> None:
        """Drive ``connection`` from now on."""
        descriptor = connection.wire.stream.descriptor
        with connection.lock:
            connection.loop, connection.watch, connection.alone = self, self.watch, self._listener is None
            connection.registered = connection.interest()
            self._connections[descriptor] = connection
            try:
                self._poller.register(descriptor, connection.registered)
            except (OSError, ValueError) as error:
                # No memory for another descriptor in the kernel's table.
                self._note_want(error)
                del self._connections[descriptor]
                connection.end()

    def start(self) -> threading.Thread:
        """Drive the connections on a new thread, in place of the current one."""
        thread = threading.Thread(target=self.run, name="anabranch-loop", daemon=True)
        self._away_since = float("inf")
        self.ident = None
        try:
            thread.start()
        except RuntimeError:
            # No thread is left in the system: still marked as busy, so that the next beat retries.
            self._away_since = time.monotonic()
            raise
        return thread

    def away(self, now: float) -> bool:
        """Return True if the thread has been running handlers for too long."""
        return now - self._away_since > _AWAY and not self._stopped

    def stop(self) -> None:
        """End the thread and its connections."""
        self._stopped = True
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Frees the descriptors; after the thread has ended."""
        self._poller.close()
        if self._listener is not None:
            os.close(self._bell)

    # --- called on the loop's thread

    def run(self) -> None:
        """Drive the connections until it is stopped, or replaced; a single one until it ends or rests."""
        self.ident, after_round = threading.get_ident(), self._server.after_round
        sweep_at = time.monotonic() + _SWEEP
        if self._listener is None:
            # The request that needed this loop has partly arrived.
            self._step(next(iter(self._connections.values())), select.POLLIN)
            if after_round is not None:
                self._end_round(after_round)
        while not self._stopped and not self._server.closed and (self._connections or self._listener is not None):
            now = time.monotonic()
            if self._accept_at <= now:
                self._listen()
            if sweep_at <= now:
                sweep_at = now + _SWEEP
                self._sweep(now)
                continue
            events = self._poller.poll(min(sweep_at if self._connections else now + 60.0, self._accept_at) - now)
            until = time.monotonic() + _ROUND
            while events:
                arrivals = False
                for descriptor, happened in events:
                    connection = self._connections.get(descriptor)
                    if connection is not None:
                        self._step(connection, happened)
                    elif descriptor != self._bell:
                        arrivals = True
                # Last: closing connections to make room frees descriptor numbers that the events may still name.
                if arrivals:
                    self._accept_all()
                # More requests may follow the first, and they are better served together. One connection carries one
                # request at a time, so a single client has no more.
                more = len(self._connections) > 1 and time.monotonic() < until
                events = self._poller.poll(0) if more else []
            self._away_since = time.monotonic()
            if after_round is not None:
                self._end_round(after_round)
            if threading.get_ident() != self.ident:
                return
            self._away_since = float("inf")
        for connection in list(self._connections.values()):
            connection.end()
        self._connections.clear()

    def _end_round(self, after_round: Callable[..., None]) -> None:
        try:
            after_round(one_of_many=self._listener is None or threading.get_ident() != self.ident)
        except BaseException as error:  # noqa: BLE001 - a bug there must not end the loop
            note_failure("transport.connection_failed", error)

    def _step(self, connection: Connection, events: int) -> None:
        try:
            events = connection.step(events)
        except BaseException as error:  # noqa: BLE001 - a fault with one connection must not end the others
            note_failure("transport.connection_failed", error)
            connection.end()
            events = 0
        if events == ALONE:
            self._leave_alone(connection)
        elif not events:
            # A closed descriptor has been removed from the poller automatically.
            self._connections.pop(connection.wire.stream.descriptor, None)
        elif events != connection.registered:
            self.watch(connection)

    def _unwatch(self, connection: Connection) -> None:
        descriptor = connection.wire.stream.descriptor
        del self._connections[descriptor]
        with connection.lock:
            self._poller.unregister(descriptor)
            connection.registered = 0

    def _leave_alone(self, connection: Connection) -> None:
        """Give ``connection`` a loop of its own, on a thread."""
        self._unwatch(connection)
        server = self._server
        try:
            loop = Loop(server)
        except OSError as error:
            # No descriptor is left: this client's connection is lost, the others are still served.
            self._note_want(error)
            connection.end()
            return
        loop.add(connection)
        thread = threading.Thread(target=loop._run_alone, args=(connection,), name="anabranch-connection", daemon=True)
        server.threads_of[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:
            self._note_want(error)
            connection.end()
            server.threads_of.pop(connection)
            loop.close()

    def _run_alone(self, connection: Connection) -> None:
        try:
            self.run()
        except BaseException as error:  # noqa: BLE001 - its client must not wait for a thread that has ended
            note_failure("transport.connection_failed", error)
            connection.end()
        finally:
            self.close()
            if connection.loop is self:  # else it is back at the first, which may have given it another thread
                self._server.threads_of.pop(connection, None)

    def _sweep(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if connection.overdue(now):
                connection.turn_away(DeadlineExceeded("no greeting arrived", peer="client", operation="greeting"))
                self._connections.pop(connection.wire.stream.descriptor, None)
            elif self._listener is None and now - connection.rests_since() > _REST:
                self._unwatch(connection)
                loop = self._server.loop
                assert loop is not None
                self._server.threads_of.pop(connection, None)
                loop.add(connection)

    # --- accepting connections

    def _listen(self) -> None:
        assert self._listener is not None
        self._accept_at = time.monotonic() + _ACCEPT_PAUSE
        if self._has_room():
            try:
                self._poller.register(self._listener.fileno(), select.EPOLLIN)
            except OSError as error:
                self._note_want(error)
                return
            self._accept_at = float("inf")

    def _accept_all(self) -> None:
        assert self._listener is not None
        while not self._stopped:
            try:
                stream = self._listener.accept()
            except OSError as error:
                self._note_want(error)
                break
            if stream is None:
                return
            connection = Connection(self._server._admission, stream)
            self.add(connection)
            self._step(connection, select.POLLIN)
            if not self._has_room():
                break
        self._poller.unregister(self._listener.fileno())
        self._accept_at = time.monotonic() + _ACCEPT_PAUSE

    def _has_room(self) -> bool:
        """Return False if too many connections have not greeted, after closing the oldest silent one of them."""
        admission = self._server._admission
        with admission.lock:
            crowd = list(admission.unknown) if len(admission.unknown) > self._server.max_unknown else []
        now = time.monotonic()
        for connection in crowd:
            if connection.loop is self and now - connection.progress >= _QUIET:
                connection.turn_away(Overloaded("too many open connections without a greeting; try later"))
                self._connections.pop(connection.wire.stream.descriptor, None)
                return True
        return not crowd

    def _note_want(self, error: Exception) -> None:
        """Report that there is no descriptor, thread or room for a client; log it now and then."""
        now = time.monotonic()
        if self._log_at <= now:
            self._log_at = now + _LOG_AGAIN
            _log.warning(
                "%s: no descriptor or thread for another client, which waits or is rejected: %s; allow this process "
                "more (ulimit -n, ulimit -u), or have fewer clients",
                self._server.endpoint, error,
            )  # fmt: skip
        mark("transport.accept_failed", error=str(error))


def _no_tensors(header: RequestHeader) -> None:
    if header.tensors:
        raise SchemaError(f"{header.verb} takes no tensors, got {len(header.tensors)}")
