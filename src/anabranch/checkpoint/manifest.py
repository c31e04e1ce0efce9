"""The manifest: the small JSON file, written last, that makes a generation of files a checkpoint.

::

    {"crc32":"0f1e2d3c","manifest":{"format":2,"step":...,"state":...,"files":{"model":{...}}}}
     ^^^^^^^^^^^^^^^^^^ of the bytes from here ->^                                    to here ->^

Every byte of the file is either fixed or under the checksum, so a flipped bit anywhere is seen. Files are named by
their group alone, and a group is a name, never a path: what a manifest says cannot lead out of its directory. Sizes are
compared with the files that are really there before anything is allocated.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

import msgspec

from anabranch.checkpoint.generations import open_regular
from anabranch.checkpoint.state import decode, encode
from anabranch.errors import CheckpointError

_FORMAT = 2
_LONGEST = 1 << 30  # bytes: a sparse file may claim any number
_START, _MIDDLE, _END = b'{"crc32":"', b'","manifest":', b"}\n"
_BODY = len(_START) + 8 + len(_MIDDLE)
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class TensorRecord(msgspec.Struct, frozen=True):
    """The manifest's entry of one tensor: dtype as safetensors names it, shape, and the CRC-32 of its bytes."""

    dtype: str
    shape: list[int]
    crc32: int


class FileRecord(msgspec.Struct, frozen=True):
    """The manifest's entry of one file: its size in bytes, and its tensors."""

    bytes: int
    tensors: dict[str, TensorRecord]


class Manifest(msgspec.Struct, frozen=True):
    """One generation of a checkpoint: its step, its state, and a record of each group's file.

    ``written`` is nanoseconds since 1970 by the writer's clock; it decides only between equal steps.
    """

    format: int
    step: int
    written: int
    state: object
    files: dict[str, FileRecord]


_decoder = msgspec.json.Decoder(Manifest)  # built at import: two threads cannot build one of a class at once


def check_group(group: object) -> None:
    """Raise ``ValueError`` unless ``group`` is a name that a file may have; for a path, above all."""
    if not isinstance(group, str) or not _GROUP.fullmatch(group):
        raise ValueError(
            "the name of a checkpoint group consists of letters, digits, '_', '-' and '.', at most 100, without '.' or "
            f"'-' first, got {group!r}"
        )


def pack(step: int, written: int, state: object, files: dict[str, FileRecord]) -> bytes:
    """Return the manifest as the bytes of its file."""
    body = msgspec.json.encode(Manifest(_FORMAT, step, written, encode(state), files))
    return _START + b"%08x" % zlib.crc32(body) + _MIDDLE + body + _END


def load(path: Path) -> Manifest:
    """Return the manifest in the file at ``path``, its state decoded.

    Raises:
        CheckpointError: it does not exist, is damaged, of another format, or names a file that no checkpoint can have.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _LONGEST:
            raise CheckpointError(f"the manifest has more than {_LONGEST} bytes")
        data = file.read()
    body = data[_BODY : -len(_END)]
    if data != _START + b"%08x" % zlib.crc32(body) + _MIDDLE + body + _END:
        raise CheckpointError("the manifest is damaged: it does not match its checksum")
    try:
        manifest = _decoder.decode(body)
        if manifest.format != _FORMAT:
            raise CheckpointError(
                f"the manifest has format {manifest.format}, but this version reads {_FORMAT} alone; load it with the "
                "version of anabranch that saved it"
            )
        for group in manifest.files:
            check_group(group)
        return msgspec.structs.replace(manifest, state=decode(manifest.state))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the manifest cannot be read: {error}") from error
