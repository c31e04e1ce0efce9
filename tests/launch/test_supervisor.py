"""The supervisor where a real worker cannot be brought to it: one that not even SIGKILL ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import cast

import pytest

from anabranch.launch.supervision import signals, supervisor
from anabranch.launch.supervision.signals import SignalBox
from anabranch.launch.supervision.supervisor import Patience, Supervisor
from anabranch.launch.supervision.worker import RoleProcess


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
