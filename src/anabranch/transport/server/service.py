"""A process that is a service: behind ``anabranch serve`` and ``job.serve``.

::

    SIGTERM, SIGINT, SIGHUP ──> the server's block is left: it refuses new calls, finishes those in flight, saves

One that lingers saves at the first signal, and leaves the block when the last client has gone: a signal to every
process of a job at once, as SLURM and systemd send it, leaves the workers their servers until they have saved too.
A closed terminal sends SIGHUP.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from anabranch.deadline import Deadline
from anabranch.errors import CheckpointError
from anabranch.transport.heap import keep_one_heap
from anabranch.transport.server.connection import ServerStatistics

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GLANCE = 0.1  # seconds between two looks whether the last client has gone


class Service(Protocol):
    """A server that serves while its ``with`` block runs."""

    @property
    def endpoint(self) -> str:
        """The address of its clients."""
        ...

    def transport_statistics(self) -> ServerStatistics:
        """Its connections, among others."""
        ...

    def checkpoint(self) -> None:
        """Write its state, if it has a place to."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_S = TypeVar("_S", bound=Service)


def serve_until_stopped(
    make: Callable[[], _S], beside: Callable[[_S], AbstractContextManager[object]] | None = None, *, linger: float = 0.0
) -> None:
    """Print ``listening on ENDPOINT``, and serve until SIGTERM, SIGINT or SIGHUP, in the main thread.

    A signal that is ignored, as ``nohup`` has it with SIGHUP, stays so. Once it has served, all are: the process ends.

    Args:
        make: makes the server; no thread was started before.
        beside: makes a context that lives as long as the server.
        linger: seconds after the first signal for which it serves on while clients are connected; the next one ends it.
    """
    keep_one_heap()
    with _signals() as come, make() as server, nullcontext() if beside is None else beside(server):
        print(f"listening on {server.endpoint}", flush=True)
        _wait_for_stop(come)
        if linger:
            with suppress(CheckpointError):  # written again at the end, which reports the reason
                server.checkpoint()
            until = Deadline.after(linger)
            come.settimeout(_GLANCE)
            while server.transport_statistics().connections and not until.expired():
                with suppress(TimeoutError):
                    _wait_for_stop(come)
                    break


def _wait_for_stop(come: socket.socket) -> None:
    while not set(come.recv(64)) & set(_STOPS):
        pass


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Return a socket that tells the number of each signal that comes.

    The interpreter's own C code writes there. Python code of a handler runs only after a wait that began in the same
    instant, or inside it: there ``Event.set`` would wait for the lock that the interrupted ``Event.wait`` holds.
    """
    come, tells = socket.socketpair()
    tells.setblocking(False)
    with come, tells:
        stops = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
        handlers: dict[signal.Signals, Any] = {n: signal.signal(n, lambda number, frame: None) for n in stops}
        told = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
        try:
            yield come
            handlers = dict.fromkeys(stops, signal.SIG_IGN)  # saved: another signal would only spoil the exit code
        finally:
            signal.set_wakeup_fd(told)
            for number, handler in handlers.items():
                signal.signal(number, handler)
