"""A process in an actor, as the launcher sees it. No Ray is started."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anabranch.launch.job_status import JobFile, status_of
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.ray.role_actor import RemoteProcess, RoleEvents
from anabranch.launch.supervision.worker import ProcessSpec
from anabranch.liveness.membership import files_beside
from waiting import wait_until

AHEAD = 5000.0
"""How far the clock of the node is behind the launcher's."""


def _process(
    folder: Path, news: list[RoleEvents], look: Callable[[], None] = lambda: None, **environment: str
) -> RemoteProcess:
    """One whose actor brings these news, ``look`` being called before each; its process id is 7."""

    def fetch(reference: Any, seconds: float) -> Any:
        look()
        return news.pop(0)

    actor = SimpleNamespace(follow=SimpleNamespace(remote=lambda: None))
    spec = ProcessSpec("worker", 0, PythonProgram("train.py"), environment, folder / "worker-0.log")
    JobFile(folder).began("worker", 0, 7, None, elsewhere=True)
    return RemoteProcess(spec, 0, actor, 7, fetch)


def test_status_shows_the_reports_and_the_end_of_a_process_on_another_machine(tmp_path: Path) -> None:
    since = time.monotonic() - AHEAD - 20.0
    wait = {"name": "wait", "peer": "rank 1", "operation": "all_reduce", "since": since}
    status = {"pid": 7, "open": [wait], "run": {"steps": 12}}
    news = [
        RoleEvents([(1, b"hello\n")], None, json.dumps(status).encode(), time.monotonic() - AHEAD),
        RoleEvents([], 0),
    ]
    process = _process(tmp_path, news)
    process._follower.join(timeout=60.0)
    (role,) = status_of(tmp_path).roles
    assert (role.state, role.steps, role.waiting_for) == ("waiting", 12, "worker 1")
    assert role.waiting_seconds is not None
    assert 20.0 <= role.waiting_seconds < AHEAD
    process.reap()
    (role,) = status_of(tmp_path).roles
    assert (role.state, process.exit.code, process.log.read_text()) == ("gone", 0, "hello\n")


def test_a_process_on_another_machine_is_shown_as_stopped_and_counts_as_frozen_once_seen_twice(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    processes: list[RemoteProcess] = []
    ready = threading.Event()

    def look() -> None:
        assert ready.wait(60.0)
        (role,) = status_of(tmp_path).roles
        seen.append((role.state, processes[0].frozen))

    news = [RoleEvents([], None, stopped=stopped) for stopped in (True, False, True, True, False)]
    processes.append(_process(tmp_path, [*news, RoleEvents([], 0)], look))
    ready.set()
    processes[0]._follower.join(timeout=60.0)
    runs, stops = ("running", False), ("stopped", False)
    assert seen == [runs, stops, runs, stops, ("stopped", True), runs]
    processes[0].reap()
    processes[0]._report("stopped")  # by a thread that comes late
    look()
    assert seen[-1][0] == "gone"


def test_what_a_process_publishes_is_there_for_the_launcher_before_its_end(tmp_path: Path) -> None:
    seen: list[dict[str, bytes]] = []
    members = tmp_path / "members-7"
    published = [{"closes": b"", "progress": b"1"}, {"progress": b"2"}]
    news = [RoleEvents([], None, published=one) for one in published]
    look = lambda: seen.append(files_beside(members))  # noqa: E731
    process = _process(
        tmp_path, [*news, RoleEvents([], 0, published={"left": b""})], look, ANABRANCH_MEMBERS=str(members)
    )
    process.reap()
    assert [*seen, files_beside(members)] == [{}, *published, {"left": b""}]


def test_a_newcomer_for_which_there_is_no_room_ends_well_when_it_is_not_needed_any_more(tmp_path: Path) -> None:
    def begin(stopped: Callable[[], bool]) -> int:
        wait_until(stopped)
        return 0

    spec = ProcessSpec("worker", 2, PythonProgram("train.py"), {}, tmp_path / "worker-2.log")
    process = RemoteProcess(spec, 0, None, 0, lambda reference, seconds: None, begin)
    process.signal(signal.SIGTERM)
    process.reap()
    assert process.exit.code == 0
    assert process.exit.well
