"""``Periodic``: a thread that does something every so many seconds, as long as its owner's block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Periodic:
    """Calls a function every so many seconds, the first time after as many; a context manager.

    >>> called = threading.Event()
    >>> with Periodic(called.set, 0.01, name="example"):
    ...     called.wait(60.0)
    True

    Args:
        call: what to call; an error that it raises ends the thread, so it sees to those that may happen.
        seconds: between two calls.
        name: the thread's.
        patience: seconds that leaving the block waits for a call under way.
        at_start: called once, as soon as the thread runs.
    """

    def __init__(
        self,
        call: Callable[[], object],
        seconds: float,
        *,
        name: str,
        patience: float = 10.0,
        at_start: Callable[[], object] = lambda: None,
    ) -> None:
        self._call = call
        self._at_start = at_start
        self._seconds = seconds
        self._patience = patience
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self._at_start()
        while not self._stop.wait(self._seconds):
            self._call()

    def __enter__(self) -> Periodic:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(self._patience)
