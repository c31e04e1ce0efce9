"""What ``anabranch run`` shows of a job that failed or was stopped: each cause once, first, and no consequences."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from jobs import Script, marked_processes

from anabranch.cli.job_end import show_end
from anabranch.errors import DeadlineExceeded, PeerLost
from anabranch.held_error import HELD_ERROR_VARIABLE, hold_back_errors, move_held_error
from anabranch.launch.job_status import JobFile
from anabranch.launch.supervision.outcome import JobOutcome
from launched import run, start_run
from waiting import wait_until

TRAINS = """
    import os, signal, sys, torch, anabranch as ab
    model = torch.nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.001))
    with ab.Executor(step, comm_mode="AllReduce") as executor:
        for number in range(10**9):
            executor.run(batch=torch.full((8, 4), 1.0 + ab.job().rank))
            if number == 2:
                executor.save(sys.argv[1])
            if number == 4 and ab.job().rank == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 4 and ab.job().rank == 0:
                print("five steps", flush=True)
"""


@pytest.fixture
def fails(script: Script) -> Path:
    return script(TRAINS)


def test_those_that_lost_a_killed_rank_are_folded_and_the_backend_s_words_kept_out(fails: Path, tmp_path: Path) -> None:
    done = run("--workers", 3, "--log-dir", tmp_path / "logs", fails, tmp_path / "saved", 1, patient=True)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    cause = next(line for line in told if "was killed by SIGKILL" in line)
    assert "rank 1" in cause
    assert f"anabranch: ranks 0, 2 lost rank 1; the logs are in {tmp_path / 'logs'}" in told
    assert told.index(cause) < len(told) - 2
    assert "Traceback" not in done.stderr
    assert ".cc:" not in done.stderr
    assert f"the last checkpoint: {tmp_path / 'saved'}" in done.stderr
    for rank in (0, 2):
        text = (tmp_path / "logs" / f"worker-{rank}.log").read_text()
        assert text.count("Traceback") == 1, "without the backend's own exception before it"
        assert "PeerLost: rank 1 is lost" in text
        assert ".cc:" not in text
    assert not (tmp_path / "logs" / "worker-0.error").exists()


def test_verbose_shows_consequences(fails: Path, tmp_path: Path) -> None:
    done = run("--workers", 2, "--verbose", fails, tmp_path / "saved", 1, patient=True)
    assert "PeerLost: rank 1 is lost" in done.stderr


def test_ctrl_c_shows_no_traceback_and_where_the_checkpoint_lies(fails: Path, tmp_path: Path) -> None:
    with start_run("--workers", 2, "--log-dir", tmp_path / "logs", fails, tmp_path / "saved", 9, patient=True) as job:
        log = tmp_path / "logs" / "worker-0.log"
        wait_until(lambda: log.exists() and "five steps" in log.read_text())
        job.send_signal(signal.SIGINT)
        _, told = job.communicate(60.0)
        assert job.wait() == 130
    assert "Traceback" not in told
    why, said, stops, checkpoint = told.splitlines()
    assert why.startswith("anabranch: the job ends with the first worker that is killed or freezes: run(")
    assert said == "anabranch: default: 2 workers x 8 rows = 16 rows a step"
    assert stops == "anabranch: SIGINT: stopping the workers (send it again to kill them)"
    assert checkpoint.startswith(f"anabranch: the last checkpoint: {tmp_path / 'saved'} (the job was at step ")
    assert "KeyboardInterrupt" in log.read_text()


PRESSES = int(os.environ.get("ANABRANCH_PRESSES", "3"))  # more to look for what happens once in a hundred


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PRESSES))
def test_ctrl_c_at_a_random_moment_is_reported_in_two_lines(seed: int, fails: Path, tmp_path: Path, mark: str) -> None:
    before, logs = marked_processes(mark), tmp_path / "logs"
    with start_run("--workers", 4, "--log-dir", logs, fails, tmp_path / "saved", 9, patient=True) as job:
        wait_until((logs / "job.json").exists)  # until then it is the tests' own program
        time.sleep(random.Random(seed).uniform(0.0, 6.0))  # any moment will do, on any machine
        job.send_signal(signal.SIGINT)
        _, told = job.communicate(120.0)
        assert job.wait() == 130
    of_workers = ("waiting for rank", " rows a step", "that is killed or freezes: ")
    lines = [line for line in told.splitlines() if not any(words in line for words in of_workers)]
    assert [line[:24] for line in lines[:1]] == ["anabranch: SIGINT: stopp"]
    assert [line for line in lines[1:] if not line.startswith("anabranch: the last checkpoint: ")] == [], told
    assert len(lines) <= 2
    assert marked_processes(mark) == before


def test_the_path_of_a_checkpoint_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    JobFile(tmp_path).began("worker", 0, os.getpid(), None)
    facts = {"pid": os.getpid(), "run": {"rank": 0, "steps": 3, "saved": "\x1b[2Jsaved"}}
    (tmp_path / "worker-0.status").write_text(json.dumps(facts))
    show_end(JobOutcome((), signal.SIGINT, timed_out=False, seconds=1.0), tmp_path, verbose=False)
    assert capsys.readouterr().err == "anabranch: the last checkpoint: ?[2Jsaved (the job was at step 3)\n"


def test_rank_0_s_own_error_is_shown_once(script: Script) -> None:
    path = script("import os\nif os.environ['RANK'] == '0':\n    raise ValueError('bad row 17')")
    done = run("--workers", 2, path, patient=True)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: bad row 17") == 1
    assert "rank 0" in done.stderr.splitlines()[-2]
    assert "Its output is above" in done.stderr


def test_those_that_failed_alike_are_folded(script: Script) -> None:
    done = run("--workers", 3, script("import sys\nsys.exit('two workers at most')"), patient=True)
    assert done.returncode == 1
    assert done.stderr.count("two workers at most") == 1, "as rank 0 wrote it, whichever was the first"
    assert done.stderr.count("failed alike; the logs are in ") == 1


def test_those_that_lost_the_same_server_are_folded_and_blame_no_worker(script: Script) -> None:
    lost = """
        import os, time
        from anabranch.errors import PeerLost
        rank = int(os.environ["RANK"])
        time.sleep(0.1 * (1 - rank))
        raise PeerLost("Connection refused", peer="unix:/there", operation="pull", elapsed=1.0 + rank)
        """
    done = run("--workers", 2, script(lost), patient=True)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "Its output is above" in done.stderr
    assert "anabranch: rank 1 failed alike; the logs are in " in done.stderr
    assert "lost rank" not in done.stderr


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, and the hook set."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv(HELD_ERROR_VARIABLE, str(tmp_path / "held"))
    hold_back_errors()
    return tmp_path / "held"


def show(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


@pytest.mark.parametrize("error", [PeerLost("gone", peer="ranks 1, 2"), KeyboardInterrupt()])
def test_a_consequential_error_is_held_back(
    error: BaseException, hook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(error)
    assert capsys.readouterr().err == ""
    assert type(error).__name__ in hook.read_text()
    log = hook.with_name("log")
    log.write_text("before\n")
    for _ in range(2):
        move_held_error(hook, log)
    assert log.read_text().startswith("before\n")
    assert log.read_text().count(type(error).__name__) == 1


@pytest.mark.parametrize(
    "error",
    [ValueError("bad row"), PeerLost("gone", peer="unix:/there"), PeerLost("gone"), DeadlineExceeded("late")],
)
def test_possible_causes_are_shown(error: BaseException, hook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(error)
    assert str(error) in capsys.readouterr().err
    assert not hook.exists()


def test_an_error_that_cannot_be_held_back_is_shown(hook: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook.mkdir()
    show(KeyboardInterrupt())
    assert "KeyboardInterrupt" in capsys.readouterr().err


def test_without_a_launcher_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HELD_ERROR_VARIABLE, raising=False)
    before = sys.excepthook
    hold_back_errors()
    assert sys.excepthook is before
