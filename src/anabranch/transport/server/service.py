"""A process that is a service: behind ``anabranch serve`` and ``job.serve``.

::

    SIGTERM, SIGINT ──> the server's block is left: it refuses new calls, finishes those in flight, saves its state
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol, Self, TypeVar

from anabranch.transport.heap import keep_one_heap

__all__ = ["Service", "serve_until_stopped"]

_NAP = 3600.0  # a signal wakes at once


class Service(Protocol):
    """A server that serves while its ``with`` block runs."""

    @property
    def endpoint(self) -> str:
        """The address of its clients."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_S = TypeVar("_S", bound=Service)


def serve_until_stopped(
    make: Callable[[], _S], beside: Callable[[_S], AbstractContextManager[object]] | None = None
) -> None:
    """Print ``listening on ENDPOINT``, and serve until SIGTERM or SIGINT, in the main thread.

    Args:
        make: makes the server; no thread was started before.
        beside: makes a context that lives as long as the server.
    """
    keep_one_heap()
    with _signals() as stop, make() as server, nullcontext() if beside is None else beside(server):
        print(f"listening on {server.endpoint}", flush=True)
        while True:
            with suppress(Empty):
                stop.get(timeout=_NAP)
                return


@contextmanager
def _signals() -> Iterator[SimpleQueue[int]]:
    """Return a queue of the signals that come. Unlike an event, it may be filled by a handler at any instant:
    ``Event.set`` waits for the lock that the interrupted ``Event.wait`` may hold.
    """
    come: SimpleQueue[int] = SimpleQueue()
    before = {
        number: signal.signal(number, lambda number, frame: come.put(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield come
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
