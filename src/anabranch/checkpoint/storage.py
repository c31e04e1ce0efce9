"""``Storage``: a checkpoint directory on any storage that ``fsspec`` reaches, such as ``s3://bucket/run``.

A store has no locks and no renames, but an object exists whole or not at all. So a generation is written to a
temporary folder of this host first, then uploaded under its final names, the manifest last. A reader downloads what it
takes into such a folder, where it is checked as any checkpoint is.

A store may also never answer: each call to it is made on a thread of its own, and abandoned after a time. The abandoned
call may still complete, so nothing that it belongs to is removed then.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from anabranch.checkpoint.generations import (
    Unreadable,
    check_path,
    complete_generations,
    complete_in,
    data_path,
    generations_in,
    manifest_path,
)
from anabranch.deadline import check_seconds
from anabranch.errors import CheckpointError
from anabranch.liveness.meeting import begin_call
from anabranch.record.spans import fault_point

SECONDS_VARIABLE = "ANABRANCH_STORAGE_SECONDS"
"""The environment variable with the seconds after which a call to a store is given up; more for each MiB it moves."""
_SECONDS = 60.0
_SLOWEST = 1 << 20  # bytes a second: a slower connection counts as dead

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

    def __deepcopy__(self, memo: dict[int, object]) -> Storage:
        return self

    def names(self) -> list[str]:
        """Return the names directly in this directory; none if it does not exist."""
        return [path.rpartition("/")[2] for path in self._listed("ls", detail=False)]

    def directories(self) -> list[Storage]:
        """Return the directories with files, of this one and those under it."""
        paths = sorted({path.rpartition("/")[0].removeprefix(self.root).strip("/") for path in self._listed("find")})
        return [Storage(f"{self.url}/{path}") if path else self for path in paths]

    def _listed(self, how: str, **options: bool) -> list[str]:
        def ask() -> list[str]:
            self._files.invalidate_cache()  # other processes save there, too
            return list(getattr(self._files, how)(self.root, **options))

        return self._ask("list", ask, [])

    def put(self, file: Path, name: str) -> None:
        """Upload ``file`` as ``name``, and verify that it is complete."""
        size = file.stat().st_size

        def upload() -> None:
            if self._files.root_marker:  # object stores have no folders, and some would make a bucket of a typing error
                self._files.makedirs(self.root, exist_ok=True)
            self._files.put_file(os.fspath(file), self._path(name))
            self._files.invalidate_cache()
            stored = self._files.info(self._path(name))["size"]
            if stored != size:
                raise OSError(f"{size} bytes were sent, but {stored} are stored")

        fault_point("checkpoint.upload")
        self._ask(f"upload {name} to", upload, size=size)
        fault_point("checkpoint.uploaded")

    def get(self, name: str, file: Path) -> None:
        """Download ``name`` to ``file``; do nothing if it does not exist."""
        fault_point("checkpoint.download")
        path = self._path(name)
        size = self._ask(f"look at {name} in", lambda: int(self._files.info(path)["size"]), 0)
        self._ask(f"read {name} from", lambda: self._files.get_file(path, os.fspath(file)), None, size=size)

    def _path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def _ask(self, what: str, ask: Callable[[], _T], *if_missing: _T, size: int = 0) -> _T:
        """Return ``ask()``, which moves ``size`` bytes."""
        thread, answer = begin_call(ask, "anabranch-storage")
        seconds = self._seconds + size / _SLOWEST
        if not wait([answer], seconds).done:
            raise NoAnswer(
                f"cannot {what} {self}: no answer for {seconds:.0f} s; check that the store is reachable, or allow "
                f"more time in {SECONDS_VARIABLE}"
            )
        thread.join(self._seconds)
        try:
            return answer.result(0)
        except FileNotFoundError as error:
            if if_missing:
                return if_missing[0]
            raise Unreadable(f"cannot {what} {self}: {error}") from error
        except Exception as error:  # each file system has its own errors
            raise Unreadable(f"cannot {what} {self}: {type(error).__name__}: {error}") from error

    def upload(self, folder: Path, local: int, groups: list[str], keep: int) -> str:
        """Upload generation ``local`` of ``folder`` as this directory's newest, and keep so many; return its manifest's
        name.
        """
        generation = max(generations_in(self.names()).values(), default=0) + 1
        manifest = manifest_path(folder, generation).name
        try:
            for group in groups:
                self.put(data_path(folder, group, local), data_path(folder, group, generation).name)
            self.put(manifest_path(folder, local), manifest)
        except NoAnswer:
            raise  # a transfer may still complete; the next save removes the remains
        except Exception:
            with suppress(CheckpointError):
                self._remove({generation})
            raise
        names = self.names()
        self._remove({*generations_in(names).values()} - {*complete_in(names)[:keep]})
        return manifest

    def _remove(self, generations: Iterable[int]) -> None:
        for name, generation in generations_in(self.names()).items():
            if generation in generations:
                fault_point("checkpoint.remove_upload")
                self._ask(f"remove {name} from", lambda name=name: self._files.rm_file(self._path(name)), None)  # type: ignore[misc]


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


Place = Path | Storage
"""A folder of this host, or a directory on a storage."""


def as_place(path: object, name: str = "path") -> Place:
    """Return ``path`` as a folder, or as a directory of a storage if it is a URL; ``file://`` is a folder.

    Raises:
        TypeError: it is not a path; names the argument and its value.
        ValueError, ModuleNotFoundError: as of ``Storage``.
    """
    if isinstance(path, Storage):
        return path
    if isinstance(path, str) and path.startswith("file://"):
        return Path(path.removeprefix("file://"))
    return Storage(path) if isinstance(path, str) and _URL.fullmatch(path) else check_path(path, name)


class Folder:
    """A directory that generations are read from.

    Attributes:
        place: what it is called in messages.
        path: where its files are.
    """

    def __init__(self, place: Place, path: Path) -> None:
        self.place, self.path = place, path

    def complete(self) -> list[int]:
        """Return the generations that have a manifest, newest first."""
        return complete_generations(self.path)

    def file(self, path: Path) -> Path:
        """Return ``path``, which is in ``self.path``, once it is there."""
        return path


class Download(Folder):
    """A directory of a storage, in a temporary folder that is removed with the last checkpoint read from it."""

    place: Storage

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage, Path(tempfile.mkdtemp(prefix="anabranch-checkpoint-")))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def complete(self) -> list[int]:
        return complete_in(self.place.names())

    def file(self, path: Path) -> Path:
        self.place.get(path.name, path)
        return path
