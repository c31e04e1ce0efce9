"""The files of a checkpoint directory: how they are named, claimed, made durable and removed.

::

    model-00000012.safetensors         a group of generation 12
    optimizer-00000012.safetensors
    manifest-00000012.json             makes generation 12 whole: there only once all of its files are durable
    model-00000011.safetensors ...     the generation before
    .model-00000013.safetensors.new    being written, or left over from a save that was killed
    .lock                              claimed by the process that is saving

A generation is a serial number, not a step: saving the same step twice makes two generations, and no file is ever
written over. Files of other names are left alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from anabranch.checkpoint.file_lock import FileLock
from anabranch.errors import CheckpointError
from anabranch.record.fault_points import fault_point

__all__ = [
    "SET_ASIDE",
    "all_generations",
    "check_path",
    "claim",
    "complete_generations",
    "data_path",
    "generation_of",
    "is_manifest",
    "make_directory",
    "manifest_path",
    "publish",
    "remove_generation",
    "set_aside",
    "set_generation_aside",
    "sync_directory",
    "temporary",
]

SET_ASIDE = "set-aside"
"""The folder of files that are not to be used any more."""
_MANIFEST = re.compile(r"manifest-(\d{8,18})\.json")
_OURS = re.compile(r"\.?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*-(\d{8,18})\.safetensors|manifest-(\d{8,18})\.json)(?:\.new)?")


def check_path(given: object, name: str = "path") -> Path:
    """``given`` as a ``Path``.

    Raises:
        TypeError: it is none; names the argument and its value.
    """
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{name} is a string or a pathlib.Path, got {given!r}")
    return Path(given)


def data_path(directory: Path, group: str, generation: int) -> Path:
    """Path of ``group`` of ``generation``."""
    return directory / f"{group}-{generation:08d}.safetensors"


def manifest_path(directory: Path, generation: int) -> Path:
    """Path of the manifest of ``generation``."""
    return directory / f"manifest-{generation:08d}.json"


def generation_of(name: str) -> int | None:
    """Return the generation that a file of this name belongs to; ``None`` if it is not one of a checkpoint."""
    match = _OURS.fullmatch(name)
    return int(match[1] or match[2]) if match else None


def is_manifest(name: str) -> bool:
    """Return True if a file of this name makes its generation whole."""
    return _MANIFEST.fullmatch(name) is not None


def temporary(path: Path) -> Path:
    """Return the name that ``path`` has until it is whole."""
    return path.with_name(f".{path.name}.new")


def complete_generations(directory: Path) -> list[int]:
    """Return the generations that have a manifest, newest first; none if there is no such directory."""
    matches = (_MANIFEST.fullmatch(name) for name in _names(directory))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def all_generations(directory: Path) -> set[int]:
    """Return the generations with any file, including remains of failed saves."""
    return {generation for _, generation in _ours(directory)}


def remove_generation(directory: Path, generation: int) -> None:
    """Remove every file of ``generation``, the manifest first, so that it is never half a checkpoint."""
    doomed = sorted(name for name, owner in _ours(directory) if owner == generation)
    for name in sorted(doomed, key=lambda name: not _MANIFEST.fullmatch(name)):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder with this name must not be emptied
            (directory / name).unlink()
        fault_point("checkpoint.removed")


def set_aside(path: Path) -> Path:
    """Move ``path`` into the folder ``SET_ASIDE`` next to it, with an unused name.

    Raises:
        CheckpointError: the folder cannot be made; nothing was moved.
    """
    aside = path.parent / SET_ASIDE
    try:
        aside.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be set aside: the folder {aside} cannot be created ({error.strerror}); remove "
            "whatever has its name, and let this user write to the directory (chmod u+rwx)"
        ) from error
    found, number = aside / path.name, 1
    while os.path.lexists(found):
        found, number = aside / f"{path.name}.{number}", number + 1
    os.rename(path, found)
    return found


def set_generation_aside(directory: Path, generation: int) -> None:
    """Move every file of ``generation`` into the folder ``SET_ASIDE``, the manifest last, by which it is found."""
    doomed = sorted(name for name, owner in _ours(directory) if owner == generation)
    for name in sorted(doomed, key=lambda name: _MANIFEST.fullmatch(name) is not None):
        set_aside(directory / name)
    sync_directory(directory)


def make_directory(directory: Path) -> None:
    """Create ``directory`` and its missing parents, durably."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)
    fault_point("checkpoint.directory_made")


def publish(path: Path) -> None:
    """Give a file that is whole and durable its final name; the name is durable after ``sync_directory``."""
    os.rename(temporary(path), path)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Keep every other writer out of ``directory`` until the block ends; the kernel lets go if the process dies.

    Raises:
        CheckpointError: another process, or another thread, is saving there.
    """
    # The file stays: a lock that is removed can be held twice. A file, not the directory itself, since network file
    # systems lock only what is open for writing.
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        lock = FileLock(descriptor)
    except BlockingIOError:
        raise CheckpointError(
            f"another process or thread is saving to {directory}; give each job its own directory, and save "
            "from one process of a job"
        ) from None
    with lock:
        yield


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _ours(directory: Path) -> list[tuple[str, int]]:
    matches = (_OURS.fullmatch(name) for name in _names(directory))
    return [(match[0], int(match[1] or match[2])) for match in matches if match]
