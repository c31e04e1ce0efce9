"""A process at its limit of descriptors or threads turns some clients away, and serves all others as before."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
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


@pytest.mark.parametrize(("where", "name", "want"), [(select, "epoll", full), (threading.Thread, "start", no_thread)])
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
