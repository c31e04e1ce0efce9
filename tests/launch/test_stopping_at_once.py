"""A signal while processes start ends the launcher at once; a second one kills, whatever the launcher is doing."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from process_marks import marked_processes, wait_until

from anabranch.launch import launch, local
from anabranch.launch.supervision.signals import ECHO_SECONDS, SignalBox, collect_signals

Script = Callable[[str], Path]
LIMIT = 120.0
LAUNCHED = Path(__file__).parents[1] / "launched.py"


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
    """While the picture of a job was imported Ctrl-C was collected, and looked at when all processes had started."""
    adopted: list[bool] = []
    adopt = local.adopt_orphans

    def pressed() -> AbstractContextManager[None]:
        os.kill(os.getpid(), signal.SIGINT)
        adopted.append(True)
        return adopt()

    monkeypatch.setattr(local, "adopt_orphans", pressed)
    monkeypatch.setattr(local.Rendezvous, "wait_until_ready", lambda rendezvous: pytest.fail("it went on"))
    outcome = launch(script("print('never')"), workers=2, log_dir=tmp_path)
    assert (outcome.exit_code, adopted) == (130, [True])


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


def test_a_key_pressed_again_kills(script: Script, tmp_path: Path, mark: str) -> None:
    path = script(
        """
        import signal, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    # The session's leader takes the terminal that it has as stdin for its own: then keys make signals.
    own = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    # A worker that ignores a signal has a minute here, not five seconds.
    command = [sys.executable, str(LAUNCHED), "patient", "run", "--spawn", "--workers", "2", "--log-dir", str(tmp_path)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", own, *command, str(path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as launcher:
        try:
            os.close(theirs)
            told = read_until(ours, b"ready")
            for rank in range(2):
                wait_until(lambda rank=rank: "ready" in (tmp_path / f"worker-{rank}.log").read_text())
            os.write(ours, b"\x03")
            told += read_until(ours, b"send it again to kill them")
            time.sleep(ECHO_SECONDS)  # which is what the promise is about
            os.write(ours, b"\x03")
            told += read_until(ours, b"killing the workers")
            assert b"SIGINT again" in told
            assert launcher.wait(LIMIT) == 130
        finally:
            launcher.kill()
            os.close(ours)
    wait_until(lambda: not marked_processes(mark))


def read_until(source: int, words: bytes) -> bytes:
    """What comes from a terminal up to these words."""
    found = b""
    while words not in found:
        assert select.select([source], [], [], LIMIT)[0], found
        found += os.read(source, 4096)
    return found


class Seconds:
    now = 7.0

    def __call__(self) -> float:
        return self.now


def test_a_signal_within_half_a_second_of_the_first_is_its_echo() -> None:
    """A wrapper sends one to the launcher, and one to its group."""
    clock = Seconds()
    box = SignalBox(clock)
    for later in (0.0, 0.001, 0.4, 0.6, 0.7):
        clock.now = 7.0 + later
        box.put(signal.SIGINT)
    assert [again for _, again in box.take()] == [False, False, False, True, True]
    box.close()


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
