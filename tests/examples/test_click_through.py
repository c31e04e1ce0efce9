"""The click-through example: three models near their ceiling, the same on two workers."""

from __future__ import annotations

import shlex
from functools import partial

import example_jobs
import pytest
from example_jobs import EXAMPLES, run_example

from anabranch.testing import LocalJob

SCRIPT = EXAMPLES / "click_through.py"
run_here = partial(example_jobs.run_here, "click_through")
SMALL = shlex.split(
    "--steps 6 --batch 64 --lines 1000 --held-out-lines 500 --ids 50 --rows 512 --evaluate-every 3 --engine tape"
)


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


# A job.


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "cached"])
def test_two_workers_end_where_one_ends(mode, tmp_path, capsys):
    one = run_here(capsys, *SMALL, "--out", tmp_path / "one")
    cache = ["--comm-mode", "Hybrid", "--cache-rows", "60"] if mode == "cached" else ["--comm-mode", mode]
    job = LocalJob(workers=2, servers=2)
    two = run_example(job, SCRIPT, *SMALL, *cache, "--out", tmp_path / "two").check().results[0]
    assert two is not None
    assert (two["workers"], two["comm_mode"]) == (2, "Hybrid")
    assert two["log_loss"] == pytest.approx(one["log_loss"], rel=1e-5)
    assert two["auc"] == pytest.approx(one["auc"], abs=1e-4)
    assert two["bytes_per_step"] > 0
    if mode == "cached":
        assert 0 < two["cache_hits"] < 1
