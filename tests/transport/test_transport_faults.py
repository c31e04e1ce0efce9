"""Faults in transit: a retried request runs once, a lost peer is named, and abuse does not affect the server."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, PeerLost, RemoteError, SchemaError
from anabranch.testing import FakeClock, LossyTransport, MemoryTransport
from anabranch.transport import Answer, Call, Client, Request, RequestHeader, Server, Verb
from anabranch.transport.server.connection import OnceTable
from frame_reading import GREETING, peer
from networks import CountingTransport
from programs import Program, Programs
from waiting import running, soon, wait_until


class Parameter:
    """One number that pushes move: what exactly-once is about."""

    def __init__(self) -> None:
        self.value = 0.0
        self.pushes = 0
        self.verb = Verb("push", self.push, once=True)

    def push(self, call: Call) -> None:
        self.value -= float(call.tensors[0])
        self.pushes += 1
        call.reply([torch.tensor(self.value)])


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_push_is_applied_once_however_often_the_network_cuts_or_repeats_it(count: int) -> None:
    network, parameter = MemoryTransport(), Parameter()
    lossy = LossyTransport(drop=0.2, duplicate=0.1, seed=3, transport=network)
    with Server([parameter.verb], transport=network) as server, Client(transport=lossy, retries=100) as client:
        for expected in range(1, count + 1):
            push = Request(server.endpoint, "push", tensors=[torch.tensor(-1.0)], once=True)
            # The answer of a retry is the first one's, not a second application's.
            assert float(client.call(push, soon()).tensors[0]) == expected
    assert parameter.value == count
    assert lossy.dropped > count // 10
    assert lossy.duplicated > count // 20


def test_a_retry_joins_the_request_that_still_runs() -> None:
    network, calls = CountingTransport(), list[Call]()
    verb = Verb("slow", calls.append, once=True)
    with Server([verb], transport=network) as server, Client(transport=network) as client:
        answers: list[Answer] = []
        request = Request(server.endpoint, "slow", once=True)
        with running(lambda: answers.append(client.call(request, soon()))):
            wait_until(lambda: calls)
            network.cut()
            wait_until(lambda: server.statistics().served >= 1)
            calls[0].reply(payload=b"once")
    assert len(calls) == 1
    assert answers[0].payload == b"once"


def test_a_declined_request_is_served_when_it_is_repeated() -> None:
    tries: list[int] = []

    def sometimes(call: Call) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise PeerLost("leaving")
        call.reply(payload=b"done")

    with Server([Verb("sometimes", sometimes, once=True)]) as server, Client() as client:
        assert client.call(Request(server.endpoint, "sometimes", once=True), soon()).payload == b"done"
    assert len(tries) == 2


def test_a_request_done_before_a_restart_is_not_done_again() -> None:
    again: list[bytes] = []

    def answer_again(call: Call) -> None:
        again.append(call.identity[0])
        call.reply(payload=b"again")

    parameter = Parameter()
    verb = Verb("push", parameter.push, once=True, again=answer_again)
    with Server([verb]) as server, Client() as client:
        server.once.restore([(client.epoch, client._next)])
        push = Request(server.endpoint, "push", tensors=[torch.tensor(-1.0)], once=True)
        assert client.call(push, soon()).payload == b"again"
        assert client.call(push, soon()).payload == b""
    assert again == [client.epoch]
    assert parameter.pushes == 1


class _Asked:
    def __init__(self, epoch: bytes, sequence: int) -> None:
        self.identity = (epoch, sequence)


def test_the_table_forgets_settled_requests_and_answers_over_its_budget() -> None:
    table = OnceTable(budget_bytes=100)

    def ask(epoch: bytes, sequence: int, settled: int = 0) -> object:
        return table.begin((epoch, sequence), _Asked(epoch, sequence), settled)

    for sequence in range(3):
        assert isinstance(ask(b"a", sequence), _Asked)
        table.finish((b"a", sequence), [memoryview(bytes(60))])
    assert ask(b"a", 0) is None
    assert ask(b"a", 2) == [memoryview(bytes(60))]
    ask(b"a", 3, settled=3)
    assert not table._kept_bytes
    with pytest.raises(Exception, match="settled"):
        ask(b"a", 1, settled=3)
    table.abandon((b"a", 3))
    assert isinstance(ask(b"a", 3), _Asked)


def test_the_table_remembers_a_client_for_a_day_after_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of a script that pushes once a minute stayed in memory, half a gigabyte."""
    clock, table = FakeClock(), OnceTable()
    monkeypatch.setattr("anabranch.transport.server.connection.time", SimpleNamespace(monotonic=clock))

    def ask(epoch: bytes) -> object:
        return table.begin((epoch, 0), _Asked(epoch, 0), 0)

    table.restore([(b"before", 0)])
    asked = [ask(b"minute %d" % number) for number in range(2)]
    table.finish((b"minute 0", 0), [memoryview(bytes(60))])
    clock.advance(86_400)
    assert ask(b"before") is None
    assert ask(b"minute 0") == [memoryview(bytes(60))]
    assert ask(b"minute 1") is asked[1]
    clock.advance(1)
    ask(b"minute 0")
    clock.advance(86_400)
    ask(b"another")
    assert list(table._epochs) == [b"minute 0", b"another"]
    clock.advance(1)
    ask(b"another")
    assert list(table._epochs) == [b"another"]
    assert not table._kept_bytes
    table.finish((b"minute 1", 0), [memoryview(bytes(60))])
    table.abandon((b"minute 1", 0))
    assert not table._kept


MORTAL = """
import sys
from anabranch.testing import faults
from anabranch.transport import Server, Verb

verbs = [
    Verb("echo", lambda call: call.reply(call.tensors, call.payload)),
    Verb("die", lambda call: faults.kill()),
    Verb("freeze", lambda call: faults.stop()),
]
with Server(verbs, heartbeat=1.0) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server_process(programs: Programs) -> Iterator[tuple[Program, str]]:
    with programs.start(MORTAL) as process:
        yield process, process.stdout.readline().strip()


@pytest.mark.parametrize("when", [pytest.param("before the call", marks=pytest.mark.slow), "during the call"])
def test_a_frozen_server_is_lost_and_used_again_when_it_resumes(server_process: tuple[Program, str], when: str) -> None:
    process, endpoint = server_process
    with Client(heartbeat=20.0) as client:
        client.call(Request(endpoint, "echo"), soon())  # from here on its own heartbeat counts
        if when == "before the call":
            process.send_signal(signal.SIGSTOP)
            process.wait_until_stopped()
        verb = "echo" if when == "before the call" else "freeze"
        with pytest.raises(PeerLost, match="no beat") as caught:
            client.call(Request(endpoint, verb), soon())
    assert caught.value.elapsed is not None
    assert caught.value.elapsed >= 2.0
    process.send_signal(signal.SIGCONT)
    with Client(heartbeat=20.0) as client:
        assert client.call(Request(endpoint, "echo", payload=b"x"), soon()).payload == b"x"


def test_a_request_of_a_patient_client_is_sent_again_to_a_server_that_was_frozen(
    server_process: tuple[Program, str],
) -> None:
    process, endpoint = server_process
    with Client(heartbeat=20.0) as client:
        client.patience = 100.0
        client.call(Request(endpoint, "echo"), soon())
        connect = client._transport.connect

        def wake(endpoint: str) -> Any:  # behind the first silence
            process.send_signal(signal.SIGCONT)
            return connect(endpoint)

        client._transport.connect = wake  # type: ignore[method-assign]
        process.send_signal(signal.SIGSTOP)
        process.wait_until_stopped()
        assert client.call(Request(endpoint, "echo", payload=b"x"), soon()).payload == b"x"


def test_a_server_that_is_killed_is_lost_and_named(server_process: tuple[Program, str]) -> None:
    _, endpoint = server_process
    with Client(retries=1, heartbeat=20.0) as client, pytest.raises(PeerLost) as caught:
        client.call(Request(endpoint, "die", step=2), soon())
    # By the end of its connection, not by its silence.
    assert "no beat" not in str(caught.value)
    assert caught.value.peer == endpoint
    assert caught.value.operation == "die"
    assert caught.value.step == 2


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def abuse(server: Server, client: Client, rng: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        kind = rng.randrange(6)
        if kind == 0:
            client.call(Request(server.endpoint, "echo", tensors=[torch.ones(64)]), soon())
        elif kind == 1:
            with pytest.raises(SchemaError):
                client.call(Request(server.endpoint, "refuse", tensors=[torch.ones(64)]), soon())
        elif kind == 2:
            with pytest.raises(RemoteError):
                client.call(Request(server.endpoint, "fail", tensors=[torch.ones(64)]), soon())
        elif kind == 3:
            # Mostly gone before it is read, now and then while it is served.
            patience = 0.001 if rng.random() < 0.2 else 1e-6
            client.gather([Request(server.endpoint, "hang")], Deadline.after(patience))
        elif kind == 4:
            with pytest.raises(BoundaryError):
                client.call(Request(server.endpoint, "echo", tensors=[torch.ones(4096)]), soon())
        else:
            throw_garbage(server, rng)


def throw_garbage(server: Server, rng: random.Random) -> None:
    said = rng.choice([b"", GREETING, GREETING[:10]]) + rng.randbytes(rng.randrange(1, 100))
    with peer(server, said):
        pass


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_mixed_abuse_leaves_descriptors_threads_and_memory_where_they_were(count: int) -> None:
    def check(header: RequestHeader) -> None:
        raise SchemaError("never right")

    def fail(call: Call) -> None:
        raise OSError("no such luck")

    hanging: list[Call] = []

    def hang(call: Call) -> None:
        hanging.append(call)
        for old in [old for old in hanging if old.drop()]:
            hanging.remove(old)

    verbs = [
        Verb("echo", lambda call: call.reply(call.tensors)),
        Verb("refuse", fail, check=check),
        Verb("fail", fail),
        Verb("hang", hang),
    ]
    rng = random.Random(0)
    with Server(verbs, max_body=8192, drain_seconds=0.01) as server, Client() as client:
        abuse(server, client, rng, count // 3)
        gc.collect()
        before, memory = descriptors(), resident_bytes()
        abuse(server, client, rng, count - count // 3)
        client.call(Request(server.endpoint, "echo", tensors=[torch.ones(64)]), soon())
        wait_until(lambda: server.statistics().connections <= 4)
        gc.collect()
        assert server.statistics().connections <= 4
        assert descriptors() <= before + 8
        assert resident_bytes() - memory < 32 << 20
        for call in hanging:
            call.fail(RuntimeError("over"))
        assert server.statistics().bytes_in_flight == 0
        assert server.statistics().calls == 0
