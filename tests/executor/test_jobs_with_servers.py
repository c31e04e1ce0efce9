"""Jobs with parameters on servers: a worker that stops, one that dies, and how the others continue."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from anabranch.launch import Patience
from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("servers_job.py")
sys.path.insert(0, str(SCRIPT.parent))

from servers_job import batch_of, executor_of, new_model, numbers  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "cached"), [(0, ""), (2, ""), (2, "cached")])
def test_when_one_worker_stops_the_others_halt_after_exactly_k_steps(bound: int, cached: str, tmp_path: Path) -> None:
    """Also where all that a step reads is cached, so that it asks the servers for nothing."""
    result = LocalJob(2, servers=2, timeout=800.0).run(SCRIPT, "stop_one", str(tmp_path), str(bound), cached).check()
    halted = result.results[0]
    assert halted is not None
    assert halted["done"] == 4 + bound  # rank 1 is in its fourth step
    assert "nothing arrived from worker 1" in str(halted["error"])


@pytest.mark.parametrize("mode", ["PS", pytest.param("Hybrid", marks=pytest.mark.slow)])
def test_a_killed_worker_is_named_on_the_others_at_once(mode: str, tmp_path: Path) -> None:
    job = LocalJob(3, servers=1, patience=Patience(failure=20.0))
    result = job.run(SCRIPT, "lose_one", str(tmp_path), mode)
    assert result.exit_codes[1] == -9
    for rank in (0, 2):
        facts = result.results[rank]
        assert facts is not None, result.logs[rank]
        assert "rank 1" in str(facts["peer"])  # rank 0 may be lost to it by then
        assert float(str(facts["seconds"])) < 30.0  # of 50


@pytest.mark.slow
def test_a_stopped_job_resumes_with_other_workers_and_servers(tmp_path: Path) -> None:
    plain = new_model()
    with executor_of(plain, None) as executor:
        for step in range(8):
            executor.run("train", batch_of(step, 0, 1))
        wanted = torch.tensor(numbers(executor, plain), dtype=torch.float64)
    stopped = LocalJob(2, servers=1).run(SCRIPT, "go_on", str(tmp_path), "PS", "8", "stop").check()
    assert [result["steps"] for result in stopped.results if result] == [4, 4]
    LocalJob(3, servers=2).run(SCRIPT, "go_on", str(tmp_path), "Hybrid", "6", "save").check()
    ended = LocalJob(1, servers=1).run(SCRIPT, "go_on", str(tmp_path), "PS", "8", "save").check()
    assert ended.results[0] is not None
    found = torch.tensor(ended.results[0]["numbers"], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_job_of_which_a_worker_was_killed_resumes_by_the_same_command(tmp_path: Path) -> None:
    """Its servers ended with it: what is on them comes from the last checkpoint."""
    plain = new_model()
    with executor_of(plain, None) as executor:
        for step in range(6):
            executor.run("train", batch_of(step, 0, 1))
        wanted = torch.tensor(numbers(executor, plain), dtype=torch.float64)
    job = LocalJob(2, servers=2, patience=Patience(failure=20.0))
    lost = job.run(SCRIPT, "killed", str(tmp_path), "PS")
    assert lost.exit_codes[1] == -9
    assert "rank 1 is lost" in lost.logs[0]
    for result in job.run(SCRIPT, "killed", str(tmp_path), "PS").check().results:
        assert result is not None
        assert result["resumed"] is True
        torch.testing.assert_close(torch.tensor(result["numbers"], dtype=torch.float64), wanted, rtol=0, atol=1e-12)
