"""Folders of sockets and keys: private, gone with their process, and removed by the next if it was killed."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.transport.endpoints import PrivateFolder
from programs import Programs

PROGRAM = """
import sys
from anabranch.transport.endpoints import PrivateFolder
with PrivateFolder() as path:
    (path / "key").write_text("secret")
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Not ``tmp_path``, which is too long for a socket.
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def test_it_is_private_and_removed_with_its_block_whatever_it_contains(parent: Path) -> None:
    with PrivateFolder() as path:
        assert path.parent == parent
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "a").mkdir()
        (path / "a" / "b").touch()
    assert list(parent.iterdir()) == []


def test_folders_of_killed_processes_are_removed_by_the_next_and_live_ones_are_not(
    parent: Path, programs: Programs
) -> None:
    with programs.start(PROGRAM) as process:
        theirs = Path(process.stdout.readline().strip())
        with PrivateFolder() as first, PrivateFolder() as second:
            assert {theirs, first, second} == set(parent.iterdir())
        process.kill()
    assert (theirs / "key").exists()
    other = parent / "anabranch-logs"
    other.mkdir()
    with PrivateFolder() as path:
        assert {path, other} == set(parent.iterdir())


def test_sockets_fit_however_deep_the_temporary_directory_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with PrivateFolder() as path:
        assert len(str(path / "parameters-100000.lock")) <= 107
    assert not path.exists()
