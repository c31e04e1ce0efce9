"""The supervisor where a real worker cannot be brought to it: one that not even SIGKILL ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from anabranch.launch.output.slow_starts import SlowStarts
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


class Compiling(Undying):
    """A parameter server that compiles its kernels before it listens."""

    role = "parameters"
    restarted = 0

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log
        log.write_text("anabranch: compiling the kernels\n")


def test_the_screen_shows_once_why_servers_do_not_listen_yet(
    monkeypatch: pytest.MonkeyPatch, box: SignalBox, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "_KERNEL_SECONDS", 0.05)
    services = [cast(RoleProcess, Compiling(tmp_path / name)) for name in "ab"]
    told: list[str] = []
    box.put(signal.SIGTERM)
    os.write(box.notify, b"x")
    Supervisor(
        [cast(RoleProcess, Undying())], box, services=services,
        monitors=[SlowStarts(services, told.append)], patience=Patience(stop=0.05, drain=0.05), tell=told.append,
    ).run()  # fmt: skip
    assert told.count("compiling the kernels") == 1


def test_servers_that_listen_are_not_looked_at_again(tmp_path: Path) -> None:
    server, told = Compiling(tmp_path / "log"), list[str]()
    server.log.write_text("")
    starts = SlowStarts([cast(RoleProcess, server)], told.append)
    starts.check(1.0)
    assert starts.next_check() == 1.5
    server.log.write_text("listening on unix:/somewhere\n")
    starts.check(1.4)
    assert starts.next_check() == 1.5
    starts.check(1.5)
    assert (starts.next_check(), told) == (None, [])
    server.abandon()
