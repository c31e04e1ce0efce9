"""Rank 0's screen where its log or its reader fails it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabranch.launch.screen import Screen


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "worker-0.log"
    log.symlink_to("/dev/full")
    with Screen(log) as screen:
        os.write(screen.stdout, b"one\n")
        assert screen.copy(min(screen.targets))
        os.write(screen.stdout, b"two\n")
        os.write(screen.stderr, b"three\n")
    shown = capfd.readouterr()
    assert shown.out == "one\ntwo\n"
    assert shown.err == f"anabranch: {log} ends here: No space left on device\nthree\n"


def test_a_reader_that_has_gone_does_not_end_the_log(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    reader, writer = os.pipe()
    os.close(reader)
    with Screen(log) as screen:
        for source in screen.targets:
            screen.targets[source] = writer
        os.write(screen.stdout, b"one\n")
        assert screen.copy(min(screen.targets))
        os.write(screen.stdout, b"two\n")
    os.close(writer)
    assert log.read_bytes() == b"one\ntwo\n"
