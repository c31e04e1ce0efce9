"""Ctrl-C at any moment of a job of four workers: one line, where the checkpoint lies, and nothing left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import marked_processes

from anabranch.launch.job_status import status_of
from launched import start_run
from waiting import wait_until

PRESSES = int(os.environ.get("ANABRANCH_PRESSES", "3"))  # more to look for what happens once in a hundred

TRAINS = """
    import sys, torch, anabranch as ab
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))
    with ab.Executor(step, comm_mode="AllReduce") as executor:
        executor.resume(sys.argv[1])
        for number in range(10**9):
            executor.run(batch=torch.full((8, 4), 1.0 + ab.job().rank))
            if number % 50 == 0:
                executor.save(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PRESSES))
def test_ctrl_c_at_a_random_moment_is_reported_in_two_lines(
    seed: int, script: Callable[[str], Path], tmp_path: Path, mark: str
) -> None:
    before = marked_processes(mark)
    logs = tmp_path / "logs"
    with start_run("--workers", 4, "--log-dir", logs, script(TRAINS), tmp_path / "saved", patient=True) as job:
        wait_until((logs / "job.json").exists)  # until then it is the tests' own program
        time.sleep(random.Random(seed).uniform(0.0, 6.0))  # any moment will do, on any machine
        job.send_signal(signal.SIGINT)
        out, told = job.communicate(120.0)
        assert job.wait() == 130
    assert out == ""
    of_workers = ("waiting for rank", " rows a step", "that is killed or freezes: ")
    lines = [line for line in told.splitlines() if not any(words in line for words in of_workers)]
    assert [line[:24] for line in lines[:1]] == ["anabranch: SIGINT: stopp"]
    assert [line for line in lines[1:] if not line.startswith("anabranch: the last checkpoint: ")] == [], told
    assert len(lines) <= 2
    assert marked_processes(mark) == before


def test_ctrl_c_ends_a_worker_that_still_waits_to_meet_the_others(
    script: Callable[[str], Path], tmp_path: Path
) -> None:
    """Gloo waits in C++, where no signal reached Python: all but one were killed after five seconds."""
    path = script(
        """
        import time, torch, anabranch as ab
        if ab.job().rank == 1:
            time.sleep(600)
        model = torch.nn.Linear(4, 1)
        step = ab.TrainStep(model, lambda m, b: m(b).mean(), torch.optim.SGD(model.parameters(), lr=0.001))
        ab.Executor(step, comm_mode="AllReduce")
        """
    )
    with start_run("--workers", 2, "--log-dir", tmp_path, path, patient=True) as job:
        wait_until((tmp_path / "job.json").exists)
        wait_until(lambda: status_of(tmp_path).roles[0].waiting_for == "worker 1")
        job.send_signal(signal.SIGINT)
        _, told = job.communicate(60.0)
        assert job.wait() == 130
    lines = [line for line in told.splitlines() if "waiting for rank 1" not in line]  # said after five seconds
    assert lines == ["anabranch: SIGINT: stopping the workers (send it again to kill them)"]
    assert "KeyboardInterrupt" in (tmp_path / "worker-0.log").read_text()
