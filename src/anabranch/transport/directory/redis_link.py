"""``RedisLink``: runs scripts in one Redis; a call ends by its deadline, with the answer or an error.

The package ``redis`` speaks the protocol. It bounds each wait for a socket, not a whole call, so its sockets are
wrapped here: each of their waits ends by the deadline of the call that uses the connection.
"""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from anabranch.deadline import Deadline
from anabranch.errors import Overloaded, PeerLost, ProtocolError
from anabranch.transport.directory.redis_address import is_loopback, parse_url, shown_url
from anabranch.transport.directory.redis_errors import translated_errors

__all__ = ["RedisLink", "Script"]

# The first version in which a script may read the clock and then write.
_OLDEST = (5, 0)
_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
_MOST_IDLE = 8


@dataclass(frozen=True, slots=True)
class Script:
    """A script in Lua, which Redis runs as one step."""

    source: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.source.encode()).hexdigest()  # noqa: S324 - Redis names scripts so
        object.__setattr__(self, "digest", digest)


class RedisLink:
    """Connections to one Redis, made as they are needed; any thread may use it, and a forked child makes its own.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://PATH``, as the package ``redis`` reads it.

    Attributes:
        url: the address without user, password and options, for messages.
        is_local: whether only processes of this host reach it.

    Raises:
        ValueError: the URL is malformed.
        ModuleNotFoundError: without the ``redis`` extra.
    """

    def __init__(self, url: str) -> None:
        self.url = shown_url(url)
        self._facts = parse_url(url)
        self.is_local = "path" in self._facts or is_loopback(str(self._facts.get("host", "localhost")))
        self._idle: list[Any] = []
        weakref.finalize(self, _disconnect, self._idle)
        self._process = os.getpid()
        self._is_checked = False

    def run(self, script: Script, arguments: Sequence[object], operation: str, deadline: Deadline) -> Any:
        """Return the answer of ``script``; retry for a while if the connection is lost.

        Every script may run twice: if its answer was lost, it is run again.

        Raises:
            BoundaryError: it was lost, refused, or not answered by ``deadline``; names the URL.
        """
        pauses = iter(_PAUSES)
        while True:
            deadline.check(peer=self.url, operation=operation)
            try:
                with self._connection(operation, deadline) as connection:
                    return _run(connection, script, arguments)
            except (PeerLost, Overloaded):
                _disconnect(self._idle)  # created before the server went away
                pause = next(pauses, None)
                if pause is None or pause >= deadline.remaining():
                    raise
                time.sleep(pause)

    def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        _disconnect(self._idle)

    @contextmanager
    def _connection(self, operation: str, deadline: Deadline) -> Iterator[Any]:
        connection = self._take()
        connection.call.deadline = deadline
        try:
            with translated_errors(self.url, operation, deadline):
                if not self._is_checked:
                    _check_version(connection, self.url)
                    self._is_checked = True
                yield connection
        except BaseException:
            connection.disconnect()
            raise
        if len(self._idle) < _MOST_IDLE and self._process == os.getpid():
            self._idle.append(connection)
        else:
            connection.disconnect()

    def _take(self) -> Any:
        if self._process != os.getpid():  # forked: the parent uses those
            self._idle.clear()
            self._process = os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            facts = dict(self._facts)
            kind = facts.pop("connection_class")
            return _bounded(kind)(**facts, protocol=2)


def _disconnect(connections: list[Any]) -> None:
    while connections:
        try:
            connections.pop().disconnect()
        except IndexError:  # another thread took the last one
            return


def _run(connection: Any, script: Script, arguments: Sequence[object]) -> Any:
    from redis.exceptions import NoScriptError

    try:
        connection.send_command("EVALSHA", script.digest, 0, *arguments)
        return connection.read_response()
    except NoScriptError:
        connection.send_command("EVAL", script.source, 0, *arguments)
        return connection.read_response()


def _check_version(connection: Any, url: str) -> None:
    """Refuse a Redis that is too old; one that does not report its version is accepted."""
    from redis.exceptions import NoPermissionError

    connection.send_command("INFO", "server")
    try:
        answer = connection.read_response()
    except NoPermissionError:
        return
    text = answer.decode(errors="replace") if isinstance(answer, bytes) else ""
    version = next((line.partition(":")[2] for line in text.splitlines() if line.startswith("redis_version:")), "")
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    if len(numbers) == 2 and tuple(numbers) < _OLDEST:
        raise ProtocolError(
            f"Redis {version} is too old for a directory; install {_OLDEST[0]}.{_OLDEST[1]} or newer", peer=url
        )


class _Call:
    """The call that uses a connection; a socket that held the connection itself would form a reference cycle."""

    deadline: Deadline


@cache
def _bounded(kind: type) -> Callable[..., Any]:
    """Return a class of connections whose waits end by the deadline of their ``call``."""

    class Bounded(kind):  # type: ignore[misc]  # of a package that has no types
        def __init__(self, **facts: Any) -> None:
            self.call = _Call()
            super().__init__(**facts)

        def _connect(self) -> _BoundedSocket:
            self.socket_connect_timeout = self.socket_timeout = _left(self.call.deadline)
            return _BoundedSocket(super()._connect(), self.call)

    return Bounded


class _BoundedSocket:
    """A socket of a connection: each of its waits ends by the call's deadline."""

    def __init__(self, sock: Any, call: _Call) -> None:
        self._sock = sock
        self._call = call

    def recv(self, size: int) -> Any:
        self._sock.settimeout(_left(self._call.deadline))
        return self._sock.recv(size)

    def recv_into(self, *arguments: Any) -> Any:
        self._sock.settimeout(_left(self._call.deadline))
        return self._sock.recv_into(*arguments)

    def sendall(self, data: Any) -> None:
        self._sock.settimeout(_left(self._call.deadline))
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def _left(deadline: Deadline) -> float:
    """Return the seconds that a socket may wait; 0 would mean not to wait at all."""
    left = deadline.remaining()
    if left <= 0:
        raise TimeoutError
    return left
