"""The record of this process on disk, for its launcher: what it does now, and its trace.

``anabranch run`` names the files to each of its processes. A thread writes them twice a second, so that they can be
read while the process is frozen. In the job's log folder ``ROLE-RANK.status`` is a line of JSON, replaced atomically:
the open spans and facts, of a run or a server::

    {"pid": 4711, "open": [{"name": "wait", "since": 8123.4, "peer": "rank 1", "operation": "all_reduce"}],
     "run": {"steps": 12, "loss": 0.5, ...}}

With ``--trace``, ``ROLE-RANK.PID.spans`` in another folder has the closed spans, in the lines that ``trace.py`` reads.
"""

from __future__ import annotations

import atexit
import errno
import json
import logging
import os
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any, Literal

from anabranch.periodic import periodic
from anabranch.record import spans
from anabranch.record.trace import as_lines, footer, header

STATUS_VARIABLE = "ANABRANCH_STATUS"
"""Names the file of the process's status, without its suffix."""

TRACE_VARIABLE = "ANABRANCH_TRACE"
"""Names the folder for the spans that the processes of a job record."""

PLAN_VARIABLE = "ANABRANCH_PLAN"
"""Set by ``anabranch plan``: the file for the plan of the first training step, before which the script ends."""

_MOST_BYTES = 64 << 20
_EVERY = 0.5  # seconds between two writings


class ProcessRecord:
    """Writes what this process does until the block ends.

    Args:
        stem: the file of its status, without the suffix; ``None``: no status.
        folder: where its spans go; ``None``: no trace. Either may vanish, and is not read then.
    """

    def __init__(self, stem: str | os.PathLike[str] | None, folder: str | os.PathLike[str] | None = None) -> None:
        self._pid = os.getpid()
        self._status = None if stem is None else Path(f"{os.fspath(stem)}.status")
        self._name = process_name()
        self._spans = None if folder is None else Path(folder) / f"{self._name.replace(' ', '-')}.{self._pid}.spans"
        self._recorder = spans.SpanRecorder()
        self._facts: dict[str, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._written = ""
        self._counted: tuple[int, int] | None = None
        self._thread = periodic(self.write, _EVERY, name="anabranch-record")
        self._started = False

    def start(self) -> None:
        """Write twice a second from now on."""
        with self._lock:
            if not self._started:
                self._started = True
                self._thread.__enter__()

    def put(self, **facts: Callable[[], object]) -> None:
        """Write facts, plain values, from now on; they are requested on whichever thread writes."""
        with self._lock:
            self._facts.update(facts)
        self.write()

    def settle(self, **facts: Callable[[], object]) -> None:
        """Leave facts at their last values, and let go of what they are read from."""
        with self._lock:
            for name, read in facts.items():
                if self._facts.get(name) == read:
                    self._facts[name] = repeat(read()).__next__
        self.write()

    def write(self) -> None:
        """Write what has changed."""
        with self._lock:
            if self._status is not None:
                self._write_status(self._status)
            if self._spans is not None:
                self._write_spans(self._spans)

    def _write_status(self, path: Path) -> None:
        facts = {name: read() for name, read in self._facts.items()}
        if opened := spans.open_spans():
            facts["open"] = opened
        text = json.dumps({"pid": self._pid, **facts}) if facts or self._written else ""
        if text != self._written:
            self._written = text
            with suppress(OSError):
                replace_text(path, text + "\n")

    def _write_spans(self, path: Path) -> None:
        taken = self._recorder.take()
        known = len(self._recorder.threads), self._recorder.dropped
        if not taken and known == (self._counted or (0, 0)):
            return
        items: list[object] = [header(self._recorder, self._name)] if self._counted is None else []
        self._counted = known
        with suppress(OSError), path.open("ab") as file:  # a full disk, a folder that was removed
            file.write(as_lines([*items, *taken, footer(self._recorder)]))

    def __enter__(self) -> ProcessRecord:
        global _record
        if self._spans is not None:
            spans.start(self._recorder.add)
            self.start()
        _record = self
        return self

    def __exit__(self, *_: object) -> None:
        global _record
        if self is not _record:  # a fork's end
            return
        _record = None
        spans.stop(self._recorder.add)
        if self._started:
            self._thread.__exit__(None, None, None)
        self.write()


_record: ProcessRecord | None = None


def process_record() -> ProcessRecord | None:
    """Return the record of this process, which writes from now on; ``None`` if no launcher has named its files.

    Whatever has something to tell calls it: a script without any of Anabranch has no thread that it has not made. So by
    then a script has configured its logging if it does; else messages go to stderr, which the launcher keeps and shows.
    """
    if _record is not None:
        _record.start()
        _show_messages()
    return _record


def _show_messages() -> None:
    log = logging.getLogger("anabranch")
    configured = logging.root.handlers or any(type(one) is not logging.NullHandler for one in log.handlers)
    if not configured and log.level == logging.NOTSET:
        log.addHandler(_Messages())
        log.setLevel(logging.INFO)


class _Messages(logging.Handler):
    """Writes to the stderr of the moment: a progress bar puts one in its place that writes above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a script may have closed it, or put what it likes in its place
            sys.stderr.write(f"anabranch: {self.format(record)}\n")
            sys.stderr.flush()


def record_process() -> None:
    """Record this process until its end if a launcher has named files for that."""
    stem, folder = os.environ.get(STATUS_VARIABLE) or None, os.environ.get(TRACE_VARIABLE) or None
    if _record is None and (stem or folder):
        atexit.register(ProcessRecord(stem, folder).__enter__().__exit__, None, None, None)


def flush() -> None:
    """Write the record; for a process that ends without Python's own teardown."""
    if _record is not None:
        _record.write()


def process_name() -> str:
    """Return the role and rank that a launcher has given this process, such as ``"worker 0"``; else its number."""
    stem = os.environ.get(STATUS_VARIABLE)
    return " ".join(Path(stem).name.rsplit("-", 1)) if stem else f"process {os.getpid()}"


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file of at most 64 MB.

    Raises:
        OSError: it cannot be read, or is another kind of file: opening a FIFO would wait for a writer.
        ValueError: it is larger.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"{path} has {status.st_size} bytes, more than {_MOST_BYTES}")
        return file.read()


def read_status(stem: Path, pid: int | None) -> dict[str, Any]:
    """Return the status record of the process ``pid``; empty if there is none, or only its predecessor's.

    ``stem``: the file, without its suffix or with another.
    """
    with suppress(OSError, ValueError):
        facts = json.loads(read_regular(stem.with_suffix(".status")))
        if isinstance(facts, dict) and facts.get("pid", 0) == pid:
            return facts
    return {}


def process_stat(pid: int) -> tuple[str, int]:
    """Return the state letter of a process of this machine and the time of its start; ``("X", 0)`` of none.

    With that the number names a process; alone it may be another's by now.
    """
    try:
        # The name in parentheses may hold anything; the state follows the last of them.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, IndexError):
        return "X", 0


def process_state(pid: int, started: int | None = None) -> Literal["running", "stopped", "gone"]:
    """Return the state of a process of this machine; ``"stopped"`` is frozen, by SIGSTOP or a debugger.

    Args:
        pid: its number.
        started: the time of its start, if that is known: another process may have the number by now.
    """
    letter, at = process_stat(pid)
    if letter in "ZXx" or started not in (None, at):
        return "gone"
    return "stopped" if letter in "Tt" else "running"


def replace_text(path: Path, text: str | bytes) -> None:
    """Replace a file whole, so that readers never see half of it.

    Raises:
        OSError: a full disk, a folder that was removed.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(new, path)


def _forget() -> None:
    """In a fork: the files are its parent's."""
    global _record
    _record = None


os.register_at_fork(after_in_child=_forget)
