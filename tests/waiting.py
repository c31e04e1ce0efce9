"""Waiting in tests for what another thread or process does: with the patience of a hang, never with a guess."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds after which a test says that it hangs; a busy machine does not need them."""


def wait_until(condition: Callable[[], object]) -> None:
    """Returns once ``condition`` holds."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(0.001)


def join(*threads: threading.Thread) -> None:
    """Returns once all threads have ended."""
    for thread in threads:
        thread.join(timeout=PATIENCE)
    left = [thread.name for thread in threads if thread.is_alive()]
    assert not left, f"threads did not end: {left}"
