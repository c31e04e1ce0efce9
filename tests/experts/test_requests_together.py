"""Requests of one process for one expert that wait at the same time: one message, and each caller's own outcome."""

from __future__ import annotations

import copy
import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType

import pytest
import torch
from expert_modules import Slow, adam, calling, expert_of, in_the_module, served, sgd, together
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, NonFinite, PeerLost, RemoteError
from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
from anabranch.experts.client import calls as lines
from anabranch.experts.client.calls import Calls, ExpertCall, call_experts
from anabranch.testing import LossyTransport, MemoryTransport
from anabranch.transport import Client, Outcome, Request
from waiting import running, wait_until


class Picky(nn.Linear):
    """Refuses a value in forward, and one in backward."""

    def forward(self, x: Tensor) -> Tensor:
        if (x == 666.0).any():
            raise IndexError("no such row")
        answer = super().forward(x)
        if answer.requires_grad:
            answer.register_hook(refuse)
        return answer


def refuse(gradient: Tensor) -> None:
    if (gradient == 7.0).any():
        raise ArithmeticError("no such gradient")


def calls_of(client: Client, server: ExpertServer, backend: ExpertBackend, rows: Sequence[Tensor]) -> Calls:
    calls = [ExpertCall(backend.uid, server.endpoint, backend.schema, [row], len(row)) for row in rows]
    return Calls(client, calls, Deadline.after(60.0), 60.0)


def outputs_of(calls: Calls) -> list[Tensor]:
    outputs = [answer[0] for answer in call_experts(calls) if answer is not None]
    assert all(output is not None for output in outputs)
    return outputs  # type: ignore[return-value]


def requests(server: ExpertServer) -> int:
    return sum(server.transport_statistics().requests.values())


@pytest.mark.parametrize("keep", [0, 100])
def test_many_calls_of_one_thread_are_one_message_and_its_batch(keep: int) -> None:
    here = nn.Linear(4, 4)
    there = copy.deepcopy(here)
    near = adam(here)
    backend = expert_of(there, optimizer=adam(there), keep_activations=keep)
    x = torch.randn(20, 4)
    with served(backend) as server, Client() as client:
        rows = [row.clone().requires_grad_() for row in x.split([1, 2, 1] * 5)]
        outputs = outputs_of(calls_of(client, server, backend, rows))
        assert requests(server) == 1
        x.requires_grad_()
        expected = here(x)
        assert torch.equal(torch.cat(outputs), expected)
        outputs[0].mul_(1.0)  # each has its own memory
        torch.cat([2 * output for output in outputs]).sum().backward()
        assert requests(server) == 2
        (2 * expected).sum().backward()
        near.step()
        assert x.grad is not None
        assert torch.allclose(torch.cat([row.grad for row in rows if row.grad is not None]), x.grad)
        assert backend.updates == 1
        assert backend.backward_pool.statistics().tasks == 15
    for mine, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.allclose(mine, theirs)


def test_a_message_has_few_rows_of_a_batch() -> None:
    backend = expert_of(nn.Linear(4, 4), max_batch_size=64)
    with served(backend) as server, Client() as client, torch.no_grad():
        assert len(outputs_of(calls_of(client, server, backend, [torch.ones(3, 4)] * 5))) == 5
        assert requests(server) == 3


@pytest.mark.parametrize("keep", [0, 100])
def test_a_faulty_request_fails_alone(keep: int) -> None:
    there = Picky(4, 4)
    here = copy.deepcopy(there)
    backend = expert_of(there, optimizer=sgd(there, 1.0), keep_activations=keep)
    with served(backend) as server, Client() as client:
        rows = [torch.full((1, 4), value, requires_grad=True) for value in (1.0, 666.0, 2.0, float("nan"), 3.0)]
        calls = calls_of(client, server, backend, rows)
        outputs = outputs_of(calls)
        failed = [call.error for call in calls.calls]
        assert [type(error) for error in failed] == [type(None), RemoteError, type(None), NonFinite, type(None)]
        assert torch.allclose(torch.cat(outputs), here(torch.cat([rows[0], rows[2], rows[4]])))
        seen: list[type[Exception]] = []
        calls.check_backward = lambda asked: seen.extend(type(call.gradient_error) for call in asked)  # type: ignore[misc]
        torch.autograd.backward(outputs, [torch.full((1, 4), value) for value in (1.0, 7.0, float("inf"))])
        assert seen == [type(None), RemoteError, NonFinite]
        assert rows[0].grad is not None
        assert (rows[2].grad, rows[4].grad) == (None, None)
        assert backend.updates == 1
        assert torch.allclose(there.bias, here.bias - 1.0)


@pytest.mark.parametrize("calls", [1, 5])
def test_updates_are_made_once_however_often_the_network_cuts_their_message(calls: int) -> None:
    network = MemoryTransport()
    lossy = LossyTransport(drop=0.3, duplicate=0.2, seed=3, transport=network)
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    backend = expert_of(module, 1, optimizer=sgd(module, 1.0))
    with served(backend, transport=network) as server, Client(transport=lossy, retries=100) as client:
        for _ in range(20):
            outputs = outputs_of(calls_of(client, server, backend, [torch.ones(1, 1)] * calls))
            torch.cat(outputs).sum().backward()
    assert lossy.dropped > 5
    assert float(module.weight.detach()) == -20.0 * calls
    assert backend.updates == 20


@contextmanager
def one_under_way(
    monkeypatch: pytest.MonkeyPatch, moment: float = 600.0, *, started: bool = True, **options: object
) -> Iterator[tuple[Slow, ExpertServer, RemoteExpert, Callable[[int], None]]]:
    """While one thread's request is in the module, the next ones wait for it."""
    monkeypatch.setattr(lines, "_MOMENT", moment)
    module = Slow()
    with served(expert_of(module, 2, "slow.0", **options)) as server:
        expert = RemoteExpert("slow.0", server.endpoint)
        expert.get_info()

        def wait_for(count: int) -> None:
            wait_until(lambda: sum(len(line.waiting) for line in lines._lines.values()) == count)

        with ExitStack() as stack:
            if started:
                stack.enter_context(torch.no_grad())
                stack.enter_context(in_the_module(module, lambda: without_gradients(expert, torch.ones(1, 2))))
            yield module, server, expert, wait_for
    assert not lines._lines


def without_gradients(expert: RemoteExpert, x: Tensor) -> Tensor:
    with torch.no_grad():
        answer: Tensor = expert(x)
        return answer


def test_requests_of_several_threads_that_wait_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[object] = []
    with one_under_way(monkeypatch) as (module, server, expert, wait_for):
        before = requests(server)
        inputs = [torch.full((1 + index % 2, 2), float(index)) for index in range(8)]
        with running(lambda: outcomes.extend(together(8, lambda index: without_gradients(expert, inputs[index])))):
            wait_for(8)
            module.open.set()
        assert requests(server) == before + 1
    for x, outcome in zip(inputs, outcomes, strict=True):
        assert isinstance(outcome, Tensor)
        assert torch.equal(outcome, x)
    assert expert.statistics().answered == 9


def test_a_caller_gives_up_at_its_own_deadline_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_under_way(monkeypatch) as (_, server, expert, _):
        hasty = RemoteExpert("slow.0", server.endpoint, forward_timeout=0.1)
        hasty._known = expert._known
        with pytest.raises(DeadlineExceeded, match=r"slow\.0"):
            hasty(torch.ones(1, 2))


def test_what_is_sent_for_a_caller_ends_when_its_own_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with much more time does not take it along: the server would do it when nobody waits any more."""
    with one_under_way(monkeypatch) as (module, server, expert, wait_for):
        before = requests(server)
        hasty = RemoteExpert("slow.0", server.endpoint, forward_timeout=25.0)
        hasty._known = expert._known
        with running(*(partial(without_gradients, caller, torch.ones(1, 2)) for caller in (expert, hasty))):
            wait_for(2)
            module.open.set()
        assert requests(server) == before + 2


def test_a_full_queue_takes_those_that_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_under_way(monkeypatch, max_batch_size=64, max_queue_rows=4) as (module, _, expert, wait_for):
        outcomes: list[object] = []
        with running(lambda: outcomes.extend(together(6, lambda _: without_gradients(expert, torch.ones(1, 2))))):
            wait_for(6)
            module.open.set()
    assert any(isinstance(outcome, Tensor) for outcome in outcomes)


def test_a_request_waits_for_those_under_way_only_a_moment() -> None:
    """The first one may wait for the others: a batch has a minimum."""
    with calling(expert_of(Slow(), 2, "slow.0", min_batch_size=8)) as expert:
        answers = together(8, lambda index: without_gradients(expert, torch.full((1, 2), float(index))))
    assert [float(answer.sum()) for answer in answers if isinstance(answer, Tensor)] == [2.0 * i for i in range(8)]


class Stop(BaseException):
    """As Ctrl-C, in any thread."""


@pytest.mark.parametrize("backward", [False, True])
def test_forwards_of_a_thread_that_is_interrupted_are_sent_by_others(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather, stopped = Client.gather, threading.Event()

    def stop_once(client: Client, requests: list[Request], deadline: Deadline, **options: object) -> list[Outcome]:
        if len(requests[0].tensors[0]) > 1 and not stopped.is_set():
            stopped.set()
            raise Stop
        return gather(client, requests, deadline, **options)  # type: ignore[arg-type]

    def ask(index: int) -> None:
        try:
            outcomes[index] = sums[index].backward() if backward else without_gradients(expert, torch.ones(1, 2))
        except BaseException as error:  # noqa: BLE001 - what a caller gets is what is tested
            outcomes[index] = error.with_traceback(None)  # which holds the requests

    with one_under_way(monkeypatch, started=False) as (module, _, expert, wait_for):
        sums = [expert(torch.ones(1, 2)).sum() for _ in range(4)]
        outcomes: list[object] = [None] * 4
        monkeypatch.setattr(Client, "gather", stop_once)
        with ExitStack() as stack, in_the_module(module, lambda: ask(0)):
            stack.enter_context(running(*(partial(ask, index) for index in range(1, 4))))
            wait_for(3)
            module.open.set()
    lost = [PeerLost] * 2 if backward else [Tensor] * 2
    assert sorted(map(type, outcomes[1:]), key=str) == sorted([*lost, Stop], key=str)
    assert isinstance(outcomes[0], type(None) if backward else Tensor)


def test_an_interrupt_at_any_line_leaves_nobody_waiting() -> None:
    with calling(expert_of(nn.Identity(), 2)) as expert:
        expert.get_info()
        left = 0
        while left >= 0:
            left = number = left + 1

            def trace(frame: FrameType, event: str, argument: object) -> object:
                nonlocal number
                if frame.f_code is not lines.gather.__code__:
                    return None
                # Only a trace comes between the body of a block and the release of its lock, no signal.
                if event == "line" and "with" not in linecache.getline(lines.__file__, frame.f_lineno):
                    number -= 1
                    if number == 0:
                        raise Stop
                return trace

            sys.settrace(trace)
            try:
                without_gradients(expert, torch.ones(1, 2))
                left = -1
            except Stop:
                pass
            finally:
                sys.settrace(None)
            without_gradients(expert, torch.ones(1, 2))
            assert not lines._lines
