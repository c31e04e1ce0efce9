"""``periodic``: a thread that does something every so many seconds, as long as its owner's block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def periodic(
    call: Callable[[], object],
    seconds: float,
    *,
    name: str,
    patience: float = 10.0,
    at_start: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Call a function every so many seconds, the first time after as many, until the block ends.

    >>> called = threading.Event()
    >>> with periodic(called.set, 0.01, name="example"):
    ...     called.wait(60.0)
    True

    Args:
        call: what to call; an error that it raises ends the thread, so it sees to those that may happen.
        seconds: between two calls.
        name: the thread's.
        patience: seconds that leaving the block waits for a call under way.
        at_start: called once, as soon as the thread runs.
    """
    ended = threading.Event()

    def run() -> None:
        at_start()
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    except GeneratorExit:  # nobody left the block, and the garbage collector is not to wait
        patience = 0.0
        raise
    finally:
        ended.set()
        thread.join(patience)
