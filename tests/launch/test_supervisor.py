"""The supervisor where a real worker cannot be brought to it; jobs that fail and are started again as a whole."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jobs import Ends

from anabranch.launch import RestartBudget
from anabranch.launch.supervision import signals, supervisor
from anabranch.launch.supervision.members import Members
from anabranch.launch.supervision.signals import SignalBox
from anabranch.launch.supervision.supervisor import Patience, Supervisor
from anabranch.launch.supervision.worker import RoleProcess
from anabranch.liveness.membership import Membership, OwnPlace, published
from anabranch.record.process import process_stat

_ATTACH = 16  # PTRACE_ATTACH


class Undying:
    """A worker in an uninterruptible system call: signals do nothing."""

    role = "worker"
    rank = 3
    pid = 4711
    who = "rank 3"
    running = True

    def __init__(self) -> None:
        self.pidfd, self._never_written = os.pipe()
        self.sent: list[signal.Signals] = []
        self.times: list[float] = []

    def signal(self, number: signal.Signals) -> None:
        self.sent.append(number)
        self.times.append(time.monotonic())

    def signal_group(self, number: int) -> None:
        pass

    def abandon(self) -> None:
        self.running = False
        os.close(self.pidfd)
        os.close(self._never_written)


@pytest.fixture
def box() -> Iterator[SignalBox]:
    received = SignalBox()
    yield received
    received.close()


def test_a_worker_that_not_even_sigkill_ends_is_given_up_and_named(
    monkeypatch: pytest.MonkeyPatch, box: SignalBox
) -> None:
    monkeypatch.setattr(supervisor, "_KERNEL_SECONDS", 0.05)
    worker = Undying()
    told: list[str] = []
    box.put(signal.SIGTERM)
    os.write(box.notify, b"x")
    Supervisor([cast(RoleProcess, worker)], box, patience=Patience(stop=0.05, drain=0.05), tell=told.append).run()
    assert worker.sent == [signal.SIGTERM, signal.SIGKILL]
    assert told[-1].startswith("rank 3 (pid 4711) does not die from SIGKILL")


@pytest.mark.parametrize("ends", ["signal", "seconds"])
def test_the_time_for_which_everything_is_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch, box: SignalBox, ends: str
) -> None:
    monkeypatch.setattr(supervisor, "_KERNEL_SECONDS", 0.05)
    monkeypatch.setattr(signals, "suspend", lambda: time.sleep(0.3))
    worker = Undying()
    if ends == "signal":
        box.put(signal.SIGINT)
    box.put(signal.SIGTSTP)
    os.write(box.notify, b"x")
    seconds = 0.2 if ends == "seconds" else None
    before = time.monotonic()
    Supervisor([cast(RoleProcess, worker)], box, patience=Patience(stop=0.0, drain=0.2), seconds=seconds).run()
    assert worker.sent == [signal.SIGINT if ends == "signal" else signal.SIGABRT, signal.SIGKILL]
    assert worker.times[-1] >= before + 0.5


@pytest.mark.parametrize("heartbeat", [0.0, 15.0])
def test_workers_that_are_all_frozen_may_be_woken_though_a_server_runs(tmp_path: Path, heartbeat: float) -> None:
    """Nobody would be left to go on with; and one that is frozen may be woken for a heartbeat."""

    class Process(SimpleNamespace):
        __hash__ = object.__hash__

    def process(role: str, rank: int) -> Any:
        return Process(
            role=role, rank=rank, pid=rank, running=True, frozen=False, spec=SimpleNamespace(restarts=object())
        )

    workers, servers = [process("worker", rank) for rank in range(2)], [process("parameters", 0)]
    meeting = tmp_path / "meeting-1"
    members = Members(workers, 2, 1, meeting, lambda line: None)
    OwnPlace(meeting, 0, joins=False, heartbeat=heartbeat).write_progress(3, 0)

    def killed(*frozen: Any) -> list[Any]:
        for one in (*workers, *servers):
            one.frozen = one in frozen
        members.frozen(servers)
        assert not heartbeat or members.frozen(servers) == []
        members._stopped = {one: since - heartbeat for one, since in members._stopped.items()}
        return members.frozen(servers)

    assert killed(*workers) == []
    assert killed(*workers, *servers) == []
    assert killed(workers[1]) == [workers[1]]
    assert killed(*servers) == servers


def test_a_newcomer_that_has_not_joined_does_not_decide_that_the_job_ends_with_any_worker(tmp_path: Path) -> None:
    """It may be in another Executor of the script, and leaves; a member's word counts until it has left."""

    def worker(rank: int) -> Any:
        facts = {"code": -9, "running": rank > 0, "spec": SimpleNamespace(restarts=None), "who": f"rank {rank}"}
        return SimpleNamespace(role="worker", rank=rank, pid=os.getpid(), **facts)

    workers, meeting = [worker(rank) for rank in range(3)], tmp_path / "meeting-1"
    members = Members(workers, 2, 1, meeting, lambda line: None)
    OwnPlace(meeting, 1, joins=False).write_progress(3, 0)
    OwnPlace(meeting, 2, joins=True).say("ends")
    assert members.may_leave(workers[0])
    OwnPlace(meeting, 0, joins=False).say("ends")
    assert not members.may_leave(workers[0])


def test_a_worker_that_has_closed_leaves_as_others_meet_unless_it_begins_again(tmp_path: Path) -> None:
    workers = [SimpleNamespace(role="worker", rank=rank, pid=os.getpid(), running=True) for rank in (0, 1)]
    meeting = tmp_path / "meeting-1"
    members = Members(cast(Any, workers), 2, 2, meeting, lambda line: None)
    first, other = (OwnPlace(meeting, rank, joins=False) for rank in (0, 1))
    first.say("closes")
    members.leave_closed()
    assert published(meeting).ranks == {0: 0, 1: 1}, "nobody meets"
    with other.saying("meets"):
        first.begin()  # its next Executor, whose first step is not done yet
        members.leave_closed()
        assert published(meeting).ranks == {0: 0, 1: 1}
        first.say("closes")
        members.leave_closed()
    assert published(meeting) == Membership(1, {1: 0}, closed=1)


def test_a_process_that_a_debugger_has_stopped_is_frozen() -> None:
    with subprocess.Popen(["sleep", "600"]) as child:
        trace = ctypes.CDLL(None, use_errno=True).ptrace
        trace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        try:
            assert trace(_ATTACH, child.pid, None, None) == 0, os.strerror(ctypes.get_errno())
            os.waitpid(child.pid, 0)
            assert process_stat(child.pid)[0] == "t"
            assert RoleProcess.frozen.fget(cast(Any, child))  # type: ignore[attr-defined]
        finally:
            child.kill()


# --- a job that fails is started again as a whole; a service's restarts are a budget that refills


@pytest.mark.parametrize(("restarts", "code", "lives"), [(3, 0, 3), (1, 1, 2)])
def test_a_job_that_fails_is_run_again_until_it_succeeds_or_no_restart_is_left(
    ended: Ends, restarts: int, code: int, lives: int
) -> None:
    source = "import os; life = int(os.environ['TORCHELASTIC_RESTART_COUNT']); print('life', life); exit(life < 2)"
    job = ended(source, code=code, workers=1, max_restarts=restarts)
    assert job.texts == ["".join(f"life {life}\n" for life in range(lives))]
    assert [line.partition("; ")[2] for line in job.told if "restarting" in line] == [
        f"restarting the job ({number} of {restarts})" for number in range(1, lives)
    ]


def test_a_budget_refills_over_time() -> None:
    """Three restarts for the life of a job ended a week's run at the fourth crash."""
    now = 0.0
    budget = RestartBudget(3, 600.0, clock=lambda: now)
    for _ in range(50):
        assert budget.take() is not None
        now += 300.0
    for pause in (0.5, 1.0, None):
        assert budget.take() == pause or budget.used == 3


@pytest.mark.parametrize("text", ["", "3", "3/600", "-1/5s", "3/0s", "x/5s", "3/5m"])
def test_budgets_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="3/600s"):
        RestartBudget.parse(text)


@pytest.mark.slow
def test_a_job_with_a_rolled_back_server_restarts_from_its_last_checkpoint(ended: Ends, tmp_path: Path) -> None:
    """Its workers died of ``SchemaError ... pushes step 503; its next is step 430``."""
    options = {"workers": 2, "servers": 1, "durability": "checkpoint", "max_restarts": 1, "seconds": 240.0}
    job = ended(ROLLED_BACK, tmp_path / "saved", **options)
    # The first worker that meets the shard again is told so; the other may hear of that worker's death before.
    assert "RolledBack: this shard came back without changes that it had acknowledged" in "".join(job.texts)
    last = json.loads(job.texts[0].splitlines()[-1])
    assert (last["life"], last["first"]) == (1, 4)
    assert "restarting the job (1 of 1)" in job.told[-1]


ROLLED_BACK = """
import json, os, pathlib, signal, sys
import torch, anabranch as ab

def kill(role):
    record = json.loads(pathlib.Path(os.environ["ANABRANCH_STATUS"]).with_name("job.json").read_text())
    os.kill(next(one["pid"] for one in record["roles"] if one["role"] == role), signal.SIGKILL)

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with ab.Executor(step, comm_mode="PS") as executor:
    executor.resume(sys.argv[1])
    first = done = executor.statistics().steps
    while done < 8:
        executor.run(batch=torch.ones(2, 4) * (1 + done))
        done = executor.statistics().steps
        if done == 4:
            executor.save(sys.argv[1])
        if done == 6 and not life and ab.job().rank == 0:
            kill("parameters")
    print(json.dumps({"first": first, "life": life}), flush=True)
"""
