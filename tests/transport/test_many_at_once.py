"""What makes many small requests cheap: they leave together, are read together, and cost nothing while they wait."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import cast

import pytest

from anabranch.transport import (
    Answer,
    Call,
    Client,
    MemoryTransport,
    Request,
    RequestHeader,
    Server,
    Verb,
    client,
)
from anabranch.transport.frame import Hello, encode
from anabranch.transport.server import server as drivers
from anabranch.transport.streams import Stream
from waiting import soon

GREETING = b"".join(encode(Hello()))


class Logging(MemoryTransport):
    """A network whose clients' streams tell when they send."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def connect(self, endpoint: str) -> Stream:
        return cast(Stream, _Logged(super().connect(endpoint), self._log))


class _Logged:
    def __init__(self, stream: Stream, log: list[str]) -> None:
        self._stream = stream
        self._log = log

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def send(self, buffers: Sequence[memoryview]) -> int:
        self._log.append("sent")
        return self._stream.send(buffers)


def test_requests_are_made_by_eights_before_the_first_of_them_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    network = Logging(log)
    quick = Verb("quick", lambda call: call.reply(), quick=True)
    with Server([quick], transport=network) as server, Client(idle=20, transport=network) as asker:
        requests = [Request(server.endpoint, "quick") for _ in range(20)]
        asker.gather(requests, soon())  # connects
        # Those that were answered before the last were asked have been used again.
        assert server.statistics().connections >= 8
        log.clear()
        monkeypatch.setattr(
            client, "encode", lambda *args, **options: (log.append("made"), encode(*args, **options))[1]
        )
        assert all(isinstance(outcome, Answer) for outcome in asker.gather(requests, soon()))
    eight = ["made"] * 8 + ["sent"] * 8
    assert log == eight + eight + ["made"] * 4 + ["sent"] * 4


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
            other.sendall(b"".join(encode(RequestHeader("take", "second", seconds=60.0))))

    def round_over() -> None:
        if calls:
            order.append("round")
        while calls:
            calls.pop().reply()

    with (
        Server([Verb("take", take, quick=True)], after_round=round_over) as server,
        socket.socket(socket.AF_UNIX) as other,
        Client() as asker,
    ):
        other.settimeout(60)
        other.connect(server.endpoint.removeprefix("unix:"))
        other.sendall(GREETING)
        assert other.recv(1 << 16)  # greeted: it is polled for from here on
        asker.call(Request(server.endpoint, "take", "first"), soon())
        assert other.recv(1 << 16)
    assert order == expected
