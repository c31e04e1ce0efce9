"""The directory in Redis is one directory more: the same answers, over a real server that may die and come back."""

from __future__ import annotations

import copy
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from expert_modules import served
from torch import nn

import anabranch as ab
from anabranch import Directory, RedisDirectory
from anabranch.errors import Overloaded, PeerLost, RemoteError, Unauthorized
from anabranch.experts.directory import as_directory
from anabranch.transport import make_keys
from anabranch.transport import redis_directory as module
from redis_servers import RealRedis, redis
from waiting import join, wait_until

__all__ = ["redis"]

AT = "unix:/run/experts"
ELSEWHERE = "tcp://10.0.0.1:7000"
UIDS = ["ffn.0.1", "ffn.2.0"]


def make(uid: str) -> ab.ExpertBackend:
    return ab.ExpertBackend(uid, nn.Linear(2, 2), args_schema=[ab.TensorSpec(2)])


@pytest.fixture
def directory(redis: RealRedis) -> Iterator[RedisDirectory]:
    found = RedisDirectory(redis.url)
    yield found
    found.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_it_answers_as_a_directory_of_this_process_does(directory: RedisDirectory) -> None:
    for one in (directory, Directory()):
        one.announce(UIDS, AT, ttl=60.0)
        one.announce(["ffn.2", "ffn.10.0", "other.0"], ELSEWHERE, ttl=60.0)
        assert one.lookup([*UIDS, "ffn.2", "ffn.9.9"]) == {"ffn.0.1": AT, "ffn.2.0": AT, "ffn.2": ELSEWHERE}
        assert one.active(["ffn", "ffn.2", "ffn.0.1", "none"]) == {
            "ffn": [0, 2, 10],
            "ffn.2": [0],
            "ffn.0.1": [],
            "none": [],
        }
        assert [found[:2] for found in one.announced()] == [
            *(("ffn.0.1", AT), ("ffn.10.0", ELSEWHERE), ("ffn.2", ELSEWHERE), ("ffn.2.0", AT), ("other.0", ELSEWHERE))
        ]
        assert all(50 < found.seconds <= 60 for found in one.announced())
        one.withdraw(["ffn.2.0", "ffn.10.0"], AT)  # the second is not served there
        assert one.lookup(["ffn.2.0", "ffn.10.0"]) == {"ffn.10.0": ELSEWHERE}
        assert one.active(["ffn", "ffn.2"]) == {"ffn": [0, 2, 10], "ffn.2": []}, "ffn.2 itself is served yet"
        one.withdraw(["ffn.2"], ELSEWHERE)
        assert one.active(["ffn"]) == {"ffn": [0, 10]}
        one.announce(["ffn.0.1"], ELSEWHERE, ttl=60.0)
        assert one.lookup(["ffn.0.1"]) == {"ffn.0.1": ELSEWHERE}, "the last one to announce it has it"
        for wrong in (["ffn"], ["ffn.01"], ["../x.1"]):
            with pytest.raises(ValueError, match="is not a uid"):
                one.announce(wrong, AT, ttl=60.0)
        with pytest.raises(ValueError, match="is not a prefix"):
            one.active(["ffn."])
        with pytest.raises(ValueError, match="ttl is a number of seconds"):
            one.announce(UIDS, AT, ttl=0.0)


def test_redis_expires_entries_that_are_not_renewed(redis: RealRedis, directory: RedisDirectory) -> None:
    directory.announce(["ffn.0.1", "ffn.0.2"], AT, ttl=60.0)
    directory.announce(["ffn.0.1"], AT, ttl=0.001)  # sooner than before
    wait_until(lambda: directory.lookup(["ffn.0.1"]) == {})
    assert directory.active(["ffn", "ffn.0"]) == {"ffn": [0], "ffn.0": [2]}
    directory.announce(["ffn.0.2", "gone.1.2.3"], AT, ttl=0.001)
    wait_until(lambda: not redis.client().keys("*"))
    assert directory.active(["ffn", "ffn.0", "gone"]) == {"ffn": [], "ffn.0": [], "gone": []}


def test_a_mixture_and_an_expert_find_their_servers(redis: RealRedis) -> None:
    with served(make("ffn.0"), make("ffn.1"), directory=redis.socket_url) as server:
        mixture = ab.RemoteMixtureOfExperts(2, [2], redis.socket_url, "ffn", k_best=2)
        out = mixture(torch.ones(3, 2))
        out.sum().backward()
        expert = ab.RemoteExpert("ffn.1", RedisDirectory(redis.socket_url))
        assert out.shape == expert(torch.ones(3, 2)).shape == (3, 2)
        assert RedisDirectory(redis.url).lookup(["ffn.0"]) == {"ffn.0": server.endpoint}
    assert RedisDirectory(redis.url).active(["ffn"]) == {"ffn": []}, "withdrawn"


def test_an_empty_restarted_redis_fills_as_servers_announce_themselves_again(
    redis: RealRedis, directory: RedisDirectory
) -> None:
    with served(make("ffn.0"), directory=redis.url, ttl=1.0):
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


# What goes wrong, and what is said.


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", (PeerLost, RemoteError), "HTTP|start redis-server"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", Overloaded, "loads its data"),
        (b"-READONLY You can't write against a read only replica.\r\n", RemoteError, "read only replica"),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", RemoteError, "MOVED|3999"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", Overloaded, "maxmemory"),
        (b"-ERR something else\r\n", RemoteError, "Redis answered with an error: something else"),
    ],
)
def test_invalid_answers(stack: ExitStack, answer: bytes, kind: type[Exception], told: str) -> None:
    pytest.importorskip("redis")
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    over = threading.Event()

    def serve() -> None:
        listening.settimeout(0.05)
        while not over.is_set():
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

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with (
            closing(RedisDirectory(f"redis://127.0.0.1:{listening.getsockname()[1]}")) as directory,
            pytest.raises(kind, match=told),
        ):
            directory.lookup(UIDS)
    finally:
        over.set()
        join(thread)


def test_a_wrong_password(tmp_path: Path, redis: RealRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    redis.client().config_set("requirepass", "secret")
    redis.client(password="secret").acl_setuser(
        "reader", enabled=True, passwords=["+mine"], keys=["*"], commands=["+get"], reset=True
    )
    wrong = [redis.url, redis.url.replace("//", "//:typo@"), redis.url.replace("//", "//reader:mine@")]
    for url in wrong:
        with pytest.raises(Unauthorized, match="put them into the URL.*ANABRANCH_REDIS_PASSWORD") as caught:
            RedisDirectory(url).lookup(UIDS)
        assert caught.value.peer == redis.url, "no password is shown"
        assert "typo" not in str(caught.value)
    with_password = RedisDirectory(redis.url.replace("//", "//:secret@"))
    assert with_password.lookup(UIDS) == {}
    assert "secret" not in repr(with_password)
    monkeypatch.setenv("ANABRANCH_REDIS_PASSWORD", "secret")
    assert RedisDirectory(redis.url).lookup(UIDS) == {}


def test_the_rights_that_its_user_needs(redis: RealRedis) -> None:
    commands = ["+eval", "+evalsha", "+time", "+@keyspace", "+@hash", "+@string", "+@sortedset", "-@dangerous"]
    redis.client().acl_setuser(
        "names", enabled=True, passwords=["+mine"], keys=["{anabranch*"], commands=commands, reset=True
    )
    directory = RedisDirectory(redis.url.replace("//", "//names:mine@"))
    directory.announce(UIDS, AT, ttl=60.0)
    assert directory.lookup(UIDS) == dict.fromkeys(UIDS, AT)
    assert directory.active(["ffn"]) == {"ffn": [0, 2]}
    assert [one.uid for one in directory.announced()] == UIDS
    directory.withdraw(UIDS, AT)
    assert directory.active(["ffn"]) == {"ffn": []}


def test_the_url_of_a_redis_is_not_an_endpoint() -> None:
    with pytest.raises(ValueError, match=r"redis://db:1 is a Redis server; use anabranch\.RedisDirectory"):
        Directory("redis://:secret@db:1")


def test_without_the_package_the_error_names_the_one_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for make in (RedisDirectory, as_directory):
        with pytest.raises(ModuleNotFoundError, match=r"redis://db:6379: .*pip install 'anabranch\[redis\]'") as caught:
            make("redis://:secret@db:6379")
        assert caught.value.name == "redis"


def test_endpoints_reachable_from_this_host_only_are_not_announced_to_others(stack: ExitStack) -> None:
    pytest.importorskip("redis")
    directory = RedisDirectory("redis://10.0.0.1:6379")
    with pytest.raises(ValueError, match="is a socket on one host"):
        directory.announce(UIDS, AT, ttl=60.0)
    with pytest.raises(ValueError, match="where a server listens"):
        directory.announce(UIDS, "tcp://0.0.0.0:7000", ttl=60.0)


@pytest.mark.slow
def test_over_tls(tmp_path: Path, redis: RealRedis) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    redis.stop()
    folder = tmp_path / "tls"
    folder.mkdir(mode=0o700)
    files = {"cert": "directory.pem", "key": "directory.pem", "ca-cert": "authority.pem"}
    options = [word for what, name in files.items() for word in (f"--tls-{what}-file", str(keys / name))]
    with RealRedis(folder, *options, "--port", "0", "--tls-port", str(redis.port)):
        url = f"rediss://127.0.0.1:{redis.port}/1?ssl_ca_certs={keys}/authority.pem&ssl_check_hostname=false"
        ours = f"{url}&ssl_certfile={keys}/worker.pem&ssl_keyfile={keys}/worker.pem"
        directory = RedisDirectory(ours)
        directory.announce(UIDS, ELSEWHERE, ttl=60.0)
        assert directory.lookup(UIDS) == dict.fromkeys(UIDS, ELSEWHERE)
        with pytest.raises(PeerLost):  # it asks for a certificate
            RedisDirectory(url).lookup(UIDS)


HERE, THERE, UID = "tcp://10.0.0.1:7000", "tcp://10.0.0.2:7000", "ffn.0"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificates of one authority: of the jobs nightly and weekly, and of every job."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "nightly", job="nightly")
    make_keys(folder / "weekly", job="weekly", authority=folder / "nightly")
    make_keys(folder / "every", authority=folder / "nightly")
    return {path.name: path for path in folder.iterdir()}


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
    directory = RedisDirectory(redis.url, role="worker", keys=keys["nightly"])
    assert directory.lookup([UID]) == {}
    directory.close()
    assert f"the directory's entry of {UID} is not used" in caplog.text


def test_servers_on_tcp_are_found_under_certificates(
    redis: RealRedis, keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expert = ab.ExpertBackend(UID, nn.Linear(2, 2), args_schema=[ab.TensorSpec(2)])
    nightly = keys["nightly"]
    with served(expert, directory=redis.url, listen="tcp://127.0.0.1:0", keys=nightly) as server:
        monkeypatch.setenv("ANABRANCH_KEYS", str(nightly))
        directory = RedisDirectory(redis.url)
        assert directory.lookup([UID]) == {UID: server.endpoint}
        assert ab.RemoteExpert(UID, directory, keys=nightly)(torch.ones(3, 2)).shape == (3, 2)
