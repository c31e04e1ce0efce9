"""``anabranch run`` as a user meets it: exit codes, messages, the screen, and Ctrl-C from outside."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
from jobs import Script, marked_processes

from anabranch.cli import main
from launched import run, start_run
from waiting import wait_until

LIMIT = 120.0
COMMANDS = [
    *("run", "plan", "keys", "status", "experts", "view"),
    *("serve experts", "serve directory", "serve parameters"),
]

# Says when it is ready, with descendants in its group and out of it.
READY = """
import pathlib, subprocess, sys, time
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("ready", flush=True)
time.sleep(600)
"""


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["anabranch", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_script_given_as_a_command_is_answered_with_the_right_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "my train.py", "--lr", "0.1") == 2
    assert "anabranch run 'my train.py'" in capsys.readouterr().err


def test_options_after_the_script_belong_to_it_and_a_note_says_so(script: Script) -> None:
    prints = script("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:])")
    done = run(prints, "--workers", 2, "--servers=1")
    assert done.stdout == "1 ['--workers', '2', '--servers=1']\n"
    for option in ("--workers", "--servers"):
        assert f"{option} comes after {prints}, so the script gets it" in done.stderr
    assert "comes after" not in run("--workers", 2, prints, "--workers", 2).stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "run"),
        (["--help"], "run"),
        *(([*name.split(), "--help"], f"anabranch {name} ") for name in COMMANDS),
        (["--version"], "anabranch "),
    ],
)
def test_help_and_version_go_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    assert run_main(monkeypatch, *arguments) == 0
    page = capsys.readouterr().out
    assert word in page
    assert "<bool>" not in page


def test_rank_0_is_on_the_screen_and_the_rest_in_logs(script: Script, tmp_path: Path, temporary: Path) -> None:
    path = script(
        """
        import os, sys
        print("out of", os.environ["RANK"], sys.argv[1:])
        print("error of", os.environ["RANK"], file=sys.stderr)
        """
    )
    logs = tmp_path / "deep" / "logs"
    done = run("--workers", "2", "--log-dir", logs, path, "--workers", "--help", "--")
    assert done.returncode == 0
    assert done.stdout == "out of 0 ['--workers', '--help', '--']\n"
    assert done.stderr == "error of 0\n"
    facts, first, second = sorted(logs.iterdir())
    assert [facts.name, first.name, second.name] == ["job.json", "worker-0.log", "worker-1.log"]
    assert sorted(first.read_text().splitlines()) == ["error of 0", "out of 0 ['--workers', '--help', '--']"]
    assert second.read_text() == "out of 1 ['--workers', '--help', '--']\nerror of 1\n"
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("options", [(), pytest.param(("--spawn",), marks=pytest.mark.slow)])
def test_a_module_is_found_and_run_as_python_m_does(options: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "beside.py").write_text("VALUE = 7\n")
    (tmp_path / "pkg" / "train.py").write_text(
        "import os, sys\nfrom . import beside\n"
        "print(__name__, __package__, beside.VALUE, sys.argv, sys.path[0], os.environ['RANK'])\n"
    )
    arguments = ("--workers", "2", *options, "-m", "pkg.train", "--workers", "-m")
    with contextlib.chdir(tmp_path):
        done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    argv = [str(tmp_path / "pkg" / "train.py"), "--workers", "-m"]
    assert done.stdout == f"__main__ pkg 7 {argv} {tmp_path} 0\n"


def test_a_failure_is_shown_with_rank_and_traceback_and_its_log_is_kept(script: Script, temporary: Path) -> None:
    path = script(
        """
        import os
        if os.environ["RANK"] == "1":
            raise RuntimeError("no more milk")
        """
    )
    done = run("--workers", 2, path)
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "Traceback (most recent call last):" in done.stderr
    assert "RuntimeError: no more milk" in done.stderr
    assert done.stderr.count("Traceback") == 1
    (logs,) = temporary.iterdir()
    assert str(logs / "worker-1.log") in done.stderr


def test_ctrl_c_ends_the_job_and_leaves_nothing(script: Script, tmp_path: Path, temporary: Path, mark: str) -> None:
    with start_run("--workers", 2, "--log-dir", tmp_path / "logs", script(READY)) as launcher:
        for rank in range(2):
            log = tmp_path / "logs" / f"worker-{rank}.log"
            wait_until(lambda log=log: log.exists() and "ready" in log.read_text())
        # The launcher, its fork server, the rendezvous, two workers, four sleepers.
        wait_until(lambda: len(marked_processes(mark)) == 9)
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=LIMIT) == 130
    assert marked_processes(mark) == []
    assert list(temporary.iterdir()) == []


def test_rank_0_has_a_terminal_where_the_launcher_has_one(script: Script, tmp_path: Path) -> None:
    path = script(
        r"""
        import os, sys
        print(sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size())
        sys.stdout.write("10 %\r20 %")
        """
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    with start_run("--log-dir", tmp_path, path, stdin=theirs, stdout=theirs, stderr=theirs) as launcher:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # EIO: the last holder of the terminal is gone
            while data := os.read(ours, 4096):
                shown += data
        assert launcher.wait(timeout=LIMIT) == 0
    os.close(ours)
    expected = "True True os.terminal_size(columns=77, lines=33)"
    assert shown.decode().startswith(f"{expected}\r\n10 %\r20 %")
    assert (tmp_path / "worker-0.log").read_bytes() == f"{expected}\n10 %\r20 %".encode()
