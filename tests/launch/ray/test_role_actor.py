"""An actor without Ray: a process that is followed, and signalled."""

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
from anabranch.launch.supervision.worker import ProcessSpec
from waiting import wait_until

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


def _start(actor: RoleActor, program: PythonProgram, folder: Path, *, apart: bool = False, **environment: str) -> int:
    log = Path("/on/another/machine/worker-0.log")
    spec = ProcessSpec("worker", 0, program, {**ENVIRONMENT, **environment}, log, cwd=str(folder))
    pid, sees = actor.start(spec, 0, str(folder), apart, 1, {"members": b"first"})
    assert sees
    return pid


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
    _start(actor, program, tmp_path, apart=True)
    assert _follow_to_the_end(actor) == ({1: b"secret 0o600\n", 2: b"trouble\n"}, 3)


def test_a_process_frozen_on_its_node_is_reported_until_it_resumes(actor: RoleActor, tmp_path: Path) -> None:
    pid = _start(actor, _program(tmp_path, "import time; time.sleep(600)"), tmp_path)
    assert not actor.follow().stopped
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: actor.follow().stopped)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not actor.follow().stopped)


def test_closing_kills_the_process_and_its_children(tmp_path: Path) -> None:
    with closing(RoleActor({}, "127.0.0.1")) as actor:
        source = (
            "import subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
            "print(child.pid, flush=True)\n"
            "time.sleep(600)\n"
        )
        pid = _start(actor, _program(tmp_path, source), tmp_path)
        output: list[tuple[int, bytes]] = []
        wait_until(lambda: output.extend(actor.follow().output) or output)
        child = int(output[0][1])
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{child}").exists()


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
    _start(actor, program, tmp_path, apart=True, ANABRANCH_TRACE="/on/another/machine")
    statuses: list[bytes] = []
    said: list[tuple[int, bytes]] = []
    while not said:
        news = actor.follow()
        said += news.output
        statuses += [news.status] if news.status else []
    statuses += [more] if (more := actor.follow().status) else []
    assert statuses == [b"{}"]
    assert actor.close() == {"worker-0.7.spans": b"spans"}


def test_what_the_launcher_publishes_is_seen_in_order_and_what_the_process_publishes_is_reported(
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
    wait_until(lambda: actor.follow().published == {"waits": b""})
    actor.show(3, {"members": b"third", "newcomers": b""})
    actor.show(2, {"members": b"second"})
    while (news := actor.follow()).code is None:
        pass
    assert (news.code, news.published) == (0, {})
    _start(actor, _program(tmp_path, ""), tmp_path, ANABRANCH_MEMBERS="/on/another/machine/members-7")
    assert actor.follow().published == {}, "of its predecessor"
