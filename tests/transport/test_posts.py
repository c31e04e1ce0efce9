"""Requests whose answers nobody waits for."""

from __future__ import annotations

import select
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.deadline import Deadline
from anabranch.errors import NotFound
from anabranch.testing import MemoryTransport
from anabranch.transport import Client, Request, Server, Verb
from waiting import wait_until


def test_a_post_is_taken_before_what_follows_and_its_answer_is_skipped() -> None:
    taken: list[str] = []
    let_go = threading.Event()

    def slow(call: Any) -> None:
        let_go.wait(30.0)
        taken.append(call.target)
        call.reply([torch.zeros(3)])

    def quick(call: Any) -> None:
        taken.append(call.target)
        call.reply([torch.ones(2)], b"own")

    with Server([Verb("slow", slow), Verb("quick", quick)]) as server, Client() as client:
        assert not client.post(Request(server.endpoint, "slow", "lost"), 30.0)  # there is no connection yet
        client.call(Request(server.endpoint, "quick", "first"), Deadline(30.0))
        assert client.post(Request(server.endpoint, "slow", "posted"), 30.0)
        assert taken == ["first"]
        let_go.set()
        answer = client.call(Request(server.endpoint, "quick", "second"), Deadline(30.0))
        assert (answer.payload, answer.tensors[0].tolist()) == (b"own", [1.0, 1.0])
        assert taken == ["first", "posted", "second"]
        assert server.statistics().connections == 1


def test_a_connection_with_an_answer_to_skip_is_not_taken_for_one_that_has_ended() -> None:
    with Server([Verb("echo", lambda call: call.reply(call.tensors))]) as server, Client() as client:
        echo = Request(server.endpoint, "echo", tensors=[torch.ones(1)])
        client.call(echo, Deadline(30.0))
        assert client.post(echo, 30.0)
        (channel,) = client._idle[server.endpoint]
        poller = select.poll()
        poller.register(channel.wire.stream.descriptor, select.POLLIN)
        assert poller.poll(30_000)  # its answer is there
        assert not channel.stale()
        client.call(echo, Deadline(30.0))
        assert not channel.posted
        assert client._idle[server.endpoint] == [channel]


def test_an_error_that_answers_a_post_is_nobodys() -> None:
    with Server([Verb("echo", lambda call: call.reply(call.tensors))]) as server, Client() as client:
        echo = Request(server.endpoint, "echo", tensors=[torch.ones(1)])
        client.call(echo, Deadline(30.0))
        assert client.post(Request(server.endpoint, "no such verb"), 30.0)
        assert client.call(echo, Deadline(30.0)).tensors[0].tolist() == [1.0]
        with pytest.raises(NotFound):
            client.call(Request(server.endpoint, "no such verb"), Deadline(30.0))


def test_a_post_to_a_server_that_has_gone_is_harmless(tmp_path: Path) -> None:
    verb, listen = Verb("echo", lambda call: call.reply(call.tensors)), f"unix:{tmp_path}/s"
    echo = Request(listen, "echo", tensors=[torch.ones(1)])
    with Client(retries=1) as client:
        with Server([verb], listen=listen):
            client.call(echo, Deadline(30.0))
        client.post(echo, 30.0)
        with Server([verb], listen=listen):
            assert client.call(echo, Deadline(30.0)).tensors[0].tolist() == [1.0]


def test_a_post_that_the_connection_does_not_take_whole_is_not_sent() -> None:
    taken: list[str] = []
    let_go = threading.Event()

    def slow(call: Any) -> None:
        let_go.wait(30.0)
        taken.append(call.target)
        call.reply()

    with Server([Verb("slow", slow), Verb("quick", lambda call: call.reply())]) as server, Client() as client:
        client.call(Request(server.endpoint, "quick"), Deadline(30.0))
        assert client.post(Request(server.endpoint, "slow", "first"), 30.0)
        assert not client.post(Request(server.endpoint, "slow", "large", tensors=[torch.zeros(4 << 20)]), 30.0)
        let_go.set()
        client.call(Request(server.endpoint, "slow", "last"), Deadline(30.0))
        assert "large" not in taken


@pytest.mark.parametrize("network", [None, MemoryTransport()])
def test_what_a_client_has_posted_before_it_leaves_is_done(network: MemoryTransport | None) -> None:
    taken: list[str] = []
    let_go = threading.Event()

    def take(call: Any) -> None:
        if call.target == "slow":
            let_go.wait(30.0)
        taken.append(call.target)
        call.reply()

    with Server([Verb("word", take)], transport=network) as server:
        with Client(transport=network) as client:
            client.call(Request(server.endpoint, "word", "first"), Deadline(30.0))
            for target in ("slow", "last"):
                assert client.post(Request(server.endpoint, "word", target), 30.0)
        let_go.set()
        wait_until(lambda: not server.statistics().connections)
    assert taken == ["first", "slow", "last"]
