"""What makes many small requests cheap: they leave together, are read together, and cost nothing while they wait."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import cast

import pytest

from anabranch.transport import (
    Answer,
    Call,
    Client,
    Deadline,
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
from waiting import wait_until

GREETING = b"".join(encode(Hello()))


def soon() -> Deadline:
    return Deadline.after(60.0)


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


class Moment:
    """A moment that counts how often it is compared."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.compared = 0

    def __lt__(self, other: float) -> bool:
        self.compared += 1
        return self.at < (other.at if isinstance(other, Moment) else other)

    def __gt__(self, other: float) -> bool:
        return not self < other

    def __le__(self, other: float) -> bool:
        return self < other


def test_an_event_of_one_request_does_not_ask_all_that_wait_how_long_they_will() -> None:
    moment = Moment(1e9)
    with ExitStack() as stack, Client() as asker:
        exchanges = [client._Exchange(asker, Request("memory:x", "x"), soon()) for _ in range(64)]
        bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in exchanges]
        advanced = [0] * 64

        def steps(number: int, bell: int) -> Iterator[tuple[int, int, object]]:
            while True:
                yield bell, select.POLLIN, moment
                os.eventfd_read(bell)
                advanced[number] += 1

        waits = client._Together(exchanges, soon())
        for number, (exchange, bell) in enumerate(zip(exchanges, bells, strict=True)):
            stack.callback(os.close, bell)
            exchange.steps = steps(number, bell)  # type: ignore[assignment]
            exchange.wait = next(exchange.steps)  # type: ignore[arg-type]
            waits._update(exchange)
        for bell in bells[:8]:
            before = moment.compared
            os.eventfd_write(bell, 1)
            waits._wait(20.0)
            assert moment.compared - before <= 6
        assert advanced == [1] * 8 + [0] * 56


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


class Counted:
    """A poller that counts the looks that do not wait."""

    def __init__(self, poller: select.epoll) -> None:
        self._poller = poller
        self.glances = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._poller, name)

    def poll(self, seconds: float) -> list[tuple[int, int]]:
        self.glances += seconds == 0
        return self._poller.poll(seconds)


def test_a_client_that_is_alone_has_asked_all_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the answers were here the test looked for the glance that follows them, which was yet to come."""
    monkeypatch.setattr(drivers, "_ROUND", 60.0)
    make, pollers = select.epoll, list[Counted]()

    def counted_poller() -> Counted:
        pollers.append(Counted(make()))
        return pollers[-1]

    monkeypatch.setattr(select, "epoll", counted_poller)
    with (
        Server([Verb("quick", lambda call: call.reply(), quick=True)]) as server,
        socket.socket(socket.AF_UNIX) as other,
        Client() as asker,
    ):
        (counted,) = pollers
        request = Request(server.endpoint, "quick")
        for _ in range(5):
            asker.call(request, soon())
        assert counted.glances == 0
        other.settimeout(60)
        other.connect(server.endpoint.removeprefix("unix:"))
        other.sendall(GREETING)
        assert other.recv(1 << 16)
        asker.call(request, soon())
        wait_until(lambda: counted.glances > 0)
