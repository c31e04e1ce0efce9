"""What a middlebox on plain TCP may do: repeat an answer or a request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import cast

import pytest
import torch

from anabranch.testing import MemoryTransport
from anabranch.transport import Call, Client, Request, Server, Stream, Verb
from anabranch.transport.frame import ReplyHeader, frame_size
from frame_reading import GREETING, next_frame, peer, request, wire_of
from waiting import soon


class RepeatsAnswers(MemoryTransport):
    """A network on which every answer comes once more, before the next one, to whoever asked for that."""

    kept = due = b""

    def connect(self, endpoint: str) -> Stream:
        return cast(Stream, AlteredStream(self, super().connect(endpoint)))


class AlteredStream:
    def __init__(self, network: RepeatsAnswers, inner: Stream) -> None:
        self._network, self._inner = network, inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def send(self, buffers: Sequence[memoryview]) -> int:
        self._network.due, self._network.kept = self._network.kept, b""
        return self._inner.send(buffers)

    def receive_into(self, buffer: memoryview) -> int:
        due, self._network.due = self._network.due, b""
        if due:
            buffer[: len(due)] = due
            return len(due)
        count = self._inner.receive_into(buffer)
        rest = bytes(buffer[:count])
        while (size := frame_size(rest)) is not None and size <= len(rest):
            if rest[5] in (3, 4):
                self._network.kept = rest[:size]
            rest = rest[size:]
        return count


class Count:
    """Answers each push with how many there were."""

    def __init__(self) -> None:
        self.pushes = 0

    def push(self, call: Call) -> None:
        self.pushes += 1
        call.reply([torch.tensor([float(self.pushes), float(call.tensors[0][0])])])


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("clients", [1, 2])
def test_a_repeated_answer_is_not_mistaken_for_the_next_one_nor_for_another_clients(clients: int, once: bool) -> None:
    """It was, wherever a relay that shares connections gave it to a client that had come as far in its numbers."""
    network, count = RepeatsAnswers(), Count()
    with Server([Verb("push", count.push, once=once)], transport=network) as server, ExitStack() as stack:
        asking = [stack.enter_context(Client(transport=network)) for _ in range(clients)]
        for turn in range(8):
            push = Request(server.endpoint, "push", tensors=[torch.tensor([float(turn)])], once=once)
            assert asking[turn % clients].call(push, soon()).tensors[0].tolist() == [turn + 1, turn]
    assert count.pushes == 8


def test_a_repeated_request_is_done_once_though_it_is_not_numbered_for_that() -> None:
    """An answer to the copy would be taken for the next request's by peers that do not number them."""
    count = Count()
    asked = [request("push", sequence=number, tensors=[torch.tensor([float(number)])]) for number in range(2)]
    with Server([Verb("push", count.push)]) as server, peer(server, GREETING + asked[0]) as sock:
        wire = wire_of(sock)
        came = [next_frame(wire).header for _ in range(2)]
        sock.sendall(asked[0] + asked[1])
        came.append(next_frame(wire).header)
    answers = [header for header in came if isinstance(header, ReplyHeader)]
    assert [answer.sequence for answer in answers] == [0, 1]
    assert count.pushes == 2
