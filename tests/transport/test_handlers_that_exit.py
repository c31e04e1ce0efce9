"""A handler that raises something other than an ``Exception``, such as an exit, still answers, and ends no thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, RemoteError
from anabranch.transport import Call, Client, Request, RequestHeader, Server, TensorHeader, Verb
from waiting import wait_until


def exits(call: Call) -> None:
    raise SystemExit("from the handler")


def checks(header: RequestHeader) -> None:
    raise KeyboardInterrupt("from the check")


def echo(call: Call) -> None:
    call.reply(call.tensors)


def ask(client: Client, server: Server, verb: str, size: int = 1) -> Sequence[Tensor]:
    return client.call(Request(server.endpoint, verb, tensors=[torch.ones(size)]), Deadline.after(60.0)).tensors


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("verb", "said"),
    [
        (lambda quick: Verb("exit", exits, quick=quick), "SystemExit: from the handler"),
        (lambda quick: Verb("exit", echo, checks, quick=quick), "KeyboardInterrupt: from the check"),
    ],
)
def test_an_exit_in_a_handler_or_a_check_is_the_callers_error(
    verb: Callable[[bool], Verb], said: str, quick: bool
) -> None:
    with Server([verb(quick), Verb("echo", echo, quick=quick)]) as server, Client(retries=0) as client:
        for _ in range(2):
            with pytest.raises(RemoteError, match=said):
                ask(client, server, "exit")
            assert ask(client, server, "echo")[0].item() == 1.0
        assert server.statistics().calls == 0


@pytest.mark.parametrize("size", [1, 100_000])  # read on the loop, and on a thread of the connection's own
def test_a_connection_that_fails_is_ended_and_the_server_serves_on(size: int, caplog: pytest.LogCaptureFixture) -> None:
    def no_memory(headers: Sequence[TensorHeader]) -> Sequence[Tensor]:
        raise SystemExit("from the allocator")

    verbs = [Verb("exit", echo, allocate=no_memory, quick=True), Verb("echo", echo, quick=True)]
    with Server(verbs) as server, Client(retries=0) as client:
        with pytest.raises(BoundaryError, match="attempt 1"):  # not after the deadline
            ask(client, server, "exit", size)
        assert ask(client, server, "echo", size)[0].sum().item() == size
        wait_until(lambda: server.statistics().calls == 0)
    assert "from the allocator" in caplog.text


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
