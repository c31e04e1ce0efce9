"""What tests of experts share: nothing may outlive a test, and every wait ends."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    gc.collect()
    threads = set(threading.enumerate())
    files = len(os.listdir("/proc/self/fd"))
    yield
    assert set(threading.enumerate()) <= threads
    # Modules close their connections when they are collected.
    gc.collect()
    until = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > files and time.monotonic() < until:
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
