"""The click-through example: three models near their ceiling, the same on two workers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from example_jobs import run_example

from anabranch.testing import LocalJob

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "click_through.py"
SMALL = shlex.split(
    "--steps 6 --batch 64 --lines 1000 --held-out-lines 500 --ids 50 --rows 512 --evaluate-every 3 --engine tape"
)


def run_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    import click_through

    assert click_through.main([str(argument) for argument in arguments]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# The models.


@pytest.mark.parametrize(
    "name", ["wide-deep", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepfm", "dcn"))]
)
def test_each_model_is_near_the_best_auc_after_80_steps(name, tmp_path, capsys):
    arguments = shlex.split("--steps 80 --batch 512 --lines 41000 --held-out-lines 8000 --ids 50 --rows 8192 --model")
    result = run_here(capsys, *arguments, name, "--out", tmp_path)
    assert result["best_auc"] - 0.045 < result["auc"] < result["best_auc"] + 0.002
    assert result["log_loss"] < result["best_log_loss"] + 0.05
    assert result["held_out_lines"] == 8000
    assert result["model"] == name


# Own data.


def test_a_file_of_ones_own_is_trained_on_and_its_end_measured(tmp_path, capsys):
    import _planted

    path = tmp_path / "mine.txt"
    _planted.Planted("criteo", seed=0, ids=50).write(path, 2000, part=0)
    result = run_here(capsys, *SMALL, "--data", path, "--out", tmp_path / "out")
    assert result["best_auc"] is None
    assert 50 < result["held_out_lines"] < 150


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "no/such/file"], "no/such/file: there is no such file"),
        (["--held-out", __file__], "--held-out belongs to --data"),
        (["--model", "tree"], "invalid choice: 'tree'"),
        (["--pull-bound", "-1"], "a whole number from 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, said, capsys):
    import click_through

    with pytest.raises(SystemExit) as stopped:
        click_through.main(arguments)
    assert said in capsys.readouterr().err + str(stopped.value.code)


# A job.


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "cached"])
def test_two_workers_end_where_one_ends(mode, tmp_path, capsys):
    one = run_here(capsys, *SMALL, "--out", tmp_path / "one")
    cache = ["--comm-mode", "Hybrid", "--cache-rows", "60"] if mode == "cached" else ["--comm-mode", mode]
    two = (
        run_example(LocalJob(workers=2, servers=2), SCRIPT, *SMALL, *cache, "--out", tmp_path / "two")
        .check()
        .results[0]
    )
    assert two is not None
    assert two["workers"] == 2
    assert two["comm_mode"] == "Hybrid"
    assert two["log_loss"] == pytest.approx(one["log_loss"], rel=1e-5)
    assert two["auc"] == pytest.approx(one["auc"], abs=1e-4)
    assert two["bytes_per_step"] > 0
    if mode == "cached":
        assert 0 < two["cache_hits"] < 1
