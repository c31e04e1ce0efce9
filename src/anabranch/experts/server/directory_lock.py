"""``DirectoryLock``: one server for each expert's checkpoint directory.

Two servers of one directory would silently overwrite each other's updates. The file ``lock`` names the holder, and is
locked.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from anabranch.checkpoint.file_lock import FileLock
from anabranch.errors import CheckpointError

__all__ = ["DirectoryLock"]

_log = logging.getLogger("anabranch.experts")
_FILE = "lock"
# From file systems without locks. Any other error is the directory's own.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


class DirectoryLock:
    """Makes this the only server that saves an expert in ``directory``, until it is closed.

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
        self._lock: FileLock | None = None
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            file = os.open(directory / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno in _READ_ONLY and directory.is_dir():
                # Frozen experts may be served from such a directory, by any number of servers.
                return
            raise CheckpointError(
                f"the checkpoint directory of {uid} cannot be used: {error}; give one that user {os.geteuid()} may "
                "write to"
            ) from error
        try:
            self._lock = FileLock(file)
        except BlockingIOError:
            raise CheckpointError(
                f"{directory}: another server saves {uid} here ({_holder(directory)}); two servers on one directory "
                "would overwrite each other's state: stop that one, or give each its own checkpoint_dir "
                "(--checkpoint-dir)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise CheckpointError(f"{directory} cannot be locked: {error}; give another directory") from error
            _log.warning(
                "%s is on a file system without locks (%s): make sure that no other server saves %s there",
                directory, error, uid,
            )  # fmt: skip
            return
        with suppress(OSError):  # only for messages
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Release the directory to another server."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> DirectoryLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holder(directory: Path) -> str:
    try:
        return (directory / _FILE).read_text(errors="replace").strip() or "its process is unknown"
    except OSError:
        return "its process is unknown"
