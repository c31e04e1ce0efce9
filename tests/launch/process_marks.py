"""Finds the processes that a test has started by a mark in their environment, also without their parents."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

MARK = "ANABRANCH_TEST_MARK"


def marked_processes(mark: str) -> list[str]:
    """The command lines of all living processes whose environment holds the mark, wherever their parents went."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Returns as soon as the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)
