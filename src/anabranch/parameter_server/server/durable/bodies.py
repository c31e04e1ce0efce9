"""The bytes of a push log's body files: each record's verb, client, number and tensors, one record after the other.

::

    log-bodies-3
    | ABBODY1 | log | file | first record | crc32 |               which log and file it is, where it goes on
    | mark | record number | length | crc32 | size | head | tensors |    one record after the other

Records are numbered over all files. A file says with which record it begins, so one that is missing, cut or from
another log is detected by the next one, and by the rows of ``log.db``.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from anabranch.checkpoint.regular_file import open_regular
from anabranch.tensors.dtypes import dtype_name, dtype_named

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
    flat = (tensor.detach().contiguous().reshape(-1) for tensor in tensors if tensor.numel())
    memory = [tensor.view(torch.uint8).numpy().data for tensor in flat]
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
