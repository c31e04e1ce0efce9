"""What the tests of launching share: scripts without torch, and the proof that a job left no process behind."""

from __future__ import annotations

import os
import textwrap
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from jobs import MARK, Ended, Ends, launch, marked_processes

from anabranch.launch import local
from anabranch.launch.forks.launcher_side import ForkServer, kept_fork_server


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    """The one that this test run keeps, started before any test has marked what it starts."""
    return kept_fork_server(os.environ)


@pytest.fixture(autouse=True)
def _shared_fork_server(monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer) -> None:
    """A job that a test launches takes the test run's: a second's import less for each."""
    monkeypatch.setattr(local, "ForkServer", lambda environment: nullcontext(fork_server))


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer) -> Iterator[str]:
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


@pytest.fixture
def ended(script: Callable[[str], Path], tmp_path: Path) -> Ends:
    """Runs a script as a job of three workers to its end, which has this exit code."""

    def run(source: str, *arguments: object, code: int = 0, workers: int = 3, **options: Any) -> Ended:
        told, words = list[str](), [str(argument) for argument in arguments]
        options = {"log_dir": tmp_path, "seconds": 120.0, "tell": told.append, "workers": workers} | options
        outcome = launch(script(source), words, **options)
        texts = [log.read_text() for log in sorted(options["log_dir"].glob("worker-*.log"))]
        assert outcome.exit_code == code, "\n".join([*told, *(log.read_text() for log in tmp_path.glob("*.log"))])
        return Ended(outcome, told, texts)

    return run


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the launcher makes its temporary files, to see what it leaves."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    return path
