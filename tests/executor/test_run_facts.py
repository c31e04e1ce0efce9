"""What a worker tells of its run: its steps, counts and their rates once a second, losses as a curve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.executor.observing.run_facts import Curve, RunFacts
from anabranch.executor.observing.tracking import Progress
from anabranch.executor.statistics import TableLoads
from anabranch.record.process import PROGRESS_VARIABLE, ProcessRecord


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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


def test_a_look_that_came_late_counts_for_all_its_time(tmp_path: Path) -> None:
    clock, record = Seconds(), ProcessRecord(tmp_path / "worker-0")
    facts = RunFacts(record, lambda: ({}, {}), clock=clock)
    for now, step in ((1.0, 10), (2.0, 30), (5.0, 45)):
        clock.now = now
        facts.counted(step)
    assert told(record, tmp_path)["pace"] == [20.0, 5.0, 5.0, 5.0]


def test_tracked_loops_are_among_the_facts(tmp_path: Path) -> None:
    clock, record = Seconds(), ProcessRecord(tmp_path / "worker-0")
    progress = Progress(True, None, clock)
    RunFacts(record, lambda: ({}, {}), progress.loops)
    for index in progress.track(10, "training"):
        if index == 3:
            found = told(record, tmp_path)["progress"]
            assert found == [{"label": "training", "done": 3, "total": 10, "seconds": 0.75}]
        clock.now += 0.25


def test_progress_is_drawn_by_the_configured_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PROGRESS_VARIABLE, "screen")
    clock = Seconds()
    for _ in Progress(True, None, clock).track(100, "training"):
        clock.now += 1.0
    assert capsys.readouterr().err == "training 100/100 100% · 1.0/s · took 1:40\n"
    monkeypatch.setenv(PROGRESS_VARIABLE, "lines")
    for _ in Progress(True, None, clock).track(10):
        clock.now += 1.0
    assert len(capsys.readouterr().err.splitlines()) == 3
