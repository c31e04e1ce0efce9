"""``anabranch status`` says how each process of a job is, while one is frozen too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from anabranch.launch import launch
from anabranch.launch.job_file import JobFile
from anabranch.launch.status import latest_job, status_of

STATUS = [sys.executable, "-m", "anabranch.cli", "status"]


def test_the_states_of_processes(tmp_path: Path) -> None:
    record = JobFile(tmp_path)
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)  # a frozen one would be waited for
        record.began("worker", 0, os.getpid(), None)
        record.began("worker", 1, process.pid, None)
        record.began("parameters", 0, process.pid, f"unix:{tmp_path}/socket")
        record.began("expert", 0, process.pid, None)
        record.returns("expert", 0)
        (tmp_path / "worker-0.steps").write_bytes((7).to_bytes(8, "little"))
        assert [one.state for one in status_of(tmp_path).roles] == ["running", "running", "starting", "restarting"]
        assert [one.steps for one in status_of(tmp_path).roles] == [7, None, None, None]
        (tmp_path / "socket").touch()
        assert status_of(tmp_path).roles[2].state == "running"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert status_of(tmp_path).roles[1].state == "stopped"
    assert status_of(tmp_path).roles[1].state == "gone"
    record.ended()
    assert {one.state for one in status_of(tmp_path).roles} == {"gone"}


def test_a_job_of_executors_tells_its_steps(tmp_path: Path, script: Callable[[str], Path]) -> None:
    path = script(
        """
        import os, subprocess, sys, torch, anabranch as ab
        model = torch.nn.Linear(2, 1)
        step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor(step, comm_mode="AllReduce") as executor:
            for _ in range(3):
                executor.run(batch=torch.ones(2, 2))
            if ab.job().rank == 0:
                subprocess.run([sys.executable, "-m", "anabranch.cli", "status", sys.argv[1], "--json"], check=True)
        """
    )
    found = launch(path, [str(tmp_path)], workers=2, log_dir=tmp_path, seconds=200)
    said = (tmp_path / "worker-0.log").read_text()
    assert found.exit_code == 0, said
    seen = json.loads(said)
    assert seen["ended"] is None
    assert [(one["role"], one["rank"], one["pid"]) for one in seen["roles"]] == [
        ("worker", 0, found.exits[0].pid),
        ("worker", 1, found.exits[1].pid),
    ]
    assert seen["roles"][0]["steps"] == 3
    assert seen["roles"][0]["state"] == "running"
    assert {"waiting_for", "waiting_seconds"} <= set(seen["roles"][0])


def test_the_command_prints_a_table_and_refuses_what_is_no_job(tmp_path: Path) -> None:
    JobFile(tmp_path).began("worker", 0, os.getpid(), None)
    done = subprocess.run([*STATUS, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[1].split() == ["worker", "0", str(os.getpid()), "running", "-"]
    done = subprocess.run([*STATUS, str(tmp_path / "no")], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "log folder" in done.stderr


def test_the_newest_job_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="no job of yours"):
        latest_job()
    for name, started in (("anabranch-logs-b", 5.0), ("anabranch-logs-a", 9.0), ("else", 11.0)):
        (tmp_path / name).mkdir()
        JobFile(tmp_path / name, clock=lambda started=started: started).began("worker", 0, 1, None)  # type: ignore[misc]
    (tmp_path / "anabranch-logs-c").mkdir()
    (tmp_path / "anabranch-logs-c" / "job.json").write_text("{")
    assert latest_job() == tmp_path / "anabranch-logs-a"
    with pytest.raises(ValueError, match="does not describe a job"):
        status_of(tmp_path / "anabranch-logs-c")
