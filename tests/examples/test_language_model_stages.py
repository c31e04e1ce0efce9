"""The language model in stages: the curve of one process, for any stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.testing import LocalJob

SCRIPT = Path(__file__).parents[2] / "examples" / "language_model.py"
SMALL = ("--batch", "4", "--memory-rows", "512", "--engine", "tape")


def run_alone(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, object], str]:
    import language_model

    assert language_model.main([str(argument) for argument in arguments]) == 0
    printed = capsys.readouterr().out
    return json.loads(printed.splitlines()[-1]), printed


def losses(out: Path) -> list[float]:
    return json.loads((out / "curve.json").read_text())["losses"]


@pytest.mark.slow
def test_two_stages_draw_the_curve_of_one_process(small_text, tmp_path, capsys):
    arguments = [*SMALL, "--steps", "3", "--text", str(small_text)]
    job = LocalJob(2).run(SCRIPT, *arguments, "--stages", "2", "--out", str(tmp_path / "two")).check()
    threads, printed = run_alone(capsys, *arguments, "--stages", "3", "--out", tmp_path / "threads")
    plain, _ = run_alone(capsys, *arguments, "--out", tmp_path / "one")
    found = job.results[0]
    assert found is not None
    assert (found["stages"], found["workers"], found["comm_mode"]) == (2, 2, "None")
    assert (threads["stages"], threads["workers"]) == (3, 1)
    assert job.results[1] is None, "only rank 0 reports"
    for one in (found, threads):
        assert losses(Path(one["out"])) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
        assert one["bits_per_byte"] == pytest.approx(plain["bits_per_byte"], rel=1e-5)
        assert (Path(one["out"]) / "schedule.svg").stat().st_size > 500
    assert str(tmp_path / "threads" / "schedule.svg") in printed


@pytest.mark.slow
def test_a_stage_may_hold_a_mixture_of_experts(small_text, tmp_path):
    arguments = [*SMALL, "--steps", "3", "--text", str(small_text), "--stages", "2", "--out", str(tmp_path)]
    job = LocalJob(2, servers=1, experts=2)
    found = job.run(SCRIPT, *arguments).check().results[0]
    assert (found["stages"], found["experts"], found["servers"]) == (2, 2, 1)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


@pytest.mark.parametrize(
    ("workers", "arguments", "message"),
    [
        ("3", ["--stages", "2"], "3 workers make no pipelines of --stages 2"),
        ("1", ["--stages", "7"], "this model has 6 layers"),
    ],
)
def test_stages_that_cannot_be_are_refused(workers, arguments, message, small_text, tmp_path, monkeypatch):
    import language_model

    monkeypatch.setenv("WORLD_SIZE", workers)
    with pytest.raises(SystemExit) as stopped:
        language_model.main([*arguments, "--text", str(small_text), "--out", str(tmp_path)])
    assert message in str(stopped.value.code)
