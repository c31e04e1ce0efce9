"""``export``: a model in the files that plain PyTorch and Hugging Face's ``from_pretrained`` read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from anabranch.checkpoint.generations import sync_directory
from anabranch.checkpoint.tensor_file import Blocks, check_writable, write_tensors

_NAME, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MOST = 5_000_000_000  # bytes of a file


def export(folder: Path, state: Mapping[str, Any], most: int = _MOST) -> None:
    """Write ``state`` to ``folder`` as ``model.safetensors``, above ``most`` bytes as shards with an index.

    Raises:
        ValueError: a value that is no tensor, or that safetensors cannot hold.
    """
    for name, value in state.items():
        if not isinstance(value, Tensor | Blocks):
            raise ValueError(f"{name} is a {type(value).__name__} (get_extra_state), and an export holds tensors only")
    check_writable(state, "model")
    sizes = {name: value.dtype.itemsize * math.prod(value.shape) for name, value in state.items()}
    files: list[list[str]] = [[]]
    room = most
    for name, size in sizes.items():
        if size > room and files[-1]:
            files.append([])
            room = most
        files[-1].append(name)
        room -= size
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        [_NAME] if len(files) == 1 else [f"model-{k + 1:05}-of-{len(files):05}.safetensors" for k in range(len(files))]
    )
    try:
        for file, members in zip(names, files, strict=True):
            with (folder / f".{file}.new").open("wb", buffering=0) as new:
                write_tensors(new, {name: state[name] for name in members}, "model")
                os.fsync(new.fileno())
    except BaseException:
        for file in names:
            (folder / f".{file}.new").unlink(missing_ok=True)
        raise
    places = {name: file for file, members in zip(names, files, strict=True) for name in members}
    index = msgspec.json.format(
        msgspec.json.encode({"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})
    )
    older = {path for path in folder.glob("model*.safetensors*") if path.name == _NAME or "-of-" in path.name}
    if len(names) > 1:  # an index never names files of two exports, wherever this ends
        (folder / _INDEX).unlink(missing_ok=True)
        sync_directory(folder)
    for file in names:
        (folder / f".{file}.new").replace(folder / file)
    # A reader takes model.safetensors first, so until it is gone, or once it is there, the rest does not count.
    if len(names) > 1:
        (folder / f".{_INDEX}.new").write_bytes(index)
        (folder / f".{_INDEX}.new").replace(folder / _INDEX)
    elif (folder / _INDEX).exists():
        older.add(folder / _INDEX)
    for path in older - {folder / file for file in names}:
        path.unlink(missing_ok=True)
    sync_directory(folder)
