"""``FileLock``: an exclusive lock on an open file or directory, for as long as its process lives."""

from __future__ import annotations

import fcntl
import os
import weakref


class FileLock:
    """Holds ``descriptor`` against every other open file of the same name, until it is closed.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> lock = FileLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    >>> try:
    ...     FileLock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    ... except BlockingIOError:
    ...     print("another one holds it")
    another one holds it
    >>> lock.close()

    The kernel lets go when the process dies, however it does, so the lock of a dead process never blocks its successor.
    A forked child does not hold it.

    Args:
        descriptor: belongs to the lock from now on, and is closed at once if it cannot be locked.

    Raises:
        BlockingIOError: another open file holds the lock.
        OSError: the file system has no locks, or none for files that are open only for reading.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        _held.add(self)

    def close(self) -> None:
        """Lets go."""
        _held.discard(self)
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            # Closing alone would leave it to a process that was forked meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Let go in a forked child, which shares its parent's open files, and would hold their locks when the parent
    dies.
    """
    for lock in list(_held):
        os.close(lock.descriptor)
        lock.descriptor = -1
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
