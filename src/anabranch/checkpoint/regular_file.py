"""``open_regular``: a file of a checkpoint or a log, opened for reading; anything else is named, and never waited for.

``open`` waits on a FIFO for a writer that never comes, with every signal held up until then. And what keeps a file from
being opened is of two kinds. Nothing is there that can be read: the file is *lost*, or *damaged*. Or the file may be
whole, and this process has no right to it, no descriptor or no memory left: it is ``Unreadable``, which no reader may
take for damage, since what is skipped or set aside for it would be given up for nothing.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from anabranch.errors import CheckpointError

# With these no user can open a file there; other errors do not concern the file.
_LOST = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EIO, errno.ENAMETOOLONG})


class Replaced(CheckpointError):
    """The generation was removed while it was read, after newer ones had been saved."""


class Unreadable(CheckpointError):
    """A file that exists but cannot be opened by this process, so that its content is unknown."""


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open the regular file at ``path`` for reading, like ``open``, without ever blocking.

    Raises:
        Unreadable: it may not be read by this user, or not now.
        CheckpointError: it does not exist, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _LOST:
            raise unreadable(path, error) from error
        raise CheckpointError(f"{path.name} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path.name} is not a regular file")
    return os.fdopen(descriptor, "rb", buffering)


def unreadable(path: Path, error: OSError) -> Unreadable:
    """Return the error to raise for an unreadable file or directory that may be whole; includes the remedy."""
    cure = "try again once the system can open it"
    if isinstance(error, PermissionError):
        cure = f"let user {os.geteuid()} read it, with chown or chmod"
    return Unreadable(f"{path} cannot be read: {error.strerror}. It is not treated as damaged or lost: {cure}")
