"""``executor.track``: one calm line on a terminal, a line every few seconds elsewhere, nothing on other ranks."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from anabranch.executor.observing.run_facts import Curve, RunFacts
from anabranch.executor.observing.tracking import Progress
from anabranch.executor.statistics import TableLoads
from anabranch.record.process import ProcessRecord
from programs import Programs
from toys import Seconds

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


def test_track_yields_the_given_items_and_other_ranks_say_nothing() -> None:
    for shown in (True, False):
        clock, stream = Seconds(), Terminal()
        progress = Progress(shown, stream, clock)
        assert list(progress.track(3)) == [0, 1, 2]
        assert list(progress.track(iter("ab"))) == ["a", "b"]
        run(progress, clock, 100, 1.0)
        assert bool(stream.getvalue()) is shown


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


# What a worker tells of its run: its steps, counts and their rates once a second, losses as a curve.


def told(record: ProcessRecord, folder: Path) -> dict[str, object]:
    record.write()
    return json.loads((folder / "worker-0.status").read_text())["run"]


def test_a_curve_of_any_length_has_few_points_of_equal_weight() -> None:
    curve = Curve(points=4)
    for value in range(19):
        curve.add(float(value))
    assert curve.points() == [1.5, 5.5, 9.5, 13.5, 17.0]  # the last of three values so far
    short = Curve()
    for value in range(64):
        short.add(float(value))
    assert short.points() == [float(value) for value in range(64)]


def test_counts_and_rates_are_read_once_a_second(tmp_path: Path) -> None:
    clock, record, crossed, asked = Seconds(), ProcessRecord(tmp_path / "worker-0"), 0, 0

    def count() -> tuple[dict[str, int], dict[str, TableLoads]]:
        nonlocal asked
        asked += 1
        return {"workers": crossed}, {"users": TableLoads(hits=3, misses=1)}

    facts = RunFacts(record, count, clock=clock)
    for step in range(1, 31):
        clock.now += 0.1
        crossed += 50
        facts.counted(step)
    assert asked <= 3
    run = told(record, tmp_path)
    assert run["steps"] == 30
    assert run["steps_per_second"] == pytest.approx(10.0)
    assert run["pace"] == pytest.approx([10.0])  # between the two looks
    assert run["bytes_per_second"] == pytest.approx({"workers": 500.0})
    assert run["tables"]["users"]["hits"] == 3  # type: ignore[index]
    for step, value in enumerate((1.0, 0.75, 0.5), start=31):
        facts.scalars(step, {"loss": value, "learning_rate": 0.1})
        assert told(record, tmp_path)["loss"] == value
    facts.scalars(33, {"validation/loss": 9.0})  # the user's own
    facts.event("save", {"step": 33, "path": "checkpoint", "seconds": 0.5})
    facts.close()
    run = told(record, tmp_path)
    assert (run["loss"], run["curve"], run["saved"]) == (0.5, [1.0, 0.75, 0.5], str(Path("checkpoint").absolute()))


def test_tracked_loops_are_among_the_facts(tmp_path: Path) -> None:
    clock, record = Seconds(), ProcessRecord(tmp_path / "worker-0")
    progress = Progress(True, None, clock)
    RunFacts(record, lambda: ({}, {}), progress.loops)
    for index in progress.track(10, "training"):
        if index == 3:
            found = told(record, tmp_path)["progress"]
            assert found == [{"label": "training", "done": 3, "total": 10, "seconds": 0.75}]
        clock.now += 0.25
