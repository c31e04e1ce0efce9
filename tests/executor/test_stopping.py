"""A job that is asked to stop saves and stops as a whole; one that dies is restarted and resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import anabranch as ab
from launched import start_run

DRAINING = """
import json, signal, sys
import torch
from torch import nn
import anabranch as ab

path = sys.argv[1]
rank = ab.job().rank
torch.manual_seed(0)
model = nn.Linear(3, 1)
step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.Adam(model.parameters()))
with ab.Executor(step, comm_mode="AllReduce") as executor:
    signal.signal(signal.SIGTERM, lambda *_: executor.request_stop())
    while not executor.stopping:
        executor.run(batch=torch.ones(2, 3))
        if executor.statistics().steps == 1 and rank == 0:
            print("running", flush=True)
    executor.save(path)
    print(json.dumps({"steps": executor.statistics().steps}))
"""


def test_a_lone_worker_stops_after_the_run_under_way() -> None:
    model = nn.Linear(3, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step) as executor:
        executor.run(batch=torch.ones(2, 3))
        assert not executor.stopping
        executor.request_stop()
        assert not executor.stopping
        executor.run(batch=torch.ones(2, 3))
        assert executor.stopping


def test_an_accumulating_worker_stops_behind_the_optimizer_step(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), optimizer, accumulate=3)
    with ab.Executor(step) as executor:
        executor.request_stop()
        found = []
        for _ in range(4):
            executor.run(batch=torch.ones(2, 3))
            found.append(executor.stopping)
            if executor.stopping:
                executor.save(tmp_path)
        assert found == [False, False, True, False]


def test_sigterm_lets_the_workers_finish_the_same_step_and_save_it(tmp_path: Path) -> None:
    script, logs = tmp_path / "draining.py", tmp_path / "logs"
    script.write_text(DRAINING)
    with start_run("--workers", 2, "--log-dir", logs, script, tmp_path / "saved") as launcher:
        while "running" not in (line := launcher.stdout.readline()):
            assert line, launcher.stderr.read()
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, err
    steps = [json.loads((logs / f"worker-{rank}.log").read_text().splitlines()[-1])["steps"] for rank in range(2)]
    assert steps[0] == steps[1] >= 1
    assert ab.checkpoint.read(tmp_path / "saved").step == steps[0]


RESTARTED = """
import json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
import anabranch as ab

path = Path(sys.argv[1])
rank = ab.job().rank
torch.manual_seed(0)
model = nn.Linear(3, 1).double()
step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.Adam(model.parameters()))
with ab.Executor(step, comm_mode="AllReduce", heartbeat=0.5) as executor:
    resumed = executor.resume(path)
    while executor.statistics().steps < 6:
        done = executor.statistics().steps
        if rank == 1 and done == 4 and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
        executor.run(batch=torch.full((2, 3), float(done + rank)).double())
        if done % 2 == 1:
            executor.save(path)
if rank == 0:
    (path / "result.json").write_text(json.dumps({"weight": model.weight.tolist(), "resumed": resumed}))
"""


@pytest.mark.slow
def test_torchrun_restarts_a_killed_job_which_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "restarted.py"
    script.write_text(RESTARTED)
    results = []
    for name, workers in (("disturbed", 2), ("whole", 2)):
        path = tmp_path / name
        if name == "whole":  # never killed: rank 1 finds a job that has been resumed, from nothing done
            script.write_text(RESTARTED.replace("and not resumed", "and False"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
        path.mkdir()
        done = subprocess.run(
            [*command, "--nproc-per-node", str(workers), str(script), str(path)],
            capture_output=True,
            text=True,
            timeout=400,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results.append(json.loads((path / "result.json").read_text()))
    disturbed, whole = results
    assert disturbed["resumed"]
    assert not whole["resumed"]
    assert disturbed["weight"] == whole["weight"]
