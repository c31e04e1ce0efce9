"""Directories of experts: what they answer, what they believe, and Redis as one more, which may die and come back."""

from __future__ import annotations

import copy
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from expert_modules import expert_of, served
from torch import nn

import anabranch as ab
from anabranch import Directory, RedisDirectory
from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, NotFound, Overloaded, PeerLost, RemoteError, Unauthorized
from anabranch.experts import DirectoryServer
from anabranch.experts.directory import as_directory
from anabranch.testing import FakeClock
from anabranch.transport import Client, Request, make_keys, pack
from anabranch.transport import redis_directory as module
from redis_servers import RealRedis, redis
from waiting import running, wait_until

__all__ = ["redis"]

AT, HERE, THERE = "unix:/run/experts", "tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000"
UIDS, UID = ["ffn.0.1", "ffn.2.0"], "ffn.0"


@pytest.fixture
def directory(redis: RealRedis) -> Iterator[RedisDirectory]:
    with closing(RedisDirectory(redis.url)) as one:
        yield one


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificates of one authority: of the jobs nightly and weekly, and two sets of every job."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "nightly", job="nightly")
    make_keys(folder / "weekly", job="weekly", authority=folder / "nightly")
    for name in ("every", "other"):
        make_keys(folder / name, authority=folder / "nightly")
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ["memory", "redis"])
def test_what_was_announced_is_found(kind: str, request: pytest.FixtureRequest) -> None:
    one = Directory() if kind == "memory" else request.getfixturevalue("directory")
    one.announce(UIDS, AT, ttl=60.0)
    one.announce(["ffn.2", "ffn.10.0", "other.0"], THERE, ttl=60.0)
    assert one.lookup([*UIDS, "ffn.2", "ffn.9.9"]) == {"ffn.0.1": AT, "ffn.2.0": AT, "ffn.2": THERE}
    indices = {"ffn": [0, 2, 10], "ffn.2": [0], "ffn.0.1": [], "none": []}
    assert one.active(indices) == indices
    one.active(["ffn"])["ffn"].clear()  # the caller's own
    assert [announced[:2] for announced in one.announced()] == [
        *(("ffn.0.1", AT), ("ffn.10.0", THERE), ("ffn.2", THERE), ("ffn.2.0", AT), ("other.0", THERE))
    ]
    assert all(50 < announced.seconds <= 60 for announced in one.announced())
    one.withdraw(["ffn.2.0", "ffn.10.0"], AT)  # the second is not served there
    assert one.lookup(["ffn.2.0", "ffn.10.0"]) == {"ffn.10.0": THERE}
    assert one.active(["ffn", "ffn.2"]) == {"ffn": [0, 2, 10], "ffn.2": []}, "ffn.2 itself is served yet"
    one.withdraw(["ffn.2"], THERE)
    assert one.active(["ffn"]) == {"ffn": [0, 10]}
    one.announce(["ffn.0.1"], THERE, ttl=60.0)
    assert one.lookup(["ffn.0.1"]) == {"ffn.0.1": THERE}, "the last one to announce it has it"
    for wrong in ("ffn", "ffn.01", "../x.1"):
        with pytest.raises(ValueError, match="is not a uid"):
            one.announce([wrong], AT, ttl=60.0)
    with pytest.raises(ValueError, match="is not a prefix"):
        one.active(["ffn."])


def test_only_experts_are_announced(keys: dict[str, Path]) -> None:
    with DirectoryServer("tcp://127.0.0.1:0", keys=keys["every"]) as server:
        experts = Directory(server.endpoint, role="experts", keys=keys["every"])
        with pytest.raises(Unauthorized, match=r"nobody may announce parameters\.0"):
            experts.announce([UID, "parameters.0"], HERE, ttl=30.0)
        for role in ("worker", "directory", "parameters"):
            with pytest.raises(Unauthorized, match="may not call 'directory.announce'"):
                Directory(server.endpoint, role=role, keys=keys["every"]).announce([UID], HERE, ttl=30.0)
        assert experts.lookup([UID, "parameters.0"]) == {}
        experts.announce(["parametersX.0"], HERE, ttl=30.0)
        assert experts.lookup(["parametersX.0", "parameters.0"]) == {"parametersX.0": HERE}


def test_a_uid_belongs_to_its_first_announcers_certificate_until_it_expires(keys: dict[str, Path]) -> None:
    clock = FakeClock()
    with DirectoryServer("tcp://127.0.0.1:0", keys=keys["every"], clock=clock) as server:
        first, second = (Directory(server.endpoint, role="experts", keys=keys[one]) for one in ("every", "other"))
        first.announce([UID], HERE, ttl=30.0)
        with pytest.raises(Unauthorized, match=r"ffn\.0 was announced with another certificate.*for 30 s more"):
            second.announce(["ffn.1", UID], THERE, ttl=30.0)
        second.withdraw([UID], HERE)
        # All or nothing; and the owner may move.
        assert second.lookup([UID, "ffn.1"]) == {UID: HERE}
        first.announce([UID], "tcp://10.0.0.1:7001", ttl=30.0)
        clock.advance(31.0)
        second.announce([UID], THERE, ttl=30.0)
        assert first.lookup([UID]) == {UID: THERE}


LISTENS, NOBODY = "where a server listens", "names no host"
UNREACHABLE = {
    "unix:/etc/passwd": "a socket on one host",
    **dict.fromkeys(["memory:0", "file:///etc/passwd"], "not an endpoint"),
    **dict.fromkeys(["tcp://0.0.0.0:7000", "tcp://[::]:7000", "tcp://10.0.0.1:0", "tcp://*:5"], LISTENS),
    **dict.fromkeys(["tcp://a b:5", "tcp://host:0", "tcp://-a:5", "tcp://[]:5", "tcp://" + 254 * "a" + ":5"], NOBODY),
    **dict.fromkeys(["tcp://h\n:5", "tcp://10.0.0.1\x00:5", "tcp://h\x1b[2J:5"], "characters that are not allowed"),
}
REACHABLE = ["node-7.cluster_a.example:7000", "localhost:1", "[fe80::1%eth0]:5", "[::ffff:10.0.0.1]:5", "a:65535",
             "3com.example.:5", "169.254.10.1:80"]  # fmt: skip


def test_an_endpoint_that_others_cannot_reach_is_refused(keys: dict[str, Path], tmp_path: Path) -> None:
    with DirectoryServer("tcp://127.0.0.1:0", keys=keys["every"]) as server:
        directory = Directory(server.endpoint, role="experts", keys=keys["every"])
        for endpoint, why in UNREACHABLE.items():
            with pytest.raises(ValueError, match=why):
                directory.announce([UID], endpoint, ttl=30.0)
            assert directory.lookup([UID]) == {}
        for endpoint in REACHABLE:
            directory.announce([UID], f"tcp://{endpoint}", ttl=30.0)
            assert directory.lookup([UID]) == {UID: f"tcp://{endpoint}"}
    with DirectoryServer() as server:  # on one host its sockets are announced
        directory = Directory(server.endpoint, role="experts")
        directory.announce([UID], f"unix:{tmp_path}/expert", ttl=30.0)
        assert directory.lookup([UID]) == {UID: f"unix:{tmp_path}/expert"}
        with pytest.raises(ValueError, match="characters that are not allowed in an endpoint"):
            directory.announce([UID], f"unix:{tmp_path}/ex\npert", ttl=30.0)


def test_expired_entries_are_dropped_without_a_lookup() -> None:
    """Twenty thousand uids, each announced for a microsecond, were kept for good."""
    clock = FakeClock()
    directory = Directory(clock=clock)
    alive = [f"f.{number}" for number in range(100)]
    directory.announce(alive, AT, ttl=8e4)
    table = directory._memory
    assert table is not None
    for number in range(2000):
        directory.announce([f"g.{number}"], AT, ttl=1e-6)
        clock.advance(1e-3)
        assert len(table._entries) <= 101
    assert directory.active(["f", "g"]) == {"f": [*range(100)], "g": []}


def test_an_experts_endpoint_in_place_of_a_directorys_is_named_as_such() -> None:
    with served(expert_of(nn.Linear(4, 4))) as server, pytest.raises(NotFound, match="whose role is 'experts'; give"):
        Directory(server.endpoint).active(["ffn"])


@pytest.mark.parametrize("ttl", [1e300, 86401.0, 0.0, -1.0, float("inf"), float("nan")])
def test_times_to_live_are_bounded(ttl: float) -> None:
    with pytest.raises(ValueError, match="at most 86400"):
        Directory().announce([UID], HERE, ttl=ttl)
    # A client that does not check by itself.
    with DirectoryServer() as server, Client() as client:
        request = Request(server.endpoint, "directory.announce", payload=pack(([UID], HERE, ttl)))
        with pytest.raises((ValueError, BoundaryError), match="at most 86400"):
            client.call(request, Deadline.after(20.0))
        assert Directory(server.endpoint).lookup([UID]) == {}


def test_a_directory_that_cannot_be_used_is_refused_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_KEYS", raising=False)
    with pytest.raises(ValueError, match=r"tcp://names:7000 is reached over TCP.*keys=DIR"):
        Directory("tcp://names:7000")
    with pytest.raises(ValueError, match="keys=DIR"):
        ab.RemoteMixtureOfExperts(4, [2], "tcp://names:7000", "ffn")
    Directory("tcp://names:7000", insecure=True)
    with pytest.raises(ValueError, match=r"redis://db:1 is a Redis server; use anabranch\.RedisDirectory"):
        Directory("redis://:secret@db:1")
    monkeypatch.setitem(sys.modules, "redis", None)
    for make in (RedisDirectory, as_directory):
        with pytest.raises(ModuleNotFoundError, match=r"redis://db:6379: .*pip install 'anabranch\[redis\]'") as caught:
            make("redis://:secret@db:6379")
        assert caught.value.name == "redis"


# --- in Redis


def test_redis_expires_entries_that_are_not_renewed(redis: RealRedis, directory: RedisDirectory) -> None:
    directory.announce(["ffn.0.1", "ffn.0.2"], AT, ttl=60.0)
    directory.announce(["ffn.0.1"], AT, ttl=0.001)  # sooner than before
    wait_until(lambda: directory.lookup(["ffn.0.1"]) == {})
    assert directory.active(["ffn", "ffn.0"]) == {"ffn": [0], "ffn.0": [2]}
    directory.announce(["ffn.0.2", "gone.1.2.3"], AT, ttl=0.001)
    wait_until(lambda: not redis.client().keys("*"))
    assert directory.active(["ffn", "ffn.0", "gone"]) == {"ffn": [], "ffn.0": [], "gone": []}


def test_a_mixture_and_an_expert_find_their_servers(redis: RealRedis) -> None:
    experts = [expert_of(nn.Linear(4, 4), uid=uid) for uid in ("ffn.0", "ffn.1")]
    with served(*experts, directory=redis.socket_url) as server:
        mixture = ab.RemoteMixtureOfExperts(4, [2], redis.socket_url, "ffn", k_best=2)
        out = mixture(torch.ones(3, 4))
        out.sum().backward()
        expert = ab.RemoteExpert("ffn.1", RedisDirectory(redis.socket_url))
        assert out.shape == expert(torch.ones(3, 4)).shape == (3, 4)
        assert RedisDirectory(redis.url).lookup([UID]) == {UID: server.endpoint}
    assert RedisDirectory(redis.url).active(["ffn"]) == {"ffn": []}, "withdrawn"


def test_an_empty_restarted_redis_fills_as_servers_announce_themselves_again(
    redis: RealRedis, directory: RedisDirectory
) -> None:
    with served(expert_of(nn.Linear(4, 4)), directory=redis.url, ttl=1.0):
        redis.stop()
        redis.start()
        wait_until(lambda: directory.active(["ffn"]) == {"ffn": [0]})


def test_a_call_waits_a_while_for_a_redis_that_is_started_again(
    redis: RealRedis, directory: RedisDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.announce(UIDS, AT, ttl=60.0)
    redis.stop()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            redis.start()

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=pause))
    directory.announce(UIDS, AT, ttl=60.0)
    assert 1 < sum(module._PAUSES) < 10
    assert directory.lookup(UIDS) == dict.fromkeys(UIDS, AT)


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", (PeerLost, RemoteError), "HTTP|start redis-server"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", Overloaded, "loads its data"),
        (b"-READONLY You can't write against a read only replica.\r\n", RemoteError, "read only replica"),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", RemoteError, "MOVED|3999"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", Overloaded, "maxmemory"),
        (b"-ERR something else\r\n", RemoteError, "Redis answered with an error: something else"),
    ],
)
def test_invalid_answers(answer: bytes, kind: type[Exception], says: str) -> None:
    pytest.importorskip("redis")
    over = False

    def serve() -> None:
        listening.settimeout(0.05)
        while not over:
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(None)
                while asked := connection.recv(4096):
                    # Whoever it is that asks, `CLIENT SETINFO` is answered as by one that does not know it.
                    count = asked.count(b"SETINFO")
                    connection.sendall(b"-ERR unknown\r\n" * count + answer * (b"SETINFO" not in asked))

    with socket.create_server(("127.0.0.1", 0)) as listening, running(serve):
        directory = RedisDirectory(f"redis://127.0.0.1:{listening.getsockname()[1]}")
        try:
            with closing(directory), pytest.raises(kind, match=says):
                directory.lookup(UIDS)
        finally:
            over = True


def test_passwords_and_the_rights_that_its_user_needs(redis: RealRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ["+eval", "+evalsha", "+time", "+@keyspace", "+@hash", "+@string", "+@sortedset", "-@dangerous"]
    for user, prefix, allowed in (("names", "{anabranch*", commands), ("reader", "*", ["+get"])):
        redis.client().acl_setuser(user, enabled=True, passwords=["+mine"], keys=[prefix], commands=allowed, reset=True)
    directory = RedisDirectory(redis.url.replace("//", "//names:mine@"))
    directory.announce(UIDS, AT, ttl=60.0)
    assert directory.lookup(UIDS) == dict.fromkeys(UIDS, AT)
    assert directory.active(["ffn"]) == {"ffn": [0, 2]}
    assert [one.uid for one in directory.announced()] == UIDS
    directory.withdraw(UIDS, AT)
    assert directory.active(["ffn"]) == {"ffn": []}
    redis.client().config_set("requirepass", "secret")
    for url in (redis.url, redis.url.replace("//", "//:typo@"), redis.url.replace("//", "//reader:mine@")):
        with pytest.raises(Unauthorized, match="put them into the URL.*ANABRANCH_REDIS_PASSWORD") as caught:
            RedisDirectory(url).lookup(UIDS)
        assert caught.value.peer == redis.url, "no password is shown"
        assert "typo" not in str(caught.value)
    with_password = RedisDirectory(redis.url.replace("//", "//:secret@"))
    assert with_password.lookup(UIDS) == {}
    assert "secret" not in repr(with_password)
    monkeypatch.setenv("ANABRANCH_REDIS_PASSWORD", "secret")
    assert RedisDirectory(redis.url).lookup(UIDS) == {}


def test_endpoints_reachable_from_this_host_only_are_not_announced_to_others() -> None:
    pytest.importorskip("redis")
    directory = RedisDirectory("redis://10.0.0.1:6379")
    with pytest.raises(ValueError, match="is a socket on one host"):
        directory.announce(UIDS, AT, ttl=60.0)
    with pytest.raises(ValueError, match="where a server listens"):
        directory.announce(UIDS, "tcp://0.0.0.0:7000", ttl=60.0)


@pytest.mark.slow
def test_over_tls(tmp_path: Path, redis: RealRedis, keys: dict[str, Path]) -> None:
    redis.stop()
    folder, own = tmp_path / "tls", keys["every"]
    folder.mkdir(mode=0o700)
    files = {"cert": "directory.pem", "key": "directory.pem", "ca-cert": "authority.pem"}
    options = [word for what, name in files.items() for word in (f"--tls-{what}-file", str(own / name))]
    with RealRedis(folder, *options, "--port", "0", "--tls-port", str(redis.port)):
        url = f"rediss://127.0.0.1:{redis.port}/1?ssl_ca_certs={own}/authority.pem&ssl_check_hostname=false"
        directory = RedisDirectory(f"{url}&ssl_certfile={own}/worker.pem&ssl_keyfile={own}/worker.pem")
        directory.announce(UIDS, THERE, ttl=60.0)
        assert directory.lookup(UIDS) == dict.fromkeys(UIDS, THERE)
        with pytest.raises(PeerLost):  # it asks for a certificate
            RedisDirectory(url).lookup(UIDS)


def test_an_announced_expert_is_found_by_its_job_only(redis: RealRedis, keys: dict[str, Path]) -> None:
    def of(whose: str, role: str = "worker") -> RedisDirectory:
        return RedisDirectory(redis.url, role=role, keys=keys[whose])

    of("nightly", "experts").announce([UID], HERE, ttl=60.0)
    of("every", "experts").announce(["shared.0", UID], THERE, ttl=60.0)
    assert of("nightly").lookup([UID, "shared.0"]) == {UID: HERE, "shared.0": THERE}
    assert of("weekly").lookup([UID, "shared.0"]) == {UID: THERE, "shared.0": THERE}
    assert of("every").active(["ffn", "shared"]) == {"ffn": [0], "shared": [0]}
    assert RedisDirectory(redis.url).lookup([UID]) == {}, "without keys there is a space of its own"
    for role, uid in (("experts", "parameters.0"), ("parameters", UID), ("worker", UID), ("directory", UID)):
        with pytest.raises(Unauthorized, match=f"may (not )?announce {uid}"):
            of("nightly", role).announce([uid], HERE, ttl=30.0)
    again = pickle.loads(pickle.dumps(of("nightly")))
    assert again.lookup([UID]) == copy.deepcopy(again).lookup([UID]) == {UID: HERE}


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:7000", "no endpoint", "tcp://a\nb:1"])
def test_what_could_not_be_announced_is_not_used(
    endpoint: str, redis: RealRedis, keys: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone who may write to that Redis can write anything there."""
    redis.client().set(f"{{anabranch:nightly}}:uid:{UID}", endpoint)
    with closing(RedisDirectory(redis.url, role="worker", keys=keys["nightly"])) as directory:
        assert directory.lookup([UID]) == {}
    assert f"the directory's entry of {UID} is not used" in caplog.text


def test_servers_on_tcp_are_found_under_certificates(
    redis: RealRedis, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    nightly = keys["nightly"]
    with served(expert_of(nn.Linear(4, 4)), directory=redis.url, listen="tcp://127.0.0.1:0", keys=nightly) as server:
        monkeypatch.setenv("ANABRANCH_KEYS", str(nightly))
        directory = RedisDirectory(redis.url)
        assert directory.lookup([UID]) == {UID: server.endpoint}
        assert ab.RemoteExpert(UID, directory, keys=nightly)(torch.ones(3, 4)).shape == (3, 4)
