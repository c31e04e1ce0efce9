"""A callback during a block that takes long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["PATIENCE", "log_if_slow"]

PATIENCE = 5.0
"""Seconds after which a capture reports its progress."""

_start_timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer


@contextmanager
def log_if_slow(tell: Callable[[], None] | None) -> Iterator[None]:
    """Call ``tell`` once, on its own thread, if the block takes longer than ``PATIENCE``."""
    if tell is None:
        yield
        return
    timer = _start_timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join(PATIENCE)  # a logger that hangs must not block forever
