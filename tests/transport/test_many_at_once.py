"""What makes many small requests cheap: they leave together, are read together, and cost nothing while they wait."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from anabranch.testing import FakeClock
from anabranch.transport import Call, Client, Request, Server, Verb
from anabranch.transport.server import server as drivers
from frame_reading import peer, request
from waiting import soon, wait_until


@pytest.mark.parametrize(
    ("seconds", "expected"), [(60.0, ["first", "second", "round"]), (0.0, ["first", "round", "second", "round"])]
)
def test_arriving_requests_are_read_before_any_is_served_up_to_a_limit(
    seconds: float, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "_ROUND", seconds)
    order: list[str] = []
    calls: list[Call] = []

    def take(call: Call) -> None:
        order.append(call.target)
        calls.append(call)
        if call.target == "first":
            # Is in the server's buffer before this one's handler returns.
            other.sendall(request("take", "second"))

    def round_over(*, one_of_many: bool) -> None:
        assert not one_of_many
        if calls:
            order.append("round")
        while calls:
            calls.pop().reply()

    with (
        Server([Verb("take", take, quick=True)], after_round=round_over) as server,
        peer(server) as other,
        Client() as asker,
    ):
        assert other.recv(1 << 16)  # greeted: it is polled for from here on
        asker.call(Request(server.endpoint, "take", "first"), soon())
        assert other.recv(1 << 16)
    assert order == expected


def test_threads_that_were_replaced_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round that took long left its thread in a list, for as long as the server ran."""
    monkeypatch.setattr(drivers, "_AWAY", 0.0)
    monkeypatch.setattr("anabranch.transport.client.time", SimpleNamespace(monotonic=FakeClock()))  # no beat is late
    calls: list[Call] = []

    def round_over(*, one_of_many: bool) -> None:
        if calls:
            call, mine = calls.pop(), threading.get_ident()
            wait_until(lambda: server.loop is not None and server.loop.ident not in (None, mine))
            call.reply()

    with Server([Verb("take", calls.append, quick=True)], heartbeat=0.01, after_round=round_over) as server:
        with Client() as client:
            for _ in range(10):
                client.call(Request(server.endpoint, "take"), soon())
        assert len(server._threads) < 10


def test_closing_waits_for_a_thread_that_replaced_another_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It polled descriptors that were closed, or another file's by then."""
    server, run, asked = Server([], heartbeat=0.01), drivers.Loop.run, threading.Event()

    def away(loop: drivers.Loop, now: float) -> bool:
        asked.set()
        wait_until(lambda: server.closed)
        return True

    def run_late(loop: drivers.Loop) -> None:
        time.sleep(0.2)
        run(loop)

    monkeypatch.setattr(drivers.Loop, "away", away)
    with server:
        assert asked.wait(timeout=60.0)
        monkeypatch.setattr(drivers.Loop, "run", run_late)
    assert not any(map(threading.Thread.is_alive, server._threads))
