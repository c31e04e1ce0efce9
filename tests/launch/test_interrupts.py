"""Signals, Ctrl-Z and closed terminals, at any moment of a job: it ends in a line or two, and nothing is left."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from jobs import Ends, Script, marked_processes

from anabranch.cli import messages
from anabranch.launch.job_status import status_of
from anabranch.launch.meeting import rendezvous
from anabranch.launch.supervision.signals import collect_signals
from launched import start_run
from waiting import wait_until

LIMIT = 120.0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_anything_of_the_users_runs_ends_at_once(
    ended: Ends, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """The start of a job takes many seconds on a busy machine, and none of it saw a signal."""
    left = threading.Event()
    reached: list[bool] = []

    def stuck(process: object) -> None:
        os.kill(os.getpid(), number)
        reached.append(left.wait(LIMIT))

    monkeypatch.setattr(rendezvous, "wait_until_ready", stuck)
    before = marked_processes(mark)
    job = ended("print('never')", code=code, workers=2, experts=1)
    assert (job.outcome.interrupted, reached) == (number, [])
    assert job.told == [f"{number.name}: stopped before all processes had started"]
    assert marked_processes(mark) == before
    assert not (tmp_path / "worker-0.log").exists()


def test_a_signal_that_came_before_its_handler_ends_the_launcher_too(
    ended: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a job was made ready Ctrl-C was collected, and looked at when all processes had started."""
    monkeypatch.setattr(rendezvous, "wait_until_ready", lambda process: pytest.fail("it went on"))
    with collect_signals():
        os.kill(os.getpid(), signal.SIGINT)
        ended("print('never')", code=130, workers=2, experts=1)


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


def test_ctrl_c_ends_a_worker_that_still_waits_to_meet_the_others(script: Script, tmp_path: Path) -> None:
    """Gloo waits in C++, where no signal reached Python: all but one were killed after five seconds."""
    path = script(
        """
        import time, torch, anabranch as ab
        if ab.job().rank == 1:
            time.sleep(600)
        model = torch.nn.Linear(4, 1)
        step = ab.TrainStep(model, lambda m, b: m(b).mean(), torch.optim.SGD(model.parameters(), lr=0.001))
        ab.Executor(step, comm_mode="AllReduce")
        """
    )
    with start_run("--workers", 2, "--log-dir", tmp_path, path, patient=True) as job:
        wait_until((tmp_path / "job.json").exists)
        wait_until(lambda: status_of(tmp_path).roles[0].waiting_for == "worker 1")
        job.send_signal(signal.SIGINT)
        _, told = job.communicate(60.0)
        assert job.wait() == 130
    lines = [line for line in told.splitlines() if "waiting for rank 1" not in line]  # said after five seconds
    assert lines == ["anabranch: SIGINT: stopping the workers (send it again to kill them)"]
    assert "KeyboardInterrupt" in (tmp_path / "worker-0.log").read_text()


# --- Ctrl-Z stops the whole job and `fg` continues it


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


# --- a launcher whose stdin, stdout or stderr is closed works as if it led nowhere


PROGRAM = """
import os, runpy, sys
messages = runpy.run_path(sys.argv[1])
messages["open_standard_streams"]()
os.write(1, b"to stdout\\n")
for text in ("to stderr", "again"):
    messages["say"](text)
assert os.read(0, 1) == b""
assert all(os.get_inheritable(descriptor) for descriptor in range(3))
first = os.open(os.devnull, os.O_RDONLY)
sys.exit(first if first > 2 else 1)
"""


@pytest.mark.parametrize(
    "closed",
    [
        *("", "2>&-", "<&- >&- 2>&-", "2>/dev/full"),
        *(pytest.param(closed, marks=pytest.mark.slow) for closed in (">&-", "<&-", "<&- >&-")),
    ],
)
def test_a_closed_stream_leads_nowhere_and_a_full_disk_is_no_error(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", PROGRAM, messages.__file__]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode > 2, done.stderr
    assert done.stdout == ("" if " >&-" in f" {closed}" else "to stdout\n")
    assert done.stderr == ("" if "2>" in closed else "to stderr\nagain\n")


@pytest.mark.slow
def test_workers_save_though_the_terminal_was_closed(tmp_path: Path) -> None:
    """The launcher passes SIGHUP on, and what it has to say about it has nowhere to go."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\n"
        "from pathlib import Path\n"
        "here, hung_up = Path(__file__), []\n"
        "signal.signal(signal.SIGHUP, lambda *_: hung_up.append(1))\n"
        "here.with_name('up').touch()\n"
        "end = time.monotonic() + 60\n"
        "while not hung_up and time.monotonic() < end:\n"
        "    time.sleep(0.02)\n"
        "here.with_name('saved').write_text(str(hung_up))\n"
    )
    # The session's leader takes the terminal that it has as stdin for its own: then its end is a SIGHUP.
    own = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-m", "anabranch.cli", "run", "--log-dir", str(tmp_path / "logs"), str(script)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", own, *command], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as launcher:
        os.close(theirs)
        wait_until((tmp_path / "up").exists)
        os.close(ours)
        assert launcher.wait(60) == 0
    assert (tmp_path / "saved").read_text() == "[1]"
