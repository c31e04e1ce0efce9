"""What tests of experts share: nothing may outlive a test, and every wait ends."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    threads = set(threading.enumerate())
    files = descriptors()
    gc.freeze()  # so that a collection looks at what the test has made, and not at all that was imported
    yield
    try:
        assert set(threading.enumerate()) <= threads
        if descriptors() > files:
            # Modules close their connections when they are collected.
            gc.collect()
    finally:
        gc.unfreeze()
    if descriptors() > files:
        gc.collect()  # it may have used the client of a module that an earlier test has left
    assert descriptors() <= files
