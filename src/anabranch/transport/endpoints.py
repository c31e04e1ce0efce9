"""Addresses of servers, ``unix:PATH`` or ``tcp://HOST:PORT``; a path is claimed under a lock so that none is stolen."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

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
        with ExitStack() as stack:
            self.path = stack.enter_context(PrivateFolder()) / "socket" if path is None else path
            self.owner = _check_directory(self.path.parent)
            self._lock_path = self.path.with_name(self.path.name + ".lock")
            stack.callback(os.close, self._take_lock())
            stack.callback(self._lock_path.unlink, missing_ok=True)
            self.path.unlink(missing_ok=True)
            stack.callback(self.path.unlink, missing_ok=True)
            self._stack = stack.pop_all()

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

    def __enter__(self) -> ClaimedPath:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


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


# --- folders ----------------------------------------------------------------------------------------------------------
# Of mode 0700 for sockets, scratch files and keys, removed however their process ends. A killed process removes
# nothing. So a folder is live while a process holds its lock, which ends with the process, and the next process to make
# a folder removes the dead ones beside it.


_PREFIX = "anabranch-live-"
# The room for a path in sockaddr_un, less the closing zero and the longest name of a socket in a folder.
_LONGEST = 107 - 27


class PrivateFolder:
    """A new folder that only this user may enter; removed at the end of its ``with`` block, or by ``remove``.

    >>> with PrivateFolder() as path:
    ...     oct(path.stat().st_mode & 0o777)
    '0o700'
    >>> path.exists()
    False

    Its path is short enough for a socket's: it is in /tmp if TMPDIR is too deep.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) + len(_PREFIX) + 9 > _LONGEST:
            parent = Path("/tmp")  # noqa: S108 - exists on every system
        _remove_dead(parent)
        # Named only once it is locked: another process would consider it dead.
        new = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}", dir=parent))
        self._lock = _lock(new, fcntl.LOCK_SH)
        self.path = new.rename(parent / new.name.removeprefix("new-"))

    def remove(self) -> None:
        """Remove the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def _lock(folder: Path, kind: int) -> int | None:
    """Return a descriptor that holds the lock, if the folder is this user's and no process holds it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                # Removed since it was opened: then the lock protects nothing.
                os.stat(folder)
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
    return None


def _remove_dead(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = _lock(folder, fcntl.LOCK_EX)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
