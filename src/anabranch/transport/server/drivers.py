"""Drivers that poll connections: one loop for all with small requests, and a thread for each that needs one.

::

    loop ── listener, and every connection at first: a wake-up reads all the small requests that have come
     │ ^
     v └─ a connection that has rested for a while comes back, and its thread ends
    thread ── one connection: its requests are large, or are served by a handler that may wait

A thread for every connection costs a thread switch for each request, and as many threads compete for the interpreter as
there are clients; on one loop, 64 clients' requests are read in a few wake-ups and reach the queue of their expert
together. A separate thread is right for requests that take long anyway: large bodies are then copied, and decrypted, in
parallel.

A server has at most ``max_connections`` connections (and a few more that are only told ``Overloaded``), so it has at
most as many threads, and the thread of an idle connection ends.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from anabranch.errors import Overloaded
from anabranch.record.spans import mark
from anabranch.transport.failures import note_failure
from anabranch.transport.network.streams import Listener, Stream
from anabranch.transport.server.connection import Answer, Connection, ConnectionState

__all__ = ["AcceptLoop", "DedicatedThread", "Host"]

_T = TypeVar("_T")
_log = logging.getLogger("anabranch.transport")

# Seconds between two checks for stalled connections.
_SWEEP = 1.0
# Seconds to wait, rather than spin, when accepting fails, mostly for lack of descriptors or room.
_ACCEPT_PAUSE = 0.05
# Seconds between two lines of the log about clients for which there is no descriptor or thread.
_LOG_AGAIN = 60.0
# Seconds of silence after which an unknown connection is closed for another; handshakes are slow on a busy machine.
_QUIET = 0.25
# Seconds for which new requests are read before the received ones are served.
_ROUND = 0.002
# Seconds after which a thread that has not returned from its handlers is replaced.
_AWAY = 0.1
# Idle seconds after which a connection returns to the loop and its thread ends.
_REST = 10.0


class Host(Protocol):
    """The interface of a server that a driver needs: its connections, and whether it is stopping."""

    threads_of: dict[Connection, threading.Thread]

    def connect(self, stream: Stream, loop: AcceptLoop) -> Connection:
        """Register a new connection."""

    def crowd(self) -> list[Connection]:
        """Return the connections that have not greeted yet, the oldest first, if they are too many."""

    def round_over(self) -> None:
        """Record that all received requests were passed to their handlers."""

    def stopping(self) -> bool:
        """Return True if connections are to end."""


class AcceptLoop:
    """Accepts connections and drives those that need no thread of their own."""

    alone = False

    def __init__(self, server: Host, listener: Listener) -> None:
        self._server = server
        self._listener = listener
        self._poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connections: dict[int, Connection] = {}
        self._answers: deque[Answer] = deque()
        self._called: deque[Connection] = deque()
        self._stopped = False
        self._lock = threading.Lock()
        self._closed = False
        self._accept_at = 0.0
        self._log_at = 0.0
        # The thread that drives the connections; one that is busy too long is replaced, and ends when it returns.
        self._ident: int | None = None
        self._away_since = float("inf")
        self._poller.register(self._wake, select.EPOLLIN)

    # --- called from any thread

    def wake(self, connection: Connection) -> None:
        """Take ``connection``, which has something to send, or to end, or is returned by its thread."""
        self._called.append(connection)
        self._ring()

    def send(self, answers: Sequence[Answer]) -> None:
        """Send many answers, at the cost of one system call for the caller; of none on the loop's own thread."""
        self._answers.extend(answers)
        if not self.is_here():
            self._ring()

    def has_answers(self) -> bool:
        """Return True if answers wait to be written."""
        return bool(self._answers)

    def start(self) -> threading.Thread:
        """Drive the connections on a new thread, in place of the current one."""
        thread = threading.Thread(target=self.run, name="anabranch-loop", daemon=True)
        self._away_since = float("inf")
        self._ident = None
        try:
            thread.start()
        except RuntimeError:
            # No thread is left in the system: still marked as busy, so that the next beat retries.
            self._away_since = time.monotonic()
            raise
        return thread

    def is_here(self) -> bool:
        """Return True if the calling thread drives the connections."""
        return threading.get_ident() == self._ident

    def away(self, now: float) -> bool:
        """Return True if the thread has been running handlers for too long."""
        return now - self._away_since > _AWAY and not self._stopped

    def stop(self) -> None:
        """End the thread and its connections."""
        self._stopped = True
        self._ring()

    def close(self) -> None:
        """Frees the descriptors; after the thread has ended."""
        with self._lock:
            self._closed = True
            self._poller.close()
            os.close(self._wake)

    def _ring(self) -> None:
        with self._lock:
            # A closed descriptor's number may belong to another file by now.
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    # --- called on the loop's thread

    def run(self) -> None:
        """Serve until it is stopped, or replaced."""
        self._ident = threading.get_ident()
        sweep_at = 0.0
        while not self._stopped:
            now = time.monotonic()
            if self._accept_at <= now:
                self._listen()
            if sweep_at <= now:
                sweep_at = now + _SWEEP
                self._sweep(now)
            found = self._poller.poll(self._timeout(now))
            until = time.monotonic() + _ROUND
            while found:
                self._handle(found)
                if self._answers or self._called:
                    self._do_what_was_asked()
                # # More requests may follow the first, and they are better served together. One connection carries one
                # request at a time, so a single client has no more.
                more = len(self._connections) > 1 and time.monotonic() < until
                found = self._poller.poll(0) if more else []
            self._away_since = time.monotonic()
            self._guard(self._server.round_over)
            if not self.is_here():
                self._ring()
                return
            self._away_since = float("inf")
            if self._answers:
                self._do_what_was_asked()
        self._do_what_was_asked()
        for connection in list(self._connections.values()):
            connection.end()
        self._connections.clear()

    def _handle(self, found: Sequence[tuple[int, int]]) -> None:
        arrivals = False
        for descriptor, events in found:
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._step(connection, events)
            elif descriptor == self._wake:
                os.eventfd_read(self._wake)
            else:
                arrivals = True
        # Last: closing connections to make room frees descriptor numbers that the events above may still name.
        if arrivals:
            self._accept_all()

    def _timeout(self, now: float) -> float:
        seconds = _SWEEP if self._connections else 60.0
        return seconds if self._accept_at == float("inf") else min(seconds, max(self._accept_at - now, 0.0))

    def _do_what_was_asked(self) -> None:
        while self._answers:
            connection, call, frame = self._answers[0]
            self._guard(partial(connection.write_answer, call, frame))
            # Only now, for callers that wait until all have been written.
            self._answers.popleft()
        while self._called:
            connection = self._called.popleft()
            if connection.driver is self and not connection.closed:
                self._watch(connection)

    def _step(self, connection: Connection, events: int) -> None:
        try:
            state = connection.step(events)
        except BaseException as error:  # noqa: BLE001 - a fault with one connection must not end the others
            note_failure("transport.connection_failed", error)
            connection.end()
            state = ConnectionState.ENDED
        if state is not ConnectionState.STAYS or connection.interest() != connection.registered:
            self._follow(connection, state)

    def _guard(self, do: Callable[[], _T]) -> _T | None:
        """Return the result, or ``None`` if it raised: a bug here must not end the loop."""
        try:
            return do()
        except BaseException as error:  # noqa: BLE001 - see above
            note_failure("transport.connection_failed", error)
            return None

    def _follow(self, connection: Connection, state: ConnectionState) -> None:
        if state is ConnectionState.STAYS:
            if connection.interest() != connection.registered:
                self._watch(connection)
            return
        # A closed descriptor has been removed from the poller automatically.
        self._connections.pop(connection.descriptor, None)
        if state is ConnectionState.NEEDS_THREAD:
            self._poller.unregister(connection.descriptor)
            connection.registered = 0
            try:
                DedicatedThread(self._server, connection, self).start()
            except (OSError, RuntimeError) as error:
                # No descriptor or thread is left: this client's connection is lost, the others are still served.
                self._note_want(error)
                connection.end()

    def _watch(self, connection: Connection) -> None:
        """Poll for the events that ``connection`` waits for now."""
        try:
            events = connection.interest()
            if connection.registered:
                self._poller.modify(connection.descriptor, events)
            else:
                self._poller.register(connection.descriptor, events)
                self._connections[connection.descriptor] = connection
            connection.registered = events
        except (OSError, ValueError) as error:
            # No memory for another descriptor in the kernel's table.
            self._note_want(error)
            self._connections.pop(connection.descriptor, None)
            connection.end()

    def _sweep(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if connection.patience(now) <= 0:
                self._follow(connection, connection.give_up())

    def _listen(self) -> None:
        if not self._make_room():
            self._accept_at = time.monotonic() + _ACCEPT_PAUSE
            return
        try:
            self._poller.register(self._listener.fileno(), select.EPOLLIN)
        except OSError as error:
            self._note_want(error)
            self._accept_at = time.monotonic() + _ACCEPT_PAUSE
            return
        self._accept_at = float("inf")

    def _accept_all(self) -> None:
        while not self._stopped:
            try:
                stream = self._listener.accept()
            except OSError as error:
                self._note_want(error)
                self._pause_accepting()
                return
            if stream is None:
                return
            connection = self._server.connect(stream, self)
            self._watch(connection)
            self._step(connection, select.POLLIN)
            if not self._make_room():
                self._pause_accepting()
                return

    def _note_want(self, error: Exception) -> None:
        """Report that there is no descriptor, thread or room for a client; log it now and then."""
        now = time.monotonic()
        if self._log_at <= now:
            self._log_at = now + _LOG_AGAIN
            _log.warning(
                "%s: no descriptor or thread for another client, which waits or is rejected: %s; allow this process "
                "more (ulimit -n, ulimit -u), or have fewer clients",
                self._listener.endpoint, error,
            )  # fmt: skip
        self._guard(partial(mark, "transport.accept_failed", error=str(error)))

    def _pause_accepting(self) -> None:
        self._poller.unregister(self._listener.fileno())
        self._accept_at = time.monotonic() + _ACCEPT_PAUSE

    def _make_room(self) -> bool:
        """Close the oldest silent connection that has not greeted, if there are too many; false if still no room."""
        crowd = self._server.crowd()
        now = time.monotonic()
        for stranger in crowd:
            # One with a thread is still being sent the reason for its close.
            if stranger.driver is self and stranger.quiet_for(now) >= _QUIET:
                full = Overloaded("too many open connections without a greeting; try later")
                self._follow(stranger, stranger.turn_away(full))
                return True
        return not crowd


class DedicatedThread:
    """A thread that drives one connection until it ends or rests."""

    alone = True

    def __init__(self, server: Host, connection: Connection, loop: AcceptLoop) -> None:
        self._server = server
        self._connection = connection
        self._loop = loop
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._over = False

    def start(self) -> None:
        """Take the connection over.

        Raises:
            RuntimeError: no thread is left in the system.
        """
        connection = self._connection
        connection.driver = self
        thread = threading.Thread(target=self.run, name="anabranch-connection", daemon=True)
        self._server.threads_of[connection] = thread
        try:
            thread.start()
        except RuntimeError:
            self._leave()
            raise

    def wake(self, connection: Connection) -> None:
        """Note that there is something to be sent, or to end; from any thread."""
        with self._lock:
            if not self._over:
                os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Drives the connection."""
        connection = self._connection
        try:
            if self._serve(connection) is ConnectionState.STAYS:
                connection.driver = self._loop
                self._loop.wake(connection)
        except BaseException as error:  # noqa: BLE001 - its client must not wait for a thread that has ended
            note_failure("transport.connection_failed", error)
            connection.end()
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._over = True
            os.close(self._wake)
        # Otherwise the two would hold each other, and the connection its answer, until the garbage collector runs.
        self._connection.driver = self._loop
        self._server.threads_of.pop(self._connection, None)

    def _serve(self, connection: Connection) -> ConnectionState:
        poller = select.poll()
        poller.register(connection.descriptor, connection.interest())
        poller.register(self._wake, select.POLLIN)
        connection.registered = connection.interest()
        # The request that needed a thread has partly arrived.
        events = select.POLLIN
        while True:
            state = ConnectionState.STAYS
            if events:
                state = connection.step(events)
                self._server.round_over()
            if state is not ConnectionState.STAYS:
                return state
            if self._server.stopping():
                connection.end()
                return ConnectionState.ENDED
            if connection.interest() != connection.registered:
                connection.registered = connection.interest()
                poller.modify(connection.descriptor, connection.registered)
            resting = connection.resting()
            patience = _REST if resting else max(connection.patience(time.monotonic()), 0.0)
            found = poller.poll(max(1, int(patience * 1000)))
            if not found and resting and connection.resting():
                connection.registered = 0
                return ConnectionState.STAYS
            if not found and connection.patience(time.monotonic()) <= 0:
                return connection.give_up()
            events = 0
            for descriptor, happened in found:
                if descriptor == self._wake:
                    os.eventfd_read(self._wake)
                    events |= select.POLLOUT
                else:
                    events |= happened
