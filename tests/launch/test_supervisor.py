"""The supervisor where a real worker cannot be brought to it, such as one that not even SIGKILL ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.launch.supervision import signals, supervisor
from anabranch.launch.supervision.members import Members
from anabranch.launch.supervision.signals import SignalBox
from anabranch.launch.supervision.supervisor import Patience, Supervisor
from anabranch.launch.supervision.worker import RoleProcess
from anabranch.liveness.membership import OwnPlace


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


def test_workers_that_are_all_frozen_may_be_woken_though_a_server_runs(tmp_path: Path) -> None:
    """Nobody would be left to go on with."""

    class Process(SimpleNamespace):
        __hash__ = object.__hash__

    def process(role: str, rank: int) -> Any:
        return Process(
            role=role, rank=rank, pid=rank, running=True, frozen=False, spec=SimpleNamespace(restarts=object())
        )

    workers, servers = [process("worker", rank) for rank in range(2)], [process("parameters", 0)]
    meeting = tmp_path / "meeting-1"
    members = Members(workers, 2, 1, meeting, lambda line: None)
    OwnPlace(meeting, 0, joins=False).write_progress(3, 0)

    def killed(*frozen: Any) -> list[Any]:
        for one in (*workers, *servers):
            one.frozen = one in frozen
        members.frozen(servers)
        return members.frozen(servers)

    assert killed(*workers) == []
    assert killed(*workers, *servers) == []
    assert killed(workers[1]) == [workers[1]]
    assert killed(*servers) == servers
