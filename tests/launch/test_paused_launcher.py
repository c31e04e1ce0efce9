"""Ctrl-Z pauses the launcher alone: the job continues, whatever it writes, and `fg` shows its state by then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Script = Callable[[str], Path]
LIMIT = 120.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    ("number", "experts", "spawn"),
    [
        (signal.SIGTSTP, 0, True),  # without a fork server, which takes seconds to import torch
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((signal.SIGTSTP, 0, False), (signal.SIGSTOP, 0, False), (signal.SIGTSTP, 1, False))
        ),
    ],
)
def test_a_job_continues_while_its_launcher_is_paused(
    script: Script, tmp_path: Path, number: signal.Signals, experts: int, spawn: bool
) -> None:
    """Its output filled a pipe that nobody read, and experts lost the directory that lay in the launcher."""
    path = script(
        f"""
        import pathlib, sys, time
        folder = pathlib.Path({str(tmp_path)!r})
        directory = None
        if {experts}:
            import anabranch as ab, torch
            directory = ab.job().serve(lambda index, count: [
                ab.ExpertBackend("double.0", torch.nn.Identity(), args_schema=[ab.TensorSpec(2)])
            ])
        (folder / "ready").touch()
        while not (folder / "paused").exists():
            time.sleep(0.005)
        for number in range(40_000):
            print(number)
        if directory is not None:
            assert directory.active(["double"]) == {{"double": [0]}}
            assert ab.RemoteExpert("double.0", directory)(torch.ones(1, 2)).sum() == 2
        (folder / "done").touch()
        while not (folder / "resumed").exists():
            print("waits")
            time.sleep(0.005)
        print("the end")
        """
    )
    command = [sys.executable, "-m", "anabranch.cli", "run", "--log-dir", str(tmp_path / "logs")]
    command += ["--experts", str(experts), *(["--spawn"] if spawn else []), str(path)]
    # A process group of its own in this session, as a shell makes one: elsewhere SIGTSTP does nothing.
    with (
        (tmp_path / "screen").open("w") as screen,
        subprocess.Popen(command, stdout=screen, stderr=subprocess.PIPE, text=True, process_group=0) as launcher,
    ):
        try:
            wait_until((tmp_path / "ready").exists)
            os.kill(launcher.pid, number)
            wait_until(lambda: state(launcher.pid) == "T")
            (tmp_path / "paused").touch()
            wait_until((tmp_path / "done").exists)
            assert state(launcher.pid) == "T"
            os.kill(launcher.pid, signal.SIGCONT)
            wait_until(lambda: "waits" in (tmp_path / "screen").read_text())  # the screen is back
            (tmp_path / "resumed").touch()
            _, told = launcher.communicate(timeout=LIMIT)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, told
    everything = [*map(str, range(40_000)), "the end"]
    logged, shown = (
        [line for line in path.read_text().splitlines() if line != "waits"]
        for path in (tmp_path / "logs" / "worker-0.log", tmp_path / "screen")
    )
    assert logged == everything
    if number == signal.SIGSTOP:
        assert (shown, told) == (everything, "")
    else:
        assert "the launcher is paused and the job continues" in told
        assert shown[-1] == "the end"
