"""A directory that two servers keep: when one dies, freezes or comes back, nothing announced is lost."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import anabranch as ab
from anabranch import Directory, DirectoryServer
from anabranch.errors import PeerLost
from anabranch.transport.replicas import Replicas
from waiting import wait_until

AT = "unix:/run/experts"
UIDS = ["ffn.0.1", "ffn.2.0"]


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    tmp_path.chmod(0o700)
    return [f"unix:{tmp_path}/{name}" for name in ("a", "b")]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who answers is too late, however busy this machine is."""
    monkeypatch.setattr("anabranch.transport.replicas._GRACE_SECONDS", 30.0)


@pytest.mark.usefixtures("_no_grace")
def test_announcements_outlive_the_first_and_the_second(places: list[str]) -> None:
    first, second = (DirectoryServer(place) for place in places)
    directory = Directory(",".join(places))
    with second:
        with first:
            directory.announce(UIDS, AT, ttl=60.0)
        assert directory.lookup(UIDS) == dict.fromkeys(UIDS, AT)
        with DirectoryServer(places[0]):  # comes back, and knows nothing
            assert directory.active(["ffn", "ffn.2"]) == {"ffn": [0, 2], "ffn.2": [0]}
            directory.announce(["ffn.3.0"], AT, ttl=60.0)  # by whoever is up
            assert Directory(places[1]).lookup(["ffn.3.0"])


@pytest.mark.usefixtures("_no_grace")
def test_a_skipped_one_is_tried_again_later(places: list[str]) -> None:
    now = [0.0]
    client = ab.transport.Client(retries=0)
    replicas = Replicas(",".join(places), clock=lambda: now[0])

    def answered() -> list[str]:
        found = replicas.ask(client, "directory.lookup", UIDS, ab.transport.Deadline.after(30.0))
        return [endpoint[-1] for endpoint in found]

    with DirectoryServer(places[1]):
        assert answered() == ["b"]
        with DirectoryServer(places[0]):
            assert answered() == ["b"], "it did not answer just now"
            now[0] += 10.0
            assert answered() == ["a", "b"]
    client.close()


def test_a_frozen_one_delays_no_others(places: list[str], stack: ExitStack) -> None:
    silent = stack.enter_context(socket.socket(socket.AF_UNIX))
    silent.bind(places[0].removeprefix("unix:"))
    os.chmod(places[0].removeprefix("unix:"), 0o600)
    silent.listen()
    stack.enter_context(DirectoryServer(places[1]))
    directory = Directory(",".join(places), timeout=60.0)
    directory.announce(UIDS, AT, ttl=60.0)
    assert directory.lookup(UIDS) == dict.fromkeys(UIDS, AT)


@pytest.mark.usefixtures("_no_grace")
def test_a_uid_refused_by_one_directory_is_claimed_in_none(places: list[str], stack: ExitStack) -> None:
    for place in places:
        stack.enter_context(DirectoryServer(place))
    alone, both = Directory(places[1]), Directory(",".join(places))
    alone.announce(["ffn.0"], AT, ttl=60.0)  # when the other one was away
    assert both.claim(["ffn.0", "ffn.1"], "one", ttl=60.0) == ["ffn.1"]
    assert Directory(places[0]).claim(["ffn.0"], "two", ttl=60.0) == ["ffn.0"], "it was given back"
    both.release(["ffn.1"], "one")
    assert both.claim(["ffn.1"], "two", ttl=60.0) == ["ffn.1"]
    both.withdraw(["ffn.0"], AT)
    assert both.lookup(["ffn.0"]) == {}


def test_without_any_of_them_the_error_names_one(places: list[str]) -> None:
    with pytest.raises(PeerLost) as caught:
        Directory(",".join(places)).lookup(UIDS)
    assert caught.value.peer in places


@pytest.mark.parametrize("wrong", ["", ",unix:/a", "unix:/a,", "unix:/a, unix:/a"])
def test_endpoints_that_are_empty_or_the_same_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="separated by commas"):
        Directory(wrong)


def test_copies_know_both(places: list[str], stack: ExitStack) -> None:
    directory = Directory(",".join(places))
    stack.enter_context(DirectoryServer(places[1]))
    for same in (copy.deepcopy(directory), pickle.loads(pickle.dumps(directory)), directory):
        same.announce(UIDS, AT, ttl=60.0)
        assert same.lookup(UIDS) == dict.fromkeys(UIDS, AT)


@pytest.mark.slow
def test_a_mixture_continues_when_the_first_directory_is_killed(places: list[str], stack: ExitStack) -> None:
    both = ",".join(places)
    command = [sys.executable, "-m", "anabranch.cli", "serve"]
    serving = ["experts", "--uids", "ffn.[0:2]", "--module", "nop", "--features", "4", "--directory", both]
    started = []
    for words in (["directory", "--listen", places[0]], ["directory", "--listen", places[1]], serving):
        process = stack.enter_context(subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True))
        stack.callback(process.wait, 60.0)
        stack.callback(process.terminate)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on ")
        started.append(process)
    for place in places:
        wait_until(lambda place=place: Directory(place).active(["ffn"]) == {"ffn": [0, 1]})
    mixture = ab.RemoteMixtureOfExperts(4, [2], both, "ffn", k_best=2)
    before = mixture(torch.ones(3, 4))
    started[0].send_signal(signal.SIGKILL)
    started[0].wait(60.0)
    assert Directory(both).active(["ffn"]) == {"ffn": [0, 1]}
    again = ab.RemoteMixtureOfExperts(4, [2], both, "ffn", k_best=2)
    again.load_state_dict(mixture.state_dict())
    assert torch.equal(again(torch.ones(3, 4)), before)
