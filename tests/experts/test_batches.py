"""Pools, the runtime and batches: which requests run or travel together, when, and which are refused."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
from expert_modules import Feedforward, Slow, adam, calling, expert_of, in_the_module, served, sgd, together
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, NonFinite, Overloaded, PeerLost, RemoteError
from anabranch.experts import Directory, ExpertBackend, ExpertServer, RemoteExpert, Runtime, Task, TaskPool, wire
from anabranch.experts.client import calls as lines
from anabranch.experts.client.calls import Calls, ExpertCall, call_experts
from anabranch.experts.server.scheduler import Unrepeatable
from anabranch.tensors import TensorSpec
from anabranch.testing import FakeClock, LossyTransport, MemoryTransport
from anabranch.transport import Client, Outcome, Request, RequestHeader, pack
from anabranch.transport.frame import Hello, encode
from networks import CountingTransport
from waiting import join, running, wait_until

Settled = Sequence[Tensor | None] | BaseException


def task(rows: int = 1, answers: list[Settled] | None = None, **options: object) -> Task:
    options.setdefault("deadline", Deadline.after(600.0))
    if answers is not None:
        options["finish"] = answers.append
    return Task([torch.ones(rows, 1)], rows, **options)  # type: ignore[arg-type]


def test_queues_are_bounded_in_rows_and_in_bytes_but_take_one_request_of_any_size() -> None:
    pool = TaskPool(lambda x: [x], max_batch_size=10, max_queue_rows=5)
    pool.submit(task(8))
    with pytest.raises(Overloaded, match="8 rows and 32 bytes are queued"):
        pool.submit(task())
    narrow = TaskPool(lambda x: [x], max_queue_bytes=16)
    narrow.submit(task(3))
    with pytest.raises(Overloaded):
        narrow.submit(task(2))
    narrow.submit(task())
    assert narrow.statistics().declined == 1


def test_an_update_that_failed_half_way_is_not_repeated_task_by_task() -> None:
    calls: list[int] = []
    answers: list[Settled] = []

    def process(x: Tensor) -> list[Tensor]:
        calls.append(1)
        raise Unrepeatable("the optimizer broke")

    pool = TaskPool(process)
    for _ in range(3):
        pool.submit(task(1, answers))
    pool.run(pool.take_batch())
    assert len(calls) == 1
    assert [type(answer) for answer in answers] == [Unrepeatable] * 3


class QuickPool:
    """A pool that notes on which thread its batches run; each is as slow as the test wants."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []
        self.seconds = 0.0
        self.pool = TaskPool(self._process, min_batch_size=2, timeout=600.0)
        self._done = threading.Semaphore(0)
        self._never = threading.Event()

    def _process(self, x: Tensor) -> list[Tensor]:
        self._never.wait(timeout=self.seconds)
        self.ran.append((threading.current_thread().name, x.shape[0]))
        return [x]

    def submit(self, runtime: Runtime, rows: int, count: int = 1) -> None:
        """Submit a task once the device sleeps, and wait until ``count`` have finished."""
        wait_until(runtime.idle)
        runtime.submit({self.pool: [task(rows, finish=lambda _: self._done.release())]})
        self.finished(count)

    def finished(self, count: int) -> None:
        for _ in range(count):
            assert self._done.acquire(timeout=60)
        assert not self._done.acquire(blocking=False)

    def known_as_quick(self, runtime: Runtime) -> None:
        wait_until(runtime.idle)
        for _ in range(60):  # what is quicker is believed by half
            self.pool.note_seconds(2, 1e-6)


def test_quick_batches_run_on_the_submitting_thread_and_others_on_the_device_thread() -> None:
    quick, here, device = QuickPool(), threading.current_thread().name, "anabranch-device"
    with Runtime([quick.pool]) as runtime:
        quick.submit(runtime, 2)  # has never run
        quick.known_as_quick(runtime)
        quick.submit(runtime, 1, 0)  # too few rows are not a batch, whoever looks
        quick.submit(runtime, 1, 2)
        quick.known_as_quick(runtime)
        with runtime.paused():
            quick.submit(runtime, 2, 0)
        quick.finished(1)
        quick.submit(runtime, 100)  # larger than anything that was quick
        quick.known_as_quick(runtime)
        quick.seconds = 0.01
        quick.submit(runtime, 2)
        quick.submit(runtime, 2)  # not so quick any more
    assert quick.ran == [(device, 2), (here, 2), (device, 2), (device, 100), (here, 2), (device, 2)]


def test_tasks_that_were_queued_before_their_runtime_are_run_by_it_and_those_left_when_it_ends_fail() -> None:
    pool, waits = TaskPool(lambda x: [x]), TaskPool(lambda x: [x], min_batch_size=10)
    future, left = pool.submit(task()), waits.submit(task())
    with Runtime([pool, waits]):
        assert future.result(timeout=60.0)[0].shape == (1, 1)  # type: ignore[union-attr]
    with pytest.raises(PeerLost):
        left.result(timeout=0)
    with pytest.raises(PeerLost, match="closed"):
        pool.submit(task())


def test_callers_take_turns_row_by_row_in_however_many_pools_of_a_device_they_wait() -> None:
    pool, more = (TaskPool(lambda x: [x], max_batch_size=4) for _ in range(2))
    scheduler = Runtime([pool, more])._scheduler
    tasks = [*[(pool, "many", 1)] * 8, (more, "many", 4), *[(pool, "few", 1)] * 2, (pool, "late", 2), (more, "few", 1)]
    for one, caller, rows in tasks:
        one.submit(task(rows, caller=caller))
    order = []
    while queue := scheduler.most_urgent(0.0):
        order.append((queue.pool is more, [one.caller for one in scheduler.take(queue)]))
    assert order == [
        (False, ["many", "few", "late"]),
        (False, ["many", "few", "many", "many"]),
        (True, ["few"]),
        (False, ["many"] * 4),
        (True, ["many"]),
    ]


def test_submitting_returns_a_future_of_the_outputs_or_of_the_error() -> None:
    def process(x: Tensor) -> Sequence[Tensor]:
        assert len(x) <= 2
        if x.max() > 5:
            raise ArithmeticError("too large")
        return [2 * x]

    with Runtime([pool := TaskPool(process, max_batch_size=2)]):
        good = pool.submit(task(5))
        bad = pool.submit(Task([torch.arange(9.0)[:, None]], 9, Deadline.after(600.0)))
        assert torch.equal(good.result(timeout=60)[0], torch.full((5, 1), 2.0))  # type: ignore[arg-type]
        with pytest.raises(ArithmeticError, match="too large"):
            bad.result(timeout=60)
        again = task(2)
        for _ in range(2):
            assert len(pool.submit(again).result(timeout=60)[0]) == 2  # type: ignore[arg-type]


def test_a_future_that_is_cancelled_takes_its_task_back_and_one_that_is_unwanted_is_cancelled() -> None:
    computed, last_cancelled = list[int](), list[bool]()
    clock = FakeClock()
    pool = TaskPool(lambda x: (computed.append(len(x)), last_cancelled.append(last.cancel()), [x])[2])
    cancelled, unwanted = pool.submit(task(1)), pool.submit(task(2, unwanted=lambda: True))
    late, last = pool.submit(task(4, deadline=Deadline.after(1.0, clock))), pool.submit(task(8))
    clock.advance(2.0)
    assert cancelled.cancel()
    pool.run(pool.take_batch())
    assert computed == [8]
    assert last_cancelled == [False]
    assert last.result(timeout=0)[0] is not None
    for future, error in ((unwanted, CancelledError), (late, DeadlineExceeded)):
        with pytest.raises(error):
            future.result(timeout=0)
    assert pool.statistics().dropped == 3


# --- requests that come together are computed together, and each gets the answer that it would get alone


def test_empty_and_oversize_requests_are_answered() -> None:
    module = Feedforward()
    here = copy.deepcopy(module)
    with calling(expert_of(module, max_batch_size=4)) as expert:
        empty = torch.zeros(0, 4, requires_grad=True)
        expert(empty).sum().backward()
        assert empty.grad is not None
        assert empty.grad.shape == (0, 4)
        x = torch.randn(11, 4, requires_grad=True)
        answer = expert(x)
        assert torch.allclose(answer, here(x), atol=1e-6)


@pytest.mark.parametrize("late", [False, True])
def test_a_backward_over_the_maximum_is_one_update_or_none(late: bool) -> None:
    """Its first part was applied, its second dropped, and a retry applied the first again."""
    module, clock, parts = nn.Linear(1, 1, bias=False), FakeClock(), list[int]()
    nn.init.zeros_(module.weight)
    backend = expert_of(module, 1, optimizer=sgd(module, 1.0), max_batch_size=2)

    def takes_long(_: object, inputs: tuple[Tensor]) -> None:
        parts.append(len(inputs[0]))
        clock.advance(2.0)

    module.register_forward_pre_hook(takes_long)
    x, pool = torch.ones(5, 1), backend.backward_pool
    with Runtime([pool]):
        future = pool.submit(Task([x, x], 5, Deadline.after(3.0 if late else 60.0, clock)))
        if late:
            with pytest.raises(DeadlineExceeded):
                future.result(timeout=60)
        else:
            (gradient,) = future.result(timeout=60)
            assert gradient is not None
            assert gradient.shape == (5, 1)
    assert parts == ([2, 2] if late else [2, 2, 1])
    assert backend.updates == (not late)
    assert module.weight.item() == (0.0 if late else -5.0)
    assert module.weight.grad is None


def test_sixteen_callers_get_the_answers_they_would_get_alone_in_fewer_module_calls() -> None:
    module = Feedforward().double()
    here = copy.deepcopy(module)
    backend = expert_of(module, min_batch_size=136, timeout=60.0)
    inputs = [torch.randn(rows, 4, dtype=torch.float64) for rows in range(1, 17)]
    with calling(backend) as expert:
        expert.get_info()
        outcomes = together(16, lambda index: expert(inputs[index]))
    for x, outcome in zip(inputs, outcomes, strict=True):
        assert isinstance(outcome, Tensor)
        assert torch.allclose(outcome, here(x), rtol=0, atol=1e-14)
    assert backend.forward_pool.statistics().tasks == 16
    assert backend.forward_pool.statistics().batches == 1


def test_a_batch_below_the_minimum_runs_after_its_timeout() -> None:
    with calling(expert_of(Feedforward(), min_batch_size=100, timeout=0.1)) as expert:
        start = time.monotonic()
        assert expert(torch.ones(2, 4)).shape == (2, 4)
        assert time.monotonic() - start >= 0.1


def test_mean_reduction_moves_a_batch_of_requests_as_far_as_one() -> None:
    moved = []
    for reduction in ("sum", "mean"):
        module = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(module.weight)
        backend = expert_of(module, 2, gradient_reduction=reduction, min_batch_size=4, timeout=60.0)
        with calling(backend) as expert:
            outputs = together(4, lambda _, expert=expert: expert(torch.ones(1, 2)))
            together(4, lambda index, outputs=outputs: outputs[index].sum().backward())
        assert backend.updates == 1
        moved.append(module.weight.detach().clone())
    assert torch.allclose(moved[0], 4 * moved[1])


@pytest.mark.parametrize("keep", [0, 8])
def test_a_lazy_module_is_served_with_the_sizes_of_its_schema(keep: int) -> None:
    module = nn.Sequential(nn.LazyInstanceNorm1d(), nn.Flatten(), nn.LazyLinear(2))
    schema = [TensorSpec(3, 4)]
    with calling(expert_of(module, args_schema=schema, optimizer=None, keep_activations=keep)) as expert:
        x = torch.randn(2, 3, 4, requires_grad=True)
        expert(x).sum().backward()
    assert x.grad is not None
    assert (module[0].num_features, module[2].in_features) == (3, 12)


# --- experts with a busy, stuck or leaving device: which callers wait, which get errors, which requests are dropped

PLAIN = pack(wire.ForwardHeader([wire.RequestPart(1, b"")], False))


def test_a_module_that_becomes_slow_delays_only_its_own_callers() -> None:
    module, network = Slow(), CountingTransport()
    backend = expert_of(module, 2, "slow.0")

    def runs_where_it_is_read() -> bool:
        for _ in range(60):
            backend.forward_pool.note_seconds(1, 1e-6)
        module.threads.clear()
        expert(torch.ones(1, 2))
        return module.threads == ["anabranch-loop"]

    with (
        served(backend, transport=network) as server,
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
    backend = expert_of(module, 2, "slow.0", max_batch_size=2, max_queue_rows=4)
    with served(backend) as server:
        expert = RemoteExpert("slow.0", server.endpoint)
        expert.get_info()
        with ExitStack() as stack:
            waiting = [partial(expert, torch.ones(2, 2)) for _ in range(2)]
            with in_the_module(module, partial(expert, torch.ones(2, 2))):
                stack.enter_context(running(*waiting))
                wait_until(lambda: backend.forward_pool.statistics().waiting_rows == 4)
                for _ in range(3):
                    with pytest.raises(Overloaded, match="rows"):
                        expert(torch.ones(1, 2))
                # It is said of the header: the body has not been sent, nor has it a place.
                asked = RequestHeader(wire.FORWARD, "slow.0", seconds=60.0, payload=PLAIN, schema=backend.schema.hash)
                with asking(server.endpoint, encode(asked, [torch.ones(1, 2)])[0]) as sock:
                    assert b"overloaded" in told(sock, b"overloaded")
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
    backend = expert_of(module, 2, "slow.0", max_batch_size=1)
    hasty = RequestHeader(wire.FORWARD, "slow.0", seconds=1.0, payload=PLAIN, schema=backend.schema.hash)
    with served(backend) as server:
        expert = RemoteExpert("slow.0", server.endpoint)
        expert.get_info()
        with ExitStack() as stack:
            # The one before it holds the device until its deadline, which began when it arrived, has passed.
            with in_the_module(module, partial(expert, torch.ones(1, 2))):
                sock = stack.enter_context(asking(server.endpoint, *encode(hasty, [torch.ones(1, 2)])))
                wait_until(lambda: backend.forward_pool.statistics().waiting_rows == 1)
                wait_until(Deadline.after(1.0).expired)
            assert b"deadline" in told(sock, b"deadline")
    statistics = backend.forward_pool.statistics()
    assert (statistics.dropped, statistics.batches) == (1, 1)


def test_a_stuck_device_stops_the_beats_so_that_callers_learn_of_it() -> None:
    module = Slow()
    with served(expert_of(module, 2, "slow.0", max_batch_size=1), heartbeat=1.0) as server:
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
    module, directory, answers = Slow(), Directory(), list[Tensor]()

    def open_when_it_leaves() -> None:
        wait_until(lambda: not directory.lookup(["slow.0"]))
        module.open.set()

    with Client(retries=1) as client, ExitStack() as stack:
        with served(expert_of(module, 2, "slow.0"), directory=directory, drain_seconds=60.0) as server:
            expert = RemoteExpert("slow.0", server.endpoint, client=client)
            expert.get_info()
            assert directory.lookup(["slow.0"]) == {"slow.0": server.endpoint}
            module.open.clear()
            module.entered.clear()
            stack.enter_context(running(lambda: answers.append(expert(torch.ones(1, 2))), open_when_it_leaves))
            assert module.entered.wait(timeout=60)
        stack.close()
        assert len(answers) == 1
        with pytest.raises(PeerLost):
            expert(torch.ones(1, 2))


# --- under ten times the load that it can bear, a server's device computes full batches of requests that are answered

BATCH, BATCHES = 4, 30


class Device(nn.Module):
    """Computes one batch whenever the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = threading.Semaphore(0)
        self.begun = 0
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.begun += 1
        assert self.turns.acquire(timeout=60)
        self.rows.append(len(x))
        return x + 1


def test_ten_times_the_load_leaves_every_batch_full() -> None:
    device = Device()
    backend = expert_of(
        device, 2, "device.0", outputs_schema=TensorSpec(2), max_batch_size=BATCH, max_queue_rows=2 * BATCH
    )
    answered: list[Tensor] = []
    declined: list[Overloaded] = []
    stop = threading.Event()

    def ask(row: int) -> None:
        expert, x = RemoteExpert("device.0", server.endpoint, client=client), torch.full((1, 2), float(row))
        with torch.no_grad():
            while not stop.is_set():
                try:
                    answered.append(expert(x) - x)
                except Overloaded as error:
                    declined.append(error)
                    stop.wait(timeout=0.01)

    with served(backend) as server, Client() as client, running(*(partial(ask, row) for row in range(10 * BATCH))):
        for number in range(1, BATCHES + 1):
            wait_until(lambda number=number: device.begun == number)
            wait_until(lambda: backend.forward_pool.statistics().waiting_rows >= BATCH)
            device.turns.release()
        wait_until(lambda: len(device.rows) == BATCHES and declined)
        rows = device.rows[1:]  # the first batch began with the first request
        stop.set()
        device.turns.release(10 * BATCH)
    assert rows == [BATCH] * (BATCHES - 1)
    assert len(answered) == sum(device.rows)
    assert all(torch.equal(answer, torch.ones(1, 2)) for answer in answered)


# --- requests of one process for one expert that wait at the same time: one message, and each caller's own outcome


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


def test_a_request_whose_thread_has_the_turn_is_taken_along_by_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose patience ends just then would take it, and its thread would not know of that."""
    turn, made, entered = threading.Lock(), lines._Line, Counter[threading.Thread]()
    impatient, ready, taken = threading.Event(), threading.Event(), threading.Event()

    class Steps:
        lock = threading.Lock()

        def __enter__(self) -> None:
            me = threading.current_thread()
            entered[me] += 1
            if me is not main and entered[me] == 3:
                impatient.set()
                assert ready.wait(60.0)
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            me = threading.current_thread()
            if me is main and entered[me] == 2:
                ready.set()
                assert taken.wait(60.0)
            elif me is not main and entered[me] == 3:
                taken.set()

    main, other = threading.current_thread(), list[Tensor]()
    with served(expert_of(nn.Identity())) as server:
        caller = RemoteExpert("ffn.0", server.endpoint)
        caller(torch.ones(1, 4))
        turn.acquire()
        monkeypatch.setattr(lines, "_Line", lambda: made(turn=turn))
        monkeypatch.setattr(lines, "_MOMENT", 0.0)
        monkeypatch.setattr(lines, "_lock", Steps())
        thread = threading.Thread(target=lambda: other.append(caller(2 * torch.ones(1, 4))))
        thread.start()
        assert impatient.wait(60.0)
        turn.release()
        assert caller(torch.ones(1, 4)).tolist() == [[1.0] * 4]
        join(thread)
    assert other[0].tolist() == [[2.0] * 4]
