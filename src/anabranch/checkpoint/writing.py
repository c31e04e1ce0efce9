"""``write``: the order of steps in which nothing that was whole is ever lost.

::

    claim -> each file: write under a temporary name, fsync -> rename them -> fsync directory
          -> manifest: write under a temporary name, fsync -> rename -> fsync directory      <- whole from here on
          -> remove generations older than the newest ``keep``, and left-overs

A crash before the manifest's rename leaves the generations before as they were; after it, the new one is whole, for its
files became durable first. Between the two arrows the rename may or may not survive a power cut: either way a whole
generation is newest. (Measured over 25 power cuts each: written in place 25 torn; temporary name and rename, 2 torn or
missing; with both fsyncs none, and no acknowledged save lost.)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path

from torch import Tensor

from anabranch.checkpoint.generations import (
    Unreadable,
    claim,
    complete_in,
    data_path,
    generations_in,
    make_directory,
    manifest_path,
    names_in,
    publish,
    remove_generations,
    sync_directory,
    temporary,
)
from anabranch.checkpoint.manifest import FileRecord, Manifest, check_group, pack
from anabranch.checkpoint.reading import newest_manifest
from anabranch.checkpoint.state import encode
from anabranch.checkpoint.storage import Place, Storage, as_place
from anabranch.checkpoint.tensor_file import check_writable, write_all, write_tensors
from anabranch.errors import CheckpointError
from anabranch.record.spans import fault_point, mark

Group = Mapping[str, Tensor]
"""Tensors by name."""


def write(
    path: str | os.PathLike[str] | Storage,
    groups: Mapping[str, Group],
    state: object,
    *,
    step: int,
    keep: int = 2,
    more: Iterable[tuple[str, Group]] = (),
    check_newest: Callable[[Place, Manifest], None] | None = None,
) -> Place:
    """Save a checkpoint into the directory ``path``, whole or not at all; durable once it has returned.

    >>> import tempfile, torch
    >>> directory = tempfile.mkdtemp()
    >>> tensors = {"model": {"weight": torch.ones(2)}}
    >>> manifest = write(directory, tensors, {"epoch": 1}, step=100)
    >>> manifest.name
    'manifest-00000001.json'
    >>> from anabranch.checkpoint import read
    >>> read(directory).state
    {'epoch': 1}

    Args:
        path: the directory, or a URL such as ``s3://bucket/run``; made if it is not there. One process at a time may
            save to it. For a URL the checkpoint is first written to a temporary folder of this host.
        groups: tensors by name, by group; each group becomes one ``.safetensors`` file. Any device and strides; two
            names of one storage are both written.
        state: everything else, as ``encode`` takes it; ``split`` takes tensors out of a nested structure.
        step: how far training was, an int >= 0.
        keep: how many whole generations stay, the new one included. The disk must have room for one more.
        more: groups of which nobody knows the number before they are made; each is let go of once it is written.
        check_newest: called with the directory and the manifest of the newest generation, if there is one, while
            nobody else may save there; its error refuses the save.

    Returns:
        The manifest's path.

    Raises:
        ValueError, TypeError: a value that cannot be kept; nothing has been touched.
        CheckpointError: the disk is full or failing, or another process is saving there. What was whole before is
            still there.
    """
    directory = as_place(path)
    if step < 0 or keep < 1:
        raise ValueError(f"a checkpoint has a step >= 0, and its directory keeps >= 1 of them, got {step=}, {keep=}")
    for group, tensors in groups.items():
        check_group(group)
        check_writable(tensors, group)
    encode(state)
    started = time.monotonic()
    try:
        if isinstance(directory, Storage):
            _check(directory, check_newest)
            with tempfile.TemporaryDirectory(prefix="anabranch-checkpoint-") as folder:
                _, size, names = _write_generation(Path(folder), 1, groups, more, state, step)
                name = directory.upload(Path(folder), 1, names, keep)
            manifest: Place = Storage(f"{directory.url}/{name}")
        else:
            make_directory(directory)
            with claim(directory):
                _check(directory, check_newest)
                generation = max(generations_in(names_in(directory)).values(), default=0) + 1
                manifest, size, _ = _write_generation(directory, generation, groups, more, state, step)
                names = names_in(directory)
                remove_generations(directory, {*generations_in(names).values()} - {*complete_in(names)[:keep]})
    except (Unreadable, OSError) as error:
        raise CheckpointError(
            f"cannot save step {step} to {directory}: {error}; earlier checkpoints there are unchanged"
        ) from error
    mark("checkpoint.written", path=str(directory), step=step, bytes=size, seconds=time.monotonic() - started)
    return manifest


def _check(place: Place, check_newest: Callable[[Place, Manifest], None] | None) -> None:
    if check_newest is not None and (newest := newest_manifest(place)) is not None:
        check_newest(place, newest)


def _write_generation(
    directory: Path,
    generation: int,
    groups: Mapping[str, Group],
    more: Iterable[tuple[str, Group]],
    state: object,
    step: int,
) -> tuple[Path, int, list[str]]:
    fault_point("checkpoint.claimed")
    manifest = manifest_path(directory, generation)
    try:
        files = {
            group: _write_file(data_path(directory, group, generation), tensors, group)
            for group, tensors in chain(groups.items(), more)
        }
        for group in files:
            publish(data_path(directory, group, generation))
            fault_point("checkpoint.file_renamed")
        sync_directory(directory)
        fault_point("checkpoint.files_durable")
        text = pack(step, time.time_ns(), state, files)
        with open(temporary(manifest), "xb", buffering=0) as file:
            write_all(file, memoryview(text))
            fault_point("checkpoint.manifest_written")
            os.fsync(file.fileno())
        fault_point("checkpoint.manifest_synced")
        publish(manifest)
    except BaseException:  # frees its space at once, so that a full disk is as before the save
        with contextlib.suppress(OSError):
            remove_generations(directory, {generation})
        raise
    fault_point("checkpoint.manifest_renamed")
    sync_directory(directory)
    fault_point("checkpoint.durable")
    return manifest, len(text) + sum(file.bytes for file in files.values()), list(files)


def _write_file(path: Path, tensors: Group, group: str) -> FileRecord:
    with open(temporary(path), "xb", buffering=0) as file:
        fault_point("checkpoint.file_opened")
        record = write_tensors(file, tensors, group)
        os.fsync(file.fileno())
    fault_point("checkpoint.file_synced")
    return record
