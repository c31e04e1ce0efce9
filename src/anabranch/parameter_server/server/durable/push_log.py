"""An append-only log of a shard's changes, which a restarted shard replays.

Appending orders records; committing makes them durable. Several threads that commit at once share one ``fsync``: the
first syncs for all that have appended by then, the others wait for it. The durable position is then written to the
directory's ``owner`` file, so a server that has been replaced by another one learns of it before it acknowledges
anything.

A log file is never rewritten. A checkpoint begins a new file, and removes the older ones once it is durable.
``log_format.py`` defines the bytes, ``recovery.py`` reads them.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Never

from torch import Tensor

from anabranch.checkpoint.generations import sync_directory
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError
from anabranch.parameter_server.server.durable.log_format import (
    Preamble,
    Record,
    encode_record,
    frame_of,
    log_numbers,
    log_path,
    write_all,
)
from anabranch.parameter_server.server.durable.ownership import DirectoryContents, Ownership
from anabranch.record.fault_points import fault_point

__all__ = ["PushLog"]


class PushLog:
    """The log files of one directory; writes the newest. A context manager.

    >>> import tempfile, torch
    >>> from anabranch.parameter_server.server.durable.recovery import LogReader
    >>> directory = Path(tempfile.mkdtemp())
    >>> with PushLog(directory) as log:
    ...     log.commit(log.append(Record("push", b"facts"), [torch.ones(2)]), Deadline.after(60.0))
    >>> [(record.verb, tensors) for record, tensors in LogReader(directory)]
    [('push', [tensor([1., 1.])])]

    Args:
        directory: made if it does not exist.
        owner: the right to write there; without one the log owns the directory until it is closed.
        after: the end of the existing records, as a ``LogReader`` found it.

    Raises:
        CheckpointError: another server has the directory, or the disk is full or failing. Where a record could not be
            written it is cut off again, and the next one may follow once there is room. Where the disk failed to make
            records durable, the log refuses further ones: whether the last ones are there is unknown, so the shard
            must be restarted.
    """

    def __init__(self, directory: Path, owner: Ownership | None = None, after: DirectoryContents | None = None) -> None:
        self._directory = directory
        self._owns = owner is None
        self._owner = Ownership(directory) if owner is None else owner
        self._state = threading.Condition()
        here = after or DirectoryContents()
        self._number = max(here.file, *log_numbers(directory), 0)
        self._records = self._durable = here.records
        # A new log starts from a random number, so that its files are not mistaken for another log's.
        self._chain = self._durable_chain = here.chain if here.file else secrets.randbits(32)
        self._syncing = False
        self._broken: Exception | None = None
        self._file = -1
        self._size = 0  # bytes of the newest file
        try:
            self._begin()
        except OSError as error:
            raise CheckpointError(f"the log in {directory} cannot be written: {error}") from error

    @property
    def end(self) -> DirectoryContents:
        """The offset of the next record."""
        with self._state:
            return DirectoryContents(self._number, self._records, self._chain)

    def append(self, record: Record, tensors: Sequence[Tensor] = ()) -> int:
        """Write a record after the existing ones; returns the position to ``commit``."""
        body = encode_record(record, tensors)
        with self._state:
            self._check()
            frame, checksum = frame_of(body, self._records, self._chain)
            try:
                fault_point("push_log.before_append")
                write_all(self._file, frame)
                fault_point("push_log.mid_append")
                write_all(self._file, body)
                fault_point("push_log.after_append")
            except OSError as error:
                self._take_back(error)
            self._records += 1
            self._size += len(frame) + len(body)
            self._chain = checksum
            return self._records

    def _take_back(self, error: OSError) -> Never:
        """Cut off a partly written record, so that the next one can follow; if that fails, the log is closed."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            self._broken = error
            self._check()
        raise CheckpointError(
            f"the log in {self._directory} cannot be written now, and nothing was changed: {error}; it will be retried "
            "at the next change"
        ) from error

    def commit(self, position: int, deadline: Deadline) -> None:
        """Wait until all records up to ``position`` are on disk."""
        while True:
            with self._state:
                while self._durable < position and self._syncing:
                    self._check()
                    if not self._state.wait(timeout=deadline.remaining()):
                        raise deadline.error(peer="the disk", operation="push_log.commit")
                self._check()
                if self._durable >= position:
                    return
                self._syncing = True
                file, until, chain, size = self._file, self._records, self._chain, self._size
            self._sync(file, until, chain, size)

    def _sync(self, file: int, until: int, chain: int, size: int) -> None:
        broken: Exception | None = None
        try:
            fault_point("push_log.before_sync")
            os.fdatasync(file)
            fault_point("push_log.after_sync")
            self._check_whole(file, size)
            self._owner.check()
        except (OSError, CheckpointError) as error:
            broken = error
        finally:
            with self._state:
                self._syncing = False
                self._broken = self._broken or broken
                if broken is None and until > self._durable:
                    self._durable, self._durable_chain = until, chain
                    self._note()
                self._state.notify_all()

    def _check_whole(self, file: int, size: int) -> None:
        """Raise if the file was cut or removed meanwhile: records written after the cut would not be found again."""
        there = os.fstat(file)
        if there.st_size < size or not there.st_nlink:
            what = f"has {there.st_size} of the {size} bytes written" if there.st_nlink else "was removed"
            raise CheckpointError(
                f"the newest log file in {self._directory} {what}; nothing more is acknowledged here: restore it from "
                "a copy, and start the server again"
            )

    def rotate(self) -> DirectoryContents:
        """Begin a new file, with all earlier ones on disk; returns its position."""
        with self._state:
            while self._syncing:
                if not self._state.wait(timeout=60.0):
                    raise CheckpointError(f"the disk under {self._directory} has not answered for 60 s")
            self._check()
            try:
                os.fsync(self._file)
                self._check_whole(self._file, self._size)
                self._owner.check()
                self._durable, self._durable_chain = self._records, self._chain
            except OSError as error:
                self._broken = error
                self._check()
            try:
                self._begin()
            except OSError as error:  # the old file continues
                raise CheckpointError(f"no new log file can be started in {self._directory} now: {error}") from error
            return DirectoryContents(self._number, self._records, self._chain)

    def _begin(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        number = self._number + 1
        file = os.open(log_path(self._directory, number), flags, 0o600)
        try:
            start = Preamble(number, self._records, self._chain, self._owner.epoch).encode()
            write_all(file, start)
            os.fsync(file)
            sync_directory(self._directory)
        except BaseException:
            os.close(file)
            with suppress(OSError):
                log_path(self._directory, number).unlink()
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._number, self._size = file, number, len(start)
        self._note(durable=True)

    def _note(self, *, durable: bool = False) -> None:
        self._owner.note(durable=durable, file=self._number, records=self._durable, chain=self._durable_chain)

    def forget_before(self, number: int) -> None:
        """Remove the files before ``number``, whose records a durable checkpoint holds."""
        for old in log_numbers(self._directory):
            if old < number:
                with suppress(IsADirectoryError):  # a folder with such a name is not the log's to remove
                    log_path(self._directory, old).unlink()
        sync_directory(self._directory)

    def close(self) -> None:
        """Make everything durable and close the file."""
        with self._state:
            if self._file >= 0:
                try:
                    if self._broken is None:
                        os.fsync(self._file)
                        self._durable, self._durable_chain = self._records, self._chain
                        self._note()
                finally:
                    os.close(self._file)
                    self._file = -1
                    if self._owns:
                        self._owner.close()

    def _check(self) -> None:
        if isinstance(self._broken, CheckpointError):
            raise CheckpointError(str(self._broken)) from self._broken
        if self._broken is not None:
            raise CheckpointError(
                f"the log in {self._directory} could not be made durable: {self._broken}; it is unknown whether the "
                "last changes are on disk: restart this server, which reads what is there"
            ) from self._broken
        if self._file < 0:
            raise CheckpointError(f"the log in {self._directory} is closed")

    def __enter__(self) -> PushLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
