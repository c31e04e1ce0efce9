"""``make soak``: it finds violations; and a short one with two kills."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
import soak  # noqa: E402

sys.path.remove(str(TOOLS))


def line(event: str, step: int, time: float = 0.0, **facts: float) -> dict[str, float | str]:
    return {"event": event, "step": step, "time": time, **facts}


def record(*lines: dict[str, float | str]) -> soak.Record:
    found = soak.Record()
    for one in lines:
        found.take(one)
    return found


UNDISTURBED = (
    line("resume", 0),
    line("step", 1, 10.0, seconds=0.1),
    line("step", 2, 11.0, seconds=0.2),
    line("save", 2),
    line("step", 3, 12.5, seconds=0.1),
    line("resume", 2),
    line("step", 3, 20.0, seconds=0.1),
    line("check", 3, lost=0, doubled=0),
    line("end", 3),
)


def result(*lines: dict[str, float | str], **changes: object) -> soak.Result:
    kept = soak.Result(14, 600.0, Counter(worker=1), [record(*(lines or UNDISTURBED))], [], 0, 0)
    return replace(kept, **changes)  # type: ignore[arg-type]


def test_a_record_says_how_much_was_kept_and_repeated() -> None:
    kept = result()
    (one,) = kept.records
    assert (one.done, one.again, one.step, one.saved, one.gap, one.longest) == (4, 1, 3, 2, 7.5, 0.2)
    assert one.goodput == pytest.approx((3 - 1) * 1.5 / 10.0)
    assert kept.broken() == []
    assert all(len(row) <= 80 for row in kept.table().splitlines())


READING = soak.Reading(20, 5, 300 << 20)


def life(last: soak.Reading, seconds: float = 100.0) -> soak.Life:
    return soak.Life("expert-1", 0.0, READING, last, seconds)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: result(*UNDISTURBED[:-2], line("check", 3, lost=2, doubled=1), UNDISTURBED[-1]), "2 acknowledged"),
        (lambda: result(*UNDISTURBED[:5], line("resume", 1), *UNDISTURBED[1:]), "checkpoints were not gone back to"),
        (lambda: result(*UNDISTURBED[:2], *UNDISTURBED[3:]), "not the steps kept"),
        (lambda: result(*UNDISTURBED[:-1]), "not every worker"),
        (lambda: result(*UNDISTURBED[:-2], UNDISTURBED[-1]), "not every worker"),
        (lambda: result(exit_code=1), "ended with 1"),
        (lambda: result(exit_code=None), "did not end"),
        (lambda: result(overdue=3), "3 waits"),
        (lambda: result(line("step", 1, 5.0, seconds=31.0), *UNDISTURBED[2:]), "1 waits"),
        (lambda: result(line("step", 1, -60.0, seconds=0.1), *UNDISTURBED[2:]), "without a step"),
        (lambda: result(lives=[life(replace(READING, descriptors=29))]), "expert-1 grew"),
        (lambda: result(lives=[life(replace(READING, threads=10))]), "expert-1 grew"),
        (lambda: result(lives=[life(replace(READING, memory=350 << 20))]), "expert-1 grew"),
        (lambda: result(trouble=["the launcher ended by itself"]), "by itself"),
    ],
)
def test_every_broken_guarantee_is_reported(make: Callable[[], soak.Result], words: str) -> None:
    assert any(words in told for told in make().broken())


def test_a_stable_process_violates_no_guarantee() -> None:
    lives = [life(replace(READING, descriptors=21, memory=310 << 20)), life(replace(READING, threads=99), seconds=1.0)]
    assert result(lives=lives).broken() == []
    assert "expert" in result(lives=lives).table()


def test_a_record_is_read_on_from_where_it_ended_last_time(tmp_path: Path) -> None:
    path, found = tmp_path / "record-0.jsonl", soak.Record()
    found.follow(path)
    texts = [json.dumps(one) + "\n" for one in UNDISTURBED]
    path.write_text("".join(texts[:2]) + texts[2][:9])
    found.follow(path)
    assert found.step == 1
    path.write_text("".join(texts))
    found.follow(path)
    assert (found.done, found.again, found.ended) == (4, 1, True)


@pytest.mark.slow
def test_a_server_and_a_worker_are_killed_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--kills", "parameters,worker", "--steps", "10", "--seed", "1", "--experts", "1"]
    monkeypatch.setattr(sys, "argv", ["soak.py", *arguments, "--out", str(tmp_path / "out")])
    monkeypatch.setattr(soak, "RECOVERY_SECONDS", 200.0)  # a busy machine: what is asserted is what is kept
    code = soak.main()
    told = capsys.readouterr().out
    assert code == 0, told
    assert "2 kills" in told
    assert "every promise was kept" in told
