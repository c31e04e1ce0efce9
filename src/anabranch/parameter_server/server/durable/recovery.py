"""``LogReader``: the records of a directory's log, and a diagnosis if some are missing.

::

    checkpoint ──> log file n ──> n + 1 ──> ... ──> the newest ──> where the owner said that all was durable
                   each begins where the one before ends           no earlier than that

Three ends are distinguished. The log is whole. Or its last write was cut short by a crash: nothing valid follows it and
no acknowledged record is missing, so it is cut off, and reported. Or the log is *damaged*: valid records follow the
place, a file is missing, empty or not a regular file, or the log ends before its last durable position. Then
acknowledged changes are lost, and the shard refuses to start without them; ``repair`` keeps the records before the
damage. A file that this user may not read is a separate case, refused with and without ``repair``.

The owner's position has the checksum of its last record, and the log must have the same one there: otherwise an owner
file of another directory, or a new one beside an old log, would hide that the log was shortened.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from anabranch.checkpoint.generations import set_aside, sync_directory
from anabranch.checkpoint.regular_file import Unreadable, open_regular
from anabranch.errors import CheckpointError
from anabranch.parameter_server.server.durable.log_format import (
    Frames,
    Preamble,
    Record,
    log_numbers,
    log_path,
    write_all,
)
from anabranch.parameter_server.server.durable.ownership import DirectoryContents
from anabranch.record.spans import mark

__all__ = ["LogReader"]

_log = logging.getLogger("anabranch.parameter_server")
_Found = tuple[Record, list[Tensor]]


class LogReader:
    """The records of a directory's log, in order; an iterator to be used once.

    Args:
        directory: of the shard.
        start: the position where the loaded checkpoint ends, and the file that continues from there; without a
            checkpoint the log begins with its first record.
        known: the contents that the directory's owner recorded, if any.
        repair: let damage end the log instead of raising.

    Attributes:
        end: the position after the last record that was read.
        known: as given, unless it belongs to another log.
        lost: the damage found, or ``None``.

    Raises:
        CheckpointError: the log is damaged; gives the place, the loss, and the choices. Or it may not be read.
    """

    def __init__(
        self,
        directory: Path,
        start: DirectoryContents | None = None,
        known: DirectoryContents | None = None,
        *,
        repair: bool = False,
    ) -> None:
        self._directory = directory
        self.known = known or DirectoryContents()
        self._has_owner = known is not None
        self._repair = repair
        self._begins = start is not None and start.file > 0
        self.end = start or DirectoryContents()
        self.lost: str | None = None
        self._numbers = [number for number in log_numbers(directory) if number >= self.end.file]

    def __iter__(self) -> Iterator[_Found]:
        self._compare(self.end.records, self.end.chain, numbered=self.end.chain > 0, start=True)
        first = self.end.file or (self._numbers[0] if self._numbers else self.known.file)
        count, chain = self.end.records, self.end.chain
        newest = max([*self._numbers, self.known.file if self.known.file >= first else 0, first])
        for number in range(first, newest + 1) if newest else ():
            frames = self._open(number, count, chain, last=number == newest)
            if frames is None:
                break
            for found in frames.records(self._until(number)):
                self._compare(frames.count, frames.chain, numbered=True)
                yield found
            self._compare(frames.count, frames.chain)
            count, chain = frames.count, frames.chain
            self.end = DirectoryContents(number, count, chain)
            if frames.fault is not None and not self._may_end(frames, last=number == newest):
                return
        if self.lost is None and count < self.known.records:
            self._damaged(f"the log ends after record {count}", count)

    def _compare(self, count: int, chain: int, *, numbered: bool = False, start: bool = False) -> None:
        """Raise if the owner's position cannot be on this log, which has ``chain`` after ``count`` records.

        ``numbered``: this log has records, here or earlier, that its owner knew of. ``start``: nothing before it is
        read, so the owner's position may not be there.
        """
        if not self._has_owner:
            return
        here = self.known.file > 0 and not start and count == self.known.records and chain != self.known.chain
        before = self.known.file > 0 and start and count > self.known.records
        if here or before or (numbered and not self.known.file):
            self._has_owner = False
            self.known = DirectoryContents()
            self.lost = (
                f"{self._directory / 'owner'} belongs to another log than the one beside it, so it is unknown "
                "whether that log is complete"
            )
            if not self._repair:
                raise CheckpointError(
                    f"the push log is damaged: {self.lost}. Restore the file from a copy, or start with --repair, "
                    "which uses the log as it is"
                )

    def _open(self, number: int, count: int, chain: int, *, last: bool) -> Frames | None:
        """Return the frames of one file; ``None`` if the log ends before it."""
        path = log_path(self._directory, number)
        if number not in self._numbers:
            self._damaged(f"{path} is missing", count)
            return None
        try:
            preamble = Preamble.read(path)
        except Unreadable:
            raise
        except CheckpointError as error:  # a link to nowhere, or no regular file
            self._damaged(f"{path} {str(error).removeprefix(f'{path.name} ')}", count)
            return None
        except ValueError as error:
            if last and number > self.known.file and count >= self.known.records:
                self._cut(path, 0, str(error))
            else:
                self._damaged(f"{path}: {error}", count)
            return None
        if not self._begins and number == self._numbers[0] and preamble.first:
            self._damaged(f"{path} begins with record {preamble.first}, and no checkpoint holds the earlier ones", 0)
            return None
        if not self._begins and number == self._numbers[0]:
            chain = preamble.chain  # the log's name
        if (preamble.file, preamble.first, preamble.chain) != (number, count, chain):
            self._damaged(
                f"{path} continues from record {preamble.first}, not from {count}, or belongs to another log",
                count,
            )
            return None
        return Frames(path, count, chain)

    def _until(self, number: int) -> int | None:
        """Return the record at which the next file continues; a replaced server's records after it were not
        acknowledged.
        """
        if number + 1 not in self._numbers:
            return None
        try:
            after = Preamble.read(log_path(self._directory, number + 1))
        except Unreadable:
            raise
        except (ValueError, CheckpointError):
            return None
        return after.first

    def _may_end(self, frames: Frames, *, last: bool) -> bool:
        """Cut off a torn tail; true if the fault is one, and the log continues."""
        where, behind = f"{frames.path} at byte {frames.at}: {frames.fault}", frames.behind()
        if not behind and frames.count >= self.known.records and last:
            self._cut(frames.path, frames.at, str(frames.fault))
            return True
        follows = f", and {behind} complete records follow it" if behind else ""
        self._damaged(where + follows, frames.count)
        return False

    def _cut(self, path: Path, at: int, why: str) -> None:
        """Remove the end of a write that a crash has cut short; it was never acknowledged."""
        size = path.stat().st_size
        cut = size - at
        _log.warning("%s: the last write was cut short (%s); %d bytes after byte %d are dropped", path, why, cut, at)
        mark("parameter_server.log_cut", path=str(path), at=at, bytes=cut)
        if at:
            os.truncate(path, at)
            with open_regular(path) as file:
                os.fsync(file.fileno())
        else:
            path.unlink()
        sync_directory(self._directory)

    def _damaged(self, what: str, kept: int) -> None:
        missing = self.known.records - kept
        gone = f"{missing} acknowledged changes" if missing > 0 else "an unknown number of changes"
        self.lost = f"{what}. {gone[0].upper()}{gone[1:]} after record {kept} cannot be read"
        if not self._repair:
            raise CheckpointError(
                f"the push log is damaged: {self.lost}. Restore the file from a copy, or start with --repair, which "
                f"keeps the {kept} records before the damage and sets the rest aside"
            )

    def repair(self) -> None:
        """Make the log end at the last record read; later files and parts are set aside, not destroyed."""
        aside: Path | None = None
        for number in log_numbers(self._directory):
            path = log_path(self._directory, number)
            if number < self.end.file:
                continue
            prefix = self._prefix(path) if number == self.end.file else b""
            if path.is_file() and len(prefix) == path.stat().st_size:
                continue
            aside = set_aside(path)
            if prefix:
                with path.open("xb", buffering=0) as file:
                    write_all(file.fileno(), prefix)
                    os.fsync(file.fileno())
        sync_directory(self._directory)
        _log.warning("%s%s", self.lost, f"; unusable files were moved to {aside.parent}" if aside else "")
        mark("parameter_server.log_repaired", path=str(self._directory), records=self.end.records)

    def _prefix(self, path: Path) -> bytes:
        """Return the part of the last file that was read to its end; empty if none was."""
        try:
            preamble = Preamble.read(path)
        except Unreadable:
            raise
        except (ValueError, CheckpointError):
            return b""
        frames = Frames(path, preamble.first, preamble.chain)
        for _ in frames.records(self.end.records):
            pass
        with open_regular(path) as file:
            return file.read(frames.at)
