"""The activity of this process's main thread outside steps, for readers while it lasts: ``ROLE-RANK.doing``.

A loader without a batch, or a capture, may delay a step for long, and no code of anabranch runs meanwhile to report it.
So the activity is written to a mapped file before it begins: the process, since when, and what. ``anabranch run`` names
the file and tells what lasts, as it tells of ``waits`` for others. It costs a few microseconds under a launcher.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path

from anabranch.status_file import STATUS_VARIABLE

__all__ = ["Activity", "during", "read_activity"]


class Activity(IntEnum):
    """Work that may last."""

    NOTHING = 0
    FETCHING = 1
    CAPTURING = 2
    COMPILING = 3
    CONNECTING = 4

    @property
    def words(self) -> str:
        """Return it for users."""
        return _WORDS[self]


_WORDS = {
    Activity.NOTHING: "",
    Activity.FETCHING: "is fetching a batch from its loader",
    Activity.CAPTURING: "is capturing a step as a graph, once for each kind of batch",
    Activity.COMPILING: "is compiling the kernels of tables, once on this machine",
    Activity.CONNECTING: "is connecting to the other workers",
}
_RECORD = struct.Struct("<qdB")  # pid, time.monotonic(), what
_file: tuple[int, str, mmap.mmap] | None = None


@contextmanager
def during(what: Activity) -> Iterator[None]:
    """Leave ``what`` while the block runs on the main thread.

    >>> with during(Activity.FETCHING):
    ...     batch = next(iter([1]))
    """
    file = _mapped()
    if file is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = file[: _RECORD.size]
    _RECORD.pack_into(file, 0, os.getpid(), time.monotonic(), what)
    try:
        yield
    finally:
        file[: _RECORD.size] = before


def read_activity(path: Path, pid: int | None) -> tuple[Activity, float]:
    """Return a process's activity and its seconds so far; nothing if the file belongs to another process."""
    with suppress(OSError, struct.error, ValueError):
        owner, since, what = _RECORD.unpack(path.read_bytes())
        if owner == pid:
            return Activity(what), max(0.0, time.monotonic() - since)
    return Activity.NOTHING, 0.0


def _mapped() -> mmap.mmap | None:
    """Return the file of this process; ``None`` without a launcher."""
    global _file
    stem = os.environ.get(STATUS_VARIABLE)
    if not stem:
        return None
    if _file is None or _file[:2] != (os.getpid(), stem):
        with suppress(OSError), open(f"{stem}.doing", "wb+") as opened:  # the folder may be gone
            opened.write(bytes(_RECORD.size))
            opened.flush()
            _file = os.getpid(), stem, mmap.mmap(opened.fileno(), _RECORD.size)
            return _file[2]
        return None
    return _file[2]
