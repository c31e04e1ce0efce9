"""launch(): how a job ends, who failed first, and that nothing outlives it, whatever the workers do."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import HURRIED, PATIENT, Ends, marked_processes

from anabranch.launch import Patience

# Starts a child in the worker's group and one in a session of its own, as daemons are.
GRANDCHILDREN = """
import subprocess
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
"""


def children() -> set[str]:
    """The children of this process, zombies included."""
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


DIED_UNNOTICED = """
import os
child = subprocess.Popen(["true"])
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
os._exit(0)
"""


def test_grandchildren_end_with_the_job_and_are_reaped(ended: Ends, mark: str) -> None:
    before = children()
    ended(GRANDCHILDREN + DIED_UNNOTICED, workers=2)
    assert marked_processes(mark) == []
    assert children() == before


def test_a_worker_that_failed_because_another_was_lost_is_not_the_first(ended: Ends, tmp_path: Path) -> None:
    source = """
        import os, sys, pathlib, time
        seen = pathlib.Path(sys.argv[1])
        if os.environ["RANK"] == "1":
            from anabranch.errors import PeerLost
            seen.touch()
            raise PeerLost("gone", peer="rank 0")
        while not seen.exists():
            time.sleep(0.01)
        time.sleep(0.1)  # later by every clock, and yet the cause
        os.kill(os.getpid(), 9)
        """
    outcome = ended(source, tmp_path / "seen", code=1, workers=2, patience=PATIENT).outcome
    assert [exit_.code for exit_ in outcome.exits] == [-9, 1]
    assert outcome.first_failure is outcome.exits[0]


def test_the_first_failure_is_named_and_the_others_are_stopped(ended: Ends) -> None:
    source = """
        import os, time
        if os.environ["RANK"] == "1":
            raise RuntimeError("first")
        time.sleep(600)
        """
    job = ended(source, code=1, patience=Patience(failure=0.3, stop=60.0))
    outcome = job.outcome
    assert [exit_.code for exit_ in outcome.exits] == [-signal.SIGTERM, 1, -signal.SIGTERM]
    assert outcome.first_failure is outcome.exits[1]
    assert outcome.exits[1].last_words().splitlines()[-1] == "RuntimeError: first"
    assert outcome.exits[1].describe().startswith("rank 1 ")
    assert job.told == ["rank 1 failed; stopping the 2 other workers"]


def test_the_others_have_time_to_report_their_errors(ended: Ends, tmp_path: Path) -> None:
    source = """
        import os, pathlib, sys, time
        pid = pathlib.Path(sys.argv[1])
        if os.environ["RANK"] == "1":
            pid.with_suffix(".new").write_text(str(os.getpid()))
            pid.with_suffix(".new").rename(pid)
            sys.exit(3)
        while not pid.exists() or pathlib.Path("/proc", pid.read_text()).exists():
            time.sleep(0.005)
        sys.exit("rank 1 is gone")
        """
    outcome = ended(source, tmp_path / "pid", code=1, workers=2, patience=Patience(failure=60.0)).outcome
    assert [(exit_.code, exit_.stopped) for exit_ in outcome.exits] == [(1, False), (3, False)]
    assert outcome.first_failure is outcome.exits[1]
    assert outcome.exits[0].last_words() == "rank 1 is gone"


def test_a_worker_that_ignores_signals_or_is_frozen_is_killed(ended: Ends, tmp_path: Path) -> None:
    source = """
        import os, signal, sys, time
        if os.environ["RANK"] != "2":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready", flush=True)
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        for log in sys.argv[1:]:
            while "ready" not in open(log).read():
                time.sleep(0.01)
        sys.exit(1)
        """
    logs = [tmp_path / f"worker-{rank}.log" for rank in range(2)]
    outcome = ended(source, *logs, code=1, patience=HURRIED).outcome
    assert [exit_.code for exit_ in outcome.exits] == [-signal.SIGKILL, -signal.SIGKILL, 1]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda n: str(n)
)
def test_a_signal_to_the_launcher_stops_all_also_a_frozen_one(
    ended: Ends, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    # Rank 1 freezes itself and is woken to meet the signal; rank 0 sends it to the launcher, its parent.
    source = """
import os, pathlib, signal, sys, time
if os.environ["RANK"] == "1":
    print("ready", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
log = pathlib.Path(sys.argv[1])
while not log.exists() or "ready" not in log.read_text():
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), int(sys.argv[2]))
while True:
    time.sleep(0.01)
"""
    before, words = signal.getsignal(number), [tmp_path / "worker-1.log", int(number)]
    outcome = ended(GRANDCHILDREN + source, *words, code=code, workers=2, patience=PATIENT).outcome
    assert outcome.interrupted == number
    assert all(exit_.stopped for exit_ in outcome.exits)
    assert all(exit_.code != -signal.SIGKILL for exit_ in outcome.exits)
    assert outcome.first_failure is None
    assert signal.getsignal(number) is before


def test_a_signal_that_arrives_twice_at_once_counts_once(ended: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.launch.supervision.signals.ECHO_SECONDS", 60.0)
    source = """
        import os, signal, sys, time
        def drain(*_):
            os.kill(os.getppid(), signal.SIGTERM)   # the echo
            time.sleep(0.2)
            print("drained")
            sys.exit(0)
        signal.signal(signal.SIGTERM, drain)
        os.kill(os.getppid(), signal.SIGTERM)
        while True:  # one long sleep would not end for a signal that comes just before it begins
            time.sleep(0.01)
        """
    assert ended(source, workers=1).texts == ["drained\n"]


def test_the_same_signal_again_kills_at_once(ended: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.launch.supervision.signals.ECHO_SECONDS", 0.0)
    source = """
        import os, signal, time
        def again(*_):
            os.kill(os.getppid(), signal.SIGINT)
        signal.signal(signal.SIGINT, again)
        again()
        while True:
            time.sleep(1)
        """
    job = ended(source, code=130, workers=1, patience=PATIENT)
    assert job.outcome.exits[0].code == -signal.SIGKILL
    assert job.told[1:] == ["SIGINT again: killing the workers", "rank 0 did not stop; killing it"]


def test_last_words_begin_at_the_exception_that_led_to_the_last(ended: Ends) -> None:
    source = """
        print("noise")
        try:
            {}["absent"]
        except KeyError as error:
            raise RuntimeError("no such key") from error
        """
    words = ended(source, code=1, workers=1).outcome.exits[0].last_words().splitlines()
    assert words[0] == "Traceback (most recent call last):"
    assert words.count(words[0]) == 2
    assert words[-1] == "RuntimeError: no such key"


def test_workers_share_the_cores_unless_the_user_says_otherwise(ended: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ended(source, workers=2).texts[0] == f"{max(1, len(os.sched_getaffinity(0)) // 2)}\n"
    descriptors = len(os.listdir("/proc/self/fd"))
    assert ended(source, workers=1).texts[0] == "None\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ended(source, workers=2).texts[0] == "3\n"
    assert len(os.listdir("/proc/self/fd")) == descriptors, "launching leaves none open"
