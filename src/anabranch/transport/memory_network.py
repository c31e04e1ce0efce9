"""A network inside the process: names instead of addresses, sockets that no other process may connect to.

Bytes are polled, buffered and split as on a real network, without touching the file system.
"""

from __future__ import annotations

import os
import socket
import threading
from functools import partial
from itertools import count

from anabranch.errors import Unauthorized
from anabranch.transport.sockets import SocketListener, SocketStream, credentials
from anabranch.transport.streams import Peer

_BACKLOG = 512


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
        self._addresses: dict[str, object] = {}
        self._lock = threading.Lock()
        self._numbers = count()

    def listen(self, endpoint: str | None) -> SocketListener:
        """Listen at ``memory:NAME``, or at a new name.

        Raises:
            ValueError: the endpoint is not one of this network, or the name is taken.
        """
        with self._lock:
            name = f"memory:{next(self._numbers)}" if endpoint is None else endpoint
            if not name.startswith("memory:"):
                raise ValueError(f"{name!r} is not an endpoint of this network; use memory:NAME")
            if name in self._addresses:
                raise ValueError(f"{name} is already served; choose another name")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind("")  # Linux then chooses an address without a file
            sock.listen(_BACKLOG)
            self._addresses[name] = sock.getsockname()
        return SocketListener(sock, name, None, _this_process, partial(self._addresses.pop, name, None))

    def connect(self, endpoint: str) -> SocketStream:
        """Connect to ``endpoint``."""
        address = self._addresses.get(endpoint)
        if address is None:
            raise ConnectionRefusedError(f"nothing listens at {endpoint}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return SocketStream(sock, None, _this_process, endpoint, connecting=True).connect(address)


def _this_process(sock: socket.socket) -> Peer:
    process, _ = credentials(sock)
    if process != os.getpid():
        raise Unauthorized(f"process {process} does not belong to the network inside process {os.getpid()}")
    return Peer("this process")
