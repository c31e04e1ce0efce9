"""Entries of a directory in Redis, which believes everybody: their reader checks who announced them, and when."""

from __future__ import annotations

import copy
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from expert_modules import served
from torch import nn

import anabranch as ab
from anabranch import RedisDirectory
from anabranch.errors import PeerLost, Unauthorized
from anabranch.transport import make_keys, pack, unpack
from anabranch.transport.directory.signed_entries import EntryReader
from anabranch.transport.directory.signing import SignedEntry, SigningIdentity
from redis_servers import RealRedis, redis
from waiting import wait_until

pytest.importorskip("cryptography")

__all__ = ["redis"]

HERE = "tcp://10.0.0.1:7000"
THERE = "tcp://10.0.0.2:7000"
UID = "ffn.0"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificates: ``one`` and ``two`` are two owners of one job, ``strange`` has another authority."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "one", job="nightly")
    make_keys(folder / "two", job="nightly", authority=folder / "one")
    make_keys(folder / "weekly", job="weekly", authority=folder / "one")
    make_keys(folder / "every", authority=folder / "one")
    make_keys(folder / "strange", job="nightly")
    return {path.name: path for path in folder.iterdir()}


@dataclass
class Directories:
    """Directories in one Redis, and a hand that writes into it past all rules."""

    redis: RealRedis
    keys: dict[str, Path]

    def of(self, whose: str, role: str = "experts") -> RedisDirectory:
        return RedisDirectory(self.redis.url, role=role, keys=self.keys[whose])

    @property
    def place(self) -> str:
        return f"{SigningIdentity(self.keys['one'], 'worker').space('nightly')}:uid:{UID}"

    def entry(self) -> bytes:
        return bytes(self.redis.client().hget(self.place, "entry"))

    def put(self, entry: bytes) -> None:
        self.redis.client().hset(self.place, mapping={"endpoint": THERE, "owner": "", "entry": entry})


@pytest.fixture
def directories(redis: RealRedis, keys: dict[str, Path]) -> Directories:
    return Directories(redis, keys)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    with caplog.at_level(logging.WARNING, "anabranch.transport"):
        yield lambda: "\n".join(record.getMessage() for record in caplog.records)


def test_an_announced_expert_is_found_by_its_job_only(directories: Directories) -> None:
    directories.of("one").announce([UID], HERE, ttl=60.0)
    directories.of("every").announce(["shared.0", UID], THERE, ttl=60.0)
    assert directories.of("two", "worker").lookup([UID, "shared.0"]) == {UID: HERE, "shared.0": THERE}
    assert directories.of("weekly", "worker").lookup([UID, "shared.0"]) == {UID: THERE, "shared.0": THERE}
    assert directories.of("every", "worker").active(["ffn", "shared"]) == {"ffn": [0], "shared": [0]}
    assert directories.of("strange", "worker").lookup([UID, "shared.0"]) == {}
    assert directories.of("strange", "worker").active(["ffn"]) == {"ffn": []}
    assert RedisDirectory(directories.redis.url).lookup([UID]) == {}, "without keys there is a space of its own"


def test_a_uid_that_every_job_finds_is_not_drawn_in_one(directories: Directories) -> None:
    directories.of("every").announce([UID], HERE, ttl=60.0)
    assert directories.of("one").claim([UID, "ffn.1"], "me", ttl=60.0) == ["ffn.1"]


def test_a_uid_belongs_to_its_first_announcers_certificate_until_it_expires(directories: Directories) -> None:
    first, second = directories.of("one"), directories.of("two")
    first.announce([UID], HERE, ttl=30.0)
    with pytest.raises(Unauthorized, match=r"ffn\.0 was announced with another certificate.*for \d+ s more"):
        second.announce(["ffn.1", UID], THERE, ttl=30.0)
    second.withdraw([UID], HERE)
    assert second.lookup([UID, "ffn.1"]) == {UID: HERE}, "all or nothing"
    first.announce([UID], "tcp://10.0.0.1:7001", ttl=0.001)  # the owner may move
    wait_until(lambda: not directories.redis.client().exists(directories.place))
    second.announce([UID], THERE, ttl=30.0)
    assert first.lookup([UID]) == {UID: THERE}


def test_only_experts_are_announced(directories: Directories) -> None:
    for role, uid in (("experts", "parameters.0"), ("parameters", UID), ("worker", UID), ("directory", UID)):
        with pytest.raises(Unauthorized, match=f"may not announce {uid}"):
            directories.of("one", role).announce([uid], HERE, ttl=30.0)
        with pytest.raises(Unauthorized, match=f"may not announce {uid}"):
            directories.of("one", role).claim([uid], "me", ttl=30.0)


def changed(entry: bytes, **facts: Any) -> bytes:
    return pack(msgspec.structs.replace(unpack(entry, SignedEntry), **facts))


def forged(path: Path, role: str, space_of: Path, *, ttl: float = 60.0, endpoint: str = THERE, uid: str = UID) -> bytes:
    """Returns an entry that the key of ``path`` signs, of whatever job it is, for the space of ``space_of``."""
    identity = SigningIdentity(path, role)
    there = SigningIdentity(space_of, "worker").space("nightly")
    identity.space = lambda job: there  # type: ignore[method-assign]
    issued = int(time.time() * 1000)
    return identity.sign(uid, endpoint, issued, issued + int(ttl * 1000))


FORGERIES: dict[str, tuple[Callable[[bytes, dict[str, Path]], bytes], str]] = {
    "no entry": (lambda entry, keys: b"tcp://10.0.0.2:7000", "is not a signed entry"),
    "unsigned": (lambda entry, keys: b"", "is not a signed entry"),
    "another endpoint": (lambda entry, keys: changed(entry, endpoint=THERE), "signature was not made with"),
    "a longer time": (
        lambda entry, keys: changed(entry, expires=unpack(entry, SignedEntry).expires + 1),
        "signature was not made with",
    ),
    "another's certificate": (
        lambda entry, keys: changed(
            entry, certificate=unpack(forged(keys["two"], "experts", keys["one"]), SignedEntry).certificate
        ),
        "signature was not made with",
    ),
    "no certificate": (lambda entry, keys: changed(entry, certificate=b"x" * 500), "has no certificate"),
    "another authority": (lambda entry, keys: forged(keys["strange"], "experts", keys["one"]), "this job's authority"),
    "another job": (lambda entry, keys: forged(keys["weekly"], "experts", keys["one"]), "is for job 'weekly'"),
    "every job": (lambda entry, keys: forged(keys["every"], "experts", keys["one"]), "is for job '*'"),
    "another role": (lambda entry, keys: forged(keys["two"], "worker", keys["one"]), "'worker' may not announce ffn.0"),
    "another uid": (
        lambda entry, keys: forged(keys["two"], "experts", keys["one"], uid="ffn.1"),
        "signature was not made",
    ),
    "over": (lambda entry, keys: forged(keys["two"], "experts", keys["one"], ttl=0.001), "it expired"),
    "for ever": (lambda entry, keys: forged(keys["two"], "experts", keys["one"], ttl=1e9), "longer than a day"),
    "nowhere": (
        lambda entry, keys: forged(keys["two"], "experts", keys["one"], endpoint="tcp://0.0.0.0:1"),
        "where a server listens",
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_entry_that_somebody_wrote_into_redis_is_not_believed(
    directories: Directories, warned: Callable[[], str], forgery: str
) -> None:
    make, why = FORGERIES[forgery]
    directories.of("one").announce([UID], HERE, ttl=60.0)
    knows = directories.of("one", "worker")
    assert knows.lookup([UID]) == {UID: HERE}
    entry = make(directories.entry(), directories.keys)
    time.sleep(0.002)  # that of a millisecond is over
    directories.put(entry)
    assert directories.of("one", "worker").lookup([UID]) == {}
    assert f"the directory's entry of {UID} is not trusted" in warned()
    assert why in warned()
    assert knows.lookup([UID]) == {UID: HERE}, "what it has seen holds until its time is over"


def test_one_more_owner_is_not_believed_while_the_first_one_has_it(
    directories: Directories, warned: Callable[[], str]
) -> None:
    directories.of("one").announce([UID], HERE, ttl=60.0)
    knows = directories.of("one", "worker")
    assert knows.lookup([UID]) == {UID: HERE}
    directories.redis.client().delete(directories.place)
    directories.of("two").announce([UID], THERE, ttl=60.0)
    assert knows.lookup([UID]) == {UID: HERE}
    assert "another certificate announced it before" in warned()
    assert directories.of("one", "worker").lookup([UID]) == {UID: THERE}, "who has seen no other believes it"


def test_an_old_entry_is_ignored(directories: Directories, warned: Callable[[], str]) -> None:
    server, knows = directories.of("one"), directories.of("one", "worker")
    server.announce([UID], HERE, ttl=60.0)
    old = directories.entry()
    time.sleep(0.002)  # announcements of one millisecond are equally old
    server.announce([UID], THERE, ttl=60.0)
    assert knows.lookup([UID]) == {UID: THERE}
    directories.put(old)
    assert knows.lookup([UID]) == {UID: THERE}
    assert "it is a replayed old entry" in warned()


def test_an_expired_entry_is_ignored(directories: Directories, warned: Callable[[], str]) -> None:
    old = forged(directories.keys["one"], "experts", directories.keys["one"], ttl=0.001, endpoint=HERE)
    time.sleep(0.002)  # that of a millisecond is over
    directories.put(old)
    assert directories.of("one", "worker").lookup([UID]) == {}
    assert "it expired" in warned()


def test_a_redis_with_a_stopped_clock_keeps_no_entry_alive(keys: dict[str, Path], warned: Callable[[], str]) -> None:
    identity, now = SigningIdentity(keys["one"], "experts"), [1_000_000.0]
    reader = EntryReader(SigningIdentity(keys["one"], "worker"), lambda endpoint: None, clock=lambda: now[0])
    now[0] = time.time()
    stands = int(now[0] * 1000)
    entry = identity.sign(UID, HERE, stands, stands + 60_000)
    assert reader.endpoint_of(entry, UID, "nightly", stands) == HERE
    now[0] += 200.0  # clocks of hosts differ by minutes
    assert reader.endpoint_of(entry, UID, "nightly", stands) == HERE
    now[0] += 200.0
    assert reader.endpoint_of(entry, UID, "nightly", stands) is None
    assert "or this host's clock is wrong" in warned()


def test_a_certificate_that_has_run_out_announces_nothing(
    directories: Directories, tmp_path: Path, warned: Callable[[], str]
) -> None:
    make_keys(tmp_path / "late", job="nightly", days=0.0, authority=directories.keys["one"])
    RedisDirectory(directories.redis.url, role="experts", keys=tmp_path / "late").announce([UID], HERE, ttl=60.0)
    assert directories.of("one", "worker").lookup([UID]) == {}
    assert "its certificate is valid from" in warned()


def test_an_answer_that_was_on_its_way_meanwhile_is_not_called_old(
    keys: dict[str, Path], warned: Callable[[], str]
) -> None:
    identity = SigningIdentity(keys["one"], "experts")
    reader = EntryReader(SigningIdentity(keys["one"], "worker"), lambda endpoint: None)
    now = int(time.time() * 1000)
    before = identity.sign(UID, HERE, now, now + 60_000)
    after = identity.sign(UID, THERE, now + 1000, now + 61_000)
    assert reader.endpoint_of(after, UID, "nightly", now + 1001) == THERE
    assert reader.endpoint_of(before, UID, "nightly", now + 999) == THERE
    assert not warned()


def test_expired_entries_are_not_remembered_for_ever(keys: dict[str, Path]) -> None:
    identity = SigningIdentity(keys["one"], "experts")
    reader = EntryReader(SigningIdentity(keys["one"], "worker"), lambda endpoint: None)
    now = int(time.time() * 1000)
    for index in range(3000):
        issued = now + index
        entry = identity.sign(f"ffn.{index}", HERE, issued, issued + 10)
        assert reader.endpoint_of(entry, f"ffn.{index}", "nightly", issued) == HERE
    assert len(reader._seen) < 2100


def test_copies_sign_and_check_too(directories: Directories) -> None:
    server = directories.of("one")
    for same in (copy.deepcopy(server), pickle.loads(pickle.dumps(server))):
        same.announce([UID], HERE, ttl=60.0)
        assert pickle.loads(pickle.dumps(directories.of("two", "worker"))).lookup([UID]) == {UID: HERE}


def test_servers_on_tcp_are_found_under_certificates(directories: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    expert = ab.ExpertBackend(UID, nn.Linear(2, 2), args_schema=[ab.TensorSpec(2)])
    one = directories.keys["one"]
    with served(expert, directory=directories.redis.url, listen="tcp://127.0.0.1:0", keys=one) as server:
        monkeypatch.setenv("ANABRANCH_KEYS", str(directories.keys["two"]))
        directory = RedisDirectory(directories.redis.url)
        assert directory.lookup([UID]) == {UID: server.endpoint}
        assert ab.RemoteExpert(UID, directory, keys=one)(torch.ones(3, 2)).shape == (3, 2)


@pytest.mark.parametrize("broken", ["authority.pem", "worker.pem"])
def test_keys_that_are_damaged_or_do_not_belong_together(keys: dict[str, Path], tmp_path: Path, broken: str) -> None:
    for name in ("authority.pem", "worker.pem"):
        (tmp_path / name).write_bytes((keys["one"] / name).read_bytes())
        (tmp_path / name).chmod(0o600)
    tmp_path.chmod(0o700)
    (tmp_path / broken).write_bytes((keys["strange"] / broken).read_bytes())
    with pytest.raises(ValueError, match="did not sign the certificates beside it"):
        SigningIdentity(tmp_path, "worker")
    (tmp_path / broken).write_text("nothing")
    with pytest.raises(ValueError, match=f"{broken} is damaged"):
        SigningIdentity(tmp_path, "worker")
    (tmp_path / broken).unlink()
    with pytest.raises(ValueError, match=f"holds no {broken}"):
        SigningIdentity(tmp_path, "worker")


def test_no_service_at_the_address_is_reported_with_keys_too(keys: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("redis")
    with pytest.raises(PeerLost, match="start redis-server"):
        RedisDirectory(f"unix://{tmp_path}/nobody", role="experts", keys=keys["one"]).announce([UID], HERE, ttl=1.0)
