"""``read`` and ``read_newest``: the newest generation that is whole, to the last bit.

A save that was killed leaves files without a manifest, which are not a checkpoint and are silently skipped. A
generation that has a manifest and does not match it is damaged: it is skipped with a warning in the log of
``anabranch.checkpoint`` that says which and why, and the one before is taken. One that this user may not read is not
a damaged one: nothing is taken in its place. One that was removed meanwhile, since a running job has saved newer ones,
is not damaged either: the newest is read anew.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from anabranch.checkpoint.generations import SET_ASIDE, Replaced, Unreadable, data_path, manifest_path, unreadable
from anabranch.checkpoint.manifest import FileRecord, Manifest
from anabranch.checkpoint.manifest import load as load_manifest
from anabranch.checkpoint.storage import Download, Folder, Place, Storage, as_place
from anabranch.checkpoint.tensor_file import check, load
from anabranch.errors import CheckpointError
from anabranch.tensors.dtypes import dtype_name

_log = logging.getLogger("anabranch.checkpoint")

_TRIES = 10  # a writer that replaces what is read as often as this keeps fewer generations than a reader needs

_T = TypeVar("_T")


def again(read: Callable[[], _T]) -> _T:
    """Return ``read()``, repeated while what it reads is ``Replaced``."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(Replaced):
            return read()
    return read()


class _Damaged(CheckpointError):
    """A generation has a manifest, and does not match it."""


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
    _folder: Folder = field(repr=False)

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
        with _named(self._folder, self.generation):
            return load(data_path(self._folder.path, group, self.generation), self._files[group], device)

    def readers(self, prefix: str = "") -> dict[str, Callable[[], dict[str, Tensor]]]:
        """Return what reads each group whose name begins with ``prefix``, by the rest of the name."""
        groups = (group for group in self.groups if group.startswith(prefix))
        return {group.removeprefix(prefix): functools.partial(self.tensors, group) for group in groups}

    def written(self) -> set[int]:
        """Return when each complete generation in its directory was written, by which it is known."""
        return {manifest.written for _, manifest in _manifests(self._folder, [])}


@contextlib.contextmanager
def _named(folder: Folder, generation: int) -> Iterator[None]:
    """Say of what generation a file is damaged; or that it was replaced, of which the manifest is removed first."""
    try:
        yield
    except Unreadable:
        raise
    except (CheckpointError, OSError) as error:
        complete = folder.complete()
        if complete and generation < min(complete):
            raise Replaced(
                f"generation {generation} in {folder.place} was replaced while it was read; read the newest"
            ) from error
        raise _Damaged(f"generation {generation} in {folder.place} is damaged: {error}") from error


def _manifest(folder: Folder, generation: int) -> Manifest:
    with _named(folder, generation):
        return load_manifest(folder.file(manifest_path(folder.path, generation)))


def _manifests(folder: Folder, damaged: list[str]) -> Iterator[tuple[int, Manifest]]:
    """Yield the generations of ``folder`` with their manifests, newest first; ``damaged`` gets errors of the others."""
    try:
        generations = folder.complete()
    except OSError as error:
        raise unreadable(folder.path, error) from error
    for generation in generations:
        try:
            yield generation, _manifest(folder, generation)
        except _Damaged as error:
            damaged.append(str(error))


def newest_manifest(place: Place) -> Manifest | None:
    """Return the newest manifest in ``place`` that is not damaged."""
    return next((manifest for _, manifest in _manifests(_folder(place), [])), None)


def _folder(place: Place) -> Folder:
    return Download(place) if isinstance(place, Storage) else Folder(place, place)


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
    folder = _folder(as_place(path))
    if generation is not None:
        return _open(folder, generation, _manifest(folder, generation), data=False)
    newest = again(lambda: _newest_whole([folder]))
    if newest is None:
        missing = "" if folder.path.is_dir() else ": there is no such directory"
        if any(folder.path.glob("model.safetensors*")):
            missing = ": it holds an exported model; model.load_state_dict(safetensors.torch.load_file(...)) reads it"
        raise CheckpointError(f"there is no checkpoint in {folder.place}{missing}")
    return newest


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
    >>> tensors = {"model": {"weight": torch.ones(2)}}
    >>> for step in (5, 10):
    ...     _ = write(f"{directory}/step-{step}", tensors, None, step=step)
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
    return again(lambda: _newest_whole(_folders(place), wanted))


def _folders(place: Place) -> list[Folder]:
    """Return ``place`` and the directories under it."""
    if isinstance(place, Storage):
        return [Download(directory) for directory in place.directories()]
    paths = (Path(path) for path, _, _ in os.walk(place, onerror=_refuse_unreadable))
    return [Folder(path, path) for path in sorted(paths) if path.name != SET_ASIDE or path == place]


def _refuse_unreadable(error: OSError) -> None:
    """Pass over what is gone or is not a directory, and what a file system keeps for itself."""
    place = Path(error.filename)
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)) and place.name != "lost+found":
        raise unreadable(place, error) from error


def _newest_whole(folders: list[Folder], wanted: Callable[[object], bool] = _any) -> Checkpoint | None:
    """Of each folder's newest whole generation the one with the highest step, of those that are ``wanted`` if any is.

    Manifests are small and say the step, so the data is read only of what would win.
    """
    damaged: list[str] = []
    older = {folder: _manifests(folder, damaged) for folder in folders}
    newest = {folder: first for folder, manifests in older.items() if (first := next(manifests, None))}
    while newest:
        folder, (generation, manifest) = max(
            newest.items(), key=lambda item: (wanted(item[1][1].state), item[1][1].step, item[1][1].written)
        )
        if damaged and not wanted(manifest.state):  # a damaged one may have been wanted
            break
        try:
            checkpoint = _open(folder, generation, manifest, data=True)
        except _Damaged as error:
            damaged.append(str(error))
            del newest[folder]
            if following := next(older[folder], None):
                newest[folder] = following
            continue
        for reason in damaged:
            _log.warning("%s; using generation %d in %s, step %d", reason, generation, folder.place, checkpoint.step)
        return checkpoint
    if damaged:
        raise CheckpointError("no checkpoint is complete: " + "; ".join(damaged))
    return None


def _open(folder: Folder, generation: int, manifest: Manifest, *, data: bool) -> Checkpoint:
    with _named(folder, generation):
        for group, record in manifest.files.items():
            check(folder.file(data_path(folder.path, group, generation)), record, data=data)
    return Checkpoint(manifest.step, manifest.state, folder.place, generation, manifest.files, folder)


def fit(expected: Mapping[str, object], saved: Mapping[str, object], what: str = "model") -> None:
    """Raise ``CheckpointError`` unless both have the same names, and under each the same shape and dtype.

    >>> import torch
    >>> fit({"weight": torch.ones(2)}, {"weight": torch.ones(3), "bias": torch.ones(2)})
    Traceback (most recent call last):
    anabranch.errors.CheckpointError: the checkpoint belongs to another model:
      unexpected: bias (2,) float32
      differs: weight is (3,) float32 in the checkpoint, (2,) float32 here

    Args:
        expected: the tensors to load into, or other state.
        saved: the checkpoint's.
        what: what both are, for the message.
    """
    here = {name: _show(value) for name, value in expected.items()}
    there = {name: _show(value) for name, value in saved.items()}
    problems = [f"missing: {name} {here[name]}" for name in here if name not in there]
    problems += [f"unexpected: {name} {there[name]}" for name in there if name not in here]
    problems += [
        f"differs: {name} is {there[name]} in the checkpoint, {shown} here"
        for name, shown in here.items()
        if there.get(name, shown) != shown
    ]
    if problems:
        raise CheckpointError(f"the checkpoint belongs to another {what}:\n  " + "\n  ".join(problems))


def _show(value: object) -> str:
    return f"{tuple(value.shape)} {dtype_name(value.dtype)}" if isinstance(value, Tensor) else "(other state)"
