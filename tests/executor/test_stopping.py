"""A job that is asked to stop saves and stops as a whole; one that dies is restarted and resumes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

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
