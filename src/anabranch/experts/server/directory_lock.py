"""``DirectoryLock``: one server for each expert's checkpoint directory.

Two servers of one directory would each save over what the other had learned, in silence. The file ``lock`` names the
holder and is locked with flock: the kernel lets go when the process dies, however it does, so the lock of a dead server
never blocks its successor.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

from anabranch.errors import CheckpointError

__all__ = ["DirectoryLock"]

_log = logging.getLogger("anabranch.experts")
_FILE = "lock"
# Of file systems without locks. Any other error is the directory's own.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class DirectoryLock:
    """Makes this the one server that saves an expert in ``directory``, until it is closed.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp()) / "ffn.0"
    >>> with DirectoryLock(directory, "ffn.0"):
    ...     try:
    ...         DirectoryLock(directory, "ffn.0")
    ...     except CheckpointError as error:
    ...         print(str(error).partition(": ")[2].partition(" (")[0])
    another server saves ffn.0 here
    >>> DirectoryLock(directory, "ffn.0").close()

    Args:
        directory: the expert's; made if it does not exist. One that may only be read has no lock: nobody saves there.
        uid: the expert, for messages.

    Raises:
        CheckpointError: another server has the directory, or it cannot be made.
    """

    def __init__(self, directory: Path, uid: str) -> None:
        self._file = -1
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno in _READ_ONLY and directory.is_dir():
                # Experts that learn nothing are served from such a place, by as many servers as one likes.
                return
            raise CheckpointError(
                f"the checkpoint directory of {uid} cannot be used: {error}; give one that user {os.geteuid()} may "
                "write to"
            ) from error
        _open.add(self)
        try:
            self._claim(directory, uid)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the directory up to another server."""
        _open.discard(self)
        file, self._file = self._file, -1
        if file >= 0:
            # Closing alone would leave it to a process that was forked meanwhile.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def _claim(self, directory: Path, uid: str) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{directory}: another server saves {uid} here ({_holder(self._file)}); two servers of one directory "
                "would overwrite each other's states: stop that one, or give each its own checkpoint_dir "
                "(--checkpoint-dir)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise CheckpointError(f"{directory} cannot be locked: {error}; give another directory") from error
            _log.warning(
                "%s lies on a file system without locks (%s): make sure yourself that no second server saves %s there",
                directory, error, uid,
            )  # fmt: skip
            return
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holder(file: int) -> str:
    return os.pread(file, 200, 0).decode(errors="replace").strip() or "its process is unknown"


_open: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child holds the lock as well, and would keep the directory when its parent dies."""
    for lock in list(_open):
        if lock._file >= 0:
            os.close(lock._file)
        lock._file = -1
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)
