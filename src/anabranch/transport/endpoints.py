"""Addresses of servers, ``unix:PATH`` or ``tcp://HOST:PORT``; a path is claimed under a lock so that none is stolen."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from anabranch.transport.private_folder import PrivateFolder

# The room for a path in sockaddr_un, less the closing zero.
_LONGEST_PATH = 107


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """A socket in the file system of this host."""

    path: Path


@dataclass(frozen=True, slots=True)
class TcpEndpoint:
    """A host and a port."""

    host: str
    port: int


def parse_endpoint(text: str) -> UnixEndpoint | TcpEndpoint:
    """Return the endpoint that ``text`` names.

    >>> parse_endpoint("tcp://127.0.0.1:7000")
    TcpEndpoint(host='127.0.0.1', port=7000)
    >>> parse_endpoint("unix:/run/job/experts").path.name
    'experts'

    Raises:
        ValueError: it is neither; the message shows the two forms.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        path = Path(text.removeprefix("unix:")).absolute()
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise ValueError(f"{text}: the path is longer than the {_LONGEST_PATH} bytes of a Unix socket; shorten it")
        return UnixEndpoint(path)
    if text.startswith("tcp://"):
        host, colon, port = text.removeprefix("tcp://").rpartition(":")
        if colon and host and port.isascii() and port.isdecimal() and int(port) < 65536:
            return TcpEndpoint(host.removeprefix("[").removesuffix("]"), int(port))
    raise ValueError(f"{text!r} is not an endpoint; use unix:PATH or tcp://HOST:PORT")


def split_endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints that ``text`` names, separated by commas.

    >>> split_endpoints("unix:/run/first,tcp://second:7000")
    ('unix:/run/first', 'tcp://second:7000')

    Raises:
        ValueError: one is empty, or named twice.
    """
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or len(set(found)) != len(found):
        raise ValueError(f"{text!r} names no endpoint, or one twice; give one, or several separated by commas")
    return found


class ClaimedPath:
    """The right to serve a Unix socket's path, held by a lock that dies with the process.

    A socket file survives its server's death, so its presence proves nothing; the lock beside it does. Only the holder
    of the lock may remove a dead server's socket, so a live server cannot lose its own.

    Args:
        path: the socket's path, or ``None`` for one in a new directory.

    Raises:
        ValueError: the directory is open to others or another user's, or a live server holds the path.
    """

    def __init__(self, path: Path | None) -> None:
        self._made: PrivateFolder | None = None
        if path is None:
            self._made = PrivateFolder()
            path = self._made.path / "socket"
        self.path = path
        try:
            self.owner = _check_directory(self.path.parent)
            self._lock_path = self.path.with_name(self.path.name + ".lock")
            self._lock = self._take_lock()
            self.path.unlink(missing_ok=True)
        except BaseException:
            self._remove_directory()
            raise

    def _take_lock(self) -> int:
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise ValueError(f"unix:{self.path} is served by a live process; choose another path") from None
            # The last holder may have removed the file between our open and our lock: then the lock protects nothing.
            try:
                if os.path.samestat(os.fstat(lock), os.stat(self._lock_path)):
                    return lock
            except FileNotFoundError:
                pass
            os.close(lock)

    def release(self) -> None:
        """Remove the socket, the lock, and the directory if it is ours."""
        self.path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._made is not None:
            self._made.remove()


def _check_directory(directory: Path) -> int:
    try:
        facts = directory.stat()
    except FileNotFoundError:
        raise ValueError(f"{directory} does not exist; create it with mode 0700") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise ValueError(f"{directory} is not a directory")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        mode = stat.S_IMODE(facts.st_mode)
        raise ValueError(f"{directory} has mode {mode:04o}, open to other users; a socket's directory must be 0700")
    if facts.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{directory} belongs to user {facts.st_uid}, not to the current user ({os.geteuid()})")
    return facts.st_uid
