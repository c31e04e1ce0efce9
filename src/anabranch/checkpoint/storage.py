"""``Storage``: a checkpoint directory on any storage that ``fsspec`` reaches, such as ``s3://bucket/run``.

A store has no locks and no renames, but an object exists whole or not at all. So a generation is written to a
temporary folder of this host first, then uploaded under its final names, the manifest last. A reader downloads what it
takes into such a folder, where it is checked as any checkpoint is.

A store may also never answer: each call to it is given up after a time, see ``bounded_call.py``. What it was at may
still come about, so nothing that it belongs to is removed then.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from anabranch.checkpoint.bounded_call import NoProgress, StoragePatience, bounded
from anabranch.checkpoint.generations import check_path, data_path, generation_of, is_manifest, manifest_path
from anabranch.checkpoint.manifest import LONGEST, Manifest
from anabranch.checkpoint.regular_file import Replaced, Unreadable
from anabranch.deadline import check_seconds
from anabranch.errors import CheckpointError
from anabranch.record.fault_points import fault_point

__all__ = ["Mirror", "NoAnswer", "Place", "SECONDS_VARIABLE", "Storage", "as_place"]

SECONDS_VARIABLE = "ANABRANCH_STORAGE_SECONDS"
"""The environment variable with the seconds after which a call to a store is given up; more for each MiB it moves."""
_SECONDS = 60.0

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://.+", re.DOTALL)
_T = TypeVar("_T")


class NoAnswer(Unreadable):
    """A store has not answered in time."""


class Storage:
    """A directory on a storage, by its URL; made without looking there.

    >>> str(Storage("memory://runs/first/"))
    'memory://runs/first'

    Args:
        url: as ``fsspec`` takes it; ``str()`` and messages leave a user and password in it out.

    Raises:
        ValueError: no file system supports this URL.
        ModuleNotFoundError: the file system's package is not installed.
        NoAnswer: from the methods, if the store does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._seconds = _seconds()
        try:
            fsspec: Any = import_module("fsspec")
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"saving to {self} needs fsspec: pip install 'anabranch[storage]'", name="fsspec"
            ) from None
        try:
            self._files, self.root = fsspec.core.url_to_fs(self.url)
        except ImportError as error:
            raise ModuleNotFoundError(f"{self} cannot be reached: {error}", name=error.name) from None
        except ValueError as error:
            raise ValueError(f"{self} cannot be saved to: {error}; give a folder or a URL of fsspec") from None

    def __str__(self) -> str:
        return re.sub(r"://[^/@]*@", "://", self.url)

    def __repr__(self) -> str:
        return f"Storage({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __deepcopy__(self, memo: dict[int, object]) -> Storage:
        return self

    def child(self, path: str) -> Storage:
        """Return the directory that is at ``path``, one of ``find``'s."""
        below = path.removeprefix(self.root).strip("/")
        return Storage(f"{self.url}/{below}") if below else self

    def names(self) -> list[str]:
        """Return the names directly in this directory; none if it does not exist."""
        return [path.rpartition("/")[2] for path in self._listed("ls", detail=False)]

    def find(self) -> dict[str, list[str]]:
        """Return the names of files by directory, in this one and any under it."""
        found: dict[str, list[str]] = {}
        for path in self._listed("find"):
            directory, _, name = path.rpartition("/")
            found.setdefault(directory, []).append(name)
        return found

    def _listed(self, how: str, **options: bool) -> list[str]:
        def ask() -> list[str]:
            self._files.invalidate_cache()  # other processes save there, too
            return list(getattr(self._files, how)(self.root, **options))

        return self._ask("list", ask, [])

    def put(self, file: Path, name: str) -> None:
        """Upload ``file`` as ``name``, and verify that it is complete."""
        patience = StoragePatience(self._seconds, file.stat().st_size)

        def upload() -> None:
            if self._files.root_marker:  # object stores have no folders, and some would make a bucket of a typing error
                self._files.makedirs(self.root, exist_ok=True)
            self._files.put_file(os.fspath(file), self._path(name), callback=_told(patience))
            self._files.invalidate_cache()
            size, sent = self._files.info(self._path(name))["size"], file.stat().st_size
            if size != sent:
                raise OSError(f"{sent} bytes were sent, but {size} are stored")

        fault_point("checkpoint.upload")
        self._ask(f"upload {name} to", upload, patience=patience)
        fault_point("checkpoint.uploaded")

    def remove(self, name: str) -> None:
        """Remove the file ``name``, if it exists."""
        fault_point("checkpoint.remove_upload")
        self._ask(f"remove {name} from", lambda: self._files.rm_file(self._path(name)), None)

    def size(self, name: str) -> int | None:
        """Return the bytes of the file ``name``; ``None`` if it does not exist."""
        return self._ask(f"look at {name} in", lambda: int(self._files.info(self._path(name))["size"]), None)

    def get(self, name: str, file: Path) -> None:
        """Download ``name`` to ``file``; do nothing if it does not exist."""
        fault_point("checkpoint.download")
        patience = StoragePatience(self._seconds, self.size(name) or 0)

        def download() -> None:
            self._files.get_file(self._path(name), os.fspath(file), callback=_told(patience))

        self._ask(f"read {name} from", download, None, patience=patience)

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def _ask(self, what: str, ask: Callable[[], _T], *if_missing: _T, patience: StoragePatience | None = None) -> _T:
        try:
            return self._bounded(what, ask, patience)
        except NoAnswer:
            raise
        except FileNotFoundError as error:
            if if_missing:
                return if_missing[0]
            raise Unreadable(f"cannot {what} {self}: {error}") from error
        except Exception as error:  # each file system has its own errors
            raise Unreadable(f"cannot {what} {self}: {type(error).__name__}: {error}") from error

    def _bounded(self, what: str, ask: Callable[[], _T], patience: StoragePatience | None = None) -> _T:
        try:
            return bounded(ask, patience or StoragePatience(self._seconds))
        except NoProgress as error:
            raise NoAnswer(
                f"cannot {what} {self}: {error}; check that the store is reachable, or allow more time in "
                f"{SECONDS_VARIABLE}"
            ) from None

    # A generation as a whole.

    def generations(self) -> set[int]:
        """Return the generations with any file, including remains of failed saves."""
        return {number for name in self.names() if (number := generation_of(name)) is not None}

    def complete(self) -> list[int]:
        """Return the generations that have a manifest, newest first."""
        return sorted((generation_of(name) or 0 for name in self.names() if is_manifest(name)), reverse=True)

    def upload(self, folder: Path, local: int, groups: list[str], keep: int) -> str:
        """Upload generation ``local`` of ``folder`` as this directory's newest, and keep so many; return its manifest's
        name.
        """
        generation = max(self.generations(), default=0) + 1
        manifest = manifest_path(folder, generation).name
        try:
            for group in groups:
                self.put(data_path(folder, group, local), data_path(folder, group, generation).name)
            self.put(manifest_path(folder, local), manifest)
        except NoAnswer:
            raise  # a transfer may still complete; the next save removes the remains
        except Exception:
            with suppress(CheckpointError):
                self._remove(generation)
            raise
        kept = set(self.complete()[:keep])
        for old in sorted(self.generations() - kept):
            self._remove(old)
        return manifest

    def _remove(self, generation: int) -> None:
        doomed = [name for name in self.names() if generation_of(name) == generation]
        for name in sorted(doomed, key=lambda name: not is_manifest(name)):
            self.remove(name)


def _seconds() -> float:
    text = os.environ.get(SECONDS_VARIABLE) or f"{_SECONDS}"
    try:
        seconds = float(text)
        check_seconds(**{SECONDS_VARIABLE: seconds})
    except ValueError:
        raise ValueError(
            f"{SECONDS_VARIABLE}={text!r} is not a number of seconds above 0; unset it, or set one"
        ) from None
    return seconds


def _told(patience: StoragePatience) -> Any:
    """Return a callback of ``fsspec`` that records progress."""
    fsspec: Any = import_module("fsspec.callbacks")
    return fsspec.Callback(hooks={"patience": lambda size, value, **facts: patience.moved() if value else None})


Place = Path | Storage
"""A folder of this host, or a directory on a storage."""


def as_place(given: object, name: str = "path") -> Place:
    """Return ``given`` as a folder, or as a directory of a storage if it is a URL; ``file://`` is a folder.

    Raises:
        TypeError: it is not a path; names the argument and its value.
        ValueError, ModuleNotFoundError: as of ``Storage``.
    """
    if isinstance(given, Storage):
        return given
    if isinstance(given, str) and given.startswith("file://"):
        return Path(given.removeprefix("file://"))
    return Storage(given) if isinstance(given, str) and _URL.fullmatch(given) else check_path(given, name)


class Mirror:
    """A temporary folder for downloads; it is removed with the last checkpoint read from it."""

    def __init__(self, top: Storage) -> None:
        self._folder = tempfile.mkdtemp(prefix="anabranch-checkpoint-")
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._top = top
        self._places: dict[Path, Storage] = {}

    def manifests(self, *, below: bool, generation: int | None = None) -> list[Path]:
        """Download the manifests of the directory, and of those ``below`` it; return the folders they are in."""
        found = self._top.find() if below else {self._top.root: self._top.names()}
        for number, (path, names) in enumerate(sorted(found.items())):
            folder = Path(self._folder, f"{number}")
            folder.mkdir()
            self._places[folder] = place = self._top.child(path)
            for name in filter(is_manifest, names):
                if generation in (None, generation_of(name)):
                    if (place.size(name) or 0) > LONGEST:
                        (folder / name).touch()  # too long for a manifest: damaged
                    else:
                        place.get(name, folder / name)
                        if not (folder / name).exists():
                            raise Replaced(f"{name} in {place} was removed while it was read; read the newest")
        return list(self._places)

    def fetch(self, folder: Path, generation: int, manifest: Manifest) -> None:
        """Download the files of a generation, of their sizes in the manifest."""
        place = self._places[folder]
        for group, record in manifest.files.items():
            path = data_path(folder, group, generation)
            if place.size(path.name) == record.bytes:
                place.get(path.name, path)

    def drop(self, folder: Path, generation: int, manifest: Manifest) -> None:
        """Give the room of a generation back that is not taken."""
        for group in manifest.files:
            data_path(folder, group, generation).unlink(missing_ok=True)

    def place(self, folder: Path) -> Storage:
        """Return where ``folder`` was downloaded from."""
        return self._places[folder]

    def named(self, text: str) -> str:
        """Return ``text`` with the storage's directories in place of the folders."""
        for folder, place in sorted(self._places.items(), reverse=True):
            text = re.sub(rf"{re.escape(str(folder))}(?!\d)", str(place), text)
        return text

    @contextmanager
    def renamed_errors(self) -> Iterator[None]:
        """Raise errors of the folders as errors of the storage."""
        try:
            yield
        except CheckpointError as error:
            if (text := self.named(str(error))) == str(error):
                raise
            raise type(error)(text) from error
