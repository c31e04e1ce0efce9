"""Liveness of peers of this host, by /proc, and elsewhere; more of those is in ``test_lost_ranks.py``."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from time import monotonic

import pytest
from torch.distributed import HashStore

from anabranch.liveness import watcher
from anabranch.liveness.peers import Identity, Peers
from anabranch.record.process import process_stat
from toys import Seconds
from waiting import wait_until


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def identity_of(pid: int) -> Identity:
    return Identity(Identity.of_this_process().host, pid, process_stat(pid)[1])


def watching(
    identities: Mapping[int, Identity],
    *,
    clock: Callable[[], float] = monotonic,
    store: HashStore | None = None,
) -> Peers:
    """Return the peers of rank 0."""
    store = store or HashStore()
    peers = Peers(0, lambda: store, clock)
    peers.know(identities, 1.0)
    return peers


def send(child: subprocess.Popen[bytes], number: int, letters: str) -> None:
    """Send a signal, and return once the process is in a state that has one of these letters."""
    child.send_signal(number)
    wait_until(lambda: process_stat(child.pid)[0] in letters)


def test_a_stopped_peer_is_lost_once_seen_stopped_for_a_heartbeat(child: subprocess.Popen[bytes]) -> None:
    clock = Seconds()
    peers = watching({1: identity_of(child.pid)}, clock=clock)
    send(child, signal.SIGSTOP, "Tt")
    assert peers.lost([1], 1.0) == {}
    clock.now = 0.9
    assert peers.lost([1], 1.0) == {}
    clock.now = 1.0
    assert peers.lost([1], 1.0) == {1: "its process is stopped"}
    assert peers.lost([1], 5.0) == {}  # in a group that is more patient


def test_a_peer_that_was_stopped_with_this_process_is_not_lost(child: subprocess.Popen[bytes]) -> None:
    clock = Seconds()
    peers = watching({1: identity_of(child.pid)}, clock=clock)
    send(child, signal.SIGSTOP, "Tt")
    assert peers.lost([1], 1.0) == {}
    clock.now = 75.0  # this one was stopped, too, and was woken first
    assert peers.lost([1], 1.0) == {}
    clock.now = 76.0
    assert peers.lost([1], 1.0) == {1: "its process is stopped"}


def test_a_peer_that_resumes_in_time_is_not_lost(child: subprocess.Popen[bytes]) -> None:
    clock = Seconds()
    peers = watching({1: identity_of(child.pid)}, clock=clock)
    send(child, signal.SIGSTOP, "Tt")
    assert peers.lost([1], 1.0) == {}
    send(child, signal.SIGCONT, "RS")
    clock.now = 0.9
    assert peers.lost([1], 1.0) == {}
    send(child, signal.SIGSTOP, "Tt")
    clock.now = 1.1
    assert peers.lost([1], 1.0) == {}  # stopped anew, for no time at all yet


def test_a_dead_peer_is_lost_at_once_even_before_it_is_buried(child: subprocess.Popen[bytes]) -> None:
    peers = watching({1: identity_of(child.pid)})
    send(child, signal.SIGKILL, "ZX")
    assert peers.lost([1], 1.0) == {1: "its process has ended"}


def ended() -> Identity:
    with subprocess.Popen(["true"]) as process:  # has ended, and is no more, when this is left
        return identity_of(process.pid)


def test_while_one_peer_may_have_frozen_another_that_ended_is_not_named_alone(child: subprocess.Popen[bytes]) -> None:
    """It may have ended because it saw the frozen one earlier than this rank."""
    clock = Seconds()
    peers = watching({1: identity_of(child.pid), 2: ended()}, clock=clock)
    send(child, signal.SIGSTOP, "Tt")
    assert peers.lost([1, 2], 1.0) == {}
    assert peers.lost([2], 1.0) == {2: "its process has ended"}  # in a group without the stopped one
    clock.now = 1.0
    assert peers.lost([1, 2], 1.0) == {1: "its process is stopped"}
    send(child, signal.SIGCONT, "RS")
    assert peers.lost([1, 2], 1.0) == {2: "its process has ended"}


def test_a_peer_that_ended_because_it_lost_another_is_not_named_beside_that() -> None:
    store, gone = HashStore(), ended()
    assert set(watching({1: gone, 2: gone}, store=store).lost([1, 2], 1.0)) == {1, 2}
    Peers(2, lambda: store).leave_word()
    assert set(watching({1: gone, 2: gone}, store=store).lost([1, 2], 1.0)) == {1}
    assert set(watching({1: gone, 2: gone}, store=store).lost([2], 1.0)) == {2}


def test_another_process_with_the_pid_of_a_dead_peer_is_not_mistaken_for_it(child: subprocess.Popen[bytes]) -> None:
    earlier = Identity(Identity.of_this_process().host, child.pid, "12345")
    assert watching({1: earlier}).lost([1], 1.0) == {1: "its process has ended"}


def test_a_peer_that_was_not_met_is_looked_up_once_it_is_there(child: subprocess.Popen[bytes]) -> None:
    store = HashStore()
    peers = watching({}, store=store)
    send(child, signal.SIGKILL, "ZX")
    peers.look_up([1], 1.0)
    assert peers.lost([1], 1.0) == {}
    store.set("anabranch/0/identity/1", identity_of(child.pid).encode())
    peers.look_up([1], 1.0)
    assert peers.lost([1], 1.0) == {1: "its process has ended"}


class Silence:
    """In place of the process that hears other hosts; ``seconds`` for which each has been silent."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = dict(seconds)

    def silence(self, name: str, heartbeat: float) -> tuple[float, float]:
        return self.seconds[name], 2 * heartbeat


def test_while_one_peer_elsewhere_may_be_lost_another_that_ended_is_not_named_alone() -> None:
    """It has ended because it missed the silent one's beats a moment earlier than this rank."""
    peers, others = watching({}), [Identity(f"host-{rank}", rank, 1) for rank in range(3)]
    peers._identities |= dict(enumerate(others))
    heard = Silence({others[1].name: 1.8, others[2].name: math.inf, others[0].name: 0.4})
    peers._watcher = heard  # type: ignore[assignment]
    assert peers.lost([0, 1, 2], 1.0) == {}
    assert peers.lost([0, 2], 1.0) == {2: "its process has ended"}
    heard.seconds[others[1].name] = 2.3
    assert peers.lost([0, 1, 2], 1.0) == {1: "sent no beat for 2.3 s"}
    heard.seconds[others[1].name] = 0.1  # it was late
    assert peers.lost([0, 1, 2], 1.0) == {2: "its process has ended"}


def test_a_job_that_has_met_without_a_master_s_address_beats_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(watcher, "_ANYWHERE", "127.0.0.1")
    beats = watcher.own_socket.__wrapped__(1)
    assert beats is not None
    with beats[0]:
        assert beats[1] == f"127.0.0.1:{beats[0].getsockname()[1]}"


def test_a_watcher_that_is_killed_beats_again_as_its_worker_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as beats,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
    ):
        monkeypatch.setattr(watcher, "own_socket", lambda pid: (beats, ""))
        for one in (beats, other):
            one.bind(("127.0.0.1", 0))
            one.settimeout(60.0)
        worker = watcher.Watcher("me")
        worker.watch({"other": f"127.0.0.1:{other.getsockname()[1]}"}, 0.2)
        process = worker._process
        assert process is not None
        while other.recv(64)[8:] != b"me":
            pass
        process.kill()
        process.wait(60.0)
        other.setblocking(False)
        with suppress(BlockingIOError):
            while other.recv(64):
                pass
        other.settimeout(60.0)
        worker.silence("other", 0.2)
        assert other.recv(64)[8:] == b"me"
        worker.close()
