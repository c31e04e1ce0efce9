"""An actor without Ray: a process that is followed, signalled, and killed when it is not followed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from anabranch.launch.python_program import PythonProgram
from anabranch.launch.ray import role_actor as role_actor_module
from anabranch.launch.ray.role_actor import RoleActor
from waiting import wait_until

ENVIRONMENT = {**os.environ, "TORCHELASTIC_RUN_ID": "actor-test"}


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[RoleActor]:
    monkeypatch.setattr(role_actor_module, "_ANSWER_SECONDS", 0.05)
    made = RoleActor({"authority.pem": b"public", "worker.pem": b"secret"}, "127.0.0.1")
    yield made
    made.close()


def _program(folder: Path, source: str) -> PythonProgram:
    (folder / "role.py").write_text(source)
    return PythonProgram("role.py")


def _follow_to_the_end(actor: RoleActor) -> tuple[dict[int, bytes], int]:
    said: dict[int, bytes] = {}
    while True:
        news = actor.follow()
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
    actor.start(program, ENVIRONMENT, str(tmp_path), True)
    assert _follow_to_the_end(actor) == ({1: b"secret 0o600\n", 2: b"trouble\n"}, 3)


def test_a_process_frozen_on_its_node_is_reported_until_it_resumes(actor: RoleActor, tmp_path: Path) -> None:
    pid = actor.start(_program(tmp_path, "import time; time.sleep(600)"), ENVIRONMENT, str(tmp_path), False)
    assert not actor.follow().stopped
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: actor.follow().stopped)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not actor.follow().stopped)


def test_a_process_that_is_not_followed_is_killed_at_the_end_of_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_actor_module, "LEASE_SECONDS", 0.2)
    with closing(RoleActor({}, "127.0.0.1")) as short:
        pid = short.start(_program(tmp_path, "import time; time.sleep(600)"), ENVIRONMENT, str(tmp_path), False)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())


def test_closing_kills_the_process_and_its_children(tmp_path: Path) -> None:
    with closing(RoleActor({}, "127.0.0.1")) as actor:
        source = (
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(600)\n"
        )
        pid = actor.start(_program(tmp_path, source), ENVIRONMENT, str(tmp_path), False)
        output: list[tuple[int, bytes]] = []
        wait_until(lambda: output.extend(actor.follow().output) or output)
        child = int(output[0][1])
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{child}").exists()


def test_a_script_that_the_node_does_not_have_is_named_with_the_cure(actor: RoleActor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"node 127\.0\.0\.1 has no 'train\.py'.*shared storage"):
        actor.start(PythonProgram("train.py"), ENVIRONMENT, str(tmp_path), False)


def test_a_process_s_status_is_sent_once_and_its_recording_on_request(actor: RoleActor, tmp_path: Path) -> None:
    program = _program(
        tmp_path,
        "import os, pathlib, sys\n"
        "pathlib.Path(os.environ['ANABRANCH_STATUS'] + '.status').write_text('{}')\n"
        "pathlib.Path(os.environ['ANABRANCH_TRACE'], 'worker-0.7.spans').write_text('spans')\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
        "import time; time.sleep(600)\n",
    )
    environment = {**ENVIRONMENT, "ANABRANCH_STATUS": "worker-0", "ANABRANCH_TRACE": "/on/another/machine"}
    actor.start(program, environment, str(tmp_path), True)
    told: list[bytes] = []
    said: list[tuple[int, bytes]] = []
    while not said:
        news = actor.follow()
        said += news.output
        told += [news.told] if news.told else []
    told += [more] if (more := actor.follow().told) else []
    assert told == [b"{}"]
    assert actor.recorded() == {"worker-0.7.spans": b"spans"}


def test_a_process_that_starts_late_is_given_a_whole_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(role_actor_module.time, "monotonic", lambda: clock[0])
    with closing(RoleActor({}, "127.0.0.1")) as actor:
        clock[0] = 2 * role_actor_module.LEASE_SECONDS
        actor.start(_program(tmp_path, "import time; time.sleep(600)"), ENVIRONMENT, str(tmp_path), False)
        assert actor._followed == clock[0]
