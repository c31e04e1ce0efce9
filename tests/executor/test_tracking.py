"""``executor.track``: one calm line on a terminal, a line every few seconds elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from collections.abc import Iterator

import pytest
from small_parts import Seconds

from anabranch.executor.observing.tracking import Progress
from programs import Programs

HELLO = "[bold]hello 1 :smile: " + "x" * 100  # as it is, markup and long lines too


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(stream: io.StringIO) -> list[str]:
    """What was on the line, one drawing after the other."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return [line for line in re.split(r"[\r\n]+", text) if line]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def run(progress: Progress, clock: Seconds, rounds: int, seconds: float, label: str | None = None) -> None:
    for _ in progress.track(rounds, label):
        clock.now += seconds


def test_track_yields_the_given_items() -> None:
    progress = Progress(True, io.StringIO())
    assert list(progress.track(3)) == [0, 1, 2]
    assert list(progress.track(iter("ab"))) == ["a", "b"]
    assert list(Progress(False).track(["x"])) == ["x"]


def test_a_terminal_has_one_line_drawn_a_few_times_a_second() -> None:
    clock, stream = Seconds(), Terminal()
    run(Progress(True, stream, clock), clock, 1000, 0.01, "training")
    run(Progress(True, long := Terminal(), clock), clock, 10, 1.0, "a" * 200)
    assert all(len(line) <= 80 for line in drawn(long))
    lines = drawn(stream)
    assert len(lines) <= 4 * 10 + 2
    assert lines[0].startswith("training 1/1000 0% · 100.0/s · 0:10 left")
    assert lines[-1] == "training 1000/1000 100% · 100.0/s · took 0:10"
    assert stream.getvalue().count("\n") == 1  # at the end


def test_elsewhere_a_line_is_written_every_five_seconds() -> None:
    clock, stream = Seconds(), io.StringIO()
    run(Progress(True, stream, clock), clock, 96, 0.125)
    assert stream.getvalue().splitlines() == [
        "40/96 41% · 8.0/s · 0:07 left",
        "80/96 83% · 8.0/s · 0:02 left",
        "96/96 100% · 8.0/s · took 0:12",
    ]
    run(Progress(True, short := io.StringIO(), clock), clock, 10, 0.1)
    assert short.getvalue() == ""


def test_other_ranks_say_nothing() -> None:
    clock, stream = Seconds(), Terminal()
    run(Progress(False, stream, clock), clock, 100, 1.0)
    assert stream.getvalue() == ""


def test_without_a_length_no_remaining_time_is_shown() -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def __len__(self) -> int:
            raise TypeError("no length")

    clock, stream = Seconds(), Terminal()
    for _ in Progress(True, stream, clock).track(Endless()):
        clock.now += 4.0
    assert drawn(stream)[-1] == "4 · 4.0 s each"


def test_a_loop_that_is_left_ends_its_line() -> None:
    clock, stream = Seconds(), Terminal()
    progress = Progress(True, stream, clock)
    for i in progress.track(10):
        clock.now += 1.0
        if i == 4:
            break
    assert drawn(stream)[-1].startswith("4/10 40%")


def test_loops_inside_one_another_share_the_line() -> None:
    clock, stream = Seconds(), Terminal()
    progress = Progress(True, stream, clock)
    for _ in progress.track(2, "epoch"):
        run(progress, clock, 10, 0.5, "batch")
    assert "epoch 1/2 · batch 5/10 50% · 2.0/s · 0:02 left" in drawn(stream)
    assert stream.getvalue().count("\n") == 1


def test_a_terminal_that_was_closed_ends_no_loop() -> None:
    ours, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w")
    clock = Seconds()
    progress = Progress(True, stream, clock)
    seen = 0
    for _ in progress.track(5):
        clock.now += 1.0
        seen += 1
        if seen == 2:
            os.close(ours)
    assert seen == 5
    with pytest.raises(OSError):  # noqa: PT011 - what it had buffered
        stream.close()


def test_prints_go_above_the_line_and_those_to_a_file_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for stdout in (Terminal(), io.StringIO()):
        clock, screen = Seconds(), Terminal()
        monkeypatch.setattr(sys, "stdout", screen if stdout.isatty() else stdout)
        monkeypatch.setattr(sys, "stderr", screen)
        before = sys.stdout
        for i in Progress(True, None, clock).track(4):
            clock.now += 1.0
            if i == 1:
                print(HELLO)
        assert sys.stdout is before
        assert sys.stderr is screen
        assert (HELLO in drawn(screen)) is stdout.isatty()
        assert stdout.getvalue() == ("" if stdout.isatty() else f"{HELLO}\n")


@pytest.mark.parametrize(("over", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), (None, TypeError)])
def test_an_object_that_is_not_a_loop_is_refused(over: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="track takes"):
        Progress(True).track(over)  # type: ignore[call-overload]


def test_the_first_line_draws_no_random_number(programs: Programs) -> None:
    """rich does, as it is imported."""
    script = (
        "import random, sys\n"
        "random.seed(0)\n"
        "import anabranch as ab\n"
        "from anabranch.executor.observing.tracking import Progress\n"
        "assert 'rich' not in sys.modules\n"
        "for _ in Progress(True, sys.stderr).track(3): pass\n"
        "assert 'rich' in sys.modules\n"
        "print(random.random() == random.Random(0).random())\n"
    )
    ended = programs.run(script)
    assert ended.stdout == "True\n", ended.stderr
