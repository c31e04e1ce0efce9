"""Requests whose answers nobody waits for."""

from __future__ import annotations

import select
import threading
from pathlib import Path

import pytest
import torch

from anabranch.testing import MemoryTransport
from anabranch.transport import Call, Client, Request, Server, Verb
from waiting import soon, wait_until


class Words:
    """A verb that notes what is said; what is "slow" waits until it is let go."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.let_go = threading.Event()
        self.verb = Verb("word", self._take)

    def _take(self, call: Call) -> None:
        if call.target == "slow":
            self.let_go.wait(60.0)
        self.taken.append(call.target)
        call.reply([torch.ones(2)], call.target.encode())


@pytest.fixture
def words() -> Words:
    return Words()


def say(client: Client, endpoint: str, word: str) -> bytes:
    return client.call(Request(endpoint, "word", word), soon()).payload


def test_a_post_is_taken_before_what_follows_and_its_answer_is_skipped(words: Words) -> None:
    with Server([words.verb]) as server, Client() as client:
        slow = Request(server.endpoint, "word", "slow")
        assert not client.post(slow, 60.0)  # there is no connection yet
        say(client, server.endpoint, "first")
        assert client.post(slow, 60.0)
        assert words.taken == ["first"]
        words.let_go.set()
        assert say(client, server.endpoint, "second") == b"second"
        assert words.taken == ["first", "slow", "second"]
        assert client.post(Request(server.endpoint, "no such verb"), 60.0)  # whose error is nobody's
        assert say(client, server.endpoint, "third") == b"third"
        assert server.statistics().connections == 1


def test_a_connection_with_an_answer_to_skip_is_not_taken_for_one_that_has_ended(words: Words) -> None:
    with Server([words.verb]) as server, Client() as client:
        say(client, server.endpoint, "first")
        assert client.post(Request(server.endpoint, "word", "posted"), 60.0)
        (channel,) = client._idle[server.endpoint]
        poller = select.poll()
        poller.register(channel.wire.stream.descriptor, select.POLLIN)
        assert poller.poll(60_000)  # its answer is there
        assert not channel.stale()


def test_a_post_to_a_server_that_has_gone_is_harmless(words: Words, tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/s"
    with Client(retries=1) as client:
        with Server([words.verb], listen=listen):
            say(client, listen, "first")
        client.post(Request(listen, "word", "lost"), 60.0)
        with Server([words.verb], listen=listen):
            assert say(client, listen, "second") == b"second"


def test_a_post_that_the_connection_does_not_take_whole_is_not_sent(words: Words) -> None:
    with Server([words.verb]) as server, Client() as client:
        say(client, server.endpoint, "first")
        assert client.post(Request(server.endpoint, "word", "slow"), 60.0)
        assert not client.post(Request(server.endpoint, "word", "large", [torch.zeros(4 << 20)]), 60.0)
        words.let_go.set()
        say(client, server.endpoint, "last")
        assert "large" not in words.taken


@pytest.mark.parametrize("network", [None, MemoryTransport()])
def test_what_a_client_has_posted_before_it_leaves_is_done(words: Words, network: MemoryTransport | None) -> None:
    with Server([words.verb], transport=network) as server:
        with Client(transport=network) as client:
            say(client, server.endpoint, "first")
            for word in ("slow", "last"):
                assert client.post(Request(server.endpoint, "word", word), 60.0)
        words.let_go.set()
        wait_until(lambda: not server.statistics().connections)
    assert words.taken == ["first", "slow", "last"]
