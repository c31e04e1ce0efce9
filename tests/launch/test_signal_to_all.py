"""A signal to every process of a job at once, as systemd and SLURM send it, loses nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import Script

from launched import start_run
from waiting import wait_until

TRAINS = """
import json, pathlib, signal, time
import torch
import anabranch as ab

folder = pathlib.Path({folder!r})
job = ab.job()


def make(index, count):
    return [ab.ExpertBackend("double.0", torch.nn.Linear(2, 2), args_schema=[ab.TensorSpec(2)])]


expert = ab.RemoteExpert("double.0", job.serve(make))
model = torch.nn.Sequential(ab.RemoteEmbedding("rows", 10, 2), torch.nn.Linear(2, 2))
step = ab.TrainStep(model, lambda model, ids: expert(model(ids)).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
with ab.Executor(step, comm_mode="Hybrid") as executor:
    signal.signal({number}, lambda *_: executor.request_stop())
    while not executor.stopping:
        executor.run(batch=torch.arange(4))
        (folder / f"ready-{{job.rank}}").touch()
    time.sleep(1.0)  # by now a service that obeyed at once is gone
    executor.run(batch=torch.arange(4))
    executor.save(folder / "saved")
    (folder / f"steps-{{job.rank}}").write_text(str(executor.step))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_all", [True, False], ids=["to all", "to the launcher"])
def test_workers_save_with_their_servers(script: Script, tmp_path: Path, number: signal.Signals, to_all: bool) -> None:
    path = script(TRAINS.format(folder=str(tmp_path), number=int(number)))
    logs = tmp_path / "logs"
    with start_run("--workers", 2, "--servers", 1, "--experts", 1, "--log-dir", logs, path, patient=True) as launcher:
        wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
        tasks = Path(f"/proc/{launcher.pid}/task").glob("*/children") if to_all else ()
        pids = [int(pid) for task in tasks for pid in task.read_text().split()]  # the fork server's, too
        for pid in [launcher.pid, *pids]:
            os.kill(pid, number)
        _, err = launcher.communicate(120.0)
    assert launcher.returncode == (130 if number == signal.SIGINT else 0), err
    assert (tmp_path / "saved").exists(), err
    assert all((tmp_path / f"steps-{rank}").exists() for rank in range(2)), err
    assert "did not stop in time" not in err
