"""An append-only log of what was done to a shard, so that a shard that was killed can do it again.

::

    log-00000003
    +--------+-------+---------------------------------+
    | length | crc32 | record                          |  one after the other
    |  u64   |  u32  | msgpack header, tensors' memory |
    +--------+-------+---------------------------------+

Appending orders records; committing makes them durable. Several threads that commit at once share one ``fsync``: the
first to come syncs for all that have appended by then, the others wait for it. A record that was cut by a crash fails
its checksum or its length: reading stops there and the file is cut there, for what follows was never acknowledged.

A log file is never rewritten. A checkpoint begins a new one, and removes the older ones once it is durable itself.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError
from anabranch.events import fault_point
from anabranch.parameter_server.kernels import as_array

__all__ = ["PushLog", "Record"]

_FRAME = struct.Struct("<QI")
_LONGEST = 4 << 30
# Of all that changes of a shard may come with; rounded rows are int8 with scales of uint8.
_DTYPES = {
    "int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "uint8": torch.uint8,
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16,
}  # fmt: skip


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One thing that was done: its verb, its message, and who asked for it under which number."""

    verb: str
    payload: bytes
    epoch: bytes = b""
    sequence: int = 0
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()


class PushLog:
    """The log files of one directory, of which the newest is written; a context manager.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> with PushLog(directory) as log:
    ...     log.commit(log.append(Record("push", b"facts"), [torch.ones(2)]), Deadline.after(5.0))
    >>> [(record.verb, tensors) for record, tensors in PushLog.read(directory)]
    [('push', [tensor([1., 1.])])]

    Args:
        directory: made if it is not there.

    Raises:
        CheckpointError: the disk is full or failing. The log takes nothing more then: what was appended is not known to
            be there, and the shard must be started again from what is.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._state = threading.Condition()
        self._number = max(_numbers(directory), default=0)
        self._written = 0
        self._durable = 0
        self._syncing = False
        self._broken: OSError | None = None
        self._file = -1
        self._rotate()

    def append(self, record: Record, tensors: Sequence[Tensor] = ()) -> int:
        """Writes a record after those that are there; returns what to ``commit``."""
        described = tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)
        header = msgspec.msgpack.encode(msgspec.structs.replace(record, tensors=described))
        parts = [struct.pack("<I", len(header)), header]
        parts += [as_array(tensor.contiguous()).tobytes() for tensor in tensors]
        body = b"".join(parts)
        with self._state:
            self._check()
            try:
                fault_point("push_log.before_append")
                _write_all(self._file, _FRAME.pack(len(body), zlib.crc32(body)))
                fault_point("push_log.mid_append")
                _write_all(self._file, body)
                fault_point("push_log.after_append")
            except OSError as error:
                self._broken = error
                self._check()
            self._written += 1
            return self._written

    def commit(self, position: int, deadline: Deadline) -> None:
        """Returns once everything up to ``position`` is on the disk."""
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
                file, until = self._file, self._written
            self._sync(file, until)

    def _sync(self, file: int, until: int) -> None:
        broken: OSError | None = None
        try:
            fault_point("push_log.before_sync")
            os.fdatasync(file)
            fault_point("push_log.after_sync")
        except OSError as error:
            broken = error
        finally:
            with self._state:
                self._syncing = False
                self._broken = self._broken or broken
                if broken is None:
                    self._durable = max(self._durable, until)
                self._state.notify_all()

    def rotate(self) -> int:
        """Begins a new file, with all before it on the disk; returns its number."""
        with self._state:
            while self._syncing:
                if not self._state.wait(timeout=60.0):
                    raise CheckpointError(f"the disk under {self._directory} has not answered for 60 s")
            self._check()
            os.fsync(self._file)
            self._durable = self._written
            self._rotate()
            return self._number

    def _rotate(self) -> None:
        self._number += 1
        if self._file >= 0:
            os.close(self._file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(_path(self._directory, self._number), flags, 0o600)
        _sync_directory(self._directory)

    def forget_before(self, number: int) -> None:
        """Removes the files before ``number``, whose records a durable checkpoint holds."""
        for old in _numbers(self._directory):
            if old < number:
                _path(self._directory, old).unlink()
        _sync_directory(self._directory)

    @staticmethod
    def read(directory: Path, first: int = 0) -> Iterator[tuple[Record, list[Tensor]]]:
        """The records of all files from number ``first`` on, in order; a cut record ends its file."""
        for number in sorted(_numbers(directory)):
            if number >= first:
                yield from _read_file(_path(directory, number))

    def close(self) -> None:
        """Makes everything durable and closes the file."""
        with self._state:
            if self._file >= 0:
                if self._broken is None:
                    os.fsync(self._file)
                os.close(self._file)
                self._file = -1

    def _check(self) -> None:
        if self._broken is not None:
            raise CheckpointError(f"the log in {self._directory} cannot be written: {self._broken}") from self._broken
        if self._file < 0:
            raise CheckpointError(f"the log in {self._directory} is closed")

    def __enter__(self) -> PushLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_file(path: Path) -> Iterator[tuple[Record, list[Tensor]]]:
    with path.open("rb") as file:
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(frame)
            if length > _LONGEST or len(body := file.read(length)) < length or zlib.crc32(body) != checksum:
                return
            yield _decode(body)


# Made here, where there is but one thread: making one is nothing that two threads can do at once.
_RECORDS = msgspec.msgpack.Decoder(Record)


def _decode(body: bytes) -> tuple[Record, list[Tensor]]:
    (size,) = struct.unpack_from("<I", body)
    record = _RECORDS.decode(body[4 : 4 + size])
    tensors, at = [], 4 + size
    for name, shape in record.tensors:
        dtype = _DTYPES[name]
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count * dtype.itemsize
        memory = bytearray(body[at : at + nbytes])
        tensors.append(torch.frombuffer(memory, dtype=dtype).view(shape) if count else torch.empty(shape, dtype=dtype))
        at += nbytes
    return record, tensors


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _path(directory: Path, number: int) -> Path:
    return directory / f"log-{number:08d}"


def _numbers(directory: Path) -> list[int]:
    return [int(path.name[4:]) for path in directory.glob("log-*") if path.name[4:].isdigit()]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
