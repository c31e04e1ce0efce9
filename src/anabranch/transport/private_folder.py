"""Folders of mode 0700 for sockets, scratch files and keys, removed however their process ends.

A killed process removes nothing. So a folder is live while a process holds its lock, which ends with the process, and
the next process to make a folder removes the dead ones beside it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "anabranch-live-"
# The room for a path in sockaddr_un, less the closing zero and the longest name of a socket in a folder.
_LONGEST = 107 - 27
_ATTEMPTS = 4


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
        # Another process may consider a folder dead before it is locked; without file locks none does.
        for _ in range(_ATTEMPTS):
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _lock(self.path, fcntl.LOCK_SH)
            if self._lock is not None:
                return
            shutil.rmtree(self.path, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))

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
