"""Rank 0's screen and log: their order, and what happens where one of them fails."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from anabranch.launch.output.screen import Screen
from waiting import running, wait_until


def on_stderr(line: str) -> None:
    os.write(2, f"launcher: {line}\n".encode())


@contextmanager
def standard_output(descriptor: int) -> Iterator[None]:
    """Let this be the process's stdout meanwhile."""
    before = os.dup(1)
    os.dup2(descriptor, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)


def test_a_traceback_is_the_end_of_the_log_and_follows_what_was_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It stood hundreds of lines before its time, as the streams were copied in pieces, in turns."""
    for attempt in range(20):
        with Screen(tmp_path / "log") as screen:
            for number in range(600):
                os.write(screen.stdout, f"{number}\n".encode())
            os.write(screen.stdout, b"no newline: ")
            for part in ("Trace", "back\n", "  line", " 1\n"):
                os.write(screen.stderr, part.encode())
        expected = [*map(str, range(600)), "no newline: Traceback", "  line 1"]
        assert (tmp_path / "log").read_text().splitlines() == expected, attempt
        shown = capfd.readouterr()
        assert shown.out == "".join(f"{number}\n" for number in range(600)) + "no newline: "
        assert shown.err == "Traceback\n  line 1\n"


def test_a_full_disk_ends_the_log_and_not_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "worker-0.log"
    log.symlink_to("/dev/full")
    with Screen(log, on_stderr) as screen:
        os.write(screen.stdout, b"one\n")
        os.write(screen.stdout, b"two\n")
        os.write(screen.stderr, b"three\n")
    shown = capfd.readouterr()
    assert shown.out == "one\ntwo\n"
    assert sorted(shown.err.splitlines()) == [f"launcher: {log} ends here: No space left on device", "three"]


def test_output_written_before_a_line_of_the_launcher_is_shown_before_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if the line comes while another is shown."""
    said: list[str] = []

    def say(line: str) -> None:
        on_stderr(line)
        if line == "20":
            os.write(screen.stderr, b"rank 0: 21\n")
            screen.say("21")
        said.append(line)

    with Screen(tmp_path / "log", say) as screen:
        for number in range(21):
            os.write(screen.stderr, f"rank 0: {number}\n".encode())
            screen.say(str(number))
            wait_until(lambda number=number: len(said) > number)
        wait_until(lambda: len(said) == 22)
    lines = [line for number in range(22) for line in (f"rank 0: {number}", f"launcher: {number}")]
    assert capfd.readouterr().err.splitlines() == lines


def test_the_last_line_of_the_launcher_may_come_with_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    for number in range(100):
        with Screen(tmp_path / "log", said.append) as screen:
            screen.say(str(number))
    assert said == [str(number) for number in range(100)]


def test_the_log_of_an_attempt_before_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A job that was started again had lost what rank 0 had written the first time."""
    for attempt in range(2):
        with Screen(tmp_path / "log", goes_on=attempt > 0) as screen:
            os.write(screen.stdout, f"attempt {attempt}\n".encode())
    assert (tmp_path / "log").read_text() == "attempt 0\nattempt 1\n"
    with Screen(tmp_path / "log"):
        pass
    assert not (tmp_path / "log").read_text()


def test_a_reader_that_has_gone_does_not_end_the_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with standard_output(writer):
        os.close(writer)
        with Screen(tmp_path / "log") as screen:
            for line in (b"one\n", b"two\n"):
                os.write(screen.stdout, line)
                wait_until(lambda line=line: (tmp_path / "log").read_bytes().endswith(line))
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_slow_reader_delays_only_rank_0(tmp_path: Path) -> None:
    """Neither its log nor the launcher's lines wait."""
    reader, writer = os.pipe()
    filled = fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)
    assert os.write(writer, b"x" * filled) == filled
    said: list[str] = []
    with standard_output(writer):
        os.close(writer)
        with Screen(tmp_path / "log", said.append) as screen:
            os.write(screen.stdout, b"one\n")
            wait_until(lambda: (tmp_path / "log").read_bytes() == b"one\n")
            screen.say("a line")
            wait_until(lambda: said == ["a line"])
            assert os.read(reader, filled) == b"x" * filled
        assert os.read(reader, 100) == b"one\n"
    os.close(reader)


def test_a_line_of_the_launcher_begins_a_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    reader, writer = os.pipe()
    said: list[str] = []
    with standard_output(writer):
        os.close(writer)
        with Screen(tmp_path / "log", said.append) as screen:
            assert screen.stdout == screen.stderr
            os.write(screen.stdout, b"progress 7 %")
            wait_until((tmp_path / "log").read_bytes)
            screen.say("a line")
            wait_until(lambda: said)
            os.write(screen.stdout, b"\x1b[?25l")
    shown = os.read(reader, 100)
    os.close(reader)
    assert shown == b"progress 7 %\n\x1b[?25l\n\x1b[?25h"  # the cursor is shown again


def test_threads_that_write_at_once_do_not_break_each_others_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Screen(tmp_path / "log") as screen:

        def write(descriptor: int, letter: str) -> None:
            for _ in range(500):
                os.write(descriptor, (letter * 40 + "\n").encode())

        with running(lambda: write(screen.stdout, "a")):
            write(screen.stderr, "b")
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1000
    assert set(lines) == {"a" * 40, "b" * 40}


@pytest.fixture
def shown(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """All that the screen has shown."""
    seen: list[str] = []

    def everything() -> str:
        seen.append(capfd.readouterr().out)
        return "".join(seen)

    return everything


def test_what_another_worker_writes_to_its_log_is_shown_from_then_on(tmp_path: Path, shown: Callable[[], str]) -> None:
    other = tmp_path / "worker-2.log"
    other.write_text("as rank 2\n")
    with Screen(tmp_path / "worker-0.log") as screen, other.open("a", buffering=1) as log:
        os.write(screen.stdout, b"rank 0\n")
        screen.follow(other)
        screen.follow(tmp_path / "of a folder that was removed")
        for number in range(3):
            log.write(f"as rank 0: {number}\n")
            wait_until(lambda line=f"{number}\n": line in shown())
        log.write("the last")
    assert shown() == "rank 0\nas rank 0: 0\nas rank 0: 1\nas rank 0: 2\nthe last"
    assert (tmp_path / "worker-0.log").read_text() == "rank 0\n"


def test_the_log_of_a_lost_rank_0_in_which_its_replacement_writes_is_shown_no_more(
    tmp_path: Path, shown: Callable[[], str]
) -> None:
    logs = [tmp_path / "worker-1.log", tmp_path / "worker-2.log"]
    for log in logs:
        log.touch()

    def write(log: Path, line: str) -> None:
        with log.open("a") as file:
            file.write(line)

    with Screen(tmp_path / "worker-0.log") as screen:
        screen.follow(logs[1])
        write(logs[1], "as rank 0\n")
        wait_until(lambda: shown() == "as rank 0\n")
        screen.follow(logs[0])
        write(logs[0], "the next\n")
        wait_until(lambda: shown().endswith("the next\n"))
        write(logs[1], "as a newcomer\n")
        screen.follow(logs[1])
        write(logs[1], "rank 0 again\n")
        wait_until(lambda: shown().endswith("again\n"))
        files = [os.readlink(path) for path in Path("/proc/self/fd").glob("*") if path.exists()]
        assert [files.count(str(log)) for log in logs] == [0, 1]
    assert shown() == "as rank 0\nthe next\nrank 0 again\n"
