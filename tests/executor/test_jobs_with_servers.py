"""Jobs with parameters on servers: a worker that stops, one that dies, and how the others continue."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers_job import batch_of, executor_of, go_on, killed, lose_one, new_model, numbers, stop_one
from small_parts import in_job, run_in_job

from anabranch.launch import Patience


def plainly(steps: int) -> object:
    """The numbers of one process after so many steps, up to rounding."""
    plain = new_model()
    with executor_of(plain, None) as executor:
        for step in range(steps):
            executor.run("train", batch_of(step, 0, 1))
        return pytest.approx(numbers(executor, plain), rel=0, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "cached"), [(0, False), (2, False), (2, True)])
def test_when_one_worker_stops_the_others_halt_after_exactly_k_steps(bound: int, cached: bool, tmp_path: Path) -> None:
    """Also where all that a step reads is cached, so that it asks the servers for nothing."""
    halted, _ = in_job(stop_one, 2, str(tmp_path), bound, cached, servers=2, timeout=800.0)
    assert halted["done"] == 4 + bound  # rank 1 is in its fourth step
    assert "nothing arrived from worker 1" in str(halted["error"])


@pytest.mark.parametrize("mode", ["PS", pytest.param("Hybrid", marks=pytest.mark.slow)])
def test_a_killed_worker_is_named_on_the_others_at_once(mode: str) -> None:
    result = run_in_job(lose_one, 3, mode, servers=1, patience=Patience(failure=20.0))
    assert result.exit_codes[1] == -9
    for rank in (0, 2):
        facts = result.results[rank]
        assert facts is not None, result.logs[rank]
        assert "rank 1" in str(facts["peer"])  # rank 0 may be lost to it by then
        assert float(str(facts["seconds"])) < 30.0  # of 50


@pytest.mark.slow
def test_a_stopped_job_resumes_with_other_workers_and_servers(tmp_path: Path) -> None:
    stopped = in_job(go_on, 2, str(tmp_path), "PS", 8, "stop", servers=1)
    assert [result["steps"] for result in stopped] == [4, 4]
    in_job(go_on, 3, str(tmp_path), "Hybrid", 6, "save", servers=2)
    assert in_job(go_on, 1, str(tmp_path), "PS", 8, "save", servers=1)[0]["numbers"] == plainly(8)


@pytest.mark.slow
def test_a_job_of_which_a_worker_was_killed_resumes_by_the_same_command(tmp_path: Path) -> None:
    """Its servers ended with it: what is on them comes from the last checkpoint."""
    lost = run_in_job(killed, 2, str(tmp_path), "PS", servers=2, patience=Patience(failure=20.0))
    assert lost.exit_codes[1] == -9
    assert "rank 1 is lost" in lost.logs[0]
    for result in in_job(killed, 2, str(tmp_path), "PS", servers=2):
        assert (result["resumed"], result["numbers"]) == (True, plainly(6))
