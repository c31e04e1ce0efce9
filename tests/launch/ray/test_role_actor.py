"""An actor without Ray: a process that is followed, and signalled; and how the launcher sees it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from anabranch.launch.job_status import JobFile, status_of
from anabranch.launch.python_program import PythonProgram
from anabranch.launch.ray import role_actor as role_actor_module
from anabranch.launch.ray.role_actor import RemoteProcess, RoleActor, RoleEvents
from anabranch.launch.supervision.worker import ProcessSpec
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


# --- a process in an actor, as the launcher sees it. No Ray is started


AHEAD = 5000.0
"""How far the clock of the node is behind the launcher's."""


def test_status_shows_the_reports_and_the_end_of_a_process_on_another_machine(tmp_path: Path) -> None:
    since = time.monotonic() - AHEAD - 20.0
    wait = {"name": "wait", "peer": "rank 1", "operation": "all_reduce", "since": since}
    status = {"pid": 7, "open": [wait], "run": {"steps": 12}}
    news = [
        RoleEvents([(1, b"hello\n")], None, json.dumps(status).encode(), time.monotonic() - AHEAD),
        RoleEvents([], 0),
    ]
    actor = SimpleNamespace(follow=SimpleNamespace(remote=lambda files: None))
    spec = ProcessSpec("worker", 0, PythonProgram("train.py"), {}, tmp_path / "worker-0.log")
    JobFile(tmp_path).began("worker", 0, 7, None, elsewhere=True)
    process = RemoteProcess(spec, 0, actor, 7, lambda reference, seconds: news.pop(0))
    process._follower.join(timeout=60.0)
    (role,) = status_of(tmp_path).roles
    assert (role.state, role.steps, role.waiting_for) == ("waiting", 12, "worker 1")
    assert role.waiting_seconds is not None
    assert 20.0 <= role.waiting_seconds < AHEAD
    process.reap()
    (role,) = status_of(tmp_path).roles
    assert (role.state, process.code, process.log.read_text()) == ("gone", 0, "hello\n")
