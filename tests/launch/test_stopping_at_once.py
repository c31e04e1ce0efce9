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
from anabranch.launch.supervision.signals import SignalBox, collect_signals, hold_signals
from anabranch.launch.supervision.stop_requests import TERMINAL, UNKNOWN, StopRequests
from anabranch.launch.supervision.supervisor import Supervisor

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


@pytest.mark.parametrize("where", ["anabranch.cli.app", "anabranch.cli.run.launch"])
def test_ctrl_c_before_the_launcher_collects_signals_is_one_line(script: Script, where: str) -> None:
    """Typer leaves with its code and says nothing."""
    program = """
        import os, signal, sys
        import anabranch.cli
        def press(*_, **__):
            os.kill(os.getpid(), signal.SIGINT)
        if sys.argv[1] == "anabranch.cli.app":
            sys.meta_path.insert(0, type("Pressed", (), {"find_spec": staticmethod(press)}))
        else:
            from anabranch.cli import run
            run.launch = press
        sys.argv = ["anabranch", "run", sys.argv[2]]
        anabranch.cli.main()
        """
    command = [sys.executable, "-c", textwrap.dedent(program), where, str(script("print('never')"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "anabranch: SIGINT: stopped before anything had started\n"


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
        wait_until(lambda: supervisor._signals._pending)
        boxes.append(supervisor._signals)
        supervisor._signals.arrived(signal.SIGINT, TERMINAL, time.monotonic())
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


def test_a_key_pressed_twice_kills_however_fast_the_fingers_were(script: Script, tmp_path: Path, mark: str) -> None:
    """A second Ctrl-C within half a second was taken for an echo of the first."""
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


def others(*moments: float, number: signal.Signals = signal.SIGINT, sender: int = 4711) -> list[bool]:
    """Says which of the signals of one process, at these moments, are further requests."""
    requests = StopRequests()
    return [requests.is_another(number, sender, moment) for moment in moments]


def test_the_first_signal_is_never_the_second() -> None:
    for sender in (TERMINAL, UNKNOWN, 4711):
        assert others(7.0, sender=sender) == [False]


def test_every_key_press_of_a_terminal_counts() -> None:
    assert others(0.0, 0.001, 0.002, sender=TERMINAL) == [False, True, True]


def test_a_signal_passed_on_by_a_wrapper_is_not_a_second_press() -> None:
    requests = StopRequests()
    assert not requests.is_another(signal.SIGINT, TERMINAL, 0.0)
    assert not requests.is_another(signal.SIGINT, 4711, 0.2)
    assert requests.is_another(signal.SIGINT, TERMINAL, 0.3)


def test_a_signal_sent_to_the_launcher_and_to_its_group_counts_once() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        assert others(0.0, 0.001, number=number) == [False, False]
        assert others(0.0, 0.6, number=number) == [False, True]
    assert others(0.0, 0.1, number=signal.SIGINT) == [False, True], "a wrapper that passes each key press on"
    assert others(0.0, 0.1, number=signal.SIGTERM) == [False, False]


def test_repeated_hangups_of_a_closed_terminal_count_once() -> None:
    assert others(0.0, 0.001, number=signal.SIGHUP, sender=TERMINAL) == [False, False]


def test_the_sender_of_a_signal_is_known_and_nothing_that_is_started_blocks_it(tmp_path: Path) -> None:
    """In a process with one thread, as the launcher's is."""
    program = """
        import os, signal, subprocess, sys, time
        from anabranch.launch.supervision.signals import collect_signals, inherited_mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        with collect_signals() as box:
            seen = []
            box._requests.is_another = lambda number, sender, now: seen.append((number, sender)) or len(seen) > 1
            asked = []
            box.call_on_stop(lambda number, again: asked.append((number, again)))
            assert inherited_mask() == sorted(map(int, before))
            for number in (signal.SIGINT, signal.SIGTERM):
                subprocess.run(["sh", "-c", f"echo $$; kill -{int(number)} $PPID"], check=True, stdout=sys.stderr)
                while not asked or asked[-1][0] != number:
                    time.sleep(0.001)
            assert [number for number, _ in box.take()] == [signal.SIGINT, signal.SIGTERM]
            assert asked == [(signal.SIGINT, False), (signal.SIGTERM, True)]
            print([sender for _, sender in seen])
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
        """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([int(pid) for pid in done.stderr.split()])


def test_a_signal_between_two_attempts_is_for_the_next_and_one_after_the_last_ends_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with hold_signals():
        with collect_signals():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        with collect_signals() as box:
            assert select.select([box.descriptor], [], [], 0)[0]
            assert box.take() == [(signal.SIGTERM, False)]
        os.kill(os.getpid(), signal.SIGTERM)
    with collect_signals() as box:
        assert box.take() == []
    assert signal.getsignal(signal.SIGTERM) is before
