"""A process at its limit of descriptors or threads turns some clients away, and serves all others as before."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from anabranch.errors import PeerLost
from anabranch.transport import Client, Request, Server, Verb, sockets
from waiting import soon, wait_until

SLOW = Verb("slow", lambda call: call.reply(payload=b"slow"))
QUICK = Verb("quick", lambda call: call.reply(payload=b"quick"), quick=True)


def full(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def no_thread(*_: object) -> NoReturn:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("where", "name", "want"), [(os, "eventfd", full), (threading.Thread, "start", no_thread)])
def test_a_connection_without_a_thread_is_closed_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: object, name: str, want: object
) -> None:
    """The error ended the thread that accepts connections: nobody was served any more."""
    with Server([SLOW, QUICK]) as server, Client() as old, Client(retries=0) as client, Client(retries=0) as late:
        assert old.call(Request(server.endpoint, "quick"), soon()).payload == b"quick"
        before = server.statistics().connections
        for each in (client, late):
            # Connected before: a client may need descriptors and threads of its own.
            assert each.call(Request(server.endpoint, "quick"), soon()).payload == b"quick"
        with monkeypatch.context() as scarce:
            scarce.setattr(where, name, want)
            for each in (client, late):
                with pytest.raises(PeerLost):
                    each.call(Request(server.endpoint, "slow"), soon())
            assert old.call(Request(server.endpoint, "quick"), soon()).payload == b"quick"
        wait_until(lambda: server.statistics().connections == before)
        assert not server.threads_of
        assert client.call(Request(server.endpoint, "slow"), soon()).payload == b"slow"
    said = [record for record in caplog.records if record.name == "anabranch.transport"]
    assert [record.levelno for record in said] == [logging.WARNING]
    assert "ulimit -n" in said[0].getMessage()


def test_a_listener_without_descriptors_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[None] = []
    accept = sockets.SocketListener.accept

    def sometimes(self: sockets.SocketListener) -> object:
        tries.append(None)
        return full() if len(tries) <= 3 else accept(self)

    monkeypatch.setattr(sockets.SocketListener, "accept", sometimes)
    with Server([QUICK]) as server, Client() as client:
        assert client.call(Request(server.endpoint, "quick"), soon()).payload == b"quick"
    assert len(tries) > 3
    assert sum("ulimit -n" in record.getMessage() for record in caplog.records) == 1


def test_nothing_stays_open_for_a_connection_that_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("/proc/self/fd")
    with Server([SLOW, QUICK]) as server:
        with Client() as client:
            client.call(Request(server.endpoint, "quick"), soon())
        wait_until(lambda: not server.statistics().connections)
        before = len(list(folder.iterdir()))
        for _ in range(3):
            with Client(retries=0) as client, monkeypatch.context() as scarce:
                client.call(Request(server.endpoint, "quick"), soon())
                scarce.setattr(os, "eventfd", full)
                with pytest.raises(PeerLost):
                    client.call(Request(server.endpoint, "slow"), soon())
        wait_until(lambda: not server.statistics().connections)
        assert len(list(folder.iterdir())) == before


def test_a_loop_that_gets_no_thread_in_place_of_one_that_is_away_gets_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error ended the thread that beats: no loop was replaced, and clients took the server as lost."""
    blocked, free = threading.Event(), threading.Event()
    starts: list[str] = []
    start = threading.Thread.start

    def scarce(self: threading.Thread) -> None:
        if self.name == "anabranch-loop":
            starts.append(self.name)
            if len(starts) == 1:
                no_thread()
        start(self)

    def after_round() -> None:
        if asked and not blocked.is_set():
            blocked.set()
            assert free.wait(timeout=60)

    asked: list[None] = []
    with Server([QUICK], after_round=after_round) as server, Client() as client:
        assert client.call(Request(server.endpoint, "quick"), soon()).payload == b"quick"
        monkeypatch.setattr(threading.Thread, "start", scarce)
        asked.append(None)
        assert client.call(Request(server.endpoint, "quick"), soon()).payload == b"quick"
        assert blocked.wait(timeout=60)
        wait_until(lambda: len(starts) == 2)
        assert client.call(Request(server.endpoint, "quick"), soon()).payload == b"quick"
        free.set()
