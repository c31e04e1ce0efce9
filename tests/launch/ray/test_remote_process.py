"""A process in a seat, as the launcher sees it. No Ray is started."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anabranch.launch.job_file import JobFile
from anabranch.launch.job_status import status_of
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.ray.remote_process import RemoteProcess
from anabranch.launch.ray.seat import News
from anabranch.launch.supervision.worker import Recipe

AHEAD = 5000.0
"""How far the clock of the node is behind the launcher's."""


def _process(folder: Path, job_file: JobFile, news: list[News]) -> RemoteProcess:
    """One whose seat brings these news; its process id is 7."""

    def fetch(reference: Any, seconds: float) -> Any:
        return news.pop(0)

    seat = SimpleNamespace(follow=SimpleNamespace(remote=lambda: None))
    recipe = Recipe("worker", 0, PythonProgram("train.py"), {}, folder / "worker-0.log")
    process = RemoteProcess(recipe, 0, seat, lambda: 7, fetch, lambda: job_file.ended_elsewhere("worker", 0))
    job_file.began("worker", 0, process.pid, None, elsewhere=True)
    return process


def test_status_shows_what_a_process_on_another_machine_tells_and_its_end(tmp_path: Path) -> None:
    since = time.monotonic() - AHEAD - 20.0
    status = {"pid": 7, "waits": [{"peers": ["rank 1"], "operation": "all_reduce", "since": since}]}
    told = {".status": json.dumps(status).encode(), ".steps": (12).to_bytes(8, "little")}
    news = [News([(1, b"hello\n")], None, told, time.monotonic() - AHEAD), News([], 0)]
    process = _process(tmp_path, JobFile(tmp_path), news)
    process._follower.join(timeout=60.0)
    (role,) = status_of(tmp_path).roles
    assert (role.state, role.steps, role.waiting_for) == ("waiting", 12, "worker 1")
    assert role.waiting_seconds is not None
    assert 20.0 <= role.waiting_seconds < AHEAD
    process.reap()
    (role,) = status_of(tmp_path).roles
    assert (role.state, process.exit.code, process.log.read_text()) == ("gone", 0, "hello\n")
