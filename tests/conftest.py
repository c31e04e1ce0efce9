"""Fixtures that all tests share, and the promise that a test leaves no thread behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# Fixtures, not modules with doctests; several of one name cannot be collected as such.
collect_ignore_glob = ["*/conftest.py"]


def pytest_configure() -> None:
    """Signals as in a terminal: a shell that starts the tests in the background lets them ignore some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # A busy machine may take longer over an example than hypothesis would have it.
    hypothesis.settings.register_profile("any machine", deadline=None)
    hypothesis.settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_thread_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    assert not left, f"threads outlived the test: {left}"
