"""Spans: what this process did from when to when, for a trace; nothing is kept unless somebody records.

::

    with spans.span("forward", "compute"):      a span of this thread; spans of one thread lie inside one another
        ...
    began = spans.begin()                       0 while nobody records
    spans.complete(began, "pull t", "crossing", track="crossings", flow=("ask", "1f"))

Spans on a ``track`` may overlap. A ``flow`` ties spans of several processes, see ``trace_file``. Clocks are
``time.monotonic_ns()``, the same in every process of a machine.

``anabranch run --trace`` names a folder in ``ANABRANCH_TRACE``; each process of the job then writes
``ROLE-RANK.PID.spans`` there twice a second and at its end, in the lines that ``as_lines`` makes. While nobody records,
a span costs a function call.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeAlias

from anabranch.status_file import STATUS_VARIABLE

__all__ = [
    "LIMIT",
    "TRACE_VARIABLE",
    "Flow",
    "Recorder",
    "Span",
    "as_lines",
    "begin",
    "complete",
    "flush",
    "footer",
    "header",
    "host",
    "process_name",
    "record_process",
    "recorded",
    "recording",
    "span",
    "start",
    "stop",
]

TRACE_VARIABLE = "ANABRANCH_TRACE"
"""Names the folder for what the processes of a job record."""

LIMIT = 250_000
"""Spans that a process records at most; the others are counted."""

Flow: TypeAlias = tuple[Literal["ask", "serve", "send", "receive", "meet"], str]
"""What a span has to do with those of the same name elsewhere: it asks and is answered, serves, sends, receives, or is
one of several ranks' that meet."""

Span: TypeAlias = tuple[str, str, str, int, int, int, dict[str, object] | None, Flow | None]
"""Name, category, track, start and end in nanoseconds, thread, facts and flow."""

_EVERY = 0.5  # seconds between two writings


class Recorder:
    """Keeps spans until they are taken.

    >>> with recorded(Recorder()) as recorder:
    ...     with span("forward", "compute", step=3):
    ...         pass
    >>> [(name, category, facts) for name, category, *_, facts, _ in recorder.take()]
    [('forward', 'compute', {'step': 3})]

    Args:
        limit: spans that it keeps at most, those that were taken included.

    Attributes:
        began: the clock when it was made, nanoseconds.
        dropped: spans beyond the limit.
        threads: the kernel's number and the name of each thread that spans are of.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.began = time.monotonic_ns()
        self.dropped = 0
        self.threads: dict[int, tuple[int, str]] = {}
        self._left = limit
        self._spans: list[Span] = []

    def add(self, one: Span) -> None:
        """Keep a span."""
        if self._left <= 0:
            self.dropped += 1
            return
        self._left -= 1
        thread = one[5]
        if thread not in self.threads:
            self.threads[thread] = threading.get_native_id(), threading.current_thread().name
        self._spans.append(one)

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        taken, self._spans = self._spans, []
        return taken


# Replaced whole, so that recording threads read a consistent tuple.
_recorders: tuple[Recorder, ...] = ()
_lock = threading.Lock()


def recording() -> bool:
    """Return True if somebody records."""
    return bool(_recorders)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[Recorder]:
    """Have the spans of the block, of all threads, kept by ``recorder``."""
    start(recorder)
    try:
        yield recorder
    finally:
        stop(recorder)


def start(recorder: Recorder) -> None:
    """Have spans kept by ``recorder`` from now on."""
    global _recorders
    with _lock:
        _recorders = (*_recorders, recorder)


def stop(recorder: Recorder) -> None:
    """Have ``recorder`` keep no more."""
    global _recorders
    with _lock:
        _recorders = tuple(other for other in _recorders if other is not recorder)


class _Nothing:
    """Stands for a span while nobody records."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_NOTHING = _Nothing()


class _Open:
    """A span under way."""

    __slots__ = ("_category", "_facts", "_flow", "_name", "_start")

    def __init__(self, name: str, category: str, flow: Flow | None, facts: dict[str, object]) -> None:
        self._name = name
        self._category = category
        self._flow = flow
        self._facts = facts

    def __enter__(self) -> None:
        self._start = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        complete(self._start, self._name, self._category, flow=self._flow, facts=self._facts)


def span(name: str, category: str, flow: Flow | None = None, **facts: object) -> _Nothing | _Open:
    """Return a context whose time is a span of this thread.

    Args:
        name: what is done; few different ones, what tells them apart goes into ``facts``.
        category: ``"step"``, ``"compute"``, ``"load"``, ``"crossing"``, ``"serve"`` or ``"wait"``.
        flow: ties it to spans of other processes.
        facts: plain values.
    """
    return _Open(name, category, flow, facts) if _recorders else _NOTHING


def begin() -> int:
    """Return the clock, nanoseconds; 0 while nobody records."""
    return time.monotonic_ns() if _recorders else 0


def complete(
    began: int,
    name: str,
    category: str,
    *,
    track: str = "",
    end: int = 0,
    flow: Flow | None = None,
    facts: dict[str, object] | None = None,
) -> None:
    """Record a span that began at ``began`` and ends now, or at ``end``; nothing if ``began`` is 0.

    Args:
        began: from ``begin()``.
        name: what was done.
        category: as for ``span``.
        track: where spans lie that may overlap; without one it is a span of this thread.
        end: the clock at its end, if that was before.
        flow: ties it to spans of other processes.
        facts: plain values.
    """
    recorders = _recorders
    if began and recorders:
        one = (name, category, track, began, end or time.monotonic_ns(), threading.get_ident(), facts or None, flow)
        for recorder in recorders:
            recorder.add(one)


# As lines.


def host() -> str:
    """Return what processes have in common that read one clock: the machine since it was started, and its namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    return "unknown"


def process_name() -> str:
    """Return the role and rank that a launcher has given this process, such as ``"worker 0"``; else its number."""
    stem = os.environ.get(STATUS_VARIABLE)
    return " ".join(Path(stem).name.rsplit("-", 1)) if stem else f"process {os.getpid()}"


def as_lines(items: Iterable[object]) -> bytes:
    """Return each item as a line of JSON; what is no plain value becomes its text."""
    import msgspec  # here: the launcher does without

    encode = msgspec.json.Encoder(enc_hook=str).encode
    return b"".join(encode(item) + b"\n" for item in items)


def header(recorder: Recorder, name: str) -> dict[str, object]:
    """Return the first line of what a process recorded."""
    return {"process": name, "pid": os.getpid(), "host": host(), "began": recorder.began}


def footer(recorder: Recorder) -> dict[str, object]:
    """Return a line that follows spans: the threads they are of, and how many are missing."""
    return {"threads": recorder.threads.copy(), "dropped": recorder.dropped}


# The file of a process.


class _FileRecorder(Recorder):
    """Writes a process's spans to its file now and then; from the first one on there is a thread that does."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._name = process_name()
        self._path = folder / f"{self._name.replace(' ', '-')}.{self._pid}.spans"
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._begun = False
        self._told = 0, 0
        atexit.register(self.write)

    def add(self, one: Span) -> None:
        """Keep a span until it is written."""
        super().add(one)
        if self._thread is None:
            self._start_thread()

    def _start_thread(self) -> None:
        with self._writing:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="anabranch-spans", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        never = threading.Event()
        while not never.wait(_EVERY):
            self.write()

    def write(self) -> None:
        """Append what is new."""
        if os.getpid() != self._pid:  # a fork's end
            return
        with self._writing:
            taken = self.take()
            known = len(self.threads), self.dropped
            if not taken and known == self._told:
                return
            items: list[object] = [] if self._begun else [header(self, self._name)]
            items += [*taken, footer(self)]
            self._begun, self._told = True, known
            with suppress(OSError), self._path.open("ab") as file:  # a full disk, a folder that was removed
                file.write(as_lines(items))


_file: _FileRecorder | None = None


def record_process() -> None:
    """Record this process from now on if a launcher has named a folder for that."""
    global _file
    folder = os.environ.get(TRACE_VARIABLE)
    if folder and _file is None:
        _file = _FileRecorder(Path(folder))
        start(_file)


def flush() -> None:
    """Write what was recorded for the launcher; for who ends the process without Python's own end."""
    if _file is not None:
        _file.write()


def _forget() -> None:
    """In a fork: what it does is no work of the process that it was."""
    global _recorders, _lock, _file
    _recorders, _lock, _file = (), threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
