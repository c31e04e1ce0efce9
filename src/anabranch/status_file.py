"""The status of this process, for readers of its job: ``ROLE-RANK.status`` in the job's log folder.

``anabranch run`` names the file to each of its processes. Reading it needs no answer from the process, so it can be
read while the process is frozen. It is a line of JSON, replaced atomically; a caller passes facts to ``put``, and calls
``write`` from time to time.

::

    {"pid": 4711, "waits": [{"peers": ["rank 1"], "operation": "all_reduce", "since": 8123.4}], ...}
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anabranch.periodic import Periodic

__all__ = [
    "PLAN_VARIABLE",
    "PROGRESS_VARIABLE",
    "STATUS_VARIABLE",
    "StatusFile",
    "replace_bytes",
    "replace_text",
    "status_file",
]

STATUS_VARIABLE = "ANABRANCH_STATUS"
"""Names the file, without its suffix: ``.status`` holds the facts, ``.steps`` the number of a worker's optimizer steps
in 8 bytes, little-endian."""

PLAN_VARIABLE = "ANABRANCH_PLAN"
"""Set by ``anabranch plan``: the file for the plan of the first training step, before which the script ends."""

PROGRESS_VARIABLE = "ANABRANCH_PROGRESS"
"""Set by ``anabranch run``: ``"screen"`` if its screen shows how far loops are, ``"lines"`` if no line is to be drawn
in its place."""

_EVERY = 1.0  # seconds between two writings of a thread


class StatusFile:
    """Keeps the file of one process.

    Args:
        path: the file; its folder may vanish, and is not read then.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._facts: dict[str, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._written = ""
        self._threads = 0

    def put(self, **facts: Callable[[], object]) -> None:
        """Have facts, plain values, requested at each ``write``, on whichever thread writes."""
        with self._lock:
            self._facts.update(facts)

    def drop(self, *names: str) -> None:
        """Let go of facts."""
        with self._lock:
            for name in names:
                self._facts.pop(name, None)

    def changed(self) -> None:
        """Write, unless a thread is to do so in a moment."""
        if not self._threads:
            self.write()

    def write(self) -> None:
        """Write the current facts."""
        with self._lock:
            text = json.dumps({"pid": os.getpid(), **{name: read() for name, read in self._facts.items()}})
            if text != self._written:
                self._written = text
                with suppress(OSError):
                    replace_text(self._path, text + "\n")

    @contextmanager
    def kept(self, **facts: Callable[[], object]) -> Iterator[None]:
        """Have a thread write, once a second, while the block runs: for processes that serve."""
        self.put(**facts)
        self.write()
        self._threads += 1
        try:
            with Periodic(self.write, _EVERY, name="anabranch-status"):
                yield
        finally:
            self._threads -= 1
            self.drop(*facts)


def replace_text(path: Path, text: str) -> None:
    """Replace a file whole, so that readers never see half of it.

    Raises:
        OSError: a full disk, a folder that was removed.
    """
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, contents: bytes) -> None:
    """Do the same with bytes."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(contents)
    os.replace(new, path)


_lock = threading.Lock()
_of_process: tuple[int, str | None, StatusFile | None] | None = None


def status_file() -> StatusFile | None:
    """Return the status file of this process; ``None`` if no launcher has named one."""
    global _of_process
    stem, pid = os.environ.get(STATUS_VARIABLE), os.getpid()
    with _lock:
        if _of_process is None or _of_process[:2] != (pid, stem):
            _of_process = pid, stem, StatusFile(Path(f"{stem}.status")) if stem else None
        return _of_process[2]
