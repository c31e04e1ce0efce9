"""Admission: only over private paths, or with certificates of our authority and the right role."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.errors import PeerLost, ProtocolError, Unauthorized
from anabranch.transport import Call, Client, Request, Server, Verb, make_keys, sockets
from frame_reading import GREETING
from programs import Programs
from waiting import soon


def echo(call: Call) -> None:
    call.reply(call.tensors, call.peer.name.encode())


ECHO = Verb("echo", echo)


@pytest.fixture(scope="module")
def foreign_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    make_keys(folder)
    return folder


def test_tcp_without_certificates_is_refused_unless_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_KEYS", raising=False)
    with pytest.raises(ValueError, match="insecure=True"):
        Server([ECHO], listen="tcp://127.0.0.1:0")
    with Client() as client, pytest.raises(ValueError, match="insecure=True"):
        client.call(Request("tcp://127.0.0.1:1", "echo"), soon())
    with Server([ECHO], listen="tcp://127.0.0.1:0", insecure=True) as server, Client(insecure=True) as client:
        assert not server.endpoint.endswith(":0")
        assert client.call(Request(server.endpoint, "echo", tensors=[torch.ones(3)]), soon()).tensors


def test_a_name_is_reached_where_its_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a resolver puts IPv6 first, as for localhost on many systems, every connection was refused."""
    both = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))]
    with Server([ECHO], listen="tcp://localhost:0", insecure=True) as server, Client(insecure=True) as client:
        port = int(server.endpoint.rpartition(":")[2])
        addresses = [(family, socket.SOCK_STREAM, 6, "", (host, port, *more)) for family, (host, _, *more) in both]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        assert client.call(Request(server.endpoint, "echo", tensors=[torch.ones(3)]), soon()).tensors


@pytest.mark.parametrize("endpoint", ["tcp://[::1]:7000", "tcp://[::]:7000"])
def test_a_host_without_ipv6_says_so_of_the_endpoint(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in many containers: Python's word was that there is no dual stack, and named nothing."""

    def refuse(address: tuple[str, int], *, dualstack_ipv6: bool, **options: object) -> socket.socket:
        assert not dualstack_ipv6
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(OSError, match=f"cannot listen on {re.escape(endpoint)}: Address family"):
        Server([ECHO], listen=endpoint, insecure=True)


@pytest.mark.parametrize("size", [1, 1_000_000])
@pytest.mark.parametrize("named", ["here", "in the environment"])
def test_certified_peers_speak_over_tls(keys: Path, size: int, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(size)
    given = keys if named == "here" else None
    if given is None:
        monkeypatch.setenv("ANABRANCH_KEYS", str(keys))
    with Server([ECHO], listen="tcp://127.0.0.1:0", keys=given) as server, Client(keys=given) as client:
        for _ in range(3):
            answer = client.call(Request(server.endpoint, "echo", tensors=[tensor]), soon())
            assert torch.equal(answer.tensors[0], tensor)
        assert answer.payload.startswith(b"worker 127.0.0.1:")


def refused(client: Client, endpoint: str) -> None:
    """At once, for nothing else ends the call before its deadline, which is another error."""
    with pytest.raises(Unauthorized) as caught:
        client.call(Request(endpoint, "echo"), soon())
    assert caught.value.peer == endpoint


def test_a_foreign_or_expired_certificate_is_rejected_at_once_with_the_reason(
    keys: Path, foreign_keys: Path, tmp_path: Path
) -> None:
    # Its own authority, so it refuses the server; with ours beside its certificate, the server refuses it.
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "authority.pem").write_bytes((keys / "authority.pem").read_bytes())
    (mixed / "worker.pem").write_bytes((foreign_keys / "worker.pem").read_bytes())
    (mixed / "worker.pem").chmod(0o600)
    make_keys(tmp_path / "expired", roles=["worker"], days=-0.01, authority=keys)
    with Server([ECHO], listen="tcp://127.0.0.1:0", keys=keys) as server:
        for folder in (foreign_keys, mixed, tmp_path / "expired"):
            with Client(keys=folder) as client:
                refused(client, server.endpoint)
        with Client(keys=keys) as client:
            assert client.call(Request(server.endpoint, "echo"), soon())


def test_a_role_without_permission_is_refused_with_the_reason(keys: Path) -> None:
    verb = Verb("echo", echo, roles=frozenset({"worker"}))
    with Server([verb], listen="tcp://127.0.0.1:0", keys=keys) as server:
        with Client(keys=keys, role="directory") as client:
            refused(client, server.endpoint)
        with Client(keys=keys) as client:
            assert client.call(Request(server.endpoint, "echo"), soon())


@pytest.mark.parametrize("secure", ["server", "client"])
def test_a_peer_without_tls_is_rejected_at_once_with_the_reason(keys: Path, secure: str) -> None:
    options: list[Any] = [{"keys": keys}, {"insecure": True}]
    of_server, of_client = options if secure == "server" else options[::-1]
    refusal = pytest.raises(Unauthorized, match="only TLS 1.3 with certificates")
    with (
        Server([ECHO], listen="tcp://127.0.0.1:0", **of_server) as server,
        Client(**of_client) as client,
        refusal if secure == "server" else pytest.raises((ProtocolError, PeerLost)),
    ):
        client.call(Request(server.endpoint, "echo"), soon())


@pytest.mark.parametrize("wrong", ["no certificate", "an old version"])
def test_a_peer_without_a_certificate_or_with_an_old_tls_gets_nothing(keys: Path, wrong: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if wrong == "an old version":  # is all that is wrong
        context.load_cert_chain(keys / "worker.pem")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    says = "CERTIFICATE_REQUIRED" if wrong == "no certificate" else "PROTOCOL_VERSION"

    def speak(plain: socket.socket) -> None:
        with context.wrap_socket(plain) as sock:
            sock.sendall(GREETING)
            sock.recv(1)

    with Server([ECHO], listen="tcp://127.0.0.1:0", keys=keys) as server:
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        with (
            socket.create_connection((host, int(port)), timeout=60) as plain,
            pytest.raises(ssl.SSLError, match=says),
        ):
            speak(plain)


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    paths = make_keys(folder, roles=["worker"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert b"PRIVATE" not in (folder / "authority.pem").read_bytes()
    before = paths["authority"].read_bytes()
    with pytest.raises(ValueError, match=r"already holds worker\.pem"):
        make_keys(folder, roles=["worker"])
    make_keys(folder, roles=["experts"])
    assert paths["authority"].read_bytes() == before
    with pytest.raises(ValueError, match="unknown roles"):
        make_keys(folder, roles=["king"])


def test_missing_or_damaged_keys_say_which_file_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no authority\.pem"):
        Client(keys=tmp_path)
    (tmp_path / "authority.pem").write_text("damaged")
    (tmp_path / "worker.pem").write_text("damaged")
    (tmp_path / "worker.pem").chmod(0o600)
    with pytest.raises(ValueError, match="damaged"):
        Client(keys=tmp_path)


def private(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def test_a_new_socket_has_its_own_directory_which_is_removed_with_it() -> None:
    with Server([ECHO]) as server:
        path = Path(server.endpoint.removeprefix("unix:"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists()


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = private(tmp_path / "open")
    folder.chmod(0o755)
    with pytest.raises(ValueError, match="must be 0700"):
        Server([ECHO], listen=f"unix:{folder}/socket")
    with pytest.raises(ValueError, match="does not exist"):
        Server([ECHO], listen=f"unix:{tmp_path}/none/socket")
    with pytest.raises(ValueError, match="longer than"):
        Server([ECHO], listen=f"unix:{folder}/{'x' * 120}")


LISTENS = """
import sys
from anabranch.transport import Server, Verb

with Server([Verb("echo", lambda call: call.reply())], listen=sys.argv[1]):
    print("up", flush=True)
    sys.stdin.read()
"""


def test_a_live_path_cannot_be_taken_and_a_dead_one_can(tmp_path: Path, programs: Programs) -> None:
    folder = private(tmp_path / "run")
    endpoint = f"unix:{folder}/socket"
    with programs.start(LISTENS, endpoint) as process:
        assert process.stdout.readline() == "up\n"
        with pytest.raises(ValueError, match="live process"):
            Server([ECHO], listen=endpoint)
        with Client() as client:
            assert client.call(Request(endpoint, "echo"), soon())
        process.kill()
    assert (folder / "socket").exists()
    with Server([ECHO], listen=endpoint) as server, Client() as client:
        assert client.call(Request(server.endpoint, "echo"), soon())
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("side", ["server", "client"])
def test_another_user_on_a_unix_socket_is_refused_with_the_reason(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known, me = sockets._of_users, os.geteuid()

    def others(*users: int) -> sockets.Recognise:
        return known(*(user + 1 for user in users))

    if side == "server":
        monkeypatch.setattr(sockets, "_of_users", others)
    with Server([ECHO]) as server, Client() as client:
        monkeypatch.setattr(sockets, "_of_users", known if side == "server" else others)
        with pytest.raises(Unauthorized, match=f"user {me} is at the other end of the socket, not user {me + 1}"):
            client.call(Request(server.endpoint, "echo"), soon())


def test_the_owner_of_a_unix_socket_has_every_role() -> None:
    with Server([Verb("echo", echo, roles=frozenset({"directory"}))]) as server, Client() as client:
        assert client.call(Request(server.endpoint, "echo"), soon()).payload == f"process {os.getpid()}".encode()
