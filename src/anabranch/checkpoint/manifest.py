"""The manifest: the small JSON file, written last, that makes a generation of files a checkpoint.

::

    {"crc32":"0f1e2d3c","manifest":{"format":1,"step":...,"state":...,"files":{"model":{...}}}}
     ^^^^^^^^^^^^^^^^^^ of the bytes from here ->^                                    to here ->^

Every byte of the file is either fixed or under the checksum, so a flipped bit anywhere is seen. Files are named by
their group alone, and a group is a name, never a path: what a manifest says cannot lead out of its directory. Sizes are
compared with the files that are really there before anything is allocated; the manifest's own size is, with the longest
that ``pack`` makes.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from pathlib import Path

import msgspec

from anabranch.checkpoint.regular_file import open_regular
from anabranch.checkpoint.state import decode, encode
from anabranch.errors import CheckpointError

__all__ = ["FileRecord", "LONGEST", "Manifest", "TensorRecord", "check_group", "load", "pack", "unique_keys", "unpack"]

_FORMAT = 1
LONGEST = 256 << 20
"""Bytes of the longest manifest: the entries of two million tensors."""
_START, _MIDDLE, _END = b'{"crc32":"', b'","manifest":', b"}\n"
_BODY = len(_START) + 8 + len(_MIDDLE)
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's entry of one tensor: dtype as safetensors names it, shape, and the CRC-32 of its bytes."""

    dtype: str
    shape: list[int]
    crc32: int


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest's entry of one file: sizes in bytes, the CRC-32 of its header, and its tensors."""

    bytes: int
    header_bytes: int
    header_crc32: int
    tensors: dict[str, TensorRecord]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One generation of a checkpoint: its step, its state as JSON, and a record of each group's file.

    ``written`` is nanoseconds since 1970 by the writer's clock; it decides only between equal steps.
    """

    format: int
    step: int
    written: int
    state: object
    files: dict[str, FileRecord]


msgspec.json.Decoder(Manifest)  # built at import: constructing a msgspec decoder is not thread-safe


def check_group(group: object) -> str:
    """Return ``group`` if it is a name that a file may have.

    Raises:
        ValueError: it is not such a name; a path, above all.
    """
    if not isinstance(group, str) or not _GROUP.fullmatch(group):
        raise ValueError(
            "the name of a checkpoint group consists of letters, digits, '_', '-' and '.', at most 100, without '.' or "
            f"'-' first, got {group!r}"
        )
    return group


def pack(step: int, written: int, state: object, files: dict[str, FileRecord]) -> bytes:
    """Return the manifest as the bytes of its file.

    Raises:
        ValueError: the state is too long for a manifest.
    """
    manifest = msgspec.to_builtins(Manifest(_FORMAT, step, written, None, files))
    manifest["state"] = encode(state)
    body = json.dumps(manifest, separators=(",", ":"), allow_nan=False).encode()
    data = _START + b"%08x" % zlib.crc32(body) + _MIDDLE + body + _END
    if len(data) > LONGEST:
        raise ValueError(
            f"the manifest would have {len(data)} bytes, more than the allowed {LONGEST}; save long "
            "values of the state as tensors of a group"
        )
    return data


def load(path: Path) -> Manifest:
    """Return the manifest in the file at ``path``.

    Raises:
        CheckpointError: it does not exist, or was not made by ``pack``.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LONGEST:
            raise CheckpointError(f"{path.name} has {size} bytes, more than the {LONGEST} of any manifest")
        return unpack(file.read(size))


def unpack(data: bytes) -> Manifest:
    """Return the manifest that ``pack`` made of ``data``, its state decoded.

    Raises:
        CheckpointError: ``data`` is damaged, of a newer format, or names a file that no checkpoint can have.
    """
    body = data[_BODY : -len(_END)]
    if data != _START + b"%08x" % zlib.crc32(body) + _MIDDLE + body + _END:
        raise CheckpointError("the manifest is damaged: it does not match its checksum")
    try:
        fields = json.loads(body, object_pairs_hook=unique_keys)
        if isinstance(fields, dict) and isinstance(fields.get("format"), int) and fields["format"] > _FORMAT:
            raise CheckpointError(
                f"the manifest has format {fields['format']}, but this version reads up to {_FORMAT}; update anabranch"
            )
        manifest = msgspec.convert(fields, Manifest)
        for group in manifest.files:
            check_group(group)
        return msgspec.structs.replace(manifest, state=decode(manifest.state))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the manifest cannot be read: {error}") from error


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the dict of a JSON object, for ``object_pairs_hook``; a key said twice is a ValueError, not the last
    one.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return found
