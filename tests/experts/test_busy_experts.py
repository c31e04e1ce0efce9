"""Experts with a busy, stuck or leaving device: which callers wait, which get errors, which requests are dropped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from expert_modules import Slow, in_the_module, served
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, Overloaded, PeerLost
from anabranch.experts import Directory, ExpertBackend, ExpertServer, RemoteExpert, wire
from anabranch.tensors import TensorSpec
from anabranch.transport import Client, Request, RequestHeader, pack
from anabranch.transport.frame import Hello, encode
from networks import CountingTransport
from waiting import join, wait_until

PLAIN = pack(wire.ForwardHeader([wire.RequestPart(1, b"")], False))


def test_a_module_that_becomes_slow_delays_only_its_own_callers() -> None:
    module, network = Slow(), CountingTransport()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)])

    def runs_where_it_is_read() -> bool:
        for _ in range(60):
            backend.forward_pool.note_seconds(1, 1e-6)
        module.threads.clear()
        expert(torch.ones(1, 2))
        return module.threads == ["anabranch-loop"]

    with (
        ExpertServer([backend], transport=network) as server,
        Client(transport=network) as client,
        Client(transport=network, heartbeat=30.0) as other,
        torch.no_grad(),
    ):
        expert = RemoteExpert("slow.0", server.endpoint, client=client)
        wait_until(runs_where_it_is_read)
        answers: list[Tensor] = []
        with in_the_module(module, lambda: answers.append(expert(torch.ones(1, 2)))):
            for _ in range(3):
                other.call(Request(server.endpoint, wire.INFO, "slow.0"), Deadline.after(60.0))
            # Who waits for the module is told that it lives.
            before = network.received
            wait_until(lambda: network.received > before)
            assert not answers
        assert len(answers) == 1
        assert torch.equal(expert(torch.ones(1, 2)), torch.ones(1, 2))


def test_a_full_queue_is_reported_while_the_module_computes_and_serves_again() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)], max_batch_size=2, max_queue_rows=4)
    with served(backend) as server:
        expert = RemoteExpert("slow.0", server.endpoint)
        expert.get_info()
        waiting = [threading.Thread(target=lambda: expert(torch.ones(2, 2))) for _ in range(2)]
        with in_the_module(module, lambda: expert(torch.ones(2, 2))):
            for thread in waiting:
                thread.start()
            wait_until(lambda: backend.forward_pool.statistics().waiting_rows == 4)
            for _ in range(3):
                with pytest.raises(Overloaded, match="rows"):
                    expert(torch.ones(1, 2))
            # It is said of the header: the body has not been sent, nor has it a place.
            asked = RequestHeader(wire.FORWARD, "slow.0", seconds=60.0, payload=PLAIN, schema=backend.schema.hash)
            with asking(server.endpoint, encode(asked, [torch.ones(1, 2)])[0]) as sock:
                assert b"overloaded" in told(sock, b"overloaded")
        join(*waiting)
        assert expert(torch.ones(1, 2)).shape == (1, 2)


@contextmanager
def asking(endpoint: str, *said: bytes | memoryview) -> Iterator[socket.socket]:
    """A connection that has said so much."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(endpoint.removeprefix("unix:"))
        sock.sendall(b"".join(map(bytes, [*encode(Hello()), *said])))
        yield sock


def told(sock: socket.socket, word: bytes) -> bytes:
    """What comes, up to ``word``."""
    heard = sock.recv(1 << 16)
    while word not in heard and (some := sock.recv(1 << 16)):
        heard += some
    return heard


def test_expired_requests_are_dropped_before_compute() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)], max_batch_size=1)
    hasty = RequestHeader(wire.FORWARD, "slow.0", seconds=1.0, payload=PLAIN, schema=backend.schema.hash)
    with served(backend) as server:
        expert = RemoteExpert("slow.0", server.endpoint)
        expert.get_info()
        with ExitStack() as stack:
            # The one before it holds the device until its deadline, which began when it arrived, has passed.
            with in_the_module(module, lambda: expert(torch.ones(1, 2))):
                sock = stack.enter_context(asking(server.endpoint, *encode(hasty, [torch.ones(1, 2)])))
                wait_until(lambda: backend.forward_pool.statistics().waiting_rows == 1)
                wait_until(Deadline.after(1.0).expired)
            assert b"deadline" in told(sock, b"deadline")
        assert expert(torch.ones(1, 2)).shape == (1, 2)
    statistics = backend.forward_pool.statistics()
    assert statistics.dropped == 1
    assert statistics.batches == 2


def test_a_stuck_device_stops_the_beats_so_that_callers_learn_of_it() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)], max_batch_size=1)
    with served(backend, heartbeat=1.0) as server:
        hasty = RemoteExpert("slow.0", server.endpoint, forward_timeout=0.2)
        patient = RemoteExpert("slow.0", server.endpoint)
        patient.get_info()
        hasty.get_info()
        module.open.clear()
        module.entered.clear()
        while not module.entered.is_set():  # on a busy machine it may come too late to be computed
            with pytest.raises(DeadlineExceeded):
                hasty(torch.ones(1, 2))
        with pytest.raises(PeerLost, match="no beat"):
            patient(torch.ones(1, 2))
        module.open.set()


def test_leaving_finishes_requests_in_flight_and_refuses_new_ones() -> None:
    module = Slow()
    backend = ExpertBackend("slow.0", module, args_schema=[TensorSpec(2)])
    directory = Directory()
    answers: list[Tensor] = []
    with Client(retries=1) as client:
        with served(backend, directory=directory, drain_seconds=60.0) as server:
            expert = RemoteExpert("slow.0", server.endpoint, client=client)
            expert.get_info()
            assert directory.lookup(["slow.0"]) == {"slow.0": server.endpoint}
            module.open.clear()
            module.entered.clear()
            thread = threading.Thread(target=lambda: answers.append(expert(torch.ones(1, 2))))
            thread.start()
            assert module.entered.wait(timeout=60)

            def open_when_it_leaves() -> None:
                wait_until(lambda: not directory.lookup(["slow.0"]))
                module.open.set()

            opener = threading.Thread(target=open_when_it_leaves)
            opener.start()
        join(thread, opener)
        assert len(answers) == 1
        with pytest.raises(PeerLost):
            expert(torch.ones(1, 2))
