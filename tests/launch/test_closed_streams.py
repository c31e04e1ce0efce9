"""A launcher whose stdin, stdout or stderr is closed works as if it led nowhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.cli import messages
from waiting import wait_until

PROGRAM = """
import os, runpy, sys
runpy.run_path(sys.argv[1])["open_standard_streams"]()
os.write(1, b"to stdout\\n")
os.write(2, b"to stderr\\n")
assert os.read(0, 1) == b""
assert all(os.get_inheritable(descriptor) for descriptor in range(3))
first = os.open(os.devnull, os.O_RDONLY)
sys.exit(first if first > 2 else 1)
"""


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", "<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_closed_stream_leads_nowhere(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-c", PROGRAM, messages.__file__]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode > 2, done.stderr
    assert done.stdout == ("" if " >&-" in f" {closed}" else "to stdout\n")
    assert done.stderr == ("" if "2>&-" in closed else "to stderr\n")


def test_output_of_the_command_line_to_a_full_disk_is_not_an_error() -> None:
    program = "import runpy, sys; say = runpy.run_path(sys.argv[1])['say']; say('one'); say('two'); print('here')"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program, messages.__file__],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "here\n")


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
