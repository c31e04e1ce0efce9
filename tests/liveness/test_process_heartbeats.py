"""Liveness of peers: on this host by /proc, elsewhere by their heartbeats."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from anabranch.liveness.process_heartbeats import Identity, ProcessHeartbeats, _process_status
from waiting import wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class MemoryStore:
    """A store whose peers beat when told to."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def identity_of(pid: int) -> Identity:
    return Identity(Identity.of_this_process().host, pid, _process_status(pid)[1])


def wait_for_state(pid: int, letters: str) -> None:
    wait_until(lambda: _process_status(pid)[0] in letters)


def test_an_identity_survives_its_text() -> None:
    here = Identity.of_this_process()
    assert Identity.decode(here.encode()) == here
    assert here.pid == os.getpid()


def test_a_running_peer_is_never_lost(child: subprocess.Popen[bytes]) -> None:
    clock = Clock()
    with ProcessHeartbeats({0: Identity.of_this_process(), 1: identity_of(child.pid)}, 0, clock=clock) as beats:
        for clock.now in (0.0, 10.0, 1000.0):
            assert beats.lost() == {}


def test_a_stopped_peer_is_lost_once_seen_stopped_for_a_heartbeat(child: subprocess.Popen[bytes]) -> None:
    clock = Clock()
    with ProcessHeartbeats(
        {0: Identity.of_this_process(), 1: identity_of(child.pid)}, 0, heartbeat=1.0, clock=clock
    ) as beats:
        child.send_signal(signal.SIGSTOP)
        wait_for_state(child.pid, "Tt")
        assert beats.lost() == {}
        clock.now = 0.9
        assert beats.lost() == {}
        clock.now = 1.0
        assert beats.lost() == {1: "its process is stopped"}


def test_a_peer_that_resumes_in_time_is_not_lost(child: subprocess.Popen[bytes]) -> None:
    clock = Clock()
    with ProcessHeartbeats(
        {0: Identity.of_this_process(), 1: identity_of(child.pid)}, 0, heartbeat=1.0, clock=clock
    ) as beats:
        child.send_signal(signal.SIGSTOP)
        wait_for_state(child.pid, "Tt")
        assert beats.lost() == {}
        child.send_signal(signal.SIGCONT)
        wait_for_state(child.pid, "RS")
        clock.now = 0.9
        assert beats.lost() == {}
        child.send_signal(signal.SIGSTOP)
        wait_for_state(child.pid, "Tt")
        clock.now = 1.1
        assert beats.lost() == {}  # stopped anew, for no time at all yet


def test_a_dead_peer_is_lost_at_once_even_before_it_is_buried(child: subprocess.Popen[bytes]) -> None:
    with ProcessHeartbeats({0: Identity.of_this_process(), 1: identity_of(child.pid)}, 0) as beats:
        child.kill()
        wait_for_state(child.pid, "ZX")
        assert beats.lost() == {1: "its process has ended"}
        assert beats.gone() == {1: "its process has ended"}


def test_while_one_peer_may_have_frozen_another_that_ended_is_not_named_alone(child: subprocess.Popen[bytes]) -> None:
    """It may have ended because it saw the frozen one earlier than this rank."""
    clock, here = Clock(), Identity.of_this_process()
    with subprocess.Popen(["true"]) as other:  # has ended, and is no more, when this is left
        gone = identity_of(other.pid)
    with ProcessHeartbeats({0: here, 1: identity_of(child.pid), 2: gone}, 0, heartbeat=1.0, clock=clock) as beats:
        child.send_signal(signal.SIGSTOP)
        wait_for_state(child.pid, "Tt")
        assert beats.lost() == {}
        clock.now = 1.0
        assert beats.lost() == {1: "its process is stopped"}
        child.send_signal(signal.SIGCONT)
        wait_for_state(child.pid, "RS")
        assert beats.lost() == {2: "its process has ended"}


def test_another_process_with_the_pid_of_a_dead_peer_is_not_mistaken_for_it(child: subprocess.Popen[bytes]) -> None:
    earlier = Identity(Identity.of_this_process().host, child.pid, "12345")
    with ProcessHeartbeats({0: Identity.of_this_process(), 1: earlier}, 0) as beats:
        assert beats.gone() == {1: "its process has ended"}


def test_a_peer_elsewhere_is_lost_after_two_heartbeats_without_a_beat() -> None:
    clock, store = Clock(), MemoryStore()
    store.values["anabranch/beat/1"] = "0"
    elsewhere = Identity("another host", 1, "1")
    beats = ProcessHeartbeats(
        {0: Identity.of_this_process(), 1: elsewhere}, 0, store=store, heartbeat=0.01, clock=clock
    )
    with beats:
        clock.now = 0.02
        assert beats.lost() == {}
        store.values["anabranch/beat/1"] = "1"
        began = int(store.values["anabranch/beat/0"])
        wait_until(lambda: int(store.values["anabranch/beat/0"]) >= began + 2)  # one whole look lies between
        clock.now = 0.04
        assert beats.lost() == {}
        clock.now = 0.041
        assert list(beats.lost()) == [1]


def test_peers_elsewhere_need_a_store() -> None:
    with pytest.raises(ValueError, match="rank 1 runs on another host"):
        ProcessHeartbeats({0: Identity.of_this_process(), 1: Identity("another host", 1, "1")}, 0)
