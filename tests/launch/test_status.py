"""`anabranch status` and `job.json` say how each process of a job is, while one is frozen too, and after restarts."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import anabranch as ab
from anabranch.cli.app import _app
from anabranch.launch import address_status
from anabranch.launch.address_status import status_at
from anabranch.launch.job_status import JobFile, RoleStatus, job_of, latest_jobs, status_of
from anabranch.parameter_server import ParameterServer
from anabranch.record.process import process_stat
from anabranch.transport import Client
from launched import run, start_run
from waiting import wait_until


def read(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "job.json").read_text())
    return record


def test_the_states_of_processes(tmp_path: Path) -> None:
    record = JobFile(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process, ExitStack() as stack:
        stack.callback(process.kill)  # a frozen one would be waited for
        record.began("worker", 0, os.getpid(), None)
        record.began("worker", 1, process.pid, None)
        record.began("parameters", 0, process.pid, f"unix:{tmp_path}/socket")
        record.began("expert", 0, process.pid, None)
        record.returns("expert", 0)
        (tmp_path / "worker-0.status").write_text(json.dumps({"pid": os.getpid(), "run": {"steps": 7}}))
        assert [one.state for one in status_of(tmp_path).roles] == ["running", "running", "starting", "restarting"]
        assert [one.steps for one in status_of(tmp_path).roles] == [7, None, None, None]
        (tmp_path / "socket").touch()
        assert status_of(tmp_path).roles[2].state == "running"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert status_of(tmp_path).roles[1].state == "stopped"
    assert status_of(tmp_path).roles[1].state == "gone"
    record.ended()
    assert {one.state for one in status_of(tmp_path).roles} == {"gone"}


def test_a_pid_that_another_process_has_by_now_is_gone_and_a_role_that_is_none_is_refused(tmp_path: Path) -> None:
    """Roles are shown on terminals, which this one would clear."""
    JobFile(tmp_path).began("worker", 0, os.getpid(), None)
    record = read(tmp_path)
    record["roles"][0]["started"] -= 1
    (tmp_path / "job.json").write_text(json.dumps(record))
    assert status_of(tmp_path).roles[0].state == "gone"
    record["roles"][0]["role"] = "worker\x1b[2J"
    (tmp_path / "job.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="does not describe a job"):
        status_of(tmp_path)


def test_only_regular_files_of_reasonable_size_are_read(tmp_path: Path) -> None:
    """A FIFO made `anabranch status` wait for ever."""
    JobFile(tmp_path).began("worker", 0, os.getpid(), None)
    os.mkfifo(tmp_path / "worker-0.status")
    assert status_of(tmp_path).roles[0].state == "running"
    (tmp_path / "job.json").unlink()
    os.mkfifo(tmp_path / "job.json")
    with pytest.raises(ValueError, match=r"job\.json cannot be read: it is not a regular file"):
        status_of(tmp_path)
    (tmp_path / "job.json").unlink()
    with (tmp_path / "job.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match="more than 67108864"):
        status_of(tmp_path)


def test_a_service_that_listens_no_more_does_not_start(tmp_path: Path) -> None:
    JobFile(tmp_path).began("expert", 0, os.getpid(), f"unix:{tmp_path}/socket")
    assert status_of(tmp_path).roles[0].state == "starting"
    (tmp_path / "expert-0.status").write_text(json.dumps({"pid": os.getpid(), "experts": {"uptime": 3.0}}))
    assert status_of(tmp_path).roles[0].state == "running"


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    JobFile(tmp_path).began("worker", 0, os.getpid(), None)
    done = run(tmp_path, command="status")
    assert done.stdout.splitlines()[2].split() == ["worker", "0", str(os.getpid()), "running"]


def test_watching_draws_until_the_job_ends(tmp_path: Path) -> None:
    record = JobFile(tmp_path)
    record.began("worker", 0, os.getpid(), None)
    ours, theirs = pty.openpty()
    drawn = ""
    with start_run(tmp_path, "--watch", command="status", stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        with open(ours, errors="replace") as screen, suppress(OSError):  # EIO: the other end is closed
            while text := screen.readline():
                drawn += text
                if "running" in text:
                    record.ended()
        assert process.wait() == 0
    assert drawn.index("running") < drawn.index("ended") < drawn.index("gone")


def test_a_loss_that_is_not_finite_is_null_for_programs(tmp_path: Path) -> None:
    JobFile(tmp_path).began("worker", 0, os.getpid(), None)
    told = {"pid": os.getpid(), "run": {"rank": 0, "steps": 2, "loss": float("nan"), "curve": [1.0, float("inf")]}}
    (tmp_path / "worker-0.status").write_text(json.dumps(told))
    done = run(tmp_path, "--json", command="status")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    (role,) = read(tmp_path)["roles"]
    assert role.items() <= found["roles"][0].items()
    assert (found["loss"], found["curve"]) == (None, [1.0, None])


def test_the_newest_job_is_the_default_and_others_that_run_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="you have no running job"):
        latest_jobs()
    for name, started in (("anabranch-logs-b", 5.0), ("anabranch-logs-a", 9.0), ("else", 11.0)):
        (tmp_path / name).mkdir()
        JobFile(tmp_path / name, clock=lambda started=started: started).began("worker", 0, 1, None)  # type: ignore[misc]
    (tmp_path / "anabranch-logs-c").mkdir()
    (tmp_path / "anabranch-logs-c" / "job.json").write_text("{")
    newest, other = tmp_path / "anabranch-logs-a", tmp_path / "anabranch-logs-b"
    assert latest_jobs() == [newest, other]
    shown = CliRunner().invoke(_app, ["status"]).output
    assert f"another job runs: anabranch status {other}" in " ".join(shown.split())
    JobFile(other, clock=lambda: 5.0).began("worker", 0, 2**22, None)  # a process that is gone
    assert latest_jobs() == [newest]


TRAINS = """
    import torch, anabranch as ab
    model = torch.nn.Linear(2, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    mode = "PS" if ab.job().servers else "AllReduce"
    with ab.Executor(step, comm_mode=mode, heartbeat=50.0) as executor:
        for _ in executor.track(range(10**9), "training"):
            executor.run(batch=torch.ones(2, 2))
"""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("frozen", "options"), [("worker 1", ["--workers", "2"]), ("parameters 0", ["--servers", "1"])]
)
def test_status_names_the_processes_that_wait_for_a_frozen_one(
    frozen: str, options: list[str], tmp_path: Path, script: Callable[[str], Path]
) -> None:
    with start_run(*options, "--log-dir", tmp_path, script(TRAINS)) as job:
        wait_until((tmp_path / "job.json").exists)
        wait_until(lambda: (status_of(tmp_path).roles[0].steps or 0) > 3)
        pid = next(role.pid for role in status_of(tmp_path).roles if role.name == frozen)
        assert pid is not None
        seen: dict[str, RoleStatus] = {}

        def waits() -> bool:
            seen.update((role.name, role) for role in status_of(tmp_path).roles)
            return seen["worker 0"].state == "waiting"

        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(waits)  # read here: a job does without a frozen server for seconds only
        finally:
            os.kill(pid, signal.SIGCONT)
        assert seen[frozen].state == "stopped"
        assert seen["worker 0"].waiting_for == frozen
        assert (seen["worker 0"].waiting_seconds or 0.0) >= 0.5
        wait_until(lambda: status_of(tmp_path).roles[0].state == "running")
        assert status_of(tmp_path).progress[0].label == "training"
        wait_until(lambda: status_of(tmp_path).loss is not None)
        job.send_signal(signal.SIGINT)
        job.wait()
    assert {role.state for role in status_of(tmp_path).roles} == {"gone"}


def test_of_many_that_are_waited_for_those_are_named_that_hold_the_others_up() -> None:
    def role(rank: int, state: str = "running") -> RoleStatus:
        return RoleStatus("worker", rank, rank, None, state)  # type: ignore[arg-type]

    def waiting(*peers: int) -> dict[str, object]:
        peer = ", ".join(f"rank {peer}" for peer in peers)
        return {"open": [{"name": "wait", "since": 0.0, "peer": peer, "operation": "barrier"}]}

    def named(*found: tuple[RoleStatus, dict[str, object]]) -> list[str | None]:
        return [one.waiting_for for one in job_of(found).roles]

    assert named((role(0), waiting(1, 2)), (role(1), waiting(0, 2)), (role(2), {})) == ["worker 2", "worker 2", None]
    assert named((role(0), waiting(1, 2)), (role(1, "stopped"), {}), (role(2), {})) == ["worker 1", None, None]
    assert named((role(0), waiting(1)), (role(1), waiting(0))) == ["worker 1", "worker 0"]
    dead, heir = (role(1, "gone"), {"run": {"rank": 1, "steps": 3}}), (role(3), {"run": {"rank": 1, "steps": 3}})
    assert named((role(0), waiting(1)), dead, (role(2), {}), heir) == ["worker 3", None, None, None]


def test_the_loss_and_the_checkpoint_are_those_of_whoever_is_rank_0() -> None:
    def report(
        process: int, rank: int, steps: int, loss: float, state: str = "running"
    ) -> tuple[RoleStatus, dict[str, object]]:
        facts = {"rank": rank, "steps": steps, "loss": loss, "saved": f"saved by {process}"}
        return RoleStatus("worker", process, 1, None, state), {"run": facts}  # type: ignore[arg-type]

    for end in ("running", "gone"):
        expert = RoleStatus("expert", 0, 1, None, "running"), report(0, 0, 99, 0.1)[1]
        job = job_of([report(0, 0, 7, 0.7, "gone"), report(1, 1, 9, 0.8, end), report(2, 0, 9, 0.9, end), expert])
        assert (job.loss, job.saved) == (0.9, "saved by 2")


def test_a_file_of_an_earlier_process_is_ignored(tmp_path: Path) -> None:
    JobFile(tmp_path).began("worker", 0, os.getpid(), None)
    told = {"pid": os.getpid() + 1, "run": {"rank": 0, "steps": 1, "loss": 0.5}}
    (tmp_path / "worker-0.status").write_text(json.dumps(told))
    assert status_of(tmp_path).loss is None
    (tmp_path / "worker-0.status").write_text(json.dumps({**told, "pid": os.getpid()}))
    assert status_of(tmp_path).loss == 0.5


def test_servers_are_queried_at_their_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_status, "_SECONDS", 60.0)
    expert = ab.ExpertBackend("e.0", torch.nn.Identity(), args_schema=[ab.TensorSpec(2)])
    with ParameterServer() as server, ab.ExpertServer([expert]) as experts:
        ab.RemoteExpert("e.0", experts.endpoint)(torch.ones(3, 2))
        nowhere = f"unix:{tmp_path}/nobody"
        with Client(retries=0) as client:
            found = status_at(client, [server.endpoint, experts.endpoint, nowhere])
        states = [(one.role, one.state) for one in found.roles]
        assert states == [("parameters", "running"), ("expert", "running"), ("server", "gone")]
        assert found.roles[0].service["clocks"] == []
        assert found.roles[1].service["experts"]["e.0"]["rows"] == 3
        for asked, code in ((server.endpoint, 0), (nowhere, 1)):
            # A script that waits for its servers reads this, and asks again.
            wait_until(lambda asked=asked, code=code: run(asked, command="status").returncode == code)


def test_a_server_that_does_not_answer_is_stopped(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent, Client(retries=0, heartbeat=60.0) as client:
        silent.bind(f"{tmp_path}/silent")
        os.chmod(f"{tmp_path}/silent", 0o600)
        silent.listen()
        assert status_at(client, [f"unix:{tmp_path}/silent"]).roles[0].state == "stopped"


# --- ``job.json`` says which processes a job has, while it runs, after restarts and at its end


def entry(role: str, rank: int, pid: int, endpoint: str | None) -> dict[str, object]:
    started = process_stat(pid)[1]
    return {"role": role, "rank": rank, "pid": pid, "endpoint": endpoint, "started": started}


def test_it_lists_the_roles_in_order_and_when_they_began_and_ended(tmp_path: Path) -> None:
    now = 100.0
    record = JobFile(tmp_path, clock=lambda: now)
    assert not (tmp_path / "job.json").exists()  # a job that never began
    record.began("rendezvous", 0, 9, None)
    record.began("expert", 0, 13, "unix:/run/expert-0")
    record.began("worker", 1, 12, None)
    record.began("worker", 0, 11, None)
    workers = [entry("worker", rank, 11 + rank, None) for rank in range(2)]
    expert = entry("expert", 0, 13, "unix:/run/expert-0")
    assert read(tmp_path) == {"roles": [*workers, expert], "started": 100.0, "ended": None}
    record.returns("expert", 0)
    assert read(tmp_path)["roles"] == [*workers, {**expert, "pid": None}]
    record.began("expert", 0, 14, "unix:/run/expert-0")
    assert read(tmp_path)["roles"] == [*workers, {**expert, "pid": 14}]
    record.returns()
    assert [role["pid"] for role in read(tmp_path)["roles"]] == [None] * 3
    now = 150.0
    record.ended()
    assert read(tmp_path)["ended"] == 150.0
    assert os.listdir(tmp_path) == ["job.json"]  # nothing half written beside it


def test_readers_never_see_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = JobFile(tmp_path)
    record.began("worker", 0, 1, None)
    before = read(tmp_path)
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        assert read(tmp_path) == before
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    record.began("worker", 1, 2, None)
    assert len(read(tmp_path)["roles"]) == 2


def test_processes_are_listed_before_they_start(tmp_path: Path) -> None:
    other = {"pid": os.getpid(), "run": {"steps": 2000}}  # of another job in the same folder
    (tmp_path / "worker-0.status").write_text(json.dumps(other))
    record = JobFile(tmp_path)
    record.expects({"worker": 1, "parameters": 0, "expert": 1})
    roles = status_of(tmp_path).roles
    assert [(role.name, role.state, role.steps) for role in roles] == [
        ("worker 0", "starting", None), ("expert 0", "starting", None),
    ]  # fmt: skip
    assert read(tmp_path)["roles"][1] == {**entry("expert", 0, 0, None), "pid": None, "started": None, "begun": False}
    record.began("worker", 0, os.getpid(), None)
    record.returns("worker", 0)
    record.returns("worker", 1)  # a newcomer for which there was no room
    assert [role.state for role in status_of(tmp_path).roles] == ["restarting", "starting"]


def test_a_file_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    told: list[str] = []
    record = JobFile(tmp_path / "gone", told.append)
    record.began("worker", 0, 1, None)
    record.ended()
    assert told == [f"{tmp_path / 'gone' / 'job.json'} is not up to date: No such file or directory"]
