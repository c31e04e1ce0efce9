"""Calls: answers reach their askers, one or many at once, and nothing is left when the block ends."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
import torch

from anabranch.errors import DeadlineExceeded, NotFound, Overloaded, PeerLost, ProtocolError, RemoteError, SchemaError
from anabranch.transport import (
    Answer,
    Call,
    Client,
    Deadline,
    MemoryTransport,
    Outcome,
    Request,
    RequestHeader,
    Server,
    SocketTransport,
    TensorHeader,
    Transport,
    Verb,
    allocate,
)
from anabranch.transport.frame import ReplyHeader
from frame_reading import GREETING, peer, request
from waiting import running, soon, wait_until


def echo(call: Call) -> None:
    call.reply(call.tensors, call.payload)


ECHO = Verb("echo", echo)


@pytest.fixture(params=["unix", "memory"])
def network(request: pytest.FixtureRequest) -> Transport:
    return SocketTransport() if request.param == "unix" else MemoryTransport()


def test_an_answer_returns_to_its_caller(network: Transport) -> None:
    tensors = [torch.randn(3, 4), torch.arange(5), torch.zeros(0, 2), torch.tensor([True])]
    with Server([ECHO], transport=network) as server, Client(transport=network) as client:
        answer = client.call(Request(server.endpoint, "echo", tensors=tensors, payload=b"note"), soon())
    assert answer.payload == b"note"
    assert all(torch.equal(sent, came) for sent, came in zip(tensors, answer.tensors, strict=True))


def test_threads_that_share_a_client_get_their_own_answers(network: Transport) -> None:
    wrong: list[object] = []

    def ask(index: int) -> None:
        for round_ in range(20):
            value = torch.tensor([index, round_])
            answer = client.call(Request(server.endpoint, "echo", tensors=[value]), soon())
            if not torch.equal(answer.tensors[0], value):
                wrong.append((index, round_))

    asks = [functools.partial(ask, index) for index in range(8)]
    with Server([ECHO], transport=network) as server, Client(transport=network) as client, running(*asks):
        pass
    assert wrong == []


def test_any_other_error_arrives_with_its_type_and_traceback() -> None:
    def divide(call: Call) -> None:
        call.reply(payload=bytes([1 // len(call.payload)]))

    with Server([Verb("divide", divide)]) as server, Client() as client, pytest.raises(RemoteError) as caught:
        client.call(Request(server.endpoint, "divide", target="numbers", step=3), soon())
    assert caught.value.remote_type == "ZeroDivisionError"
    assert "1 // len(call.payload)" in caught.value.remote_traceback
    assert caught.value.peer == server.endpoint
    assert caught.value.operation == "divide numbers"
    assert caught.value.step == 3
    assert caught.value.elapsed is not None


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        ({"verb": "pull"}, NotFound, "there are: echo, push"),
        ({"verb": "push"}, ProtocolError, "number its requests"),
        ({"verb": "echo", "tensors": [torch.zeros(1000)]}, ProtocolError, "over the limit of 1000"),
    ],
)
def test_a_refused_request_is_answered_with_the_reason_and_the_server_continues(
    request_: dict[str, Any], error: type[Exception], says: str
) -> None:
    done: list[Call] = []
    push = Verb("push", done.append, once=True)
    with Server([ECHO, push], max_body=1000) as server, Client(retries=0) as client:
        with pytest.raises(error, match=says):
            client.call(Request(server.endpoint, **request_), soon())
        assert client.call(Request(server.endpoint, "echo", tensors=[torch.zeros(250)]), soon()).tensors
    assert not done


def test_a_request_is_checked_before_its_body_has_a_place() -> None:
    made: list[int] = []

    def check(header: RequestHeader) -> None:
        if header.tensors[0].shape != (3,):
            raise SchemaError(f"expected (3,), got {header.tensors[0].shape}")

    def make(headers: Sequence[TensorHeader]) -> Sequence[torch.Tensor]:
        made.append(len(headers))
        return allocate(headers)

    verb = Verb("checked", echo, check=check, allocate=make)
    with Server([verb]) as server, Client() as client:
        for size in (4, 5 << 20):
            with pytest.raises(SchemaError, match="expected"):
                client.call(Request(server.endpoint, "checked", tensors=[torch.zeros(size)]), soon())
        assert made == []
        client.call(Request(server.endpoint, "checked", tensors=[torch.zeros(3)]), soon())
        assert made == [1]


def test_the_asker_may_refuse_an_answer_before_it_has_a_place() -> None:
    def refuse(answer: ReplyHeader) -> None:
        raise SchemaError(f"did not expect {answer.tensors[0].shape}")

    with Server([ECHO]) as server, Client() as client:
        with pytest.raises(SchemaError, match="did not expect"):
            client.call(Request(server.endpoint, "echo", tensors=[torch.zeros(9)], check=refuse), soon())
        assert client.call(Request(server.endpoint, "echo", payload=b"x"), soon()).payload == b"x"


def test_an_answer_to_another_request_is_a_protocol_error() -> None:
    def answer_the_next(call: Call) -> None:
        call.identity = call.identity[0], call.identity[1] + 1
        call.reply()

    verb = Verb("wrong", answer_the_next)
    with (
        Server([verb]) as server,
        Client() as client,
        pytest.raises(ProtocolError, match="the server answered request"),
    ):
        client.call(Request(server.endpoint, "wrong"), soon())


class Gate:
    """A verb whose calls wait until the test lets them through, without a thread waiting."""

    def __init__(self, name: str = "gate") -> None:
        self.calls: list[Call] = []
        self._arrived = threading.Condition()
        self.verb = Verb(name, self._keep)

    def _keep(self, call: Call) -> None:
        with self._arrived:
            self.calls.append(call)
            self._arrived.notify_all()

    def wait_for(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.calls) >= count, timeout=60)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


SMALL, LARGE = (request("echo", tensors=[torch.ones(size)]) for size in (8, 1 << 17))


@pytest.mark.parametrize(
    "said",
    [b"", GREETING[:10], GREETING + SMALL[:-3], GREETING + LARGE[:-3]],
    ids=["nothing", "half a greeting", "half a request", "half of a request with a thread of its own"],
)
def test_a_connection_that_stalls_in_the_middle_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.transport.server.connection._GREETING", 0.2)
    monkeypatch.setattr("anabranch.transport.server.connection._STALLED", 0.2)
    monkeypatch.setattr("anabranch.transport.server.connection._LINGER", 0.05)
    monkeypatch.setattr("anabranch.transport.server.server._SWEEP", 0.05)
    with Server([Verb("echo", echo, quick=True)]) as server, peer(server, said) as sock:
        # The end, after the greeting or the reason that came before it; a timeout otherwise.
        with suppress(ConnectionError):
            while sock.recv(1 << 16):
                pass
        wait_until(lambda: server.statistics().connections == 0)
        assert server.statistics().bytes_in_flight == 0


def test_a_second_request_while_the_first_is_served_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.transport.server.connection._LINGER", 0.05)
    gate = Gate("echo")
    with Server([gate.verb]) as server, peer(server, GREETING + SMALL) as sock:
        gate.wait_for(1)
        sock.sendall(request("echo", sequence=1, tensors=[torch.ones(8)]))
        told = b""
        while some := sock.recv(1 << 16):
            told += some
        assert b"one at a time" in told
        assert len(gate.calls) == 1
        wait_until(gate.calls[0].drop)
        assert server.statistics().calls == 0


def test_many_peers_are_called_at_once_and_stragglers_cancelled() -> None:
    gate = Gate()
    with Server([ECHO]) as gone:
        pass
    with Server([ECHO]) as quick, Server([gate.verb]) as slow, Client(retries=2) as client:
        requests = [
            Request(slow.endpoint, "gate"),
            Request(quick.endpoint, "echo", payload=b"1"),
            Request(gone.endpoint, "echo"),
            Request(quick.endpoint, "echo", payload=b"2"),
        ]

        def three(outcomes: Sequence[Outcome]) -> bool:
            return sum(outcome is not None for outcome in outcomes) >= 3

        start = time.monotonic()
        straggler, first, lost, second = client.gather(requests, soon(), enough=three, grace=0.2)
        assert time.monotonic() - start >= 0.2  # the gate, which never opens, was not waited for any longer
        assert straggler is None
        assert [each.payload for each in (first, second) if isinstance(each, Answer)] == [b"1", b"2"]
        assert isinstance(lost, PeerLost)
        gate.wait_for(1)
        wait_until(gate.calls[0].drop)
        wait_until(lambda: slow.statistics().calls == 0)


def test_a_deadline_that_ends_the_retries_names_their_errors() -> None:
    with Server([ECHO]) as gone:
        endpoint = gone.endpoint
    with Client(retries=1000) as client, pytest.raises(DeadlineExceeded, match=r"No such file.*, at attempt \d"):
        client.call(Request(endpoint, "echo"), Deadline.after(0.2))


def test_a_client_survives_its_servers_restart_without_being_notified() -> None:
    network = MemoryTransport()
    with Client(transport=network) as client:
        for _ in range(3):
            with Server([ECHO], transport=network, listen="memory:here") as server:
                for _ in range(2):
                    assert client.call(Request(server.endpoint, "echo", payload=b"x"), soon()).payload == b"x"


def test_connections_to_stopped_servers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.transport.client._PRUNE", 0.0)
    with Client() as client, Server([ECHO]) as stays:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            with Server([ECHO]) as goes:
                assert client.call(Request(goes.endpoint, "echo", payload=b"x"), soon()).payload == b"x"
        for _ in range(2):
            client.call(Request(stays.endpoint, "echo"), soon())
        assert stays.statistics().connections == 1
        # The server's connection, its loop's two descriptors, and the client's.
        assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_small_requests_of_many_clients_are_read_by_one_thread_and_large_ones_by_their_own() -> None:
    threads: list[str] = []

    def note(call: Call) -> None:
        threads.append(threading.current_thread().name)
        call.reply(call.tensors)

    verbs = [Verb("quick", note, quick=True), Verb("slow", note)]
    with Server(verbs) as server, Client() as client:
        client.most_idle = 32
        requests = [Request(server.endpoint, "quick", tensors=[torch.ones(3)]) for _ in range(32)]
        for outcome in client.gather(requests, soon()):
            assert isinstance(outcome, Answer)
            assert torch.equal(outcome.tensors[0], torch.ones(3))
        assert set(threads) == {"anabranch-loop"}
        assert not server.threads_of
        large = torch.randn(100_000)
        assert torch.equal(client.call(Request(server.endpoint, "quick", tensors=[large]), soon()).tensors[0], large)
        client.call(Request(server.endpoint, "slow"), soon())
        assert threads[32:] == ["anabranch-connection"] * 2


def test_a_waiting_handler_delays_no_other_request() -> None:
    opened = threading.Event()
    verbs = [Verb("wait", lambda call: call.reply(payload=str(opened.wait(timeout=60)).encode())), ECHO]
    verbs.append(Verb("quick", lambda call: call.reply(), quick=True))
    with Server(verbs) as server, Client() as client:
        waiting = in_thread(lambda: client.call(Request(server.endpoint, "wait"), soon()))
        for verb in ("quick", "echo") * 3:
            client.call(Request(server.endpoint, verb), soon())
        assert waiting.is_alive()
        opened.set()
        waiting.join(timeout=60)
        assert not waiting.is_alive()


def test_an_idle_connection_releases_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.transport.server.server._REST", 0.05)
    monkeypatch.setattr("anabranch.transport.server.server._SWEEP", 0.02)
    with Server([ECHO]) as server, Client() as client:
        for _ in range(3):
            assert client.call(Request(server.endpoint, "echo", payload=b"x"), soon()).payload == b"x"
            wait_until(lambda: not server.threads_of)
        assert server.statistics().connections == 1


def test_draining_declines_new_requests_and_waits_until_long_answers_are_sent() -> None:
    gate = Gate()
    verb = Verb("gate", gate.verb.handler, quick=True)
    with Server([verb], drain_seconds=60.0) as server, Client(retries=0) as client:
        client.most_idle = 8
        outcomes: list[Outcome] = []
        requests = [Request(server.endpoint, "gate") for _ in range(8)]
        asking = in_thread(lambda: outcomes.extend(client.gather(requests, soon())))
        gate.wait_for(8)
        assert not server.drain(0.05)
        with pytest.raises(PeerLost, match="shutting down"):
            client.call(Request(server.endpoint, "gate"), soon())
        for call in gate.calls:
            # More than a socket takes at once.
            call.reply([torch.ones(2_000_000)])
        assert server.statistics().calls == 0
        assert server.drain(60.0)
        server.close()
        asking.join(timeout=60)
    assert [type(outcome) for outcome in outcomes] == [Answer] * 8


def test_bytes_in_flight_are_bounded_and_released() -> None:
    gate = Gate()
    with Server([gate.verb, ECHO], max_bytes_in_flight=5000) as server, Client() as client:
        thread = in_thread(lambda: client.call(Request(server.endpoint, "gate", tensors=[torch.zeros(1000)]), soon()))
        gate.wait_for(1)
        for size in (500, 1 << 22):
            with pytest.raises(Overloaded, match="4000 bytes"):
                client.call(Request(server.endpoint, "echo", tensors=[torch.zeros(size)]), soon())
        assert client.call(Request(server.endpoint, "echo", tensors=[torch.zeros(100)]), soon()).tensors
        gate.calls[0].reply()
        thread.join(timeout=60)
        assert client.call(Request(server.endpoint, "echo", tensors=[torch.zeros(1000)]), soon()).tensors
        counts = asdict(server.statistics())
    assert counts["bytes_in_flight"] == 0
    assert counts["requests"] == {"gate": 1, "echo": 2}
    assert counts["errors"] == {"overloaded": 2}


def test_a_closed_client_ends_the_calls_of_other_threads() -> None:
    gate = Gate()
    with Server([gate.verb], drain_seconds=0.01) as server:
        client = Client(retries=0)
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                client.call(Request(server.endpoint, "gate"), soon())
            except PeerLost as error:
                errors.append(error)

        thread = in_thread(ask)
        gate.wait_for(1)
        client.close()
        thread.join(timeout=60)
        assert len(errors) == 1
        with pytest.raises(PeerLost, match="closed"):
            client.call(Request(server.endpoint, "gate"), soon())


def test_mistakes_in_the_arguments_of_a_server_are_explained() -> None:
    with pytest.raises(ValueError, match="two verbs are called 'echo'"):
        Server([ECHO, ECHO])
    with pytest.raises(ValueError, match="not an endpoint"):
        Server([ECHO], listen="/tmp/path")
    with pytest.raises(ValueError, match="heartbeat"):
        Server([ECHO], heartbeat=0)
