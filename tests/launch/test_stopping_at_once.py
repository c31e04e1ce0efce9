"""A signal while processes start ends the launcher at once; a second one kills, whatever the launcher is doing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import launch, marked_processes

from anabranch.launch import local
from anabranch.launch.supervision.signals import collect_signals

Script = Callable[[str], Path]
LIMIT = 120.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_anything_of_the_users_runs_ends_at_once(
    script: Script, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """The start of a job takes many seconds on a busy machine, and none of it saw a signal."""
    left = threading.Event()
    reached: list[bool] = []

    def stuck(rendezvous: object) -> None:
        os.kill(os.getpid(), number)
        reached.append(left.wait(LIMIT))

    monkeypatch.setattr(local.Rendezvous, "wait_until_ready", stuck)
    before = marked_processes(mark)
    told: list[str] = []
    outcome = launch(script("print('never')"), workers=2, log_dir=tmp_path, tell=told.append)
    assert (outcome.exit_code, outcome.interrupted, reached) == (code, number, [])
    assert told == [f"{number.name}: stopped before all processes had started"]
    assert marked_processes(mark) == before
    assert not (tmp_path / "worker-0.log").exists()


def test_a_signal_that_came_before_its_handler_ends_the_launcher_too(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a job was made ready Ctrl-C was collected, and looked at when all processes had started."""
    monkeypatch.setattr(local.Rendezvous, "wait_until_ready", lambda rendezvous: pytest.fail("it went on"))
    with collect_signals():
        os.kill(os.getpid(), signal.SIGINT)
        outcome = launch(script("print('never')"), workers=2, log_dir=tmp_path)
    assert outcome.exit_code == 130


def test_ctrl_c_before_the_launcher_collects_signals_is_one_line(script: Script) -> None:
    """Typer leaves with its code and says nothing."""
    program = """
        import os, signal, sys
        import anabranch.cli
        def press(*_, **__):
            os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, type("Pressed", (), {"find_spec": staticmethod(press)}))
        sys.argv = ["anabranch", "run", sys.argv[1]]
        anabranch.cli.main()
        """
    command = [sys.executable, "-c", textwrap.dedent(program), str(script("print('never')"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "anabranch: SIGINT: stopped before anything had started\n"


def test_a_signal_between_two_attempts_is_for_the_next_and_one_after_the_last_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with collect_signals() as outer:
        with collect_signals() as box:
            assert box is outer
        os.kill(os.getpid(), signal.SIGTERM)
        with collect_signals():
            assert select.select([box.descriptor], [], [], 0)[0]
            assert box.take() == [(signal.SIGTERM, False)]
        os.kill(os.getpid(), signal.SIGTERM)
    with collect_signals() as box:
        assert box.take() == []
    assert signal.getsignal(signal.SIGTERM) is before
