"""Events that boundaries report, and points at which tests make them fail.

Boundaries are a low layer of the package and must not know their observers, so they ``report`` named events to this
sink, which calls its subscribers: a progress bar, a trace, a metric, a test's order log. With nobody subscribed a
report is one truth test.

A ``fault_point`` is a named place where a crash would be interesting: between two writes of a checkpoint, before an
acknowledgement leaves. It does nothing until ``on_fault_point`` installs a handler, as ``anabranch.testing`` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

__all__ = ["Event", "Sink", "fault_point", "on_fault_point", "report", "subscribe"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened: its name, when (``time.monotonic`` seconds), on which thread, and its facts."""

    name: str
    time: float
    thread: int
    facts: dict[str, object] = field(default_factory=dict)


Sink = Callable[[Event], None]

# Replaced whole under the lock, so that reporting threads read a consistent tuple without taking it.
_sinks: tuple[Sink, ...] = ()
_lock = threading.Lock()
_fault_handler: Callable[[str], None] | None = None


def report(name: str, /, **facts: object) -> None:
    """Tells every subscriber that ``name`` happened."""
    if _sinks:
        event = Event(name, monotonic(), threading.get_ident(), facts)
        for sink in _sinks:
            sink(event)


@contextmanager
def subscribe(sink: Sink) -> Iterator[None]:
    """Call ``sink`` with every event, from whichever thread reports it, until the block ends.

    >>> seen = []
    >>> with subscribe(lambda event: seen.append(event.name)):
    ...     report("bucket.launched", index=0)
    >>> seen
    ['bucket.launched']
    """
    global _sinks
    with _lock:
        _sinks = (*_sinks, sink)
    try:
        yield
    finally:
        with _lock:
            remaining = list(_sinks)
            remaining.remove(sink)
            _sinks = tuple(remaining)


def fault_point(name: str) -> None:
    """Name a place where a test may raise, block or kill the process; nothing happens elsewhere."""
    if _fault_handler is not None:
        _fault_handler(name)


@contextmanager
def on_fault_point(handler: Callable[[str], None]) -> Iterator[None]:
    """Call ``handler(name)`` at every fault point until the block ends; its exceptions are raised there."""
    global _fault_handler
    with _lock:
        if _fault_handler is not None:
            raise RuntimeError("a fault handler is already installed; leave its block first")
        _fault_handler = handler
    try:
        yield
    finally:
        _fault_handler = None
