"""``make soak``: it finds violations; and a short one of each kind of job."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import soak  # noqa: E402

sys.path.remove(str(TOOLS))

Line = dict[str, Any]
BATCHES = [[3, 1], [0, 2], [1, 2]]


def line(event: str, time: float = 0.0, **facts: object) -> Line:
    return {"event": event, "time": time, **facts}


def records() -> list[list[Line]]:
    """Of two workers, of which the second dies in the second step."""
    first = [
        line("doing", 9.9, step=1, number=1, ids=[3]),
        line("step", 10.0, step=1, seconds=0.1),
        line("doing", 10.1, step=2, number=1, ids=[0]),
        line("doing", 10.5, step=2, number=2, ids=[0, 2]),
        line("step", 11.0, step=2, seconds=0.2),
        line("doing", 11.1, step=3, number=2, ids=[1, 2]),
        line("step", 18.5, step=3, seconds=7.5),
        line("check", 18.6, lost=0, twice=0),
        line("end", 18.7, step=3, again=1, memberships=2),
    ]
    second = [
        line("doing", 9.9, step=1, number=1, ids=[1]),
        line("step", 10.1, step=1, seconds=0.1),
        line("doing", 10.2, step=2, number=1, ids=[2]),
    ]
    return [first, second]


def result(change: Callable[[list[Line]], object] = lambda first: None, **facts: object) -> soak.Result:
    both = records()
    change(both[0])
    counted = soak.Result("20 s")
    counted.read(both, iter(BATCHES))
    return replace(counted, **facts)  # type: ignore[arg-type]


def test_a_job_s_records_say_how_much_was_kept_and_done_again() -> None:
    one = result()
    assert one.broken() == []
    assert (one.steps, one.again, one.memberships, one.checks, one.gap, one.longest) == (3, 1, 2, 1, 7.5, 7.5)
    one.take_goodput(9.0, 11.5, [[line("step", at, step=number) for number, at in enumerate((9.5, 10.0, 10.5, 13.5))]])
    assert one.goodput == pytest.approx(1 / (2.0 * 2.0))
    assert all(len(row) <= 80 for row in soak.table([one] * 5).splitlines())


READING = soak.Reading(20, 5, 300 << 20)


def life(last: soak.Reading, name: str = "expert-1", seconds: float = 100.0) -> soak.Life:
    return soak.Life(name, 0.0, READING, last, seconds)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: result(lambda first: first[3].update(ids=[0])), "1 samples are missing"),
        (lambda: result(lambda first: first[3].update(ids=[0, 2, 2])), "1 were counted twice"),
        (lambda: result(lambda first: first[7].update(lost=2, twice=1)), "2 acknowledged updates are lost, and 1"),
        (lambda: result(lambda first: first.pop(7)), "nobody has looked"),
        (lambda: result(lambda first: first.pop()), "ended at steps []"),
        (lambda: result(lambda first: first[8].update(step=2)), "ended at steps [2]"),
        (lambda: result(lambda first: first[6].update(seconds=61.0)), "a step took 61.0 s"),
        (lambda: result(gap=61.0), "61.0 s without a step"),
        (lambda: result(difference=2e-12), "differs by 2e-12"),
        (lambda: result(difference=float("nan")), "differs by nan"),
        (lambda: result(lives=[life(replace(READING, descriptors=29))]), "expert-1 grew"),
        (lambda: result(lives=[life(replace(READING, threads=10))]), "expert-1 grew"),
        (lambda: result(lives=[life(replace(READING, memory=350 << 20))]), "expert-1 grew"),
        (lambda: result(trouble=["the launcher ended by itself"]), "by itself"),
    ],
)
def test_every_broken_guarantee_is_reported(make: Callable[[], soak.Result], words: str) -> None:
    assert any(words in told for told in make().broken())


def test_a_stable_process_violates_no_guarantee() -> None:
    lives = [
        life(replace(READING, descriptors=21, memory=310 << 20)),
        life(replace(READING, threads=99), seconds=1.0),
        life(replace(READING, descriptors=40), name="worker-1"),  # a group is not freed yet
    ]
    assert result(lives=lives).broken() == []
    assert "expert" in soak.table([result(lives=lives)])


@pytest.mark.slow
def test_processes_are_killed_and_frozen_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--every", "2", "--minutes", "0.2", "--modes", "PS", "--kills", "2", "--seed", "1"]
    monkeypatch.setattr(sys, "argv", ["soak.py", *arguments, "--out", str(tmp_path / "out")])
    monkeypatch.setattr(soak, "RECOVERY_SECONDS", 200.0)  # a busy machine: what is asserted is what is kept
    monkeypatch.setattr(soak, "UNDISTURBED_SECONDS", 2.0)
    code = soak.main()
    told = capsys.readouterr().out
    assert code == 0, told
    assert "every promise was kept" in told
