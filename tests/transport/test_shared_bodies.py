"""Bodies in memory that a client and a server of one host share: the same tensors, no trust, and nothing left of it."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.errors import PeerLost, ProtocolError
from anabranch.transport import Answer, Call, Client, Request, RequestHeader, Server, Verb, memory
from anabranch.transport.frame import Hello, Limits, ReplyHeader, Wire, encode
from anabranch.transport.memory import HALF, LEAST, memory_to_pass
from frame_reading import next_frame, wire_of
from programs import Programs
from waiting import join, soon, wait_until

ECHO = Verb("echo", lambda call: call.reply(call.tensors), quick=True)
LARGE = torch.arange(LEAST, dtype=torch.float32)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:anabranch-bodies")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_mapped() -> Iterator[None]:
    yield
    wait_until(lambda: mappings() == 0)


def _fail(*_: object, **__: object) -> None:
    raise OSError("none is left")


@pytest.mark.parametrize("missing", [None, "memory", "mapping there", "pages", "room"])
def test_a_body_of_any_size_arrives_as_it_was_sent(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "memory":
        monkeypatch.setattr(os, "memfd_create", _fail)
    if missing == "mapping there":
        monkeypatch.setattr("anabranch.transport.server.connection.BodyMemory", _fail)
    if missing == "pages":
        monkeypatch.setattr(memory._libc, "madvise", lambda *_: -1)
    budget = 8 * HALF - 1 if missing == "room" else 4 << 30
    bits = torch.randint(2, (LEAST,)).bool()
    longest = (HALF - 8 - 2000 - LEAST) // 4  # with the other tensors
    with Server([ECHO], max_bytes_in_flight=budget) as server, Client() as client:
        for size in (0, 1, LEAST // 4 - 1, LEAST // 4, 3 * LEAST, longest, longest + 1, 5):
            sent = [torch.arange(size, dtype=torch.float32), torch.ones(3, 0), torch.tensor(size)]
            sent += [torch.arange(min(size, 1000)).bfloat16(), bits[: size // 2]]
            got = client.call(Request(server.endpoint, "echo", tensors=sent), soon()).tensors
            assert all(map(torch.equal, sent, got))
        lent = server._admission.lent  # as many bytes as have gone through memory at once
        assert lent == HALF if missing is None else 0 < lent < HALF if missing == "room" else lent == 0
        assert server.statistics().bytes_in_flight == 0
        client.close()
        wait_until(lambda: server._admission.lent == 0)


def test_what_is_executed_once_is_answered_again_on_another_connection() -> None:
    calls: list[Call] = []

    def count(call: Call) -> None:
        calls.append(call)
        call.reply([LARGE + len(calls)])

    with Server([Verb("count", count, once=True)], heartbeat=60.0) as server, Client(retries=1) as client:
        client.call(Request(server.endpoint, "count", once=True), soon())
        answer = client.call(Request(server.endpoint, "count", tensors=[LARGE], once=True), soon())
        epoch, sequence = calls[-1].identity
        with connected(server) as (wire, _):
            header = RequestHeader("count", epoch=epoch, sequence=sequence, seconds=60.0)
            for buffer in encode(header, [LARGE]):
                wire.stream._sock.sendall(buffer)  # type: ignore[attr-defined]
            (again,) = next_frame(wire).tensors
        assert torch.equal(again, answer.tensors[0])
        assert len(calls) == 2


@contextmanager
def connected(
    server: Server, passing: Sequence[int] = (), frame: Sequence[memoryview] = ()
) -> Iterator[tuple[Wire, Any]]:
    """A client of a server as bytes: its side of the connection, and the server's greeting."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(server.endpoint.removeprefix("unix:"))
        socket.send_fds(sock, [b"".join(encode(Hello())), *frame], list(passing))
        wire = wire_of(sock, Limits())
        yield wire, next_frame(wire).header


@contextmanager
def sharing(server: Server) -> Iterator[tuple[Wire, memory.BodyMemory]]:
    mine, descriptor = memory_to_pass()
    with connected(server, [descriptor]) as (wire, _):
        os.close(descriptor)
        wire.memory = mine
        yield wire, mine
        wire.drop()


def test_the_server_reads_a_body_that_its_client_changes_meanwhile_once() -> None:
    """So what was checked, such as ids and bools, is what is used."""
    calls: list[Call] = []
    bits = torch.zeros(2 * LEAST, dtype=torch.bool)
    with Server([Verb("hold", calls.append, quick=True)], heartbeat=60.0) as server, sharing(server) as (wire, mine):
        for buffer in wire.share(encode(RequestHeader("hold", sequence=1, seconds=60.0), [bits, LARGE])):
            wire.stream._sock.sendall(buffer)  # type: ignore[attr-defined]
        wait_until(lambda: calls)
        mine._out[:] = 255
        assert torch.equal(calls[0].tensors[0], bits)
        assert torch.equal(calls[0].tensors[1], LARGE)
        calls[0].reply()
        next_frame(wire)


@pytest.mark.parametrize("hostile", ["no memory", "too long", "not bools"])
def test_a_body_that_cannot_be_in_memory_is_refused(hostile: str) -> None:
    flagged = encode(RequestHeader("echo", sequence=1, seconds=60.0), [torch.zeros(HALF // 4 + 1)], shares=True)[:1]
    with Server([ECHO], heartbeat=60.0) as server:
        if hostile == "no memory":
            peer = connected(server, frame=flagged)
        else:
            peer = sharing(server)
        with peer as (wire, mine):
            if hostile == "not bools":
                frame = encode(RequestHeader("echo", sequence=1, seconds=60.0), [torch.zeros(LEAST, dtype=torch.bool)])
                flagged = wire.share(frame)
                mine._out[7] = 2
            if hostile != "no memory":
                wire.stream._sock.sendall(flagged[0])  # type: ignore[attr-defined]
            failure = next_frame(wire).header
            assert failure.code == "protocol", failure
        wait_until(lambda: server.statistics().connections == 0)
        assert server.statistics().bytes_in_flight == 0


def test_a_client_refuses_memory_that_it_has_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", _fail)  # the client's

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            wire = wire_of(sock)
            next_frame(wire)
            sequence = next_frame(wire).header.sequence
            sock.sendall(b"".join(encode(Hello(1.0, 1 << 30), shares=True)))
            sock.sendall(encode(ReplyHeader(sequence=sequence), [LARGE], shares=True)[0])
            sock.recv(1)

    folder = Path(os.environ["TMPDIR"]) / "refused"
    with socket.socket(socket.AF_UNIX) as listener, Client(retries=0) as client:
        listener.bind(str(folder))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with pytest.raises(ProtocolError, match="cannot be in memory"):
            client.call(Request(f"unix:{folder}", "echo"), soon())
        join(thread)
    folder.unlink()


def _unsealed() -> int:
    descriptor = os.memfd_create("anabranch-bodies", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * HALF)
    return descriptor


def _short() -> int:
    descriptor = os.memfd_create("anabranch-bodies", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, memory._SEALS)
    return descriptor


@pytest.mark.parametrize("make", [_unsealed, _short, lambda: os.open("/dev/null", os.O_RDWR), lambda: os.eventfd(0)])
def test_a_descriptor_of_something_else_is_closed_and_not_used(make: Any) -> None:
    with Server([ECHO], heartbeat=60.0) as server:
        before, few = descriptors(), torch.ones(5)
        passed = make()
        with connected(server, [passed, passed, passed]) as (wire, _):
            os.close(passed)
            assert not wire.shared, "the server has no memory"
            for sequence in range(3):  # nor does it take a descriptor that comes later
                header = RequestHeader("echo", sequence=sequence, seconds=60.0)
                socket.send_fds(wire.stream._sock, encode(header, [few]), [0, 1])  # type: ignore[attr-defined]
                assert torch.equal(next_frame(wire).tensors[0], few)
        wait_until(lambda: descriptors() == before and mappings() == 0)


CLIENT = """
import sys
import torch
from anabranch.deadline import Deadline
from anabranch.transport import Client, Request

sent = torch.ones(int(sys.argv[2]) // 4)
with Client() as client:
    while True:
        client.call(Request(sys.argv[1], "echo", tensors=[sent]), Deadline.after(60.0))
        print("answered", flush=True)
"""

SERVER = """
import sys, time
from anabranch.transport import Server, Verb

with Server([Verb("echo", lambda call: call.reply(call.tensors), quick=True)]) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_client_that_is_killed(count: int, programs: Programs) -> None:
    draw = random.Random(0)
    with Server([ECHO]) as server:
        before = descriptors()
        for _ in range(count):
            with programs.start(CLIENT, server.endpoint, draw.choice([LEAST, HALF // 4, HALF])) as client:
                assert client.stdout.readline() == "answered\n"
                time.sleep(draw.random() * 0.02)  # any moment of a call
                client.kill()
        wait_until(lambda: server.statistics().connections == 0)
        wait_until(lambda: descriptors() == before and mappings() == 0)
        assert server._admission.lent == server.statistics().bytes_in_flight == 0


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_server_that_is_killed(count: int, programs: Programs) -> None:
    draw = random.Random(1)
    with Client(retries=0) as client:
        before = descriptors()
        for _ in range(count):
            with programs.start(SERVER) as server:
                sent = torch.ones(draw.choice([LEAST, HALF // 4, HALF]) // 4)
                request = Request(server.stdout.readline().strip(), "echo", tensors=[sent])
                moment = threading.Timer(draw.random() * 0.05, server.send_signal, [9])
                moment.start()
                while isinstance(outcome := client.gather([request], soon())[0], Answer):
                    assert torch.equal(outcome.tensors[0], sent)
                assert isinstance(outcome, PeerLost)
                join(moment)
                server.wait()
        client._prune(time.monotonic())
        assert mappings() == 0
    wait_until(lambda: descriptors() <= before)
