"""An actor without Ray: a process that is followed, and signalled; and how the launcher sees it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.launch.job_status import JobFile, status_of
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.ray import role_actor as role_actor_module
from anabranch.launch.ray.role_actor import RemoteProcess, RoleActor, RoleEvents
from anabranch.launch.supervision.worker import ProcessSpec
from anabranch.liveness.membership import files_beside
from waiting import wait_until

FIRST = {"members": b"first"}
ENVIRONMENT = {**os.environ, "TORCHELASTIC_RUN_ID": "actor-test"}


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[RoleActor]:
    monkeypatch.setattr(role_actor_module, "_NEWS_SECONDS", 0.05)
    made = RoleActor({"authority.pem": b"public", "worker.pem": b"secret"}, "127.0.0.1")
    yield made
    made.close()


def _program(folder: Path, source: str) -> PythonProgram:
    (folder / "role.py").write_text(source)
    return PythonProgram("role.py")


def _start(actor: RoleActor, program: PythonProgram, folder: Path, **environment: str) -> int:
    log = Path("/on/another/machine/worker-0.log")
    spec = ProcessSpec("worker", 0, program, {**ENVIRONMENT, **environment}, log, cwd=str(folder))
    pid, sees = actor.start(spec, 0, str(folder), FIRST)
    assert sees
    return pid


def _follow_to_the_end(actor: RoleActor) -> tuple[dict[int, bytes], int]:
    said: dict[int, bytes] = {}
    while True:
        news = actor.follow({})
        for stream, data in news.output:
            said[stream] = said.get(stream, b"") + data
        if news.code is not None and not news.output:
            return said, news.code


def test_a_role_has_its_keys_and_its_output_and_exit_code_are_reported(actor: RoleActor, tmp_path: Path) -> None:
    program = _program(
        tmp_path,
        "import os, sys\n"
        "path = os.path.join(os.environ['ANABRANCH_KEYS'], 'worker.pem')\n"
        "print(open(path).read(), oct(os.stat(path).st_mode & 0o777))\n"
        "print('trouble', file=sys.stderr)\n"
        "sys.exit(3)\n",
    )
    _start(actor, program, tmp_path)
    assert _follow_to_the_end(actor) == ({1: b"secret 0o600\n", 2: b"trouble\n"}, 3)


def test_a_process_frozen_on_its_node_is_reported_until_it_resumes(actor: RoleActor, tmp_path: Path) -> None:
    pid = _start(actor, _program(tmp_path, "import time; time.sleep(600)"), tmp_path)
    assert not actor.follow({}).stopped
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: actor.follow({}).stopped)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not actor.follow({}).stopped)


def test_closing_kills_the_process_and_its_children(actor: RoleActor, tmp_path: Path) -> None:
    source = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    pid = _start(actor, _program(tmp_path, source), tmp_path)
    output: list[tuple[int, bytes]] = []
    wait_until(lambda: output.extend(actor.follow({}).output) or output)
    actor.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not Path("/proc", output[0][1].decode().strip()).exists()


def test_a_script_that_the_node_does_not_have_is_named_with_the_cure(actor: RoleActor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"node 127\.0\.0\.1 has no 'train\.py'.*shared storage"):
        _start(actor, PythonProgram("train.py"), tmp_path)


def test_a_process_s_status_is_sent_once_and_its_recording_at_the_end(actor: RoleActor, tmp_path: Path) -> None:
    program = _program(
        tmp_path,
        "import os, pathlib, sys\n"
        "pathlib.Path(os.environ['ANABRANCH_STATUS'] + '.status').write_text('{}')\n"
        "pathlib.Path(os.environ['ANABRANCH_TRACE'], 'worker-0.7.spans').write_text('spans')\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
        "import time; time.sleep(600)\n",
    )
    _start(actor, program, tmp_path, ANABRANCH_TRACE="/on/another/machine")
    statuses: list[bytes] = []
    said: list[tuple[int, bytes]] = []
    while not said:
        news = actor.follow({})
        said += news.output
        statuses += [news.status] if news.status else []
    statuses += [more] if (more := actor.follow({}).status) else []
    assert statuses == [b"{}"]
    assert actor.close() == {"worker-0.7.spans": b"spans"}


def test_what_the_launcher_publishes_is_seen_and_what_the_process_publishes_is_reported(
    actor: RoleActor, tmp_path: Path
) -> None:
    program = _program(
        tmp_path,
        "import os, pathlib, time\n"
        "members = os.environ['ANABRANCH_MEMBERS']\n"
        "print(pathlib.Path(members + '.members').read_text(), flush=True)\n"
        "pathlib.Path(members + '.waits').touch()\n"
        "while not os.path.exists(members + '.newcomers'): time.sleep(0.01)\n"
        "print(pathlib.Path(members + '.members').read_text())\n"
        "pathlib.Path(members + '.waits').unlink()\n",
    )
    _start(actor, program, tmp_path, ANABRANCH_MEMBERS="/on/another/machine/members-7")
    said: list[tuple[int, bytes]] = []

    def published(files: dict[str, bytes]) -> bool:
        news = actor.follow(files)
        said.extend(news.output)
        return news.published == {"waits": b""}

    wait_until(lambda: published(FIRST))
    second = {"members": b"second", "newcomers": b""}
    while (news := actor.follow(second)).code is None or news.output:
        said.extend(news.output)
    assert (news.code, news.published) == (0, {})
    assert b"".join(data for _, data in said) == b"first\nsecond\n"
    _start(actor, _program(tmp_path, ""), tmp_path, ANABRANCH_MEMBERS="/on/another/machine/members-7")
    assert actor.follow(FIRST).published == {}, "of its predecessor"


# --- a process in an actor, as the launcher sees it. No Ray is started


AHEAD = 5000.0
"""How far the clock of the node is behind the launcher's."""


def _process(
    folder: Path, news: list[RoleEvents], look: Callable[[], None] = lambda: None, **environment: str
) -> RemoteProcess:
    """One whose actor brings these news, ``look`` being called before each; its process id is 7."""

    def fetch(reference: Any, seconds: float) -> Any:
        look()
        return news.pop(0)

    actor = SimpleNamespace(follow=SimpleNamespace(remote=lambda files: None))
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
    assert (role.state, process.code, process.log.read_text()) == ("gone", 0, "hello\n")


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
    assert process.code == 0
    assert process.well
