"""Spans: timed activities of this process, for a trace; nothing is kept unless a trace is being recorded.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import Literal, TypeAlias

from anabranch.status_file import STATUS_VARIABLE

__all__ = [
    "CAPACITY",
    "FOLDER_VARIABLE",
    "Flow",
    "Span",
    "SpanRecorder",
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

FOLDER_VARIABLE = "ANABRANCH_TRACE"
"""Names the folder for what the processes of a job record."""

CAPACITY = 250_000
"""Spans that a process records at most; the others are counted."""

Flow: TypeAlias = tuple[Literal["ask", "serve", "send", "receive", "meet"], str]
"""What a span has to do with those of the same name elsewhere: it asks and is answered, serves, sends, receives, or is
one of several ranks' that meet."""

Span: TypeAlias = tuple[str, str, str, int, int, int, dict[str, object] | None, Flow | None]
"""Name, category, track, start and end in nanoseconds, thread, facts and flow."""

_EVERY = 0.5  # seconds between two writings


class SpanRecorder:
    """Keeps spans until they are taken.

    >>> with recorded(SpanRecorder()) as recorder:
    ...     with span("forward", "compute", step=3):
    ...         pass
    >>> [(name, category, facts) for name, category, *_, facts, _ in recorder.take()]
    [('forward', 'compute', {'step': 3})]

    Args:
        limit: spans that it keeps at most, those that were taken included.

    Attributes:
        began: the clock when it was made, nanoseconds.
        dropped: spans beyond the limit, as far as ``take`` has seen.
        threads: the kernel's number and the name of threads that spans are of, except for those that had ended.
        add: keeps a span.
    """

    def __init__(self, limit: int = CAPACITY) -> None:
        self.began = monotonic_ns()
        self.dropped = 0
        self.threads: dict[int, tuple[int, str]] = {}
        self._left = limit
        # Memory stays bounded if none is taken; the queue's own method costs a tenth of a function here.
        self._spans: deque[Span] = deque(maxlen=2 * CAPACITY)
        self.add = self._spans.append

    def take(self) -> list[Span]:
        """Return the spans since the last call, the first up to the limit."""
        taken: list[Span] = []
        with suppress(IndexError):
            while True:
                taken.append(self._spans.popleft())
        self.dropped += max(0, len(taken) - self._left)
        del taken[self._left :]
        self._left -= len(taken)
        if not {one[5] for one in taken} <= self.threads.keys():
            for thread in threading.enumerate():
                if thread.ident is not None and thread.native_id is not None:
                    self.threads[thread.ident] = thread.native_id, thread.name
        return taken


# Their ``add``; replaced whole, so that recording threads read a consistent tuple.
_adds: tuple[Callable[[Span], None], ...] = ()
_lock = threading.Lock()


def recording() -> bool:
    """Return True if a trace is being recorded."""
    return bool(_adds)


@contextmanager
def recorded(recorder: SpanRecorder) -> Iterator[SpanRecorder]:
    """Have the spans of the block, of all threads, kept by ``recorder``."""
    start(recorder)
    try:
        yield recorder
    finally:
        stop(recorder)


def start(recorder: SpanRecorder) -> None:
    """Have spans kept by ``recorder`` from now on."""
    global _adds
    with _lock:
        _adds = (*_adds, recorder.add)


def stop(recorder: SpanRecorder) -> None:
    """Have ``recorder`` keep no more."""
    global _adds
    with _lock:
        _adds = tuple(add for add in _adds if add is not recorder.add)


class _Nothing:
    """A no-op span while no trace is being recorded."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


_NOTHING = _Nothing()


class _Open:
    """A span in progress."""

    __slots__ = ("_category", "_facts", "_flow", "_name", "_start")

    def __init__(self, name: str, category: str, flow: Flow | None, facts: dict[str, object] | None) -> None:
        self._name = name
        self._category = category
        self._flow = flow
        self._facts = facts

    def __enter__(self) -> None:
        self._start = monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # As `complete`, without its call.
        one = (self._name, self._category, "", self._start, monotonic_ns(), get_ident(), self._facts, self._flow)
        for add in _adds:
            add(one)


def span(name: str, category: str, flow: Flow | None = None, **facts: object) -> _Nothing | _Open:
    """Return a context whose time is a span of this thread.

    Args:
        name: what is done; few different ones, what tells them apart goes into ``facts``.
        category: ``"step"``, ``"compute"``, ``"load"``, ``"crossing"``, ``"serve"`` or ``"wait"``.
        flow: ties it to spans of other processes.
        facts: plain values.
    """
    return _Open(name, category, flow, facts or None) if _adds else _NOTHING


def begin() -> int:
    """Return the clock in nanoseconds; 0 while no trace is being recorded."""
    return monotonic_ns() if _adds else 0


def complete(
    began: int,
    name: str,
    category: str,
    *,
    track: str = "",
    flow: Flow | None = None,
    facts: dict[str, object] | None = None,
) -> None:
    """Record a span that began at ``began`` and ends now; nothing if ``began`` is 0.

    Args:
        began: from ``begin()``.
        name: what was done.
        category: as for ``span``.
        track: where spans lie that may overlap; without one it is a span of this thread.
        flow: ties it to spans of other processes.
        facts: plain values.
    """
    adds = _adds
    if began and adds:
        one = (name, category, track, began, monotonic_ns(), get_ident(), facts or None, flow)
        for add in adds:
            add(one)


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
    """Return each item as a line of JSON; values that are not plain become their text."""
    import msgspec  # here: the launcher does without

    encode = msgspec.json.Encoder(enc_hook=str).encode
    return b"".join(encode(item) + b"\n" for item in items)


def header(recorder: SpanRecorder, name: str) -> dict[str, object]:
    """Return the first line of a process's records."""
    return {"process": name, "pid": os.getpid(), "host": host(), "began": recorder.began}


def footer(recorder: SpanRecorder) -> dict[str, object]:
    """Return a line that follows spans: the threads they are of, and how many are missing."""
    return {"threads": recorder.threads, "dropped": recorder.dropped}


# The file of a process.


class _FileRecorder(SpanRecorder):
    """Writes a process's spans to its file now and then."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._name = process_name()
        self._path = folder / f"{self._name.replace(' ', '-')}.{self._pid}.spans"
        self._writing = threading.Lock()
        self._begun = False
        self._told = 0, 0
        atexit.register(self.write)
        threading.Thread(target=self._run, name="anabranch-spans", daemon=True).start()

    def _run(self) -> None:
        never = threading.Event()
        while not never.wait(_EVERY):
            self.write()

    def write(self) -> None:
        """Append the new spans."""
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
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and _file is None:
        _file = _FileRecorder(Path(folder))
        start(_file)


def flush() -> None:
    """Write the recorded spans for the launcher; for a process that ends without Python's own teardown."""
    if _file is not None:
        _file.write()


def _forget() -> None:
    """In a fork: its activity does not belong to the parent process."""
    global _adds, _lock, _file
    _adds, _lock, _file = (), threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
