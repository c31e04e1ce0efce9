"""``read`` and ``read_newest``: the newest generation that is whole, to the last bit.

A save that was killed leaves files without a manifest, which are not a checkpoint and are silently skipped. A
generation that has a manifest and does not match it is damaged: it is skipped with a warning in the log of
``anabranch.checkpoint`` that says which and why, and the one before is taken. One that this user may not read is not
a damaged one: nothing is taken in its place. One that was removed meanwhile, since a running job has saved newer ones,
is not damaged either: the newest is read anew.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from anabranch.checkpoint.generations import SET_ASIDE, complete_generations, data_path, manifest_path
from anabranch.checkpoint.manifest import FileRecord, Manifest
from anabranch.checkpoint.manifest import load as load_manifest
from anabranch.checkpoint.regular_file import Replaced, Unreadable, unreadable
from anabranch.checkpoint.storage import Mirror, Place, Storage, as_place
from anabranch.checkpoint.tensor_file import check, load
from anabranch.errors import CheckpointError

__all__ = ["Checkpoint", "again", "newest_manifest", "read", "read_newest"]

_log = logging.getLogger("anabranch.checkpoint")

_TRIES = 10  # a writer that replaces what is read as often as this keeps fewer generations than a reader needs

_T = TypeVar("_T")


def again(read: Callable[[], _T]) -> _T:
    """Return ``read()``, repeated while what it reads is ``Replaced``."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(Replaced):
            return read()
    return read()


def _any(state: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One whole generation on disk; its tensors are read when requested.

    Attributes:
        step: how far training was.
        state: the saved state other than tensors.
        path: the directory, or that of a storage.
        generation: its serial number there; ``read(path, generation=...)`` finds this one again.
    """

    step: int
    state: Any
    path: Place
    generation: int
    _files: Mapping[str, FileRecord] = field(repr=False)
    _folder: Path = field(repr=False)
    _mirror: Mirror | None = field(repr=False, default=None)

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups, as they were given."""
        return tuple(self._files)

    def tensors(self, group: str, *, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the tensors of ``group``, each checked as it is read, and moved to ``device``.

        They own their memory (nothing is mapped): one that is changed, or a file that is removed, harms neither.

        Raises:
            CheckpointError: there is no such group, or its file was damaged or removed since.
        """
        if group not in self._files:
            raise CheckpointError(f"the checkpoint in {self.path} has the groups {list(self._files)}, not {group!r}")
        try:
            return load(data_path(self._folder, group, self.generation), self._files[group], device)
        except Unreadable:
            raise
        except CheckpointError as error:
            raise _damaged(self.path, self.generation, error) from error

    def written(self) -> set[int]:
        """Return when each complete generation in its directory was written, by which it is known."""
        return {manifest.written for manifest in _undamaged(self._folder)}


def newest_manifest(place: Place) -> Manifest | None:
    """Return the newest manifest in ``place`` that is not damaged."""
    if isinstance(place, Storage):
        mirror = Mirror(place)
        return newest_manifest(mirror.manifests(below=False)[0])
    return next(_undamaged(place), None)


def _undamaged(directory: Path) -> Iterator[Manifest]:
    for generation in complete_generations(directory):
        try:
            yield _manifest(directory, generation)
        except Unreadable:
            raise
        except CheckpointError:
            continue


def read(path: str | os.PathLike[str] | Storage, *, generation: int | None = None) -> Checkpoint:
    """Return the newest complete checkpoint in the directory ``path`` itself.

    >>> import tempfile, torch
    >>> from anabranch.checkpoint import write
    >>> directory = tempfile.mkdtemp()
    >>> _ = write(directory, {"model": {"weight": torch.ones(2)}}, {"epoch": 1}, step=100)
    >>> checkpoint = read(directory)
    >>> checkpoint.step, checkpoint.tensors("model")
    (100, {'weight': tensor([1., 1.])})

    Args:
        path: the directory or URL that ``write`` was given.
        generation: this one and no other. Then the bytes of the tensors are not read before ``tensors`` requests them:
            for the ranks of a job that follow the choice of the first.

    Raises:
        CheckpointError: there is none, or none is whole, and says why, of each; or what would be taken may not be read.
    """
    directory = as_place(path)
    if isinstance(directory, Storage):
        found = again(lambda: _read_stored(directory, below=False, generation=generation))
        if found is None:
            raise CheckpointError(f"there is no checkpoint in {directory}")
        return found
    if generation is not None:
        return _open(directory, generation, _manifest(directory, generation), data=False)
    found = again(lambda: _newest_whole([directory]))
    if found is None:
        missing = "" if directory.is_dir() else ": there is no such directory"
        raise CheckpointError(f"there is no checkpoint in {directory}{missing}")
    return found


def read_newest(
    path: str | os.PathLike[str] | Storage, *, wanted: Callable[[object], bool] = _any
) -> Checkpoint | None:
    """Return the newest complete checkpoint in the directory ``path`` or in any directory under it.

    Of each directory its newest whole generation counts, and of these the one with the highest step (clocks differ
    between hosts, steps do not). ``None`` if there is none at all.

    >>> import tempfile, torch
    >>> from anabranch.checkpoint import write
    >>> directory = tempfile.mkdtemp()
    >>> read_newest(directory) is None
    True
    >>> for step in (5, 10):
    ...     _ = write(f"{directory}/step-{step}", {"model": {"weight": torch.ones(2)}}, None, step=step)
    >>> read_newest(directory).step
    10

    Args:
        path: the directory or URL; directories ``set-aside`` under it are passed over.
        wanted: whether a checkpoint with this ``state`` is wanted; another is only returned if there are no others.

    Raises:
        CheckpointError: there are checkpoints and every one is damaged, which starting again would hide; or a file or
            directory may not be read, in which the newest may be.
    """
    place = as_place(path)
    if isinstance(place, Storage):
        return again(lambda: _read_stored(place, below=True, wanted=wanted))
    directories = sorted(Path(found) for found, _, _ in os.walk(place, onerror=_refuse_unreadable))
    directories = [found for found in directories if found.name != SET_ASIDE or found == place]
    return again(lambda: _newest_whole(directories, wanted=wanted))


def _read_stored(
    storage: Storage, *, below: bool, generation: int | None = None, wanted: Callable[[object], bool] = _any
) -> Checkpoint | None:
    mirror = Mirror(storage)
    folders = mirror.manifests(below=below, generation=generation)
    with mirror.renamed_errors():
        if generation is not None:
            manifest = _manifest(folders[0], generation, mirror.place(folders[0]))
            return _open(folders[0], generation, manifest, data=False, mirror=mirror)
        return _newest_whole(folders, mirror, wanted)


def _refuse_unreadable(error: OSError) -> None:
    """Pass over what is gone or is not a directory, and what a file system keeps for itself."""
    place = Path(error.filename)
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)) and place.name != "lost+found":
        raise unreadable(place, error) from error


def _newest_whole(
    directories: list[Path], mirror: Mirror | None = None, wanted: Callable[[object], bool] = _any
) -> Checkpoint | None:
    """Of each directory's newest whole generation the one with the highest step, of those that are ``wanted`` if any
    is.

    Manifests are small and say the step, so the data is read only of what would win.
    """
    heap: list[tuple[bool, int, int, Path, Iterator[int], int, Manifest]] = []
    reasons: list[str] = []

    def offer(directory: Path, generations: Iterator[int]) -> None:
        for generation in generations:
            try:
                manifest = _manifest(directory, generation)
            except (Unreadable, Replaced):
                raise
            except CheckpointError as error:
                reasons.append(str(error))
            else:
                order = (not wanted(manifest.state), -manifest.step, -manifest.written, directory)
                heapq.heappush(heap, (*order, generations, generation, manifest))
                return

    for directory in directories:
        try:
            newest_first = complete_generations(directory)
        except OSError as error:
            raise unreadable(directory, error) from error
        offer(directory, iter(newest_first))
    while heap:
        unwanted, _, _, directory, rest, generation, manifest = heapq.heappop(heap)
        if unwanted and reasons:  # a damaged one may have been wanted
            break
        try:
            checkpoint = _open(directory, generation, manifest, data=True, mirror=mirror)
        except (Unreadable, Replaced):
            raise
        except CheckpointError as error:
            reasons.append(str(error))
            offer(directory, rest)
            continue
        for reason in reasons:
            told = reason if mirror is None else mirror.named(reason)
            _log.warning("%s; using generation %d in %s, step %d", told, generation, checkpoint.path, checkpoint.step)
        return checkpoint
    if reasons:
        raise CheckpointError("no checkpoint is complete: " + "; ".join(reasons))
    return None


def _manifest(directory: Path, generation: int, place: Place | None = None) -> Manifest:
    try:
        return load_manifest(manifest_path(directory, generation))
    except Unreadable:
        raise
    except (CheckpointError, OSError) as error:
        raise _damaged(place or directory, generation, error) from error


def _open(
    directory: Path, generation: int, manifest: Manifest, *, data: bool, mirror: Mirror | None = None
) -> Checkpoint:
    place = directory if mirror is None else mirror.place(directory)
    if mirror is not None:
        mirror.fetch(directory, generation, manifest)
    try:
        for group, record in manifest.files.items():
            check(data_path(directory, group, generation), record, data=data)
    except Unreadable:
        raise
    except CheckpointError as error:
        if mirror is not None:
            mirror.drop(directory, generation, manifest)
        raise _damaged(place, generation, error) from error
    return Checkpoint(manifest.step, manifest.state, place, generation, manifest.files, directory, mirror)


def _damaged(directory: Place, generation: int, error: Exception) -> CheckpointError:
    complete = directory.complete() if isinstance(directory, Storage) else complete_generations(directory)
    if complete and generation < min(complete):  # the manifest is removed first
        return Replaced(f"generation {generation} in {directory} was replaced while it was read; read the newest")
    return CheckpointError(f"generation {generation} in {directory} is damaged: {error}")
