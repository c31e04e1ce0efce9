"""A handler that raises something other than an ``Exception``, such as an exit, still answers, and ends no thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, RemoteError
from anabranch.transport import Call, Client, Request, Server, Verb
from anabranch.transport.server.connection import Connection
from waiting import wait_until


def exits(*_: object) -> NoReturn:
    raise SystemExit("this is over")


def echo(call: Call) -> None:
    call.reply(call.tensors)


def ask(client: Client, server: Server, verb: str, size: int = 1) -> Sequence[Tensor]:
    return client.call(Request(server.endpoint, verb, tensors=[torch.ones(size)]), Deadline.after(60.0)).tensors


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    "verb", [Verb("exit", exits), Verb("exit", echo, exits), Verb("exit", echo, allocate=exits)],
    ids=["handler", "check", "allocator"],
)  # fmt: skip
def test_an_exit_of_a_verb_is_the_callers_error(verb: Verb, quick: bool) -> None:
    verbs = [replace(verb, quick=quick), Verb("echo", echo, quick=quick)]
    with Server(verbs) as server, Client(retries=0) as client:
        for _ in range(2):
            with pytest.raises(RemoteError, match="SystemExit: this is over"):
                ask(client, server, "exit")
            assert ask(client, server, "echo")[0].item() == 1.0
        assert server.statistics().calls == 0


@pytest.mark.parametrize("size", [1, 100_000])  # read on the loop, and on a thread of the connection's own
def test_a_connection_that_fails_is_ended_and_the_server_serves_on(
    size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    verb = Verb("echo", echo, quick=True)
    with Server([verb], drain_seconds=0.01) as server, Client(retries=0) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "_serve", exits)
            with pytest.raises(BoundaryError, match="attempt 1"):  # not after the deadline
                ask(client, server, "echo", size)
        assert ask(client, server, "echo", size)[0].sum().item() == size
        wait_until(lambda: server.statistics().connections == 1)
    assert "this is over" in caplog.text


def test_heartbeats_continue_after_a_health_check_has_exited(caplog: pytest.LogCaptureFixture) -> None:
    looks = 0

    def healthy() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise SystemExit("from the look")
        return True

    with Server([Verb("echo", echo)], heartbeat=0.01, healthy=healthy):
        wait_until(lambda: looks > 2)
    assert "from the look" in caplog.text
