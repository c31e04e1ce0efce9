"""Answers that clients ask for and do not read: bounded together, and freed the moment their client has gone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from anabranch.errors import Overloaded
from anabranch.transport import Call, Checked, Client, Request, Server, Verb
from frame_reading import GREETING, peer, request
from waiting import soon, wait_until

# More than the buffers of a Unix socket take.
NUMBERS = 2 << 20
NBYTES = 4 * NUMBERS


class Large:
    """Answers with 8 MiB, and knows whether they are still there."""

    def __init__(self, *, quick: bool) -> None:
        self.alive: list[weakref.ref[np.ndarray]] = []
        self.verb = Verb("large", self._answer, quick=quick)

    def _answer(self, call: Call) -> None:
        memory = np.ones(NUMBERS, dtype=np.float32)
        self.alive.append(weakref.ref(memory))
        call.reply([torch.from_numpy(memory)])

    def held(self) -> int:
        return sum(ref() is not None for ref in self.alive)


ASKS = GREETING + request("large")
"""Of one that asks and does not read."""


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("quick", [True, False])
def test_an_answer_is_freed_at_once_when_its_client_has_gone(quick: bool) -> None:
    large = Large(quick=quick)
    with Server([large.verb]) as server, ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(peer(server, ASKS))
        wait_until(lambda: server.statistics().served == 4)
        assert large.held() == 4
        stack.close()
        wait_until(lambda: server.statistics().connections == 0)
        # The thread that served it may still be on its way out.
        wait_until(lambda: large.held() == 0)


def test_unread_answers_have_a_budget_and_reading_clients_are_served() -> None:
    large = Large(quick=True)
    with Server([large.verb], max_bytes_in_flight=2 * NBYTES) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(peer(server, ASKS))
        wait_until(lambda: server.statistics().served == 2)
        with Client() as client:
            with pytest.raises(Overloaded, match="clients that do not read"):
                client.call(Request(server.endpoint, "large"), soon())
            wait_until(lambda: large.held() == 2)
            stack.close()
            wait_until(lambda: server.statistics().connections == 1)
            assert float(client.call(Request(server.endpoint, "large"), soon()).tensors[0].sum()) == NUMBERS


@pytest.mark.usefixtures("_no_collector")
def test_half_a_request_is_freed_at_once_when_its_client_has_gone() -> None:
    places: list[weakref.ref[np.ndarray]] = []

    def place(headers: object) -> list[torch.Tensor]:
        memory = np.empty(NUMBERS, dtype=np.float32)
        places.append(weakref.ref(memory))
        return [torch.from_numpy(memory)]

    verb = Verb("large", lambda call: call.reply(), allocate=place)
    asked = GREETING + request("large", tensors=[torch.ones(NUMBERS)])
    with Server([verb]) as server, peer(server, asked[: NBYTES // 2]) as sock:
        wait_until(lambda: len(places) == 1)
        sock.close()
        wait_until(lambda: server.statistics().connections == 0)
        wait_until(lambda: places[0]() is None)


def test_an_answer_without_room_is_not_made() -> None:
    """Room was reserved for answers that had been made, so as many as there are threads exceeded the bound."""
    made: list[int] = []

    def answer(call: Call) -> None:
        made.append(call.identity[1])
        call.reply([torch.ones(NUMBERS)])

    verb = Verb("large", answer, lambda header: Checked(answer_bytes=NBYTES), quick=True)
    with Server([verb], max_bytes_in_flight=2 * NBYTES) as server, ExitStack() as stack, Client() as client:
        for _ in range(2):
            stack.enter_context(peer(server, ASKS))
        wait_until(lambda: server.statistics().served == 2)
        with pytest.raises(Overloaded, match=f"{NBYTES} bytes"):
            client.call(Request(server.endpoint, "large"), soon())
        assert len(made) == 2
        stack.close()
        wait_until(lambda: server.statistics().connections == 1)
        for _ in range(3):
            assert float(client.call(Request(server.endpoint, "large"), soon()).tensors[0].sum()) == NUMBERS
        wait_until(lambda: server.statistics().bytes_in_flight == 0)


@pytest.mark.parametrize("end", ["error", "leaves"])
def test_room_is_free_again_if_no_answer_comes(end: str) -> None:
    calls: list[Call] = []
    verb = Verb("large", calls.append, lambda header: Checked(answer_bytes=NBYTES), quick=True)
    with Server([verb]) as server, peer(server, ASKS) as sock:
        wait_until(lambda: len(calls) == 1)
        assert server.statistics().bytes_in_flight == NBYTES
        if end == "error":
            calls[0].fail(ValueError("no"))
        else:
            sock.close()
            wait_until(calls[0].drop)
        wait_until(lambda: server.statistics().bytes_in_flight == 0)
