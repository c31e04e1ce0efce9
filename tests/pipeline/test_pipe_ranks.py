"""A pipe across ranks: the same answers, and every failure named on every rank, soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("pipeline_ranks_job.py")
OVER_GLOO = {"PIPELINE_POST": "gloo"}
"""Ranks of one host use shared memory unless they are told not to."""


@pytest.mark.parametrize(
    ("ranks", "what"),
    [(2, "exact"), *(pytest.param(ranks, "exact all", marks=pytest.mark.slow) for ranks in (1, 2, 3, 4))],
)
def test_ranks_are_the_unsplit_module(ranks: int, what: str):
    LocalJob(ranks, timeout=110).run(SCRIPT, *what.split()).check()


@pytest.mark.parametrize(
    "what",
    ["exact", "mistakes", *(pytest.param(what, marks=pytest.mark.slow) for what in ("exact all", "failures 1F1B,ZBV"))],
)
def test_so_they_are_over_gloo_alone(what: str):
    """As between hosts."""
    LocalJob(2, timeout=110, environment=OVER_GLOO).run(SCRIPT, *what.split()).check()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_draw_what_one_process_draws(ranks: int):
    LocalJob(ranks, timeout=60).run(SCRIPT, "random_numbers").check()


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_clipping_spans_all_stages_and_state_fits_another_split(ranks: int, tmp_path: Path):
    LocalJob(ranks, timeout=60).run(SCRIPT, "clipping_and_checkpoints", str(tmp_path)).check()


@pytest.mark.parametrize(
    ("ranks", "schedules"),
    [
        (2, "1F1B,ZBV"),
        pytest.param(2, "GPipe,Interleaved1F1B,ZB1P", marks=pytest.mark.slow),
        pytest.param(3, "GPipe,1F1B,Interleaved1F1B,ZB1P,ZBV", marks=pytest.mark.slow),
    ],
)
def test_a_failure_anywhere_ends_the_step_on_every_rank_long_before_its_deadline(ranks: int, schedules: str):
    result = LocalJob(ranks, timeout=200).run(SCRIPT, "failures", schedules).check()
    for found in result.results:
        assert found["tried"] >= 40
        assert found["longest"] < 20.0  # of 30; a tenth of a second where the machine is free


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_callers_mistake_on_one_rank_reaches_the_others(ranks: int):
    LocalJob(ranks, timeout=60).run(SCRIPT, "mistakes").check()


def test_a_job_ends_well_with_its_pipes_left_open():
    LocalJob(2, timeout=60).run(SCRIPT, "left_open").check()


@pytest.mark.slow
def test_pipelines_of_a_grid_stand_beside_one_another():
    LocalJob(4, timeout=100).run(SCRIPT, "grid").check()


@pytest.mark.parametrize("environment", [{}, pytest.param(OVER_GLOO, marks=pytest.mark.slow)], ids=str)
def test_a_stopped_rank_is_named_by_its_beats_and_the_pipe_works_when_it_goes_on(environment: dict[str, str]):
    found = LocalJob(2, timeout=60, environment=environment).run(SCRIPT, "stopped").check().results
    assert found[0]["peer"] == "rank 1"
    assert "its process is stopped" in found[0]["text"]
    assert found[0]["step"] == 1
    assert found[0]["seconds"] < 30.0  # of 60; two beats on a clock of its own: test_beats.py
    assert found[1]["type"].endswith("PeerLost")


@pytest.mark.parametrize("environment", [{}, pytest.param(OVER_GLOO, marks=pytest.mark.slow)], ids=str)
def test_a_killed_rank_is_named_at_once(environment: dict[str, str]):
    result = LocalJob(2, timeout=60, environment=environment).run(SCRIPT, "killed")
    assert result.exit_codes[1] == -9
    assert result.results[0]["peer"] == "rank 1"
    assert result.results[0]["seconds"] < 30.0  # of 60
