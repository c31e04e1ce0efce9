"""A launcher whose stdin, stdout or stderr is closed works as if it led nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.cli import standard_streams

PROGRAM = """
import os, runpy, sys
runpy.run_path(sys.argv[1])["open_standard_streams"]()
print("to stdout", flush=True)
print("to stderr", file=sys.stderr, flush=True)
assert sys.stdin.read() == ""
assert all(os.get_inheritable(descriptor) for descriptor in range(3))
first = os.open(os.devnull, os.O_RDONLY)
sys.exit(first if first > 2 else 1)
"""


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", "<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_closed_stream_leads_nowhere(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", PROGRAM, standard_streams.__file__]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode > 2, done.stderr
    assert done.stdout == ("" if " >&-" in f" {closed}" else "to stdout\n")
    assert done.stderr == ("" if "2>&-" in closed else "to stderr\n")


@pytest.mark.slow
def test_a_job_runs_to_its_end_though_nobody_can_see_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from pathlib import Path\nprint('seen by nobody')\nPath(__file__).with_name('done').touch()\n")
    command = [sys.executable, "-m", "anabranch.cli", "run", "--log-dir", str(tmp_path / "logs"), str(script)]
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" >&-', *command], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "done").exists()
    assert "seen by nobody" in (tmp_path / "logs" / "worker-0.log").read_text()
