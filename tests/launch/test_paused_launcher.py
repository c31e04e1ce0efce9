"""Ctrl-Z stops the whole job and `fg` continues it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from waiting import wait_until

Script = Callable[[str], Path]
LIMIT = 120.0


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("services", "spawn"), [(0, True), pytest.param(1, False, marks=pytest.mark.slow)]
)  # --spawn: without a fork server, which takes seconds to import torch
def test_ctrl_z_stops_every_process_until_fg(script: Script, tmp_path: Path, services: int, spawn: bool) -> None:
    """Waits do not count the time for which a job is stopped: it is longer than two heartbeats."""
    path = script(
        f"""
        import pathlib, subprocess, sys, time
        folder = pathlib.Path({str(tmp_path)!r})
        call = lambda: None
        if {services}:
            import anabranch as ab, torch
            directory = ab.job().serve(lambda index, count: [
                ab.ExpertBackend("double.0", torch.nn.Linear(2, 2), args_schema=[ab.TensorSpec(2)])
            ])
            expert = ab.RemoteExpert("double.0", directory)
            call = lambda: expert(torch.ones(1, 2, requires_grad=True)).sum().backward()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child").write_text(str(child.pid))
        while not (folder / "resumed").exists():
            call()
            (folder / "ready").touch()
            time.sleep(0.005)
        call()
        print("the end")
        """
    )
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "anabranch.cli", "run", "--log-dir", str(logs)]
    command += ["--servers", str(services), "--experts", str(services), *(["--spawn"] if spawn else []), str(path)]
    # A process group of its own in this session, as a shell makes one: elsewhere SIGTSTP does nothing.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0) as job:
        try:
            wait_until((tmp_path / "ready").exists)
            roles = [role["pid"] for role in json.loads((logs / "job.json").read_text())["roles"]]
            everyone = [job.pid, *roles, int((tmp_path / "child").read_text())]
            os.kill(job.pid, signal.SIGTSTP)
            wait_until(lambda: [state(pid) for pid in everyone] == ["T"] * len(everyone))
            if services:
                time.sleep(2.5)
            os.kill(job.pid, signal.SIGCONT)
            wait_until(lambda: all(state(pid) != "T" for pid in everyone))
            (tmp_path / "resumed").touch()
            out, err = job.communicate(timeout=LIMIT)
        finally:
            job.kill()
    assert (job.returncode, out, err) == (0, "the end\n", "")
