"""A pipe across ranks: the same answers, and every failure named on every rank, soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.launch import Patience
from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("pipeline_ranks_job.py")
OVER_GLOO = {"PIPELINE_POST": "gloo"}
"""Ranks of one host use shared memory unless they are told not to."""


def test_ranks_compute_and_fail_like_one_process(tmp_path: Path):
    """A job for all of it: outputs and gradients, random numbers, clipping, state, mistakes, failures, pipes left open.

    What each of them is says the function of that name in the job, and the test below that runs it on more ranks.
    """
    checks = ("exact", "random_numbers", f"clipping_and_checkpoints:{tmp_path}", "mistakes")
    result = LocalJob(2).run(SCRIPT, *checks, "failures:1F1B,ZBV", "left_open").check()
    for found in result.results:
        assert found["tried"] >= 40
        assert found["longest"] < 20.0  # of 30; a tenth of a second where the machine is free


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_are_the_unsplit_module(ranks: int):
    LocalJob(ranks).run(SCRIPT, "exact:all").check()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_code_between_modules_is_read_at_every_call_on_every_rank(ranks: int):
    LocalJob(ranks).run(SCRIPT, "code_between").check()


@pytest.mark.slow
@pytest.mark.parametrize("what", [("exact:all", "mistakes"), ("failures:1F1B,ZBV",)], ids=str)
def test_so_they_are_over_gloo_alone(what: tuple[str, ...]):
    """As between hosts."""
    LocalJob(2, environment=OVER_GLOO).run(SCRIPT, *what).check()


@pytest.mark.slow
def test_three_ranks_draw_the_same_numbers_as_one_process():
    LocalJob(3).run(SCRIPT, "random_numbers").check()


@pytest.mark.slow
def test_clipping_spans_three_stages_and_state_fits_another_split(tmp_path: Path):
    LocalJob(3).run(SCRIPT, f"clipping_and_checkpoints:{tmp_path}").check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "schedules"), [(2, "GPipe,Interleaved1F1B,ZB1P"), (3, "GPipe,1F1B,Interleaved1F1B,ZB1P,ZBV")]
)
def test_a_failure_anywhere_ends_the_step_on_every_rank_long_before_its_deadline(ranks: int, schedules: str):
    result = LocalJob(ranks).run(SCRIPT, f"failures:{schedules}").check()
    for found in result.results:
        assert found["tried"] >= 40
        assert found["longest"] < 20.0  # of 30; a tenth of a second where the machine is free


@pytest.mark.slow
def test_a_callers_mistake_on_one_of_three_ranks_reaches_the_others():
    LocalJob(3).run(SCRIPT, "mistakes").check()


@pytest.mark.slow
def test_pipelines_of_a_grid_run_side_by_side():
    LocalJob(4).run(SCRIPT, "grid").check()


@pytest.mark.parametrize("environment", [{}, pytest.param(OVER_GLOO, marks=pytest.mark.slow)], ids=str)
def test_a_stopped_rank_is_found_by_its_heartbeats_and_the_pipe_works_when_it_resumes(environment: dict[str, str]):
    found = LocalJob(2, environment=environment).run(SCRIPT, "stopped").check().results
    assert found[0]["peer"] == "rank 1"
    assert "its process is stopped" in found[0]["text"]
    assert found[0]["step"] == 1
    assert found[0]["seconds"] < 30.0  # of 60; two beats on a clock of its own: test_peers.py
    assert found[1]["type"].endswith("PeerLost")


@pytest.mark.parametrize("environment", [{}, pytest.param(OVER_GLOO, marks=pytest.mark.slow)], ids=str)
def test_a_killed_rank_is_named_at_once(environment: dict[str, str]):
    result = LocalJob(2, environment=environment, patience=Patience(failure=60.0)).run(SCRIPT, "killed")
    assert result.exit_codes[1] == -9
    assert result.results[0]["peer"] == "rank 1"
    assert result.results[0]["seconds"] < 30.0  # of 60
