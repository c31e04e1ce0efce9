"""What the tests of launching share: scripts without torch, and the proof that a job left no process behind."""

from __future__ import annotations

import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_marks import MARK, marked_processes


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks everything that the test starts; fails it if any of that outlives it."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    left = marked_processes(value)
    assert not left, f"processes outlived the test: {left}"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a script and gives its path."""

    def write(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(source))
        return path

    return write
