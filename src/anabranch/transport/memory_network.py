"""A network inside the process: names instead of addresses, socket pairs instead of connections.

Bytes are polled, buffered and split as on a real network, without touching the file system or leaving the process.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from itertools import count

from anabranch.transport.sockets import SocketStream
from anabranch.transport.streams import Peer

__all__ = ["MemoryListener", "MemoryTransport"]


class MemoryListener:
    """The listening end of a name in a ``MemoryTransport``; see ``Listener``."""

    def __init__(self, transport: MemoryTransport, endpoint: str) -> None:
        self.endpoint = endpoint
        self.job: str | None = None
        self._transport = transport
        self._waiting: deque[SocketStream] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._arrivals = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor that is readable while a client waits."""
        return self._arrivals

    def accept(self) -> SocketStream | None:
        """Return the stream that has waited the longest."""
        with self._lock:
            if not self._waiting:
                return None
            os.eventfd_read(self._arrivals)
            return self._waiting.popleft()

    def close(self) -> None:
        """Frees the name; waiting clients find the connection lost."""
        self._transport._forget(self.endpoint)
        with self._lock:
            self._closed = True
            for stream in self._waiting:
                stream.close()
            self._waiting.clear()
            os.close(self._arrivals)

    def _arrive(self, stream: SocketStream) -> None:
        with self._lock:
            if self._closed:
                stream.close()
                raise ConnectionRefusedError(f"nothing listens at {self.endpoint}")
            self._waiting.append(stream)
            os.eventfd_write(self._arrivals, 1)


class MemoryTransport:
    """A network inside this process, for tests and for jobs of one process; see ``Transport``.

    >>> from anabranch.transport import Client, Deadline, Request, Server, Verb
    >>> network = MemoryTransport()
    >>> echo = Verb("echo", lambda call: call.reply(payload=call.payload))
    >>> with Server([echo], transport=network) as server, Client(transport=network) as client:
    ...     client.call(Request(server.endpoint, "echo", payload=b"hello"), Deadline.after(60.0)).payload
    b'hello'
    """

    def __init__(self) -> None:
        self._listeners: dict[str, MemoryListener] = {}
        self._lock = threading.Lock()
        self._numbers = count()

    def listen(self, endpoint: str | None) -> MemoryListener:
        """Listen at ``memory:NAME``, or at a new name.

        Raises:
            ValueError: the endpoint is not one of this network, or the name is taken.
        """
        with self._lock:
            name = f"memory:{next(self._numbers)}" if endpoint is None else endpoint
            if not name.startswith("memory:"):
                raise ValueError(f"{name!r} is not an endpoint of this network; use memory:NAME")
            if name in self._listeners:
                raise ValueError(f"{name} is already served; choose another name")
            self._listeners[name] = MemoryListener(self, name)
            return self._listeners[name]

    def connect(self, endpoint: str) -> SocketStream:
        """Connect to ``endpoint``."""
        with self._lock:
            listener = self._listeners.get(endpoint)
        if listener is None:
            raise ConnectionRefusedError(f"nothing listens at {endpoint}")
        near, far = socket.socketpair()
        for end in (near, far):
            end.setblocking(False)
        try:
            listener._arrive(SocketStream(far, _anyone, name=endpoint))
        except BaseException:
            near.close()
            raise
        return SocketStream(near, _anyone, name=endpoint)

    def _forget(self, endpoint: str) -> None:
        with self._lock:
            self._listeners.pop(endpoint, None)


def _anyone(_: socket.socket) -> Peer:
    return Peer("this process")
