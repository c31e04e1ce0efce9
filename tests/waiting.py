"""Waiting in tests for another thread or process: with a limit for hangs, never with a guessed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anabranch.deadline import Deadline

PATIENCE = 120.0
"""Seconds after which a test counts as hanging; far more than a busy machine needs."""


def wait_until(condition: Callable[[], object]) -> None:
    """Return once ``condition`` holds."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.001)


def join(*threads: threading.Thread) -> None:
    """Return once all threads have ended."""
    for thread in threads:
        thread.join(timeout=PATIENCE)
    left = [thread.name for thread in threads if thread.is_alive()]
    assert not left, f"threads did not end: {left}"


@contextmanager
def running(*functions: Callable[[], object]) -> Iterator[None]:
    """Run each function in a thread of its own beside the block; behind it all have ended."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    yield
    join(*threads)


def soon() -> Deadline:
    """A deadline that a busy machine does not miss."""
    return Deadline.after(PATIENCE)
