"""Compilation of kernels: by one process at a time for each function, and once per machine.

Numba caches compiled code on disk: for each function an index of signatures, and beside it a file of machine
code for each. It writes the index first and takes no lock, so two processes that compile a function for two dtypes at
once can leave an index whose entry for one dtype names the code of the other, for good. And every server of a job that
starts on a new machine would compile the same kernels. Here a process that compiles locks the function, and processes
that waited for it find the code in the cache. Processes that load existing code share the lock and wait only for the
compiling one.

Numba checks whether the file of a function has changed, but not those of the functions it calls, and it unpickles an
index that names classes of another version before it checks. So the version that it compares first is replaced by a
digest of all sources of tables, and unreadable files are compiled again.

Compiling takes half a minute on a new machine, during which nothing else happens. So a process that compiles, or waits
for another one that does, logs one line (``INFO``, ``anabranch.compiling``); the command line shows it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numba
from numba.core.compiler_lock import global_compiler_lock

from anabranch.deadline import Deadline
from anabranch.record.spans import Lasting

Function = Callable[..., Any]

_LONGEST_WAIT = 300.0  # seconds; then the function is compiled without the lock
_PAUSE = 0.02
_log = logging.getLogger("anabranch.compiling")
_MADE_FOR: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


@functools.cache
def _say_once() -> None:
    _log.info("compiling the kernels of tables (once on this machine, about a minute)")


def compiled(function: Function) -> Function:
    """Return ``function`` compiled by Numba at the first call with arguments of new types; kept on the disk if
    possible.
    """
    try:
        dispatcher = numba.njit(cache=True, **_MADE_FOR)(function)
    except RuntimeError as error:  # neither the package's folder nor the user's cache can be written to
        warnings.warn(f"each process compiles the kernels again: {error}", RuntimeWarning, stacklevel=2)
        return cast(Function, numba.njit(**_MADE_FOR)(function))
    dispatcher._cache._cache_file._version = f"{numba.__version__} {_sources()}"
    compile_ = dispatcher.compile
    lock = Path(dispatcher.stats.cache_path, f"{function.__module__}.{function.__qualname__}.lock")

    def compile_alone(signature: object) -> object:
        with global_compiler_lock:  # first: two threads compile functions that call each other
            readable = True
            try:
                with _locked(lock, fcntl.LOCK_SH), _only_loads(dispatcher):
                    return compile_(signature)
            except _NotOnDisk:
                pass
            except Exception:  # noqa: BLE001  half a file may hold anything, and end in any error
                readable = False
            _say_once()
            with _locked(lock, fcntl.LOCK_EX), Lasting("compile", "compute"):
                if not readable:
                    dispatcher._cache.flush()
                return compile_(signature)

    dispatcher.compile = compile_alone
    return cast(Function, dispatcher)


@functools.cache
def _sources() -> str:
    """Return a digest of all that kernels may call."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class _NotOnDisk(Exception):
    """The machine code of a function is not on disk."""


@contextmanager
def _only_loads(dispatcher: Any) -> Iterator[None]:
    """Raise ``_NotOnDisk`` where ``dispatcher`` would compile."""

    def refuse(*arguments: object) -> None:
        raise _NotOnDisk

    dispatcher._compiler.compile = refuse
    try:
        yield
    finally:
        del dispatcher._compiler.compile


@contextmanager
def _locked(path: Path, mode: int) -> Iterator[None]:
    """Hold the lock of all processes of this user, shared or alone; none if its file cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = Deadline.after(_LONGEST_WAIT)
        while not _takes(descriptor, mode) and not deadline.expired():
            _say_once()
            time.sleep(_PAUSE)
        yield
    finally:
        os.close(descriptor)  # which releases it


def _takes(descriptor: int, mode: int) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
