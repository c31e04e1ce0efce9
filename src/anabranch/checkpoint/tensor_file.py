"""One ``.safetensors`` file: written and read one tensor at a time, with a checksum of every tensor and of the header.

::

    8 bytes        length of the header, little-endian
    header         JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, padded with spaces to 8 bytes
    data           the tensors' bytes, one after the other without gaps

The files are plain safetensors, for any tool to read. The library's own writer is not used, for three reasons. It takes
all tensors at once as contiguous CPU memory of their own, so that a model on a GPU, or one with transposed or tied
weights, must be copied whole before the first byte is written; here one tensor is copied at a time. It refuses two
names for one storage. And a checksum taken in the same pass is over the bytes that were written, whatever another
thread does to the tensor meanwhile.

The checksum is CRC-32 (zlib): 4.8 GB/s here against 1.2 for BLAKE2b and 1.9 for SHA-256. It finds every single flipped
bit and every burst of up to 32, and misses other damage once in four billion; it is not a defence against forgery.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch import Tensor

from anabranch.checkpoint.manifest import FileRecord, TensorRecord, unique_keys
from anabranch.checkpoint.regular_file import open_regular
from anabranch.errors import CheckpointError
from anabranch.record.fault_points import fault_point
from anabranch.tensors.dtypes import SAFETENSORS_NAMES

__all__ = ["check", "lay_out", "load", "write_all", "write_tensors"]

_FROM_NAME = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}

_LONGEST_HEADER = 100_000_000  # what the safetensors library accepts
_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header describes it: where its bytes lie, counted from the start of the data."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


def lay_out(tensors: Mapping[str, Tensor], group: str) -> tuple[bytes, list[str]]:
    """Return the header of a file of ``tensors`` (with its length before it), and the order in which their bytes
    follow.

    Raises:
        TypeError: a name that is not a str, or a value that is not a tensor.
        ValueError: a tensor that safetensors cannot hold (sparse, quantized, meta, complex128), or a reserved name.
    """
    for name, tensor in tensors.items():
        _check_writable(name, tensor, group)
    # Wide dtypes first keeps every tensor aligned to its own itemsize.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in order:
        tensor = tensors[name]
        end = begin + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LONGEST_HEADER:
        raise ValueError(
            f"group {group!r} has {len(tensors)} tensors, whose names and shapes take {len(text)} bytes; safetensors "
            f"allows {_LONGEST_HEADER}: spread them over several groups"
        )
    return struct.pack("<Q", len(text)) + text, order


def write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor], group: str) -> FileRecord:
    """Write ``tensors`` to ``file``, holding one copy of one tensor at a time at most."""
    header, order = lay_out(tensors, group)
    write_all(file, memoryview(header))
    fault_point("checkpoint.header_written")
    written = len(header)
    records = {}
    for name in order:
        data = _bytes_of(tensors[name])
        checksum = 0
        for start in range(0, len(data), _CHUNK):
            checksum = zlib.crc32(data[start : start + _CHUNK], checksum)
            write_all(file, data[start : start + _CHUNK])
        written += len(data)
        del data  # before the next one is copied
        records[name] = TensorRecord(SAFETENSORS_NAMES[tensors[name].dtype], list(tensors[name].shape), checksum)
        fault_point("checkpoint.tensor_written")
    in_order_given = {name: records[name] for name in tensors}
    return FileRecord(written, len(header), zlib.crc32(header), in_order_given)


def write_all(file: BinaryIO, data: memoryview) -> None:
    """Write all of ``data`` to an unbuffered ``file``, which may take it in parts."""
    while data:
        data = data[file.write(data) :]


def load(path: Path, record: FileRecord, device: torch.device | str) -> dict[str, Tensor]:
    """Return the tensors of the file, each checked against ``record`` as it is read into its own memory.

    Raises:
        CheckpointError: the file does not exist, or is not the one that ``record`` describes.
    """
    with open_regular(path, buffering=0) as file:
        entries = _read_header(file, path, record)
        tensors = {}
        for name, entry in entries.items():
            tensor = _empty(path, name, entry)
            checksum = 0
            for chunk in _filled(file, path, name, _flat(tensor).numpy().data):
                checksum = zlib.crc32(chunk, checksum)
            _compare(path, name, record, checksum)
            tensors[name] = tensor.to(device)
        return {name: tensors[name] for name in record.tensors}


def check(path: Path, record: FileRecord, *, data: bool) -> None:
    """Raise ``CheckpointError`` unless the file is the one that ``record`` describes.

    Args:
        path: the file.
        record: its entry in the manifest.
        data: read the tensors' bytes too, through a small buffer, not only the size and the header.
    """
    with open_regular(path, buffering=0) as file:
        entries = _read_header(file, path, record)
        buffer = memoryview(bytearray(_CHUNK if data else 0))
        for name, entry in entries.items() if data else ():
            left, checksum = entry.end - entry.begin, 0
            while left:
                part = buffer[: min(left, _CHUNK)]
                for chunk in _filled(file, path, name, part):
                    checksum = zlib.crc32(chunk, checksum)
                left -= len(part)
            _compare(path, name, record, checksum)


def _check_writable(name: object, tensor: object, group: str) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise TypeError(f"group {group!r} maps names to tensors, got {name!r}: {type(tensor).__name__}")
    if name == "__metadata__":
        raise ValueError(f"group {group!r} has a tensor named '__metadata__', which safetensors reserves; rename it")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"group {group!r} has a tensor whose name is not Unicode text: {name!r}") from None
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise ValueError(
            f"tensor {name!r} of group {group!r} is {kind}; save the dense tensors it consists of, such as its indices "
            "and values"
        )
    if tensor.is_meta:
        raise ValueError(f"tensor {name!r} of group {group!r} is on the meta device and has no values to save")
    if tensor.dtype not in SAFETENSORS_NAMES:
        raise ValueError(
            f"tensor {name!r} of group {group!r} is {tensor.dtype}, which safetensors cannot hold; view or convert it"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    values = tensor.detach().resolve_conj().resolve_neg().to("cpu", memory_format=torch.contiguous_format)
    return _flat(values.contiguous()).numpy().data


def _flat(tensor: Tensor) -> Tensor:
    # One value, or none, counts as contiguous whatever its strides, 0 among them, which no view as bytes accepts.
    flat = tensor.reshape(-1) if tensor.numel() > 1 else tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _filled(file: BinaryIO, path: Path, name: str, buffer: memoryview) -> Iterator[memoryview]:
    """Read until ``buffer`` is full; yields each part of it as it comes, still warm in the processor's cache."""
    while buffer:
        try:
            count = file.readinto(buffer[:_CHUNK])  # type: ignore[attr-defined]
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{path.name} ends within {name}")
        yield buffer[:count]
        buffer = buffer[count:]


def _compare(path: Path, name: str, record: FileRecord, checksum: int) -> None:
    expected = record.tensors[name].crc32
    if checksum != expected:
        raise CheckpointError(
            f"{path.name}: tensor {name!r} is damaged, its checksum is {checksum:08x}, but was {expected:08x} when "
            "saved"
        )


def _empty(path: Path, name: str, entry: _Entry) -> Tensor:
    try:
        return torch.empty(entry.shape, dtype=_FROM_NAME[entry.dtype], device="cpu")
    except (RuntimeError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path.name}: the tensor {name!r} cannot have the shape {entry.shape}: {error}"
        ) from error


def _read_header(file: BinaryIO, path: Path, record: FileRecord) -> dict[str, _Entry]:
    """Return the header's entries in the order of their bytes, checked against ``record`` and against the size of the
    file.
    """
    size = os.fstat(file.fileno()).st_size
    if size != record.bytes:
        raise CheckpointError(f"{path.name} has {size} bytes, but had {record.bytes} when saved")
    if not 8 <= record.header_bytes <= min(size, _LONGEST_HEADER + 8):
        raise CheckpointError(f"{path.name} cannot have a header of {record.header_bytes} bytes: it has {size} in all")
    header = bytearray(record.header_bytes)
    checksum = 0
    for chunk in _filled(file, path, "its header", memoryview(header)):
        checksum = zlib.crc32(chunk, checksum)
    if checksum != record.header_crc32 or struct.unpack("<Q", header[:8])[0] != len(header) - 8:
        raise CheckpointError(f"{path.name}: the header is damaged, it does not match its checksum")
    entries = _parse_header(bytes(header[8:]), path)
    _check_tiles(entries, path, size - len(header))
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in record.tensors.items()}
    if {name: (entry.dtype, entry.shape) for name, entry in entries.items()} != described:
        raise CheckpointError(f"{path.name} holds different tensors than the manifest says")
    return entries


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


msgspec.json.Decoder(_HeaderEntry)  # learns its fields here, where there is but one thread: two cannot at once


def _parse_header(text: bytes, path: Path) -> dict[str, _Entry]:
    try:
        objects = json.loads(text, object_pairs_hook=unique_keys)
        objects.pop("__metadata__", None)
        found = msgspec.convert(objects, dict[str, _HeaderEntry])
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: the header cannot be read: {error}") from error
    entries = {name: _Entry(entry.dtype, entry.shape, *entry.data_offsets) for name, entry in found.items()}
    return dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))


def _check_tiles(entries: Mapping[str, _Entry], path: Path, data_bytes: int) -> None:
    """Every byte of the data belongs to exactly one tensor, and every tensor has the bytes its shape requires."""
    reached = 0
    for name, entry in entries.items():
        if entry.dtype not in _FROM_NAME or any(size < 0 for size in entry.shape):
            raise CheckpointError(f"{path.name}: tensor {name!r} claims to be {entry.dtype} of shape {entry.shape}")
        needed = math.prod(entry.shape) * _FROM_NAME[entry.dtype].itemsize
        if entry.begin != reached or entry.end - entry.begin != needed:
            raise CheckpointError(
                f"{path.name}: tensor {name!r} of shape {entry.shape} takes {needed} bytes from {reached} on, but the "
                f"header says bytes {entry.begin} to {entry.end}"
            )
        reached = entry.end
    if reached != data_bytes:
        raise CheckpointError(f"{path.name}: its tensors take {reached} bytes, but it holds {data_bytes}")
