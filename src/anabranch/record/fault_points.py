"""Fault points: named places where a crash would be interesting.

Between two writes of a checkpoint, before an acknowledgement leaves. They do nothing until ``on_fault_point`` installs
a handler, as ``anabranch.testing`` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.Lock()
installed: Callable[[str], None] | None = None
"""The handler that is called at every fault point."""


def fault_point(name: str) -> None:
    """Name a place where a test may raise, block or kill the process; nothing happens elsewhere."""
    if installed is not None:
        installed(name)


@contextmanager
def on_fault_point(handler: Callable[[str], None]) -> Iterator[None]:
    """Call ``handler(name)`` at every fault point until the block ends; its exceptions are raised there."""
    global installed
    with _lock:
        if installed is not None:
            raise RuntimeError("a fault handler is already installed; leave its block first")
        installed = handler
    try:
        yield
    finally:
        installed = None
