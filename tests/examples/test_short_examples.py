"""The short examples: each runs alone and as a job, with a loss that has fallen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from example_jobs import EXAMPLES as ALL

from anabranch.testing import LocalJob
from covering import slow_except

FOLDER = ALL / "short"
EXAMPLES = sorted(FOLDER.glob("*.py"))
JOBS = {
    "experts": {"experts": 2}, "graph": {}, "own_loop": {"workers": 2}, "stages": {"workers": 2},
    "tables": {"workers": 2, "servers": 1},
}  # fmt: skip


def loss_of(printed: str) -> float:
    return float(re.findall(r"loss (\d\.\d+)", printed)[-1])


@pytest.mark.parametrize("example", slow_except(EXAMPLES, FOLDER / "own_loop.py"), ids=lambda path: path.stem)
def test_an_example_of_under_60_lines_learns_alone_and_in_a_job(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(example.read_text().splitlines()) < 60
    monkeypatch.chdir(tmp_path)
    alone = loss_of(LocalJob().run(example).check().logs[0])
    assert alone < 0.5
    if job := JOBS[example.stem]:
        assert loss_of(LocalJob(**job).run(example).check().logs[0]) == pytest.approx(alone, abs=0.1)


def test_there_are_five() -> None:
    assert [path.stem for path in EXAMPLES] == [*JOBS]
