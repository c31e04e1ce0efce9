"""Rank 0's screen where its log, its reader or its copier fails it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from anabranch.launch.output import copier
from anabranch.launch.output.copier import Copier
from anabranch.launch.output.screen import Screen
from waiting import join, wait_until


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "worker-0.log"
    log.symlink_to("/dev/full")
    with Screen(log) as screen:
        os.write(screen.stdout, b"one\n")
        os.write(screen.stdout, b"two\n")
        os.write(screen.stderr, b"three\n")
    shown = capfd.readouterr()
    assert shown.out == "one\ntwo\n"
    assert shown.err == "anabranch: /dev/full ends here: No space left on device\nthree\n"


def test_output_written_before_a_line_of_the_launcher_is_shown_before_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Screen(tmp_path / "log") as screen:
        for number in range(20):
            os.write(screen.stderr, f"rank 0: {number}\n".encode())
            screen.finish_line()
            os.write(2, f"launcher: {number}\n".encode())
    lines = [line for number in range(20) for line in (f"rank 0: {number}", f"launcher: {number}")]
    assert capfd.readouterr().err.splitlines() == lines


def test_the_log_of_an_attempt_before_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A job that was started again had lost what rank 0 had written the first time."""
    for attempt in range(2):
        with Screen(tmp_path / "log", goes_on=attempt > 0) as screen:
            os.write(screen.stdout, f"attempt {attempt}\n".encode())
    assert (tmp_path / "log").read_text() == "attempt 0\nattempt 1\n"
    with Screen(tmp_path / "log"):
        pass
    assert not (tmp_path / "log").read_text()


def test_a_copier_that_was_killed_is_replaced_and_nothing_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with Screen(log) as screen:
        os.write(screen.stdout, b"one\n")
        screen.finish_line()
        signal.pidfd_send_signal(screen.pidfd, signal.SIGKILL)
        screen.finish_line()  # says nothing and goes on
        os.write(screen.stdout, b"two\n")
        screen.revive()
        os.write(screen.stdout, b"three\n")
        screen.finish_line()
        signal.pidfd_send_signal(screen.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, screen.pidfd, os.WEXITED | os.WNOWAIT)
        os.write(screen.stdout, b"four\n")
    assert log.read_text() == capfd.readouterr().out == "one\ntwo\nthree\nfour\n"


class Copying:
    """A copier in a thread of this process."""

    def __init__(self, log: Path, shown: int, *, terminal: bool = False) -> None:
        self.source, self.given = os.pipe()
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(60)
        self._log = log.open("wb", buffering=0)
        self._theirs = theirs
        copying = Copier(theirs.fileno(), self._log.fileno(), {self.source: shown}, terminal)
        self.thread = threading.Thread(target=copying.run)
        self.thread.start()

    def order(self, letter: bytes) -> None:
        self.channel.sendall(letter)
        assert self.channel.recv(1) == copier.DONE

    def close(self) -> None:
        self.channel.close()
        join(self.thread)
        for descriptor in (self.source, self.given):
            os.close(descriptor)
        self._theirs.close()
        self._log.close()


def full_pipe() -> tuple[int, int, int]:
    """Its two ends, and how many bytes lie in it."""
    reader, writer = os.pipe()
    filled = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    assert os.write(writer, b"x" * filled) == filled
    return reader, writer, filled


def test_a_reader_that_has_gone_does_not_end_the_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    copying = Copying(tmp_path / "log", writer)
    for line in (b"one\n", b"two\n"):
        os.write(copying.given, line)
        copying.order(copier.FINISH_LINE)
    copying.close()
    os.close(writer)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_slow_reader_delays_only_rank_0(tmp_path: Path) -> None:
    reader, writer, filled = full_pipe()
    copying = Copying(tmp_path / "log", writer)
    os.write(copying.given, b"one\n")
    copying.order(copier.FINISH_LINE)  # answers, though nothing can be shown
    assert not (tmp_path / "log").read_bytes()
    copying.order(copier.HIDE)
    wait_until((tmp_path / "log").read_bytes)
    copying.order(copier.SHOW)
    os.write(copying.given, b"two\n")
    assert os.read(reader, filled) == b"x" * filled
    assert os.read(reader, 100) == b"two\n"  # what came while the screen was left alone is in the log
    copying.close()
    os.close(writer)
    os.close(reader)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_launcher_that_was_killed_ends_the_copier_whatever_its_reader_does(tmp_path: Path) -> None:
    reader, writer, _ = full_pipe()
    copying = Copying(tmp_path / "log", writer)
    os.write(copying.given, b"last\n")
    copying.close()
    os.close(writer)
    os.close(reader)
    assert (tmp_path / "log").read_bytes() == b"last\n"


def test_a_line_of_the_launcher_begins_a_line_on_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    copying = Copying(tmp_path / "log", writer, terminal=True)
    os.write(copying.given, b"progress 7 %")
    copying.order(copier.FINISH_LINE)
    copying.order(copier.FINISH_LINE)
    assert capfd.readouterr().err == "\n"
    copying.close()
    os.close(writer)
    os.close(reader)
