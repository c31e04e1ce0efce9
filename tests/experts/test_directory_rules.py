"""What a directory believes: a role announces its own kind, where others reach it, for a bounded time, its own uids."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, Unauthorized
from anabranch.experts import Directory, DirectoryServer
from anabranch.testing import FakeClock
from anabranch.transport import Client, Request, make_keys, pack

HERE = "tcp://10.0.0.1:7000"
THERE = "tcp://10.0.0.2:7000"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of one authority: other certificates of the same roles."""
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "one")
    make_keys(folder / "two", authority=folder / "one")
    return folder / "one", folder / "two"


def test_only_experts_are_announced(keys: tuple[Path, Path]) -> None:
    with DirectoryServer("tcp://127.0.0.1:0", keys=keys[0]) as server:
        experts = Directory(server.endpoint, role="experts", keys=keys[0])
        with pytest.raises(Unauthorized, match=r"nobody may announce parameters\.0"):
            experts.announce(["ffn.0", "parameters.0"], HERE, ttl=30.0)
        for role in ("worker", "directory", "parameters"):
            with pytest.raises(Unauthorized, match="may not call 'directory.announce'"):
                Directory(server.endpoint, role=role, keys=keys[0]).announce(["ffn.0"], HERE, ttl=30.0)
        assert experts.lookup(["ffn.0", "parameters.0"]) == {}
        experts.announce(["parametersX.0"], HERE, ttl=30.0)
        assert experts.lookup(["parametersX.0", "parameters.0"]) == {"parametersX.0": HERE}


def test_a_uid_belongs_to_its_first_announcers_certificate_until_it_expires(keys: tuple[Path, Path]) -> None:
    clock = FakeClock()
    with DirectoryServer("tcp://127.0.0.1:0", keys=keys[0], clock=clock) as server:
        first, second = (Directory(server.endpoint, role="experts", keys=each) for each in keys)
        first.announce(["ffn.0"], HERE, ttl=30.0)
        with pytest.raises(Unauthorized, match=r"ffn\.0 was announced with another certificate.*for 30 s more"):
            second.announce(["ffn.1", "ffn.0"], THERE, ttl=30.0)
        second.withdraw(["ffn.0"], HERE)
        # All or nothing; and the owner may move.
        assert second.lookup(["ffn.0", "ffn.1"]) == {"ffn.0": HERE}
        first.announce(["ffn.0"], "tcp://10.0.0.1:7001", ttl=30.0)
        clock.advance(31.0)
        second.announce(["ffn.0"], THERE, ttl=30.0)
        assert first.lookup(["ffn.0"]) == {"ffn.0": THERE}


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


def test_an_endpoint_that_others_cannot_reach_is_refused(keys: tuple[Path, Path]) -> None:
    with DirectoryServer("tcp://127.0.0.1:0", keys=keys[0]) as server:
        directory = Directory(server.endpoint, role="experts", keys=keys[0])
        for endpoint, why in UNREACHABLE.items():
            with pytest.raises(ValueError, match=why):
                directory.announce(["ffn.0"], endpoint, ttl=30.0)
            assert directory.lookup(["ffn.0"]) == {}
        for endpoint in REACHABLE:
            directory.announce(["ffn.0"], f"tcp://{endpoint}", ttl=30.0)
            assert directory.lookup(["ffn.0"]) == {"ffn.0": f"tcp://{endpoint}"}


def test_expired_entries_are_dropped_without_a_lookup() -> None:
    """Twenty thousand uids, each announced for a microsecond, were kept for good."""
    clock = FakeClock()
    directory = Directory(clock=clock)
    table = directory._memory
    assert table is not None
    for number in range(20_000):
        directory.announce([f"e.{number}"], "unix:/x", ttl=1e-6)
        clock.advance(1.0)
        assert len(table._entries) <= 1025
    alive = [f"f.{number}" for number in range(3000)]
    directory.announce(alive, "unix:/x", ttl=8e4)
    for number in range(20_000):
        directory.announce([f"g.{number}"], "unix:/x", ttl=1e-6)
        clock.advance(1e-3)
        assert len(table._entries) <= 2 * (len(alive) + 1)
    assert directory.active(["f"])["f"] == list(range(3000))
    assert sum(map(len, table._below["g"].values())) <= 2 * (len(alive) + 1)


def test_on_one_host_its_sockets_are_announced(tmp_path: Path) -> None:
    with DirectoryServer() as server:
        directory = Directory(server.endpoint, role="experts")
        directory.announce(["ffn.0"], f"unix:{tmp_path}/expert", ttl=30.0)
        assert directory.lookup(["ffn.0"]) == {"ffn.0": f"unix:{tmp_path}/expert"}
        with pytest.raises(ValueError, match="characters that are not allowed in an endpoint"):
            directory.announce(["ffn.0"], f"unix:{tmp_path}/ex\npert", ttl=30.0)


@pytest.mark.parametrize("ttl", [1e300, 86401.0, 0.0, -1.0, float("inf"), float("nan")])
def test_times_to_live_are_bounded(ttl: float) -> None:
    with pytest.raises(ValueError, match="at most 86400"):
        Directory().announce(["ffn.0"], HERE, ttl=ttl)
    # A client that does not check by itself.
    with DirectoryServer() as server, Client() as client:
        request = Request(server.endpoint, "directory.announce", payload=pack((["ffn.0"], HERE, ttl)))
        with pytest.raises((ValueError, BoundaryError), match="at most 86400"):
            client.call(request, Deadline.after(20.0))
        assert Directory(server.endpoint).lookup(["ffn.0"]) == {}
