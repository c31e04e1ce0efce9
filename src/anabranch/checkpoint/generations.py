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
from collections.abc import Iterable, Iterator
from pathlib import Path

from anabranch.checkpoint.file_lock import FileLock
from anabranch.errors import CheckpointError
from anabranch.record.fault_points import fault_point

SET_ASIDE = "set-aside"
"""The folder of files that are not to be used any more."""
_MANIFEST = re.compile(r"manifest-(\d{8,18})\.json")
_OURS = re.compile(r"\.?(?:[A-Za-z0-9_][A-Za-z0-9_.-]*-(\d{8,18})\.safetensors|manifest-(\d{8,18})\.json)(?:\.new)?")


def check_path(path: object, name: str = "path") -> Path:
    """``path`` as a ``Path``.

    Raises:
        TypeError: it is none; names the argument and its value.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} is a string or a pathlib.Path, got {path!r}")
    return Path(path)


def data_path(directory: Path, group: str, generation: int) -> Path:
    """Path of ``group`` of ``generation``."""
    return directory / f"{group}-{generation:08d}.safetensors"


def manifest_path(directory: Path, generation: int) -> Path:
    """Path of the manifest of ``generation``."""
    return directory / f"manifest-{generation:08d}.json"


def generations_in(names: Iterable[str]) -> dict[str, int]:
    """Return the generation of each file that is one of a checkpoint, remains of failed saves included, in the order
    in which they are removed: manifests first, so that none is ever half a checkpoint.
    """
    matches = [match for name in names if (match := _OURS.fullmatch(name))]
    return {match[0]: int(match[1] or match[2]) for match in sorted(matches, key=lambda match: match[2] is None)}


def complete_in(names: Iterable[str]) -> list[int]:
    """Return the generations that have a manifest, newest first."""
    return sorted((int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name))), reverse=True)


def temporary(path: Path) -> Path:
    """Return the name that ``path`` has until it is whole."""
    return path.with_name(f".{path.name}.new")


def complete_generations(directory: Path) -> list[int]:
    """Return the generations that have a manifest, newest first; none if there is no such directory."""
    return complete_in(names_in(directory))


def remove_generations(directory: Path, generations: Iterable[int]) -> None:
    """Remove every file of ``generations``."""
    doomed = set(generations)
    for name, generation in generations_in(names_in(directory)).items():
        if generation in doomed:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a folder of this name must not be emptied
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
    target, number = aside / path.name, 1
    while os.path.lexists(target):
        target, number = aside / f"{path.name}.{number}", number + 1
    os.rename(path, target)
    return target


def set_generation_aside(directory: Path, generation: int) -> None:
    """Move every file of ``generation`` into the folder ``SET_ASIDE``, the manifest last, by which it is known."""
    for name, owner in reversed(generations_in(names_in(directory)).items()):
        if owner == generation:
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


def names_in(directory: Path) -> list[str]:
    """Return the names in ``directory``; none if there is no such directory."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
