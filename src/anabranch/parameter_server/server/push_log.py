"""``PushLog``: a shard's changes on disk, in order, which a restarted shard does again.

::

    log.db          SQLite: one row a record, committed once its body is on disk and before it is acknowledged
    log-bodies-7    the records themselves, appended and synced:
    | ABBODY1 | log | file | first record | crc32 |               which log and file it is, where it goes on
    | mark | record number | length | crc32 | size | head | tensors |    one record after the other

Records are numbered over all files. A file says with which record it begins, so one that is missing, cut or from
another log is detected by the next one, and by the rows of ``log.db``.

Appending orders records; committing makes them durable. Several threads that commit at once share one sync: the first
syncs for all that are applied by then, the others wait for it.

Bodies and rows are each other's witness. A body that is missing or damaged and has a row is *damage*: the log is
refused, since acknowledged changes would be missing. A body that is cut short and has no row was never acknowledged,
and is cut off. A whole body without a row is done again: bodies can rebuild the rows, which need no sync of their own.
``UNIQUE (client, sequence)`` keeps a request from being logged twice. SQLite's exclusive lock, which ends with its
process, keeps another server of this host from the directory, which is therefore on a local disk.

A body file is never rewritten. A checkpoint begins a new one, and removes the older ones and their rows once it is
durable. A log that was repaired is begun anew behind the checkpoint that holds what could be read.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor

from anabranch.checkpoint.generations import (
    Unreadable,
    complete_generations,
    make_directory,
    open_regular,
    set_aside,
    sync_directory,
)
from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError
from anabranch.record.spans import fault_point, mark
from anabranch.tensors.dtypes import as_bytes, dtype_name, dtype_named

_log = logging.getLogger("anabranch.parameter_server")
_SCHEMA = [
    "CREATE TABLE state (log INTEGER NOT NULL, saved INTEGER NOT NULL)",
    "CREATE TABLE record (number INTEGER PRIMARY KEY, client BLOB, sequence INTEGER, UNIQUE (client, sequence))",
]
_NOT_DAMAGE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY})
_WAL_PAGES = "PRAGMA wal_autocheckpoint = 4000"  # of a KiB; SQLite syncs twice when it folds them in
_ROWS = 4096  # removed at a time, so that a commit never waits long


class Position(NamedTuple):
    """A position in a log: the log's number, the file that goes on from there, and the records before it."""

    log: int
    file: int
    records: int


# Of a record that is not durable: its row, and the offset behind its body.
_Row = tuple[int, bytes | None, int, int]


class PushLog:
    """The log of one directory, which no other server can open until it is closed.

    >>> import tempfile, torch
    >>> from contextlib import closing
    >>> directory = Path(tempfile.mkdtemp())
    >>> with closing(PushLog(directory)) as log:
    ...     assert not list(log.replay())
    ...     log.commit(log.append(Record("push", b"facts"), [torch.ones(2)]), Deadline.after(60.0))
    >>> with closing(PushLog(directory)) as log:
    ...     [(record.verb, tensors) for record, tensors in log.replay()]
    [('push', [tensor([1., 1.])])]

    Args:
        directory: made if it does not exist.
        repair: let damage end the log instead of raising.

    Attributes:
        lost: the damage that a repair continues without, or ``None``.
        saved: 1 if a checkpoint was written beside it.

    Raises:
        CheckpointError: another server has the directory, or its files are damaged, or the disk is full or failing.
            Where a record could not be written it is cut off again, and the next one may follow once there is room.
            Where the disk failed to make records durable, nothing more is acknowledged: whether the last ones are there
            is unknown, so the shard must be restarted, which begins a new file.
    """

    def __init__(self, directory: Path, *, repair: bool = False) -> None:
        self.directory, self._repair = directory, repair
        self._path = directory / "log.db"
        self.lost: str | None = None
        self._state = threading.Condition()
        self._committing = threading.Lock()  # SQLite's transactions belong to the connection, not to a thread
        self._rows: list[_Row] = []  # of records that are not durable
        self._records = self._applied = self._durable = 0
        self._syncing = False
        self._broken: str | None = None
        self._file, self._number, self._size, self._before = -1, 0, 0, 0
        if (directory / "owner").exists():
            raise CheckpointError(
                f"{directory} was written by a version with another format of logs: finish the training with that "
                "version, or give another --checkpoint-dir"
            )
        try:
            make_directory(directory)
        except OSError as error:
            raise _unusable(directory, error) from error
        self._database = self._open()

    # --- the database -----------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except LookupError as error:
            self._doubt(str(error))
        except sqlite3.DatabaseError as error:
            code = error.sqlite_errorcode & 0xFF
            if code == sqlite3.SQLITE_BUSY:
                raise CheckpointError(
                    f"{self.directory}: another server holds it (process {_holder(self._path)}); two servers on one "
                    "directory would lose each other's acknowledged changes: give each its own --checkpoint-dir or "
                    "--shard, or stop that one"
                ) from None
            if code in _NOT_DAMAGE:
                raise _unusable(self._path, error) from error
            self._doubt(f"is damaged ({error})")
        for path in self.directory.glob("log.db*"):
            set_aside(path)
        return self._connect(secrets.randbits(62))

    def _doubt(self, what: str) -> None:
        """Note that the database cannot be trusted; raise unless under ``repair``."""
        lost = f"{self._path} {what}, so it is unknown whether the bodies beside it are complete"
        self._lose(lost, "uses the bodies as they are")

    def _lose(self, lost: str, repair: str) -> None:
        self.lost = lost
        if not self._repair:
            raise CheckpointError(
                f"the push log is damaged: {lost}. Restore the file from a copy, or start with --repair, which {repair}"
            )

    def _connect(self, log: int | None = None) -> sqlite3.Connection:
        """Open and lock the database; begin a new one as that of ``log``, or if nothing that it would know is there.

        Raises:
            LookupError: it is not the index of these files.
            sqlite3.DatabaseError: it is damaged, or another server has it.
        """
        new = log is not None or not (body_numbers(self.directory) or complete_generations(self.directory))
        if not self._path.is_file() and (os.path.lexists(self._path) or not new):
            raise LookupError("is not a regular file" if os.path.lexists(self._path) else "is missing")
        database = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            for sql in ("PRAGMA page_size = 1024", "PRAGMA locking_mode = EXCLUSIVE", "BEGIN EXCLUSIVE"):
                database.execute(sql)
            if new and not database.execute("SELECT * FROM sqlite_schema").fetchall():
                for sql in _SCHEMA:
                    database.execute(sql)
                database.execute("INSERT INTO state VALUES (?, 0)", (secrets.randbits(62) if log is None else log,))
            schema = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")]
            state = database.execute("SELECT log, saved FROM state").fetchall() if schema == _SCHEMA else []
            if len(state) != 1 or database.execute("PRAGMA quick_check").fetchall() != [("ok",)]:
                raise LookupError("is not the index of a push log, or damaged")
            self._id, self.saved = state[0]
            # Bodies are synced before their rows are written, and can rebuild them, so that NORMAL is enough.
            for sql in ("COMMIT", "PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", _WAL_PAGES):
                database.execute(sql)
        except BaseException:
            database.close()
            raise
        return database

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._committing:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # where SQLite has done it itself
                    self._database.execute("ROLLBACK")
                raise

    def _insert(self, rows: Sequence[_Row]) -> None:
        with self._transaction() as database:
            database.executemany("INSERT INTO record VALUES (?, ?, ?)", [row[:3] for row in rows])

    # --- reading ----------------------------------------------------------------------------------------------------

    def replay(self, after: Position | None = None) -> Iterator[tuple[Record, list[Tensor]]]:
        """Yield the records behind the checkpoint that ends at ``after``, or all; then new ones can be appended, unless
        something is ``lost``, which needs ``begin_anew``.

        Raises:
            CheckpointError: the log is damaged; gives the position, the loss, and the choices. Or it may not be read.
        """
        numbers = [number for number in body_numbers(self.directory) if after is None or number >= after.file]
        (newest,) = self._database.execute("SELECT max(number) FROM record").fetchone()
        rows = 0 if newest is None else newest + 1
        if after is not None and after.log != self._id:
            if self.lost is None:
                self._doubt("belongs to another log than the checkpoint beside it")
            self._id, rows = after.log, 0
        elif self.lost is not None and numbers:
            self._id = log_of(body_path(self.directory, numbers[0]))
        _, first, self._records = after or (0, min(numbers, default=1), 0)
        self._number = max(numbers, default=first if after else 0)
        unlisted: list[_Row] = []
        for number in range(first, self._number + 1):
            path, again = body_path(self.directory, number), None
            try:
                bodies = Bodies(path, self._id, number, self._records)
            except Unreadable:
                raise
            except CheckpointError as error:
                self._damage(f"{path} {str(error).removeprefix(f'{path.name} ')}", rows)
                return
            for record, tensors in bodies:
                yield record, tensors
                if bodies.count >= rows:
                    again = again or bodies.at
                    unlisted.append((bodies.count, record.client or None, record.sequence, 0))
            self._records = bodies.count
            if bodies.fault is not None:
                # A checkpoint names only files that were begun durably.
                cut_short = bodies.at or (path.stat().st_size <= PREAMBLE_BYTES and (after is None or number > first))
                behind = bodies.whole_behind()
                if not cut_short or behind or number < self._number or self._records < rows:
                    follow = f", and {behind} complete records follow it" if behind else ""
                    self._damage(f"{path} at byte {bodies.at}: {bodies.fault}{follow}", rows)
                    return
                again = again or bodies.at
            if number == self._number and again is not None and self.lost is None:
                self._mend(bodies, again)
        if self._records < rows:
            self._damage(f"the log ends after record {self._records}", rows)
        if self.lost is None:
            try:
                self._insert(unlisted)
            except sqlite3.Error as error:  # such as a request that is there twice
                raise CheckpointError(f"{self._path} cannot take the records beside it: {error}") from error
            self._applied = self._durable = self._records
            self._begin()

    def _damage(self, what: str, rows: int) -> None:
        missing = rows - self._records
        gone = f"{missing} acknowledged changes" if missing > 0 else "An unknown number of changes"
        lost = f"{what}. {gone} after record {self._records} cannot be read"
        self._lose(lost, f"keeps the {self._records} records before the damage and sets the log aside")

    def _mend(self, bodies: Bodies, again: int) -> None:
        """Cut off the end of a write that was cut short, which was never acknowledged, and write the records from
        ``again`` on once more: a sync that failed may have dropped them, and the next would succeed without them.
        """
        path, at = bodies.path, bodies.at
        if bodies.fault is not None:
            cut = (path, bodies.fault, path.stat().st_size - at, at)
            _log.warning("%s: the last write was cut short (%s); %d bytes after byte %d are dropped", *cut)
            mark("parameter_server.log_cut", path=str(path), at=at)
        if not at:
            path.unlink()
            self._number -= 1
            return
        with open(path, "r+b", buffering=0) as file:
            file.truncate(at)
            file.seek(again)
            while chunk := file.read(1 << 20):
                again += os.pwrite(file.fileno(), chunk, again)
            os.fsync(file.fileno())

    def begin_anew(self, after: Position) -> None:
        """Set all files of the log aside, and begin another one behind a durable checkpoint that ends at ``after``."""
        self._database.close()
        for path in self.directory.glob("log[.-]*"):
            aside = set_aside(path)
        sync_directory(self.directory)
        _log.warning("%s; the files of the log were moved to %s", self.lost, aside.parent)
        mark("parameter_server.log_repaired", path=str(self.directory), records=self._records)
        self._database = self._connect(after.log)
        self._number, self._applied, self._durable, self._records = after.file - 1, *3 * (after.records,)
        self._begin()

    # --- writing ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        number = self._number + 1
        path = body_path(self.directory, number)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                write_all(file, [preamble(self._id, number, self._records)])
                os.fsync(file)
                sync_directory(self.directory)
            except OSError:
                os.close(file)
                path.unlink()
                raise
        except OSError as error:  # a file that was begun before continues
            raise CheckpointError(f"no log file can be begun in {self.directory} now: {error}") from error
        if self._file >= 0:
            os.close(self._file)
        self._file, self._number, self._size = file, number, PREAMBLE_BYTES

    def append(self, record: Record, tensors: Sequence[Tensor] = ()) -> int:
        """Write a record after the existing ones; returns the position to ``commit`` once its change is applied."""
        with self._state:
            self._check()
            frame, *body = frames(record, tensors, self._records)
            try:
                fault_point("push_log.before_append")
                write_all(self._file, [frame])
                fault_point("push_log.mid_append")
                write_all(self._file, body)
                fault_point("push_log.after_append")
            except OSError as error:
                self._truncate()
                raise CheckpointError(
                    f"the log in {self.directory} cannot be written now, and nothing was changed: {error}; it will be "
                    "retried at the next change"
                ) from error
            self._before, self._size = self._size, self._size + len(frame) + sum(map(len, body))
            self._rows.append((self._records, record.client or None, record.sequence, self._size))
            self._records += 1
            return self._records

    def take_back(self) -> None:
        """Remove the last record, whose change was refused as it was applied; nobody has committed it."""
        with self._state:
            self._rows.pop()
            self._records -= 1
            self._size = self._before
            self._truncate()

    def _truncate(self) -> None:
        """Cut off what is behind the last record; if that fails, nothing more is written."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError as error:
            self._broken = f"the log in {self.directory} cannot be written: {error}; restart this server"
            self._check()

    def commit(self, position: int, deadline: Deadline) -> None:
        """Wait until all records up to ``position``, which have been applied, are on disk."""
        while True:
            with self._state:
                self._applied = max(self._applied, position)
                while self._durable < position and self._syncing:
                    self._check()
                    if not self._state.wait(timeout=deadline.remaining()):
                        raise deadline.error(peer="the disk", operation="push_log.commit")
                self._check()
                if self._durable >= position:
                    return
                self._syncing = True
                rows = self._rows[: self._applied - self._durable]
            self._sync(rows)

    def _sync(self, rows: Sequence[_Row]) -> None:
        broken: str | None = "a sync of the log was interrupted; restart this server"
        try:
            fault_point("push_log.before_sync")
            os.fdatasync(self._file)
            fault_point("push_log.after_sync")
            broken = self._out_of_place(rows[-1][3])
            if broken is None:
                self._insert(rows)
            fault_point("push_log.after_commit")
        except (OSError, sqlite3.Error) as error:
            broken = (
                f"the log in {self.directory} could not be made durable: {error}; it is unknown whether the last "
                "changes are on disk: restart this server, which reads what is there"
            )
        finally:
            with self._state:
                self._syncing = False
                self._broken = self._broken or broken
                if broken is None:
                    self._durable += len(rows)
                    del self._rows[: len(rows)]
                self._state.notify_all()

    def _out_of_place(self, size: int) -> str | None:
        """Return the error of a file that was cut, removed or replaced: its records would not be found again."""
        ours = os.fstat(self._file)
        with suppress(OSError):
            there = body_path(self.directory, self._number).stat()
            if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) and there.st_size >= size:
                return None
        return (
            f"the newest log file in {self.directory} was cut, moved, removed or replaced while this server wrote to "
            "it; nothing more is acknowledged here: restore it, and start the server again"
        )

    def _check(self) -> None:
        if self._broken is not None:
            raise CheckpointError(self._broken)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def rotate(self) -> Position:
        """Begin a new file, with all earlier ones on disk, between two changes; returns where it begins."""
        self.commit(self._records, Deadline.after(60.0))
        with self._state:
            self._begin()
            return Position(self._id, self._number, self._records)

    def forget_before(self, position: Position | None) -> None:
        """Note that there is a durable checkpoint, and remove the files and rows before ``position``."""
        with self._transaction() as database:
            database.execute("UPDATE state SET saved = 1")
            (oldest,) = database.execute("SELECT min(number) FROM record").fetchone()
        if position is None:
            return
        for old in body_numbers(self.directory):
            if old < position.file:
                with suppress(IsADirectoryError):  # a folder with such a name is not the log's to remove
                    body_path(self.directory, old).unlink()
        for until in range(position.records if oldest is None else oldest, position.records, _ROWS):
            with self._transaction() as database:
                database.execute("DELETE FROM record WHERE number < ?", (min(until + _ROWS, position.records),))

    def close(self) -> None:
        """Close the files, which lets another server have the directory."""
        with self._state:
            self._broken = self._broken or f"the log in {self.directory} is closed"
            file, self._file = self._file, -1
            if file >= 0:
                os.close(file)
        with self._committing:
            self._database.close()


def _holder(path: Path) -> str:
    """Return the process that has a file locked, if the system says so."""
    with suppress(OSError):
        inode = f":{path.stat().st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) == 8 and words[5].endswith(inode):
                return words[4]
    return "unknown"


def _unusable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be used: {error}; let user {os.geteuid()} read and write it, with chown or chmod, or give a "
        "directory on another local disk"
    )


# --- body files -------------------------------------------------------------------------------------------------------


_MAGIC = b"ABBODY1\n"
_PREAMBLE = struct.Struct("<8sQQQI")
_MARK = b"\xabrec"
_FRAME = struct.Struct("<4sQQI")
_SIZE = struct.Struct("<I")
PREAMBLE_BYTES = _PREAMBLE.size


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One applied change: its verb and message, the client and number of the request, and what the client has
    settled by then.
    """

    verb: str
    message: bytes
    client: bytes = b""
    sequence: int = 0
    settled: int = 0
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()


# Built at import: constructing a msgspec decoder is not thread-safe.
_RECORDS = msgspec.msgpack.Decoder(Record)


def body_path(directory: Path, number: int) -> Path:
    """Return the path of body file ``number``."""
    return directory / f"log-bodies-{number}"


def body_numbers(directory: Path) -> list[int]:
    """Return the numbers of the body files in the directory, ascending."""
    names = (path.name.removeprefix("log-bodies-") for path in directory.glob("log-bodies-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def preamble(log: int, number: int, first: int) -> bytes:
    """Return the first bytes of file ``number`` of a log, which begins with record ``first``."""
    return _sealed(_PREAMBLE.pack(_MAGIC, log, number, first, 0)[:-4])


def frames(record: Record, tensors: Sequence[Tensor], number: int) -> list[bytes | memoryview]:
    """Return the bytes of a record: its frame, its head, and the memory of its tensors."""
    described = tuple((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)
    head = msgspec.msgpack.encode(msgspec.structs.replace(record, tensors=described))
    memory = [as_bytes(tensor.detach().contiguous()).numpy().data for tensor in tensors if tensor.numel()]
    body: list[bytes | memoryview] = [_SIZE.pack(len(head)) + head, *memory]
    return [_sealed(_FRAME.pack(_MARK, number, sum(map(len, body)), 0)[:-4], body), *body]


def _sealed(start: bytes, body: Sequence[bytes | memoryview] = ()) -> bytes:
    checksum = zlib.crc32(start)
    for part in body:
        checksum = zlib.crc32(part, checksum)
    return start + checksum.to_bytes(4, "little")


def write_all(file: int, parts: Sequence[bytes | memoryview]) -> None:
    """Write all of ``parts``, in as many calls as it takes."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(file, rest) :]


class Bodies:
    """The records of one file, read one at a time up to the end or to the first that is not whole.

    Args:
        path: of the file.
        log: the number of the log that it should belong to.
        number: of the file.
        first: the record with which it should begin.

    Attributes:
        at: the offset after the last whole record.
        count: the number of the next record.
        fault: the damage found at ``at``; ``None`` at the end of the file.

    Raises:
        CheckpointError: it cannot be opened; ``Unreadable`` if it may be whole.
    """

    def __init__(self, path: Path, log: int, number: int, first: int) -> None:
        self.path, self.count, self.at = path, first, 0
        with open_regular(path) as file:
            self.fault = _fault_of(file.read(PREAMBLE_BYTES), log, number, first)

    def __iter__(self) -> Iterator[tuple[Record, list[Tensor]]]:
        if self.fault is not None:
            return
        with open_regular(self.path) as file:
            self.at = file.seek(PREAMBLE_BYTES)
            end = os.fstat(file.fileno()).st_size
            while self.at < end:
                one = self._read(file, end)
                if isinstance(one, str):
                    self.fault = one
                    return
                yield one
                self.at = file.tell()
                self.count += 1

    def _read(self, file: BinaryIO, end: int) -> tuple[Record, list[Tensor]] | str:
        """Return the next record, or a description of the damage."""
        frame = file.read(_FRAME.size)
        if len(frame) < _FRAME.size:
            return f"a record's frame ends after {len(frame)} bytes"
        mark, number, length, checksum = _FRAME.unpack(frame)
        if mark != _MARK:
            return "these bytes do not start a record"
        if length > end - file.tell():
            return f"a record of {length} bytes ends after {end - file.tell()}"
        body = memoryview(file.read(length))
        if zlib.crc32(body, zlib.crc32(frame[:-4])) != checksum:
            return "a record does not match its checksum"
        if number != self.count:
            return f"record {number} is where record {self.count} belongs"
        return _decode(body)

    def whole_behind(self) -> int:
        """Return the number of whole records in the rest of the file, after the one that cannot be read."""
        if os.path.getsize(self.path) <= self.at + 1:
            return 0
        with open_regular(self.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            whole, at = 0, self.at
            while (at := memory.find(_MARK, at + 1)) >= 0 and at + _FRAME.size <= len(memory):
                _, _, length, checksum = _FRAME.unpack_from(memory, at)
                end = at + _FRAME.size + length
                if end <= len(memory):
                    start = zlib.crc32(memory[at : at + _FRAME.size - 4])
                    if zlib.crc32(memory[at + _FRAME.size : end], start) == checksum:
                        whole, at = whole + 1, end - 1
            return whole


def log_of(path: Path) -> int:
    """Return the number of the log to which a body file says it belongs; 0 if it does not."""
    with open_regular(path) as file:
        start = file.read(PREAMBLE_BYTES)
    return int(_PREAMBLE.unpack(start)[1]) if len(start) == PREAMBLE_BYTES else 0


def _fault_of(start: bytes, log: int, number: int, first: int) -> str | None:
    if len(start) < PREAMBLE_BYTES:
        return "it is empty" if not start else f"it ends after {len(start)} bytes"
    if _sealed(start[:-4]) != start or not start.startswith(_MAGIC):
        return "its first bytes are damaged"
    _, its_log, its_number, its_first, _ = _PREAMBLE.unpack(start)
    if (its_log, its_number) != (log, number):
        return "it belongs to another log"
    if its_first != first:
        return f"it continues from record {its_first}, not from {first}"
    return None


def _decode(body: memoryview) -> tuple[Record, list[Tensor]]:
    (size,) = _SIZE.unpack_from(body)
    at = _SIZE.size + size
    record = _RECORDS.decode(body[_SIZE.size : at])
    tensors = []
    for name, shape in record.tensors:
        dtype, count = dtype_named(name), math.prod(shape)
        memory = bytearray(body[at : at + count * dtype.itemsize])  # a copy, which is aligned
        tensors.append(
            torch.frombuffer(memory, dtype=dtype).view(shape)
            if count
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
        at += len(memory)
    return record, tensors
