"""Spans: what this process does, timed. The open ones are its waits and its activity, the closed ones its trace.

::

    with spans.span("forward", "compute"):      a span of this thread; spans of one thread lie inside one another
        ...
    began = spans.begin()                       0 while nobody records
    spans.complete(began, "pull t", "crossing", track="requests", flow=("ask", "1f"))
    spans.mark("transport.retry", peer=peer)    something that happened, at one moment
    with spans.Lasting("wait", "wait", facts):  shown while it is open
        ...

Spans on a ``track`` may overlap. A ``flow`` ties spans of several processes, see ``trace.py``. Clocks are
``time.monotonic_ns()``, the same in every process of a machine.

While nobody records, a span costs a function call and nothing of it is kept; a lasting one is in a dict while it is
open, for ``anabranch status`` and ``/metrics``.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from threading import get_ident
from time import monotonic, monotonic_ns
from typing import Any, Literal, TypeAlias

CAPACITY = 250_000
"""Spans that a process records at most; the others are counted."""

LONG = 0.5
"""Seconds after which an open span is shown."""

Flow: TypeAlias = tuple[Literal["ask", "serve", "send", "receive", "meet"], str]
"""A span's role in a flow across processes, by the flow's name: request, response, send, receive, or one of several
ranks in a collective."""

Span: TypeAlias = tuple[str, str, str, int, int, int, dict[str, object] | None, Flow | None]
"""Name, category, track, start and end in nanoseconds, thread, facts and flow."""


class SpanRecorder:
    """Keeps spans until they are taken.

    >>> recorder = SpanRecorder()
    >>> with heard(recorder.add), span("forward", "compute", step=3):
    ...     pass
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


# Those who hear of closed spans; replaced whole, so that recording threads read a consistent tuple.
_adds: tuple[Callable[[Span], None], ...] = ()
_lock = threading.Lock()


@contextmanager
def heard(add: Callable[[Span], None]) -> Iterator[None]:
    """Have ``add`` called with the spans of the block, of all threads: on their thread, when they end.

    >>> names = []
    >>> with heard(lambda span: names.append(span[0])):
    ...     mark("bucket.launched", index=0)
    >>> names
    ['bucket.launched']
    """
    start(add)
    try:
        yield
    finally:
        stop(add)


def start(add: Callable[[Span], None]) -> None:
    """Call ``add`` with each span from now on."""
    global _adds
    with _lock:
        _adds = (*_adds, add)


def stop(add: Callable[[Span], None]) -> None:
    """Call ``add`` no more."""
    global _adds
    with _lock:
        _adds = tuple(one for one in _adds if one is not add)


_NOTHING = nullcontext()


class _Recorded:
    """A span in progress."""

    __slots__ = ("_category", "_facts", "_flow", "_name", "_start")

    def __init__(self, name: str, category: str, flow: Flow | None, facts: dict[str, object] | None) -> None:
        self._name = name
        self._category = category
        self._flow = flow
        self._facts = facts

    def __enter__(self) -> None:
        self._start = monotonic_ns()

    def __exit__(self, *_: object) -> None:
        # As `complete`, without its call.
        one = (self._name, self._category, "", self._start, monotonic_ns(), get_ident(), self._facts, self._flow)
        for add in _adds:
            add(one)


def span(name: str, category: str, flow: Flow | None = None, **facts: object) -> nullcontext[None] | _Recorded:
    """Return a context whose time is a span of this thread.

    Args:
        name: what is done; few different ones, what tells them apart goes into ``facts``.
        category: ``"step"``, ``"compute"``, ``"load"``, ``"crossing"``, ``"serve"``, ``"wait"`` or ``"event"``.
        flow: ties it to spans of other processes.
        facts: plain values.
    """
    return _Recorded(name, category, flow, facts or None) if _adds else _NOTHING


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


def mark(name: str, /, **facts: object) -> None:
    """Record something that happened now."""
    if _adds:
        complete(monotonic_ns(), name, "event", facts=facts)


class Lasting:
    """A span of this thread that is shown while it is open: a wait for others, or work that may delay a step for long.

    >>> with Lasting("wait", "wait", lambda: {"peer": "rank 1", "operation": "all_reduce"}):
    ...     [one["name"] for one in open_spans(longer_than=0.0)]
    ['wait']

    Args:
        name: what is done.
        category: as for ``span``.
        facts: returns its facts. It is called when the span is shown, on any thread, and when it is recorded.
    """

    __slots__ = ("_category", "_facts", "_name", "_start", "_thread", "_traced")

    def __init__(self, name: str, category: str, facts: Callable[[], Mapping[str, object]] = dict) -> None:
        self._name = name
        self._category = category
        self._facts = facts

    def open_span(self) -> Mapping[str, object]:
        """Say what is being done."""
        work = {} if self._category == "wait" else {"thread": self._thread}
        return {"name": self._name, "since": self._start / 1e9, **work, **self._facts()}

    def __enter__(self) -> None:
        self._traced = _adds
        self._thread = get_ident()
        self._start = monotonic_ns()
        shown[self] = None

    def __exit__(self, *_: object) -> None:
        shown.pop(self, None)
        if self._traced:
            complete(self._start, self._name, self._category, facts=dict(self._facts()))


shown: dict[Lasting, None] = {}
"""Those that are open: a dict, so that each change is one operation and needs no lock. A wait on the way of every step
adds and removes itself, for a tenth of a microsecond."""


def open_spans(longer_than: float = LONG) -> list[dict[str, Any]]:
    """Return name, start and facts of the spans that have lasted this many seconds, the longest first.

    Of all threads the waits, of the main thread its work, too.
    """
    latest, main = monotonic() - longer_than, threading.main_thread().ident
    every: list[dict[str, Any]] = [dict(one.open_span()) for one in tuple(shown)]
    lasting = [one for one in every if one["since"] <= latest and one.get("thread", main) == main]
    return sorted(lasting, key=lambda one: one["since"])


# --- fault points: named places where a crash would be interesting, as before an acknowledgement leaves

fault_handler: Callable[[str], None] | None = None
"""The handler that is called at every fault point; ``anabranch.testing`` installs one."""


def fault_point(name: str) -> None:
    """Name a place where a test may raise, block or kill the process; nothing happens elsewhere."""
    if fault_handler is not None:
        fault_handler(name)


@contextmanager
def on_fault_point(handler: Callable[[str], None]) -> Iterator[None]:
    """Call ``handler(name)`` at every fault point until the block ends; its exceptions are raised there."""
    global fault_handler
    with _lock:
        if fault_handler is not None:
            raise RuntimeError("a fault handler is already installed; leave its block first")
        fault_handler = handler
    try:
        yield
    finally:
        fault_handler = None


def _forget() -> None:
    """In a fork: its activity does not belong to the parent process."""
    global _adds, _lock
    _adds, _lock = (), threading.Lock()
    shown.clear()


os.register_at_fork(after_in_child=_forget)
