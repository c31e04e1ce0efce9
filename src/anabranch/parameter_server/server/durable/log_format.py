"""The bytes of a push log's files: the frame of a record, and a reader's diagnosis of an unreadable file.

::

    log-00000003
    +------------------------------------------------------------+
    | ABLOG2 | file | first record | chain | server epoch | crc32 |   40 bytes: which file it is, what it goes on from
    +------------------------------------------------------------+
    | mark | length | record number | chain | crc32 | body        |   one frame after the other
    +------------------------------------------------------------+

Records are numbered over all files, and each frame holds the checksum of the previous one (its *chain*), so that a
record that is missing, repeated or from another log is detected. The mark can be searched for: valid frames after an
unreadable one mean damage; if there are none, it is the tail of a write that a crash cut short.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from anabranch.checkpoint.regular_file import open_regular
from anabranch.tables.kernels.memory import as_array
from anabranch.tensors.dtypes import dtype_name, dtype_named

__all__ = [
    "Frames",
    "Preamble",
    "Record",
    "encode_record",
    "frame_of",
    "log_numbers",
    "log_path",
    "write_all",
]

_MAGIC = b"ABLOG2\r\n"
_PREAMBLE = struct.Struct("<8sQQIQI")
_MARK = b"\xabrec"
_FRAME = struct.Struct("<4sQQII")
_LONGEST = 4 << 30


class Record(msgspec.Struct, array_like=True, frozen=True):
    """One applied change: its verb, its message, and the client and number of the request."""

    verb: str
    payload: bytes
    epoch: bytes = b""
    sequence: int = 0
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Preamble:
    """The beginning of a log file.

    Attributes:
        file: its number, which is also in its name.
        first: the number of its first record, counted from 0 over all files.
        chain: the checksum of the previous record; without one a random number, which names the log.
        epoch: of the server that wrote it: the number of starts so far.
    """

    file: int
    first: int
    chain: int
    epoch: int

    def encode(self) -> bytes:
        """Return the preamble as bytes."""
        start = _PREAMBLE.pack(_MAGIC, self.file, self.first, self.chain, self.epoch, 0)[:-4]
        return start + zlib.crc32(start).to_bytes(4, "little")

    @classmethod
    def read(cls, path: Path) -> Preamble:
        """Return the preamble of the file at ``path``.

        Raises:
            ValueError: the file is too short to have one, or it is damaged.
            CheckpointError: it cannot be opened; ``Unreadable`` if it may be whole.
        """
        with open_regular(path) as file:
            start = file.read(_PREAMBLE.size)
        if len(start) < _PREAMBLE.size:
            raise ValueError("it is empty" if not start else f"it ends after {len(start)} bytes")
        magic, number, first, chain, epoch, checksum = _PREAMBLE.unpack(start)
        if magic != _MAGIC or zlib.crc32(start[:-4]) != checksum:
            raise ValueError("its first bytes are damaged")
        return cls(number, first, chain, epoch)


def encode_record(record: Record, tensors: Sequence[Tensor]) -> bytes:
    """Return the body of a frame."""
    described = tuple((dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)
    header = msgspec.msgpack.encode(msgspec.structs.replace(record, tensors=described))
    parts = [struct.pack("<I", len(header)), header]
    parts += [as_array(tensor.contiguous()).tobytes() for tensor in tensors]
    return b"".join(parts)


def frame_of(body: bytes, number: int, chain: int) -> tuple[bytes, int]:
    """Return the frame before a body, and its checksum, which is the next frame's chain."""
    start = _FRAME.pack(_MARK, len(body), number, chain, 0)[:-4]
    checksum = zlib.crc32(body, zlib.crc32(start))
    return start + checksum.to_bytes(4, "little"), checksum


class Frames:
    """The frames of one file, read in order up to the end or to the first unreadable one.

    Attributes:
        at: the offset after the last frame that was read.
        count: the number of the next record.
        chain: the checksum of the last record.
        fault: the damage found at ``at``; ``None`` at the end of the file.
    """

    def __init__(self, path: Path, count: int, chain: int) -> None:
        self.path = path
        self.count = count
        self.chain = chain
        self.fault: str | None = None
        self.at = _PREAMBLE.size

    def records(self, until: int | None = None) -> Iterator[tuple[Record, list[Tensor]]]:
        """Yield the records; only those below number ``until``, if it is given."""
        with open_regular(self.path) as file:
            file.seek(self.at)
            end = os.fstat(file.fileno()).st_size
            while self.at < end and (until is None or self.count < until):
                frame = file.read(_FRAME.size)
                checked = self._length(frame)
                if isinstance(checked, str):
                    self.fault = checked
                    return
                length, start, checksum = checked
                body = file.read(length) if length <= min(_LONGEST, end - self.at) else b""
                if len(body) < length:
                    self.fault = f"a record of {length} bytes ends after {end - self.at - len(frame)}"
                    return
                if zlib.crc32(body, start) != checksum:
                    self.fault = "a record does not match its checksum"
                    return
                yield _decode(body)
                self.at += len(frame) + length
                self.count += 1
                self.chain = checksum

    def _length(self, frame: bytes) -> tuple[int, int, int] | str:
        """Return the body's length, the checksum so far and the expected one; or a description of the damage."""
        if len(frame) < _FRAME.size:
            return f"a record's frame ends after {len(frame)} bytes"
        mark, length, number, chain, checksum = _FRAME.unpack(frame)
        if mark != _MARK:
            return "these bytes do not start a record"
        if number != self.count or chain != self.chain:
            start = zlib.crc32(frame[:-4])
            whole = self._is_whole(length, start, checksum)
            return f"found record {number} where record {self.count} belongs" if whole else "a frame is damaged"
        return length, zlib.crc32(frame[:-4]), checksum

    def _is_whole(self, length: int, start: int, checksum: int) -> bool:
        with open_regular(self.path) as file:
            file.seek(self.at + _FRAME.size)
            body = file.read(min(length, _LONGEST))
        return len(body) == length and zlib.crc32(body, start) == checksum

    def behind(self) -> int:
        """Return the number of whole records in the rest of the file, after the one that cannot be read."""
        if os.path.getsize(self.path) <= self.at:
            return 0
        with open_regular(self.path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            return _whole_frames(memory, self.at)


def _whole_frames(memory: mmap.mmap, at: int) -> int:
    found = 0
    while (at := memory.find(_MARK, at + 1)) >= 0 and at + _FRAME.size <= len(memory):
        _, length, _, _, checksum = _FRAME.unpack_from(memory, at)
        end = at + _FRAME.size + length
        if end <= len(memory):
            start = zlib.crc32(memory[at : at + _FRAME.size - 4])
            if zlib.crc32(memory[at + _FRAME.size : end], start) == checksum:
                found += 1
                at = end - 1
    return found


# Built at import: constructing a msgspec decoder is not thread-safe.
_RECORDS = msgspec.msgpack.Decoder(Record)


def _decode(body: bytes) -> tuple[Record, list[Tensor]]:
    (size,) = struct.unpack_from("<I", body)
    record = _RECORDS.decode(body[4 : 4 + size])
    tensors, at = [], 4 + size
    for name, shape in record.tensors:
        dtype = dtype_named(name)
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count * dtype.itemsize
        memory = bytearray(body[at : at + nbytes])
        tensors.append(
            torch.frombuffer(memory, dtype=dtype).view(shape)
            if count
            else torch.empty(shape, dtype=dtype, device="cpu")
        )
        at += nbytes
    return record, tensors


def log_path(directory: Path, number: int) -> Path:
    """Return the path of log file ``number``."""
    return directory / f"log-{number:08d}"


def log_numbers(directory: Path) -> list[int]:
    """Return the numbers of the log files in the directory, ascending."""
    return sorted(int(path.name[4:]) for path in directory.glob("log-*") if path.name[4:].isdigit())


def write_all(file: int, data: bytes) -> None:
    """Write all of ``data``, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
