"""The supervisor where a real worker cannot be brought to it: one that not even SIGKILL ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import cast

import pytest

from anabranch.launch.supervision import supervisor
from anabranch.launch.supervision.signals import SignalBox
from anabranch.launch.supervision.supervisor import Patience, Supervisor
from anabranch.launch.supervision.worker import RoleProcess


class Undying:
    """A worker in an uninterruptible system call: signals do nothing."""

    role = "worker"
    rank = 3
    pid = 4711
    running = True

    def __init__(self) -> None:
        self.pidfd, self._never_written = os.pipe()
        self.sent: list[signal.Signals] = []

    def signal(self, number: signal.Signals) -> None:
        self.sent.append(number)

    def abandon(self) -> None:
        self.running = False
        os.close(self.pidfd)
        os.close(self._never_written)


@pytest.fixture
def box() -> Iterator[SignalBox]:
    signals = SignalBox()
    yield signals
    signals.close()


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
