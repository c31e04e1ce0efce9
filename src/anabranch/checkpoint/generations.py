"""The files of a checkpoint directory: how they are named, claimed, made durable and removed.

::

    model-00000012.safetensors         a group of generation 12
    optimizer-00000012.safetensors
    manifest-00000012.json             makes generation 12 whole: there only once all of its files are durable
    model-00000011.safetensors ...     the generation before
    .model-00000013.safetensors.new    being written, or left over from a save that was killed
    .lock                              claimed by the process that is saving

A generation is a serial number, not a step: saving the same step twice makes two generations, and no file is ever
written over. Files of other names are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from anabranch.errors import CheckpointError
from anabranch.record.spans import fault_point

SET_ASIDE = "set-aside"
"""The folder of files that are not to be used any more."""
_MANIFEST = re.compile(r"manifest-(\d{8,18})\.json")
_OURS = re.compile(r"\.?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*-(\d{8,18})\.safetensors|manifest-(\d{8,18})\.json)(?:\.new)?")


def check_path(path: object, name: str = "path") -> Path:
    """``path`` as a ``Path``.

    Raises:
        TypeError: it is none; names the argument and its value.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} is a string or a pathlib.Path, got {path!r}")
    return Path(path)


def data_path(directory: Path, group: str, generation: int) -> Path:
    """Path of ``group`` of ``generation``."""
    return directory / f"{group}-{generation:08d}.safetensors"


def manifest_path(directory: Path, generation: int) -> Path:
    """Path of the manifest of ``generation``."""
    return directory / f"manifest-{generation:08d}.json"


def generations_in(names: Iterable[str]) -> dict[str, int]:
    """Return the generation of each file that is one of a checkpoint, remains of failed saves included, in the order
    in which they are removed: manifests first, so that none is ever half a checkpoint.
    """
    matches = [match for name in names if (match := _OURS.fullmatch(name))]
    return {match[0]: int(match[1] or match[2]) for match in sorted(matches, key=lambda match: match[2] is None)}


def complete_in(names: Iterable[str]) -> list[int]:
    """Return the generations that have a manifest, newest first."""
    return sorted((int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name))), reverse=True)


def temporary(path: Path) -> Path:
    """Return the name that ``path`` has until it is whole."""
    return path.with_name(f".{path.name}.new")


def complete_generations(directory: Path) -> list[int]:
    """Return the generations that have a manifest, newest first; none if there is no such directory."""
    return complete_in(names_in(directory))


def remove_generations(directory: Path, generations: Iterable[int]) -> None:
    """Remove every file of ``generations``."""
    doomed = set(generations)
    for name, generation in generations_in(names_in(directory)).items():
        if generation in doomed:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder is not ours to remove
                (directory / name).unlink()
            fault_point("checkpoint.removed")


def set_aside(path: Path) -> Path:
    """Move ``path`` into the folder ``SET_ASIDE`` next to it, with an unused name.

    Raises:
        CheckpointError: the folder cannot be made; nothing was moved.
    """
    aside = path.parent / SET_ASIDE
    try:
        aside.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be set aside: the folder {aside} cannot be created ({error.strerror}); remove "
            "whatever has its name, and let this user write to the directory (chmod u+rwx)"
        ) from error
    target, number = aside / path.name, 1
    while os.path.lexists(target):
        target, number = aside / f"{path.name}.{number}", number + 1
    os.rename(path, target)
    return target


def set_generation_aside(directory: Path, generation: int) -> None:
    """Move every file of ``generation`` into the folder ``SET_ASIDE``, the manifest last, by which it is known."""
    for name, owner in reversed(generations_in(names_in(directory)).items()):
        if owner == generation:
            set_aside(directory / name)
    sync_directory(directory)


def make_directory(directory: Path) -> None:
    """Create ``directory`` and its missing parents, durably."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)
    fault_point("checkpoint.directory_made")


def publish(path: Path) -> None:
    """Give a file that is whole and durable its final name; the name is durable after ``sync_directory``."""
    os.rename(temporary(path), path)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Keep every other writer out of ``directory`` until the block ends; the kernel lets go if the process dies.

    Raises:
        CheckpointError: another process, or another thread, is saving there.
    """
    # The file stays: a lock that is removed can be held twice. A file, not the directory itself, since network file
    # systems lock only what is open for writing.
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock = FileLock(descriptor)
    except BlockingIOError:
        raise CheckpointError(
            f"another process or thread is saving to {directory}; give each job its own directory, and save "
            "from one process of a job"
        ) from None
    with lock:
        yield


def names_in(directory: Path) -> list[str]:
    """Return the names in ``directory``; none if there is no such directory."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


# --- locks ------------------------------------------------------------------------------------------------------------


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


# --- reading ----------------------------------------------------------------------------------------------------------
# ``open`` waits on a FIFO for a writer that never comes, with every signal held up until then. And what keeps a file
# from being opened is of two kinds. Nothing is there that can be read: the file is *lost*, or *damaged*. Or the file
# may be whole, and this process has no right to it, no descriptor or no memory left: it is ``Unreadable``, which no
# reader may take for damage, since what is skipped or set aside for it would be given up for nothing.


# With these no user can open a file there; other errors do not concern the file.
_LOST = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EIO, errno.ENAMETOOLONG})


class Replaced(CheckpointError):
    """The generation was removed while it was read, after newer ones had been saved; or a shard was restarted."""


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
