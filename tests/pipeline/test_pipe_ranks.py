"""A pipe across ranks: the same answers, and every failure named on every rank, soon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pipeline_ranks_job as job
import pytest
import torch

from anabranch.launch import Patience
from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("pipeline_ranks_job.py")


def test_ranks_compute_and_fail_like_one_process():
    """A job for all of it: outputs and gradients, random numbers, clipping, state, mistakes, failures, pipes left open.

    What each of them is says the function of that name in the job, and the test below that runs it on more ranks.
    """
    checks = ("exact", "random_numbers", "clipping_and_checkpoints", "mistakes")
    result = LocalJob(2).run(SCRIPT, *checks, "failures:1F1B", "left_open").check()
    ends = [tuple(end) for found in result.results for end in found["arrows"]]
    sent, received = (sorted(name for way, name in ends if way == which) for which in ("send", "receive"))
    assert len(sent) >= 4
    assert sent == received, "each message's two ends have one name, whichever ranks they are on"
    for found in result.results:
        assert found["tried"] >= 24
        assert found["longest"] < 20.0  # of 30; a tenth of a second where the machine is free


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Runs a function of the job in this process, which has the stages of as many ranks."""

    def run(function: Callable[..., dict], ranks: int, *arguments: str) -> dict:
        monkeypatch.setattr(job, "ALONE", True)
        monkeypatch.setattr(job, "WORLD", ranks)
        torch.manual_seed(0)
        return function(*arguments)

    return run


@pytest.mark.parametrize(
    ("ranks", "cases"), [(4, ""), *(pytest.param(ranks, "all", marks=pytest.mark.slow) for ranks in (3, 2, 1, 4))]
)
def test_stages_of_one_process_are_the_unsplit_module(alone: Callable[..., dict], ranks: int, cases: str):
    alone(job.exact, ranks, cases)


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_process_clips_and_its_state_fits_another_split(alone: Callable[..., dict], ranks: int):
    alone(job.clipping_and_checkpoints, ranks)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("schedule", job.SCHEDULES)
def test_a_failure_of_any_stage_of_one_process_is_the_original_and_leaves_no_gradient(
    alone: Callable[..., dict], schedule: str
):
    assert alone(job.failures, 2, schedule)["tried"] >= 24


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_are_the_unsplit_module(ranks: int):
    LocalJob(ranks).run(SCRIPT, "exact:all").check()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_code_between_modules_is_read_at_every_call_on_every_rank(ranks: int):
    LocalJob(ranks).run(SCRIPT, "code_between").check()


@pytest.mark.slow
def test_a_rank_whose_code_differs_has_its_number_in_the_job():
    LocalJob(3).run(SCRIPT, "code_of_the_last_two").check()


@pytest.mark.slow
def test_so_they_are_over_gloo_alone():
    """As between hosts."""
    LocalJob(2, environment={"PIPELINE_OVER_GLOO": "1"}).run(SCRIPT, "exact:all", "mistakes").check()


@pytest.mark.slow
def test_three_ranks_draw_the_same_numbers_as_one_process():
    LocalJob(3).run(SCRIPT, "random_numbers").check()


@pytest.mark.slow
def test_clipping_spans_three_stages_and_state_fits_another_split():
    LocalJob(3).run(SCRIPT, "clipping_and_checkpoints").check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "schedules"), [(2, "GPipe,Interleaved1F1B,ZB1P,ZBV"), (3, "GPipe,1F1B,Interleaved1F1B,ZB1P,ZBV")]
)
def test_a_failure_anywhere_ends_the_step_on_every_rank_long_before_its_deadline(ranks: int, schedules: str):
    result = LocalJob(ranks).run(SCRIPT, f"failures:{schedules}").check()
    for found in result.results:
        assert found["tried"] >= 40
        assert found["longest"] < 20.0  # of 30; a tenth of a second where the machine is free


@pytest.mark.slow
def test_a_callers_mistake_on_one_of_three_ranks_reaches_the_others():
    LocalJob(3).run(SCRIPT, "mistakes").check()


def test_a_stopped_rank_is_found_by_its_heartbeats_and_the_pipe_works_when_it_resumes():
    found = LocalJob(2).run(SCRIPT, "stopped").check().results
    assert found[0]["peer"] == "rank 1"
    assert "its process is stopped" in found[0]["text"]
    assert found[0]["step"] == 1
    assert found[0]["seconds"] < 30.0  # of 60; two beats on a clock of its own: test_peers.py
    assert found[1]["type"].endswith("PeerLost")


def test_a_killed_rank_is_named_at_once():
    result = LocalJob(2, patience=Patience(failure=60.0)).run(SCRIPT, "killed")
    assert result.exit_codes[1] == -9
    assert result.results[0]["peer"] == "rank 1"
    assert result.results[0]["seconds"] < 30.0  # of 60
