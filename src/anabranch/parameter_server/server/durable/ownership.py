"""``Ownership``: one server for each directory, and a record of the least that its files must hold.

::

    the directory itself    locked with flock: the kernel lets go when the process dies, however it does
    owner                   epoch | log file, records, chain | checkpoint | changes | pid: two slots, in turn

The *epoch* counts the servers that have owned the directory. A server increments it before it reads anything; a server
that was frozen so long that it lost its lock (network file systems do that) finds a higher one before it acknowledges
anything, and stops writing. The *position* is the durable end of the log when it was written, after each sync of the
log and without its own sync: it is never ahead of the log, and after the death of a process it is exact. So a log that
was cut, emptied or removed later is detected.

The file is durable before there is a log or a checkpoint beside it. If it is damaged, emptied or removed, the log
cannot be known to be whole.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

from anabranch.checkpoint.file_lock import FileLock
from anabranch.checkpoint.generations import complete_generations, set_aside, sync_directory
from anabranch.checkpoint.regular_file import Unreadable, open_regular
from anabranch.errors import CheckpointError
from anabranch.parameter_server.server.durable.log_format import log_numbers

__all__ = ["DirectoryContents", "Ownership", "holds_changes"]

_SLOT = struct.Struct("<8sQQQQIQQQI")
_MAGIC = b"ABOWNER\n"
_APART = 512  # bytes; a sector each, which a disk writes whole


@dataclass(frozen=True, slots=True)
class DirectoryContents:
    """The known contents of a directory.

    Attributes:
        file: the number of the newest log file; 0 without one.
        records: the number of durable records of the log, counted over all its files.
        chain: the checksum of the last one.
        saved: the number of changes in the newest durable checkpoint; -1 if there is none.
        changes: the number of changes that the shard had acknowledged, logged or not.
    """

    file: int = 0
    records: int = 0
    chain: int = 0
    saved: int = -1
    changes: int = 0


@dataclass(frozen=True, slots=True)
class _Slot:
    turn: int
    epoch: int
    pid: int
    position: DirectoryContents

    def encode(self) -> bytes:
        here = self.position
        log = (here.file, here.records, here.chain)
        start = _SLOT.pack(_MAGIC, self.epoch, self.turn, *log, here.saved + 1, here.changes, self.pid, 0)[:-4]
        return start + zlib.crc32(start).to_bytes(4, "little")


class Ownership:
    """Makes this the only server that may write into a directory, while it lives.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> first = Ownership(directory)
    >>> try:
    ...     Ownership(directory)
    ... except CheckpointError as error:
    ...     print(str(error).partition(": ")[2].partition(" (")[0])
    another server holds it
    >>> first.close()
    >>> with Ownership(directory) as second:
    ...     second.epoch
    2

    Args:
        directory: made if it does not exist.

    Attributes:
        epoch: the number of servers that have owned it, this one included.
        found: the contents recorded by the server before; ``None`` if none has recorded any.
        lost: the damage to what the server before had recorded, under ``repair``; else ``None``.

    Raises:
        CheckpointError: another server has the directory, or its ``owner`` file is damaged, or there is none beside a
            log or a checkpoint that had one, or one of these may not be read.
    """

    def __init__(self, directory: Path, *, repair: bool = False) -> None:
        self._path = directory / "owner"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._held = self._claim(directory)
        except OSError as error:
            raise _unusable(directory, error, "give a directory that can be created") from error
        self._file = -1
        self._lock = threading.Lock()
        self.lost: str | None = None
        try:
            self._check_file(directory, repair=repair)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            before = self._read(repair=repair)
            self.found = None if before is None else before.position
            self.epoch = 1 if before is None else before.epoch + 1
            self._slot = _Slot(
                0 if before is None else before.turn, self.epoch, os.getpid(), self.found or DirectoryContents()
            )
            self.note(durable=True)
        except OSError as error:
            self.close()
            raise _unusable(directory, error, "give one that is writable") from error
        except BaseException:
            self.close()
            raise

    @property
    def position(self) -> DirectoryContents:
        """The known contents of the directory."""
        return self._slot.position

    def note(self, *, durable: bool = False, **known: int) -> None:
        """Record contents of the directory, by the names of ``DirectoryContents``; safe from several threads.

        ``durable``: returns once the record is on disk.
        """
        with self._lock:
            position = replace(self._slot.position, **known)
            self._slot = _Slot(self._slot.turn + 1, self.epoch, os.getpid(), position)
            os.pwrite(self._file, self._slot.encode(), self._slot.turn % 2 * _APART)
        if durable:
            os.fsync(self._file)
            sync_directory(self._path.parent)

    def check(self) -> None:
        """Raise if another server has taken the directory over, or it has been moved.

        Raises:
            CheckpointError: changes written by this server would not be found at its next start.
        """
        if not self._is_in_place():
            raise CheckpointError(
                f"{self._path.parent} was moved, removed or replaced while this server wrote to it; nothing more is "
                "acknowledged here: restore it, and restart the server"
            )
        newest = max((slot.epoch for slot in self._slots()), default=self.epoch)
        if newest > self.epoch:
            raise CheckpointError(
                f"{self._path.parent}: another server has taken over this directory (its epoch is {newest}, this "
                f"one's {self.epoch}); nothing more is written or acknowledged here"
            )

    def _is_in_place(self) -> bool:
        ours = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except OSError:
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def close(self) -> None:
        """Release the directory to another server."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        self._held.close()

    def _claim(self, directory: Path) -> FileLock:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                return FileLock(descriptor)
            except BlockingIOError:
                raise
            except OSError:
                # Network file systems that lock only files open for writing.
                return FileLock(os.open(directory / ".owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except BlockingIOError:
            raise CheckpointError(
                f"{directory}: another server holds it (process {self._holder()}); two servers on one directory would "
                "lose each other's acknowledged changes: give each its own --checkpoint-dir or --shard, or stop that "
                "one"
            ) from None

    def _holder(self) -> str:
        try:
            with open(self._path, "rb", opener=_without_waiting) as file:
                slots = _slots_in(file.read(2 * _APART))
        except OSError:
            return "unknown"
        return str(max(slots, key=_newest).pid) if slots else "unknown"

    def _check_file(self, directory: Path, *, repair: bool) -> None:
        """Raise for a file that cannot be this directory's ``owner`` file; under ``repair`` make room for a new one."""
        if not os.path.lexists(self._path):
            if _has_state(directory):
                self._give_up("is missing", repair=repair)
            return
        try:
            open_regular(self._path).close()
        except Unreadable:
            raise
        except CheckpointError as error:
            self._give_up(str(error).removeprefix(f"{self._path.name} "), repair=repair)
            set_aside(self._path)

    def _read(self, *, repair: bool) -> _Slot | None:
        slots = self._slots()
        if slots:
            return max(slots, key=_newest)
        # A killed start, or a power cut soon after one, leaves an empty file, or zeros, and nothing beside it.
        if any(os.pread(self._file, 2 * _APART, 0)):
            self._give_up("is damaged", repair=repair)
        elif self.lost is None and _has_state(self._path.parent):
            self._give_up("is empty", repair=repair)
        return None

    def _give_up(self, what: str, *, repair: bool) -> None:
        self.lost = f"{self._path} {what}, so it is unknown whether the log beside it is complete"
        if not repair:
            raise CheckpointError(
                f"the push log is damaged: {self.lost}. Restore the file from a copy, or start with --repair, which "
                "uses the log as it is"
            )

    def _slots(self) -> list[_Slot]:
        return _slots_in(os.pread(self._file, 2 * _APART, 0))

    def __enter__(self) -> Ownership:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def holds_changes(directory: Path) -> bool:
    """Return False if a shard's directory is known to hold no change; another server may hold the directory."""
    try:
        if not _has_state(directory):
            return False
        with open_regular(directory / "owner") as file:
            slots = _slots_in(file.read(2 * _APART))
    except (OSError, CheckpointError):
        return True
    newest = max(slots, key=_newest, default=None)
    if newest is None:
        return True
    position = newest.position
    return max(position.records, position.changes, position.saved) > 0


def _has_state(directory: Path) -> bool:
    return bool(log_numbers(directory) or complete_generations(directory))


def _slots_in(memory: bytes) -> list[_Slot]:
    """Return the readable slots of an ``owner`` file."""
    found = []
    for at in (0, _APART):
        if at + _SLOT.size > len(memory):
            continue
        magic, epoch, turn, file, records, chain, saved, changes, pid, checksum = _SLOT.unpack_from(memory, at)
        if magic == _MAGIC and zlib.crc32(memory[at : at + _SLOT.size - 4]) == checksum:
            found.append(_Slot(turn, epoch, pid, DirectoryContents(file, records, chain, saved - 1, changes)))
    return found


def _unusable(directory: Path, error: OSError, cure: str) -> CheckpointError:
    if isinstance(error, PermissionError):
        cure = f"let user {os.geteuid()} read and write it, with chown or chmod"
    return CheckpointError(f"{directory} cannot be used: {error}; {cure}")


def _newest(slot: _Slot) -> tuple[int, int]:
    return slot.epoch, slot.turn


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking, even if it is a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK)
