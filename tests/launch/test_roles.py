"""A job of several roles: who is stopped when, who is started again, whose failure ends the job.

The scripts of the first half import no torch: an expert process is then one that merely runs, and counts as having
served where a test says so.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from jobs import HURRIED, PATIENT, Ends, Script, marked_processes

from anabranch.errors import RemoteError
from anabranch.launch import Patience, RestartBudget
from anabranch.launch.meeting.addresses import tcp_place
from anabranch.launch.supervision import budget
from anabranch.launch.supervision.worker import RoleProcess
from anabranch.testing import JobResult, LocalJob
from anabranch.transport import Server, make_keys
from covering import slow_except
from launched import start_run
from waiting import wait_until

LIMIT = 200.0

# An expert process without experts: it says that it is there, and that it was told to stop.
STANDS_BY = """
import os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
role, rank = os.environ.get("ANABRANCH_ROLE", "worker"), os.environ["RANK"]

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def stand_by():
    def told(*_):
        print("drained", flush=True)
        (here / f"drained-{rank}").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, told)
    (here / f"ready-{rank}").write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert processes count as having served."""
    monkeypatch.setattr(RoleProcess, "has_served", lambda process: True)


def test_services_know_their_role_and_are_stopped_when_the_workers_have_ended(ended: Ends, tmp_path: Path) -> None:
    source = """
print(role, rank, os.environ["WORLD_SIZE"], os.environ["ANABRANCH_EXPERTS"], os.environ["ANABRANCH_DIRECTORY"][:5],
      "MASTER_PORT" in os.environ, flush=True)
if role == "expert":
    stand_by()
wait_for("ready-0")
wait_for("ready-1")
"""
    job = ended(STANDS_BY + source, tmp_path, workers=1, experts=2)
    assert job.outcome.first_failure is None
    assert [(one.role, one.rank, one.code) for one in job.outcome.services] == [("expert", 0, 0), ("expert", 1, 0)]
    assert job.texts == ["worker 0 1 2 unix: True\n"]
    for rank in range(2):
        assert (tmp_path / f"expert-{rank}.log").read_text() == f"expert {rank} 2 2 unix: False\ndrained\n"


def test_a_service_that_was_still_starting_is_not_a_failure(ended: Ends, tmp_path: Path) -> None:
    source = "import os, time; time.sleep(600 if 'ANABRANCH_ROLE' in os.environ else 0)"
    ended(source, workers=1, servers=1, experts=1)
    assert {log.name for log in tmp_path.glob("*.log")} == {"worker-0.log", "parameters-0.log", "expert-0.log"}


def test_a_service_that_does_not_stop_is_killed_and_the_job_a_failure(ended: Ends, tmp_path: Path) -> None:
    source = """
if role == "expert":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (here / "ready-0").touch()
    time.sleep(600)
wait_for("ready-0")
"""
    job = ended(STANDS_BY + source, tmp_path, code=1, workers=1, experts=1, patience=HURRIED)
    assert job.outcome.services[0].code == -signal.SIGKILL
    assert any("expert 0" in line and "did not stop" in line for line in job.told)


@pytest.mark.parametrize(
    ("ends", "how", "told"),
    [
        ("raise RuntimeError('no more milk')", "RuntimeError: no more milk", "expert 0 failed"),
        ("sys.exit()", "while workers still ran", "never called job.serve()"),
    ],
)
def test_an_expert_that_ends_before_it_serves_ends_the_job(ended: Ends, ends: str, how: str, told: str) -> None:
    source = f"import os, sys, time\nif 'ANABRANCH_ROLE' in os.environ:\n    {ends}\ntime.sleep(600)\n"
    patience = Patience(failure=0.3, stop=60.0)
    job = ended(source, code=1, workers=2, experts=1, patience=patience)
    failure = job.outcome.first_failure
    assert failure is not None
    assert failure.describe().startswith("expert 0 (pid ")
    assert how in failure.describe() + failure.last_words()
    assert told in job.told[0]
    assert job.told[-1] == "expert 0 failed; stopping the 2 workers"


@pytest.mark.usefixtures("served")
def test_an_expert_that_dies_is_started_again_then_done_without(ended: Ends, tmp_path: Path) -> None:
    source = """
if role == "expert":
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("life", life, flush=True)
    (here / f"life-{life}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("life-2")
wait_for("go")
"""
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 3:
            (tmp_path / "go").touch()

    options = {"workers": 1, "experts": 1, "tell": tell, "service_restarts": RestartBudget(2, 3600.0)}
    assert ended(STANDS_BY + source, tmp_path, **options).outcome.first_failure is None
    assert (tmp_path / "expert-0.log").read_text() == "life 0\nlife 1\nlife 2\n"
    assert [line.partition("; ")[2] for line in told] == [
        "restarted (1 of 2)",
        "restarted in 0.5 s (2 of 2)",
        "the job continues without it",
    ]
    assert all(line.startswith("expert 0 (pid ") and "SIGKILL" in line for line in told)


@pytest.mark.usefixtures("served")
def test_an_expert_that_is_not_back_before_the_workers_have_ended_is_forgiven(
    ended: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_FIRST_PAUSE", 600.0)
    source = """
if role == "expert":
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("go")
"""

    def tell(line: str) -> None:
        if "(2 of 3)" in line:
            (tmp_path / "go").touch()

    job = ended(STANDS_BY + source, tmp_path, workers=1, experts=1, tell=tell)
    assert job.outcome.services[0].code == -signal.SIGKILL


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_services_outlive_the_workers_that_drain(ended: Ends, tmp_path: Path, number: int, code: int) -> None:
    source = f"""
if role == "expert":
    stand_by()

def told(*_):
    time.sleep(0.2)
    print("served to the end:", not (here / "drained-0").exists(), flush=True)
    sys.exit(0)

signal.signal({number:d}, told)
wait_for("ready-0")
os.kill(os.getppid(), {number:d})
while True:
    time.sleep(0.01)
"""
    job = ended(STANDS_BY + source, tmp_path, code=code, workers=1, experts=1, patience=PATIENT)
    assert job.texts == ["served to the end: True\n"]
    assert (tmp_path / "expert-0.log").read_text() == "drained\n"


# With torch: real servers, real experts.

EXPERTS = """
import json, os, pathlib, signal, sys, time
import torch
import anabranch as ab
from anabranch import checkpoint
from anabranch.record.process import process_stat

torch.set_num_threads(1)
job = ab.job()

def make_backends(index, count):
    linear = torch.nn.Linear(4, 4)
    torch.nn.init.constant_(linear.weight, index + 1.0)
    return [ab.ExpertBackend(f"ffn.{index}", linear, torch.optim.SGD(linear.parameters(), lr=0.5),
                             args_schema=[ab.TensorSpec(4)])]

def pid_of(role, rank):
    jobs = json.loads(pathlib.Path(os.environ["ANABRANCH_STATUS"]).with_name("job.json").read_text())
    return next(one["pid"] for one in jobs["roles"] if (one["role"], one["rank"]) == (role, rank))
"""


def run(source: str, **options: Any) -> JobResult:
    return LocalJob(timeout=LIMIT, **options).run_source(EXPERTS + source)


@pytest.mark.parametrize(
    ("host", "listening"), [(None, "unix:"), pytest.param("127.0.0.1", "tcp://127.0.0.1:", marks=pytest.mark.slow)]
)
def test_workers_experts_and_servers_work_together(host: str | None, listening: str, temporary: Path) -> None:
    source = """
directory = job.serve(make_backends)
with ab.ParameterClient() as client:
    name = f"bias-{job.rank}"
    client.init(name, (2,), init=float(job.rank))
    values = client.pull(name).tolist()
    shards = len(client.statistics())  # asks every shard: none is still starting at the end
experts = [ab.RemoteExpert(f"ffn.{index}", directory) for index in range(2)]
x = torch.ones(1, 4, requires_grad=True)
sum(expert(x).sum() for expert in experts).backward()
print(json.dumps({"job": [job.role, job.rank, job.world_size, len(job.servers), job.experts, job.workers],
                  "active": directory.active(["ffn"]), "values": values, "shards": shards,
                  "gradient": x.grad.tolist()}))
"""
    result = run(source, workers=2, servers=2, experts=2, host=host).check()
    for rank, found in enumerate(result.results):
        assert found is not None
        assert found["job"] == ["worker", rank, 2, 2, 2, 2]
        assert found["active"] == {"ffn": [0, 1]}
        assert found["values"] == [rank, rank]
        assert found["shards"] == 2
    assert set(result.service_logs) == {"parameters-0", "parameters-1", "expert-0", "expert-1"}
    assert not {who: log for who, log in result.service_logs.items() if f"listening on {listening}" not in log}
    assert result.told == ()
    assert list(temporary.glob("anabranch*")) == []


def test_a_job_on_tcp_admits_only_peers_with_its_certificates(temporary: Path) -> None:
    """The directory is in the launcher, so a script without torch will do."""
    foreign = temporary / "foreign"
    make_keys(foreign, roles=["worker"])
    source = f"""
import json, os
from anabranch.deadline import Deadline
from anabranch.errors import AnabranchError
from anabranch.transport import Client, Request, pack

def ask(**client):
    with Client(retries=0, **client) as asker:
        try:
            request = Request(os.environ["ANABRANCH_DIRECTORY"], "directory.active", payload=pack([]))
            asker.call(request, Deadline.after(60.0))
        except AnabranchError as error:
            return type(error).__name__
        return "let in"

keys = os.environ.pop("ANABRANCH_KEYS")
print(json.dumps({{"own": ask(keys=keys), "foreign": ask(keys={str(foreign)!r}), "none": ask(insecure=True),
                  "files": sorted(os.listdir(keys)), "mode": oct(os.stat(keys).st_mode)[-3:]}}))
"""
    result = LocalJob(servers=1, host="127.0.0.1", timeout=LIMIT).run_source(source).check()
    assert result.results[0] == {
        "own": "let in",
        "foreign": "Unauthorized",
        "none": "Unauthorized",
        "files": ["authority.pem", "directory.pem", "experts.pem", "parameters.pem", "worker.pem"],
        "mode": "700",
    }
    assert [path.name for path in temporary.glob("anabranch*")] == []


def test_a_held_port_is_its_servers_alone_and_stays_theirs_over_a_restart() -> None:
    with tcp_place("127.0.0.1", 1) as place:
        endpoint, keys = place.parameters[0], place.keys
        for _ in range(2):
            with Server([], listen=endpoint, role="parameters", keys=keys) as server:
                assert server.endpoint == endpoint
                with pytest.raises(OSError, match="Address already in use"):
                    Server([], listen=endpoint, role="parameters", keys=keys)
        assert keys is not None
    assert not keys.exists()


def test_keys_that_the_environment_names_are_the_jobs(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    with tcp_place("127.0.0.1", 0, tmp_path / "keys") as place:
        assert place.keys == tmp_path / "keys"
    assert place.keys.exists()


def test_an_expert_that_is_killed_returns_with_its_state_and_is_used_again(tmp_path: Path) -> None:
    source = f"""
directory = job.serve(make_backends, checkpoint_dir={str(tmp_path / "experts")!r}, checkpoint_seconds=0.05)
expert = ab.RemoteExpert("ffn.0", directory)
for step in range(3):
    expert(torch.ones(1, 4)).sum().backward()
learned = expert(torch.ones(1, 4)).tolist()
saved = pathlib.Path({str(tmp_path / "experts" / "ffn.0")!r})
while not (saved.is_dir() and (newest := checkpoint.read_newest(saved)) and newest.step == 3):
    time.sleep(0.01)
os.kill(pid_of("expert", 0), signal.SIGKILL)
mixture = ab.RemoteMixtureOfExperts(4, [2], directory, "ffn", k_best=2, forward_timeout=30.0)
while True:  # goes on with the one that answers
    mixture(torch.ones(1, 4))
    try:
        again = ab.RemoteExpert("ffn.0", directory)(torch.ones(1, 4)).tolist()
        break
    except (ab.BoundaryError, ab.NotFound):
        time.sleep(0.05)
print(json.dumps({{"same": again == learned}}))
"""
    result = run(source, experts=2).check()
    assert result.results == ({"same": True},)
    (told,) = result.told
    assert "was killed by SIGKILL" in told
    assert told.endswith("restarted (1 of 3)")


@pytest.mark.parametrize("durability", slow_except(["none", "log"], "log"))
def test_a_parameter_server_that_is_killed_returns_with_every_push_or_ends_the_job(durability: str) -> None:
    source = """
with ab.ParameterClient() as client:
    client.init("sum", (1,), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0))
    for push in range(20):
        client.push("sum", torch.tensor([-1.0]))
        if push == 9:
            os.kill(pid_of("parameters", 0), signal.SIGKILL)
    print(json.dumps({"sum": client.pull("sum").item()}))
"""
    result = run(source, servers=1, durability=durability)
    if durability == "log":
        assert result.check().results[0] == {"sum": 20.0}
        assert "parameters 0" in result.told[0]
        assert result.told[0].endswith("restarted (1 of 3)")
        return
    assert result.first_failed == "parameters 0"
    assert result.told == ("parameters 0 failed; stopping the worker",)
    with pytest.raises(RemoteError, match="parameters 0 failed"):
        result.check()


def test_a_frozen_service_is_named_by_its_callers_long_before_their_deadline() -> None:
    source = """
directory = job.serve(make_backends)
found = {}
with ab.ParameterClient() as client:
    client.init("bias", (1,))
    expert = ab.RemoteExpert("ffn.0", directory)
    expert(torch.ones(1, 4))
    for role, call in (("parameters", lambda: client.pull("bias")), ("expert", lambda: expert(torch.ones(1, 4)))):
        pid = pid_of(role, 0)
        os.kill(pid, signal.SIGSTOP)
        while process_stat(pid)[0] != "T":  # on a busy machine its other threads may still answer
            time.sleep(0.001)
        began = time.monotonic()
        try:
            call()
        except ab.PeerLost as error:
            found[role] = [error.peer, time.monotonic() - began]
        os.kill(pid, signal.SIGCONT)
print(json.dumps(found))
"""
    (lost,) = run(source, servers=1, experts=1).check().results
    assert lost is not None
    for role in ("parameters", "expert"):
        peer, seconds = lost[role]
        assert peer.endswith(f"{role}-0")
        assert seconds < 20.0, "of 30 at least; two beats on a clock of their own: test_peers.py"


def test_a_launcher_that_is_killed_takes_all_roles_along(script: Script, tmp_path: Path, mark: str) -> None:
    path = script(STANDS_BY + "\n(here / f'up-{role}').touch()\ntime.sleep(600)")
    with start_run("--servers", 1, "--experts", 1, "--log-dir", tmp_path / "logs", path, tmp_path) as process:
        wait_until(lambda: (tmp_path / "up-worker").exists() and (tmp_path / "up-expert").exists())
        assert len(marked_processes(mark)) >= 4
        process.kill()
    wait_until(lambda: marked_processes(mark) == [])


def test_a_worker_leaves_its_grid_once_all_have_connected(ended: Ends, tmp_path: Path) -> None:
    """One that ended at once broke the connections that the others were making."""
    source = """
        import pathlib, sys, time
        import anabranch as ab, torch.distributed as dist
        left, new_group = pathlib.Path(sys.argv[1]), dist.new_group

        def slow(ranks, **options):
            group, until = new_group(ranks, **options), time.monotonic() + 0.5
            while len(ranks) == 2 and time.monotonic() < until:
                assert not left.exists(), "rank 1 has left while rank 0 connects"
                time.sleep(0.01)
            return group

        if ab.job().rank == 0:
            dist.new_group = slow
        ab.job().grid(data=2)
        if ab.job().rank == 1:
            left.touch()
        """
    ended(source, tmp_path / "left", workers=2)


def test_workers_meet_in_the_groups_of_their_grid() -> None:
    source = """
import torch.distributed as dist

grid, sums = job.grid(data=2, pipeline=2), []
for group in (grid.data_group, grid.pipeline_group):
    value = torch.tensor([10.0 ** job.rank])
    dist.all_reduce(value, group=group)
    sums.append(value.item())
print(json.dumps({"at": [grid.data_rank, grid.pipeline_rank], "sums": sums}))
"""
    result = run(source, workers=4).check()
    assert result.results == (
        {"at": [0, 0], "sums": [101.0, 11.0]},
        {"at": [0, 1], "sums": [1010.0, 11.0]},
        {"at": [1, 0], "sums": [101.0, 1100.0]},
        {"at": [1, 1], "sums": [1010.0, 1100.0]},
    )
