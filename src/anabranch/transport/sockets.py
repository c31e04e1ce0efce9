"""Streams on sockets: Unix on one host, TCP under mutual TLS between hosts, plain TCP only on explicit request.

OpenSSL forbids two threads in one connection at once, so a stream is used under its owner's lock; only
``abort`` may be called from anywhere.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from errno import EINPROGRESS
from functools import partial
from itertools import count
from typing import Any, Literal

from anabranch.errors import ProtocolError, Unauthorized
from anabranch.transport.certificates import (
    EVERY_JOB,
    client_context,
    job_of_keys,
    names_of,
    resolve_keys,
    server_context,
)
from anabranch.transport.endpoints import ClaimedPath, TcpEndpoint, UnixEndpoint, parse_endpoint
from anabranch.transport.streams import NOBODY, Listener, Peer

# The kernel doubles this: two megabytes and their header are sent in one go, so that neither side waits in between.
_UNIX_BUFFER = 1088 << 10
_BACKLOG = 512
_MOST_BUFFERS = 16
_CREDENTIALS = struct.Struct("3i")
# OpenSSL's texts for the peer's refusal of our certificate, by its alert.
_REFUSALS = (
    "ALERT_CERTIFICATE",
    "ALERT_UNKNOWN_CA",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_ACCESS_DENIED",
    "HANDSHAKE_FAILURE",
)
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "UNEXPECTED_MESSAGE")
_FOREIGN = ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")

Recognise = Callable[[socket.socket], Peer]


class SocketStream:
    """One socket that was accepted, or connects, possibly under TLS; see ``Stream``."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        recognise: Recognise,
        name: str,
        *,
        connect_to: Any = None,
    ) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNIX_BUFFER)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._secure = context is not None
        if context is not None:
            # wrap_socket asks whether the socket is connected, so a client wraps before it connects.
            sock = context.wrap_socket(sock, server_side=connect_to is None, do_handshake_on_connect=False)
        self._sock = sock
        self._recognise = recognise
        self._name = name
        self._accepted = connect_to is None
        self._connecting = not self._accepted
        self._want: Literal["read", "write"] = "write" if self._connecting else "read"
        self.descriptor = sock.fileno()
        self.ready_at = 0.0
        self.peer = NOBODY
        if self._connecting:  # ``handshake`` completes it
            code = sock.connect_ex(connect_to)
            if code not in (0, EINPROGRESS):
                sock.close()
                raise ConnectionRefusedError(code, os.strerror(code))

    def wants_write(self) -> bool:
        """Return True if the handshake waits to write."""
        return self._want == "write"

    def handshake(self) -> bool:
        """Continue connecting, TLS and identifying the peer."""
        if self.peer is not NOBODY:
            return True
        if self._connecting:
            if not _writable(self._sock):
                return False
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise ConnectionRefusedError(code, os.strerror(code))
            self._connecting = False
        if isinstance(self._sock, ssl.SSLSocket):
            try:
                self._sock.do_handshake()
            except ssl.SSLWantReadError:
                self._want = "read"
                return False
            except ssl.SSLWantWriteError:
                self._want = "write"
                return False
            except ssl.SSLError as error:
                # A peer that started without TLS gets an error in the clear.
                self._secure = error.reason not in _NO_TLS
                if self._accepted and not self._secure:
                    raise Unauthorized(
                        f"this server accepts only TLS 1.3 with certificates ({error.reason}); give keys=DIR",
                        peer=self._name,
                    ) from None
                raise _explain(error, self._name) from None
        self.peer = self._recognise(self._sock)
        return True

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Send as much as the kernel accepts."""
        try:
            if self._secure:
                return self._sock.send(buffers[0])
            if len(buffers) > _MOST_BUFFERS:
                buffers = buffers[:_MOST_BUFFERS]
            return socket.socket.sendmsg(self._sock, buffers)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except ssl.SSLError as error:
            raise _explain(error, self._name) from None

    def receive_into(self, buffer: memoryview) -> int:
        """Receive what the kernel has."""
        try:
            count = self._sock.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except ssl.SSLError as error:
            raise _explain(error, self._name) from None
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        return count

    def abort(self) -> None:
        """Shuts the connection down, which wakes the thread that polls it."""
        with suppress(OSError, ValueError):
            # On the plain socket below: SSLSocket.shutdown would drop the TLS state while the reader uses it.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Frees the descriptor."""
        self._sock.close()

    def finish(self) -> None:
        """Shut down our side."""
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_WR)


def _writable(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    return bool(poller.poll(0))


def _explain(error: ssl.SSLError, name: str) -> Exception:
    reason = error.reason or ""
    if any(word in reason for word in _REFUSALS):
        return Unauthorized(f"the peer rejected our certificate ({reason})", peer=name)
    if any(word in reason for word in _FOREIGN):
        return Unauthorized(f"the peer's certificate is not from our authority ({reason})", peer=name)
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)):
        return ConnectionResetError("the peer closed the connection during TLS")
    if reason in _NO_TLS:
        return ProtocolError(f"the peer does not use TLS 1.3 ({reason}); give both sides keys", peer=name)
    return ProtocolError(f"TLS failed: {reason or error}", peer=name)


class SocketListener:
    """A listening socket; see ``Listener``."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: str,
        context: ssl.SSLContext | None,
        recognise: Recognise,
        release: Callable[[], object] = lambda: None,
        job: str | None = None,
    ) -> None:
        sock.setblocking(False)
        self.endpoint = endpoint
        self.job = job
        self._sock = sock
        self._context = context
        self._recognise = recognise
        self._release = release

    def fileno(self) -> int:
        """Return the listening descriptor."""
        return self._sock.fileno()

    def accept(self) -> SocketStream | None:
        """Return the next connection."""
        try:
            sock, address = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return None
        name = "unix" if sock.family == socket.AF_UNIX else f"{address[0]}:{address[1]}"
        try:
            # Raises if the peer has gone: wrap_socket would leave the socket open.
            sock.getpeername()
            return SocketStream(sock, self._context, self._recognise, name)
        except OSError:
            # A client that has already left must not delay the others.
            sock.close()
            return None

    def close(self) -> None:
        """Stop listening; removes the socket's file."""
        self._sock.close()
        self._release()


class SocketTransport:
    """The network of this host and its neighbours; see ``Transport``.

    Args:
        role: the role of this process, which names its certificate.
        keys: the directory with ``authority.pem`` and ``<role>.pem``; without it, the one in ``ANABRANCH_KEYS``.
        insecure: allow TCP without certificates.

    Raises:
        ValueError: the directory lacks a file, or holds a damaged one.
    """

    def __init__(
        self, role: str = "worker", *, keys: str | os.PathLike[str] | None = None, insecure: bool = False
    ) -> None:
        self._insecure = insecure
        folder = None if insecure and keys is None else resolve_keys(keys)
        self._server_context = None if folder is None else server_context(folder, role)
        self._client_context = None if folder is None else client_context(folder, role)
        self._job = None if folder is None else job_of_keys(folder, role)
        self._certified = _certified(self._job or EVERY_JOB)

    def listen(self, endpoint: str | None) -> Listener:
        """Listen at ``endpoint``; ``None``: at a new Unix socket in a new directory.

        Raises:
            ValueError: TCP without keys, a path that is taken, or one whose directory is open to others.
            OSError: the address cannot be bound.
        """
        parsed = None if endpoint is None else self.check(endpoint)
        if isinstance(parsed, TcpEndpoint):
            return self._listen_tcp(parsed)
        return self._listen_unix(parsed)

    def _listen_unix(self, endpoint: UnixEndpoint | None) -> SocketListener:
        with ExitStack() as stack:
            claim = stack.enter_context(ClaimedPath(None if endpoint is None else endpoint.path))
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.bind(str(claim.path))
            claim.path.chmod(0o600)
            sock.listen(_BACKLOG)
            release = stack.pop_all().close
        return SocketListener(sock, f"unix:{claim.path}", None, _of_users(claim.owner), release)

    def _listen_tcp(self, endpoint: TcpEndpoint) -> SocketListener:
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        try:
            is_ipv6 = ":" in endpoint.host
            sock = socket.create_server(
                (endpoint.host, endpoint.port),
                family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
                backlog=_BACKLOG,
                # Of "::" alone: an address is of one kind.
                dualstack_ipv6=endpoint.host == "::" and socket.has_dualstack_ipv6(),
            )
        except OSError as error:
            message = f"cannot listen on tcp://{host}:{endpoint.port}: {error.strerror or error}"
            raise OSError(error.errno, message) from None
        return SocketListener(
            sock, f"tcp://{host}:{sock.getsockname()[1]}", self._server_context, self._certified, job=self._job
        )

    def connect(self, endpoint: str) -> SocketStream:
        """Begins to connect to ``endpoint``; a host name is resolved at once, which may take the resolver's time."""
        parsed = self.check(endpoint)
        if isinstance(parsed, UnixEndpoint):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # Root can read this process's memory anyway.
            recognise = _of_users(os.geteuid(), 0)
            return SocketStream(sock, None, recognise, endpoint, connect_to=str(parsed.path))
        try:
            addresses = socket.getaddrinfo(parsed.host, parsed.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise ConnectionRefusedError(f"{parsed.host} has no address: {error}") from None
        # A server at a name listens on its IPv4 address, where it has one; resolvers may put the other first.
        family, _, _, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
        sock = socket.socket(family, socket.SOCK_STREAM)
        return SocketStream(sock, self._client_context, self._certified, endpoint, connect_to=address)

    def check(self, endpoint: str) -> UnixEndpoint | TcpEndpoint:
        """Return the endpoint that ``endpoint`` names; raise ``ValueError`` if it is none, or TCP without keys."""
        parsed = parse_endpoint(endpoint)
        if isinstance(parsed, TcpEndpoint) and self._server_context is None and not self._insecure:
            raise ValueError(
                f"{endpoint}: TCP without certificates would admit anyone; make keys with `anabranch keys DIR` and "
                "give keys=DIR, or set insecure=True (on the command line --keys DIR, --insecure)"
            )
        return parsed


def _of_users(*users: int) -> Recognise:
    """Identify peers on a Unix socket that run as one of ``users``."""

    def recognise(sock: socket.socket) -> Peer:
        process, user = credentials(sock)
        if user not in users:
            raise Unauthorized(f"user {user} is at the other end of the socket, not user {users[0]}")
        return Peer(f"process {process}")

    return recognise


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user on the remote side, of the client or of the listener."""
    process, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(process), int(user)


def _certified(job: str) -> Recognise:
    """Identify peers of ``job`` by their certificates; without TLS, accepts everyone."""

    def recognise(sock: socket.socket) -> Peer:
        try:
            host, port = sock.getpeername()[:2]
        except OSError:
            raise ConnectionResetError("the peer closed the connection during the handshake") from None
        name = f"{host}:{port}"
        if not isinstance(sock, ssl.SSLSocket):
            return Peer(name, plain=True)
        names = names_of(sock)
        if names is None:
            raise Unauthorized("the certificate names no job and role; make it again: anabranch keys DIR", peer=name)
        if job not in (names[0], EVERY_JOB) and names[0] != EVERY_JOB:
            raise Unauthorized(f"a {names[1]} of job {names[0]!r} does not belong to job {job!r}", peer=name)
        shown = hashlib.sha256(sock.getpeercert(binary_form=True) or b"").hexdigest()
        return Peer(f"{names[1]} {name}", names[1], names[0] if job == EVERY_JOB else job, shown)

    return recognise


# --- inside the process -----------------------------------------------------------------------------------------------
# Names in place of addresses, and sockets that no other process may connect to. Bytes are polled, buffered and split as
# on a real network, without touching the file system.


class MemoryTransport:
    """A network inside this process, for tests and for jobs of one process; see ``Transport``.

    >>> from anabranch.transport import Client, Deadline, Request, Server, Verb
    >>> network = MemoryTransport()
    >>> echo = Verb("echo", lambda call: call.reply(payload=call.payload))
    >>> client = Client(transport=network)
    >>> with Server([echo], transport=network) as server, client:
    ...     request = Request(server.endpoint, "echo", payload=b"hello")
    ...     client.call(request, Deadline.after(60.0)).payload
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
        return SocketStream(sock, None, _this_process, endpoint, connect_to=address)


def _this_process(sock: socket.socket) -> Peer:
    process, _ = credentials(sock)
    if process != os.getpid():
        raise Unauthorized(f"process {process} does not belong to the network inside process {os.getpid()}")
    return Peer("this process")
