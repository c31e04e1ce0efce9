"""Heartbeats: a server that waits or computes says that it lives, and one that has gone silent is given up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from anabranch.errors import DeadlineExceeded, PeerLost
from anabranch.testing import FakeClock
from anabranch.transport import Call, Client, Deadline, Request, Server, Verb
from anabranch.transport.frame import Heartbeat, Hello
from frame_reading import GREETING, next_frame, peer, request, wire_of
from networks import CountingTransport
from waiting import running, wait_until

HEARTBEAT = 0.05


def waits(calls: list[Call]) -> Verb:
    """A verb whose calls nobody answers."""
    return Verb("wait", calls.append)


def ask(client: Client, server: Server, errors: list[Exception]) -> None:
    try:
        client.call(Request(server.endpoint, "wait"), Deadline.after(100.0))
    except PeerLost as error:
        errors.append(error)


def test_a_server_beats_while_a_call_waits() -> None:
    with (
        Server([waits([])], heartbeat=HEARTBEAT, drain_seconds=0.01) as server,
        peer(server, GREETING + request("wait")) as asker,
    ):
        wire = wire_of(asker)
        headers = [type(next_frame(wire).header) for _ in range(4)]
    assert headers == [Hello, Heartbeat, Heartbeat, Heartbeat]


def test_beats_keep_a_client_waiting_and_their_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the client's clock, which moves when it is told to; beats come when they come."""
    clock, network = FakeClock(), CountingTransport()
    monkeypatch.setattr("anabranch.transport.client.time", SimpleNamespace(monotonic=clock))
    calls: list[Call] = []
    errors: list[Exception] = []
    healthy = True
    server = Server([waits(calls)], heartbeat=HEARTBEAT, healthy=lambda: healthy, transport=network, drain_seconds=0.01)
    with (
        server,
        Client(transport=network, heartbeat=HEARTBEAT) as client,
        running(lambda: ask(client, server, errors)),
    ):
        wait_until(lambda: calls)
        for _ in range(5):  # more than four silences that are too long, were the beats not heard
            clock.advance(1.8 * HEARTBEAT)
            before = network.received
            wait_until(lambda before=before: network.received > before)
        assert not errors
        healthy = False

        def given_up() -> bool:
            clock.advance(2 * HEARTBEAT)  # a last beat may have been on its way
            return bool(errors)

        wait_until(given_up)
    assert "no beat" in str(errors[0])


class Watched(FakeClock):
    """Counts how often it was read."""

    read = 0

    def __call__(self) -> float:
        self.read += 1
        return super().__call__()


def test_a_client_that_slept_itself_waits_for_one_more_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stood still for seconds: its client woke before its server, and gave it up."""
    clock = Watched()
    monkeypatch.setattr("anabranch.transport.client.time", SimpleNamespace(monotonic=clock))
    calls: list[Call] = []
    errors: list[Exception] = []

    def after(heartbeats: float) -> list[Exception]:
        clock.advance(heartbeats * HEARTBEAT)
        before = clock.read
        wait_until(lambda: errors or clock.read > before + 20)
        return errors

    with (
        Server([waits(calls)], heartbeat=HEARTBEAT, healthy=lambda: False, drain_seconds=0.01) as server,
        Client(heartbeat=HEARTBEAT) as client,
        running(lambda: ask(client, server, errors)),
    ):
        wait_until(lambda: calls)
        assert not after(0.0)  # the server may have the request before its client has noted the time
        assert not after(1.9)
        assert not after(50.0)
        assert not after(0.9)
        assert after(0.2)
    assert "no beat for 2.65 s" in str(errors[0])


def test_the_deadline_ends_a_wait_for_a_server_that_lives() -> None:
    calls: list[Call] = []
    with Server([waits(calls)], heartbeat=30.0, drain_seconds=0.01) as server, Client(heartbeat=30.0) as client:
        with pytest.raises(DeadlineExceeded) as caught:
            client.call(Request(server.endpoint, "wait", step=4), Deadline.after(0.2))
        assert caught.value.elapsed is not None
        assert caught.value.elapsed >= 0.2
    assert caught.value.peer == server.endpoint
    assert caught.value.operation == "wait"
    assert caught.value.step == 4
