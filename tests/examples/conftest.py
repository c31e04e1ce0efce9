"""What the tests of the examples share: the examples on the import path, and a small text."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from example_jobs import EXAMPLES


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run in this process draws its curve, which takes longer than its steps, unless the test takes ``drawn``."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def drawn() -> None:
    """Asks for the pictures."""


@pytest.fixture
def small_text(tmp_path: Path) -> Path:
    """A directory with 24 files of 600 bytes; file i is made of the two bytes 2 i and 2 i + 1 alone."""
    directory = tmp_path / "text"
    directory.mkdir()
    chance = random.Random(0)
    for index in range(24):
        content = bytes(2 * index + chance.randrange(2) for _ in range(600))
        (directory / f"{index:02}.txt").write_bytes(content)
    return directory
