"""A service ends on a signal, at whatever instant that comes, and not by another behind it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.testing import FakeClock
from anabranch.transport import Deadline
from anabranch.transport.server import service

STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
ROUNDS = 200


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def reset() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(service, "keep_one_heap", lambda: None)  # this process keeps several
    before = {number: signal.getsignal(number) for number in STOPS}
    reset()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Server:
    """Looks whether its clients have gone, and does something at the second look."""

    endpoint = "unix:/run/here"

    def __init__(self, at_look: Callable[[], object] = bool, clock: FakeClock | None = None) -> None:
        self.looks = self.saves = self.left = 0
        self._at_look, self._clock = at_look, clock

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.left += 1

    def checkpoint(self) -> None:
        self.saves += 1

    def transport_statistics(self) -> Any:
        assert self._clock is not None
        self.looks += 1
        self._clock.advance(10.0)
        gone = self.looks == 2 and self._at_look()
        return SimpleNamespace(connections=0 if gone else 1)


def test_a_signal_is_noticed_at_any_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread sends it as soon as the service listens, that is, while it begins to wait."""
    listens = threading.Semaphore(0)

    def stop() -> None:
        for number in range(ROUNDS):
            assert listens.acquire(timeout=60.0)
            until = time.perf_counter() + number % 50 * 2e-6
            while time.perf_counter() < until:
                pass
            kill(STOPS[number % 3])

    def listening(text: str, *, flush: bool) -> None:
        assert text == "listening on unix:/run/here"
        listens.release()

    monkeypatch.setattr(service, "print", listening, raising=False)
    thread, server = threading.Thread(target=stop), Server()
    thread.start()
    for _ in range(ROUNDS):
        reset()
        service.serve_until_stopped(lambda: server)  # type: ignore[type-var]
        for number in STOPS:  # as the process ends
            kill(number)
    thread.join(60.0)
    assert server.left == ROUNDS


def test_signals_of_a_service_that_could_not_be_made_are_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        service.serve_until_stopped(lambda: 1 / 0)  # type: ignore[type-var]
    assert {signal.getsignal(number) for number in STOPS} == {signal.SIG_DFL}


@contextmanager
def signalled(server: object) -> Iterator[None]:
    kill(signal.SIGTERM)
    yield


@pytest.mark.parametrize(
    ("linger", "at_look", "looks", "saves"),
    [
        pytest.param(25.0, bool, 3, 1, id="for its time"),  # at the third look 30 seconds are over
        pytest.param(25.0, partial(kill, signal.SIGINT), 2, 1, id="until the next signal"),
        pytest.param(25.0, lambda: True, 2, 1, id="until the last client has gone"),
        pytest.param(0.0, bool, 0, 0, id="not at all"),
    ],
)
def test_one_that_lingers_saves_at_the_first_signal_and_serves_on(
    linger: float, at_look: Callable[[], object], looks: int, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(service, "Deadline", SimpleNamespace(after=partial(Deadline.after, clock=clock)))
    monkeypatch.setattr(service, "_GLANCE", 0.001)
    server = Server(at_look, clock)
    service.serve_until_stopped(lambda: server, signalled, linger=linger)  # type: ignore[type-var]
    assert (server.looks, server.saves, server.left) == (looks, saves, 1)
