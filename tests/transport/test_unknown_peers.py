"""Peers that are not admitted yet: few at a time, none for long, and never in the way of admitted ones."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from anabranch.errors import Overloaded
from anabranch.transport import Client, Request, Server, Verb
from frame_reading import GREETING
from waiting import soon, wait_until

ECHO = Verb("echo", lambda call: call.reply(payload=call.payload), quick=True)
TCP = "tcp://127.0.0.1:0"


@contextmanager
def silent(server: Server, count: int) -> Iterator[list[socket.socket]]:
    """Peers that connect and say nothing."""
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(count)]


@pytest.mark.parametrize("secure", [True, False])
def test_silent_peers_keep_no_one_out(keys: Path, secure: bool) -> None:
    options = {"keys": keys} if secure else {"insecure": True}
    with (
        Server([ECHO], listen=TCP, max_connections=2, max_unknown=8, **options) as server,  # type: ignore[arg-type]
        silent(server, 40),
        Client(retries=0, heartbeat=20.0, **options) as client,  # type: ignore[arg-type]
    ):
        assert client.call(Request(server.endpoint, "echo", payload=b"in"), soon()).payload == b"in"
        assert server.statistics().connections <= 9 + 1


def test_the_oldest_goes_first(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None of them for standing still.
    monkeypatch.setattr("anabranch.transport.server.connection._GREETING", 60.0)
    with Server([ECHO], listen=TCP, max_unknown=2, keys=keys) as server, silent(server, 3) as peers:
        # Closed from the other side; the others are still waited for.
        assert peers[0].recv(1) == b""
        for peer in peers[1:]:
            peer.setblocking(False)
            with pytest.raises(BlockingIOError):
                peer.recv(1)


def test_known_peers_have_reserved_room(keys: Path) -> None:
    with (
        Server([ECHO], listen=TCP, max_connections=1, max_unknown=2, keys=keys) as server,
        Client(keys=keys) as first,
        Client(keys=keys) as second,
        silent(server, 1),
    ):
        assert first.call(Request(server.endpoint, "echo"), soon())
        with pytest.raises(Overloaded, match="already has 1 connections"):
            second.call(Request(server.endpoint, "echo"), soon())
        assert first.call(Request(server.endpoint, "echo"), soon())


def test_a_stalled_handshake_is_closed(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.transport.server.connection._GREETING", 0.1)
    monkeypatch.setattr("anabranch.transport.server.server._SWEEP", 0.02)
    with Server([ECHO], listen=TCP, keys=keys) as server, silent(server, 1) as peers:
        assert peers[0].recv(1) == b""
        wait_until(lambda: server.statistics().connections == 0)


def test_who_has_not_greeted_has_ten_seconds_however_it_drips() -> None:
    with Server([ECHO], listen=TCP, insecure=True) as server, silent(server, 1) as peers:
        wait_until(lambda: server.statistics().connections == 1)
        (connection,) = server._admission.connections
        began = connection._began
        peers[0].sendall(GREETING[:10])
        wait_until(lambda: connection.progress > began)
        assert not connection.overdue(began + 9.9)
        assert connection.overdue(began + 10.1)


# One that leaves in the middle of Python's own wrap_socket, which then lets go of the socket and closes it nowhere.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
def test_a_peer_that_leaves_before_it_is_accepted_does_not_stop_others(keys: Path) -> None:
    with Server([ECHO], listen=TCP, keys=keys) as server, Client(keys=keys) as client:
        with silent(server, 8) as peers:
            for peer in peers:
                # A reset instead of an end.
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        assert client.call(Request(server.endpoint, "echo", payload=b"in"), soon()).payload == b"in"
