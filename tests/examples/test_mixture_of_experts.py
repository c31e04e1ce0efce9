"""The example's promise: a server killed on the way changes nothing about where training ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from example_jobs import EXAMPLES

RUN = [sys.executable, "-m", "anabranch.cli", "run", "--experts", "4", "--workers", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[sys.executable], RUN], ids=["alone", "two workers"])
def test_a_killed_server_restarts_and_the_accuracy_is_that_of_the_undisturbed_run(
    launcher: list[str], tmp_path: Path
) -> None:
    arguments = [*launcher, str(EXAMPLES / "mixture_of_experts.py"), "--steps", "60", "--out", str(tmp_path)]
    # A short path, for sockets.
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, env=environment)
        left = [path.name for path in Path(temporary).glob("anabranch-*")]
    assert done.returncode == 0, done.stderr
    assert not left
    lines = done.stdout.splitlines()
    result = json.loads(lines[-1])
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert sum("server 1 was killed" in line and "step 21/60" in line for line in lines) == 1, "one worker tells"
    assert any("server 1 is back" in line for line in lines)
    assert result["failed"].get("PeerLost", 0) > 0
    assert result["used_again"]
    assert result["undisturbed_accuracy"] > 0.8
    # Better is fine. Experts take the workers' gradients as they come, so that two undisturbed runs differ, too.
    assert result["accuracy"] > result["undisturbed_accuracy"] - 0.06


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "start the job with --experts 4"),
        ({"ANABRANCH_EXPERTS": "3"}, "start the job with --experts 4"),
    ],
)
def test_a_job_of_another_shape_is_refused(
    environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mixture_of_experts

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["mixture_of_experts.py"])
    with pytest.raises(SystemExit) as caught:
        mixture_of_experts.main()
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_ctrl_c_promises_no_checkpoint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import mixture_of_experts

    def run(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(mixture_of_experts, "run", run)
    monkeypatch.setattr(sys, "argv", ["mixture_of_experts.py"])
    assert mixture_of_experts.main() == 130
    assert capsys.readouterr().err == "stopped\n"
