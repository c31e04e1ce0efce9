"""A signal while processes start ends the launcher at once; a second one kills, whatever the launcher is doing."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from process_marks import marked_processes

from anabranch.launch import launch, local
from anabranch.launch.signals import SignalBox, collect_signals
from anabranch.launch.supervisor import Supervisor

Script = Callable[[str], Path]
LIMIT = 60.0


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


def test_a_second_signal_kills_though_the_launchers_loop_is_busy(
    script: Script, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(
        """
        import signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)
        """
    )
    boxes: list[SignalBox] = []
    run = Supervisor.run

    def busy_first(supervisor: Supervisor) -> None:
        workers = supervisor._workers.processes
        os.kill(os.getpid(), signal.SIGINT)
        assert all(worker.running for worker in workers)
        since = supervisor._signals._stopping_since
        assert since is not None
        supervisor._signals._stopping_since = since - 10.0
        boxes.append(supervisor._signals)
        os.kill(os.getpid(), signal.SIGINT)
        for worker in workers:
            assert select.select([worker.pidfd], [], [], LIMIT)[0], "killed in the handler"
        run(supervisor)

    monkeypatch.setattr(Supervisor, "run", busy_first)
    before = marked_processes(mark)
    outcome = launch(path, workers=2, log_dir=tmp_path)
    assert outcome.exit_code == 130
    assert [exit_.code for exit_ in outcome.exits] == [-signal.SIGKILL] * 2
    assert boxes
    assert marked_processes(mark) == before


def test_what_a_wrapper_passes_on_is_no_second_signal() -> None:
    seen: list[tuple[signal.Signals, bool]] = []
    with collect_signals() as box:
        box.on_stop = lambda number, again: seen.append((number, again))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert box._stopping_since is not None
        box._stopping_since -= 1.0
        os.kill(os.getpid(), signal.SIGINT)
    assert seen[0] == (signal.SIGTERM, False)
    assert seen[-1] == (signal.SIGINT, True)


def test_the_first_signal_is_never_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.launch.signals.ECHO_SECONDS", 0.0)
    seen: list[bool] = []
    with collect_signals() as box:
        box.on_stop = lambda number, again: seen.append(again)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert seen == [False, True]
