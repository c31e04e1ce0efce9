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
    yield
    assert set(threading.enumerate()) <= threads
    for _ in range(2):  # modules close their connections when they are collected; a graph lets go of them before that
        if descriptors() > files:
            gc.collect()
    assert descriptors() <= files
