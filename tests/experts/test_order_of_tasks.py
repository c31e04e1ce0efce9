"""The order of tasks: by priority, then each caller in turn, then the oldest; and the futures of submitted tasks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest
import torch
from expert_modules import Slow, in_the_module, served
from torch import Tensor, nn

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, RemoteError
from anabranch.experts import ExpertBackend, RemoteExpert, Runtime, Task, TaskPool
from anabranch.tensors import TensorSpec
from anabranch.testing import FakeClock
from waiting import join, wait_until


def task(caller: str = "", rows: int = 1, **options: object) -> Task:
    options.setdefault("deadline", Deadline.after(600.0))
    return Task([torch.zeros(rows, 1)], rows, caller=caller, **options)  # type: ignore[arg-type]


def callers(pool: TaskPool) -> list[list[str]]:
    batches = []
    while batch := pool.take_batch():
        batches.append([one.caller for one in batch])
    return batches


def test_a_caller_with_many_tasks_and_one_with_few_take_turns_row_by_row() -> None:
    pool = TaskPool(lambda x: [x], max_batch_size=4)
    for _ in range(8):
        pool.submit(task("many"))
    for _ in range(2):
        pool.submit(task("few"))
    pool.submit(task("late", rows=2))
    assert callers(pool) == [["many", "few", "late"], ["many", "few", "many", "many"], ["many", "many", "many", "many"]]


def test_tasks_without_a_caller_are_served_in_the_order_of_arrival() -> None:
    pool = TaskPool(lambda x: [x], max_batch_size=2)
    for value in range(5):
        pool.submit(Task([torch.full((1, 1), float(value))], 1, Deadline.after(600.0)))
    order = []
    while batch := pool.take_batch():
        order += [int(one.inputs[0]) for one in batch]  # type: ignore[arg-type]
    assert order == [0, 1, 2, 3, 4]


def test_a_higher_priority_goes_first_regardless_of_waiting_time() -> None:
    pool = TaskPool(lambda x: [x], max_batch_size=2)
    for caller, priority in (("a", 0), ("a", 0), ("b", -1), ("c", 5), ("a", 5)):
        pool.submit(task(caller, priority=priority))
    assert callers(pool) == [["c", "a"], ["a", "a"], ["b"]]


def test_pools_of_a_device_share_the_turns_and_the_priorities() -> None:
    order: list[str] = []
    done = threading.Semaphore(0)

    def pool(name: str) -> TaskPool:
        return TaskPool(lambda x: (order.append(name), [x])[1], name=name, max_batch_size=1)

    mine, more, theirs, urgent = pool("many"), pool("more of many"), pool("few"), pool("urgent")
    finish = lambda outcome: done.release()  # noqa: E731
    with Runtime([mine, more, theirs, urgent]) as runtime:
        with runtime.paused():
            mine.submit(task("many", finish=finish))
            wait_until(lambda: not runtime.idle())  # the device has taken it, and waits for the pause to end
            for _ in range(3):
                mine.submit(task("many", finish=finish))
            more.submit(task("many", finish=finish))
            theirs.submit(task("few", finish=finish))
            urgent.submit(task("few", priority=1, finish=finish))
        for _ in range(7):
            assert done.acquire(timeout=60)
    assert order.index("few") < 4
    assert order[-1] == "more of many"  # a caller has one turn, in however many pools it waits
    assert order.index("urgent") < order.index("few")


def test_submitting_returns_a_future_of_the_outputs_or_of_the_error() -> None:
    def process(x: Tensor) -> Sequence[Tensor]:
        if x.max() > 5:
            raise ArithmeticError("too large")
        return [2 * x]

    with Runtime([pool := TaskPool(process, max_batch_size=2)]):
        good = pool.submit(Task([torch.ones(5, 1)], 5, Deadline.after(600.0)))
        bad = pool.submit(Task([torch.full((1, 1), 9.0)], 1, Deadline.after(600.0)))
        assert torch.equal(good.result(timeout=60)[0], torch.full((5, 1), 2.0))  # type: ignore[arg-type]
        with pytest.raises(ArithmeticError, match="too large"):
            bad.result(timeout=60)


def test_a_future_that_is_cancelled_takes_its_task_back_and_one_that_is_unwanted_is_cancelled() -> None:
    computed: list[int] = []
    clock = FakeClock()
    pool = TaskPool(lambda x: (computed.append(len(x)), [x])[1])
    cancelled, unwanted, late, kept = (
        pool.submit(task(rows=1)),
        pool.submit(task(rows=2, unwanted=lambda: True)),
        pool.submit(task(rows=4, deadline=Deadline.after(1.0, clock))),
        pool.submit(task(rows=8)),
    )
    clock.advance(2.0)
    assert cancelled.cancel()
    pool.run(pool.take_batch())
    assert computed == [8]
    assert kept.result(timeout=0)[0] is not None
    with pytest.raises(CancelledError):
        unwanted.result(timeout=0)
    with pytest.raises(DeadlineExceeded):
        late.result(timeout=0)
    assert pool.statistics().dropped == 3
    running = pool.submit(task())
    batch = pool.take_batch()
    assert running.running()
    assert not running.cancel()
    pool.run(batch)
    assert running.result(timeout=0)[0] is not None
    assert computed == [8, 1]


def test_an_expert_decides_the_order_of_its_tasks() -> None:
    seen: list[tuple[str, int, bool]] = []
    order: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            order.append(self.name)
            return x * 1.0

    class First(ExpertBackend):
        def prioritize(self, caller: str, rows: int, *, backward: bool) -> int:
            seen.append((caller, rows, backward))
            return 3 if self.uid == "second.0" else 0

    slow = Slow()
    backends = [First(f"{name}.0", Named(name), args_schema=[TensorSpec(1)]) for name in ("first", "second")]
    with served(*backends, ExpertBackend("slow.0", slow, args_schema=[TensorSpec(1)])) as server:
        for backend in backends:
            RemoteExpert(backend.uid, server.endpoint)(torch.ones(1, 1))
        order.clear()
        seen.clear()
        with in_the_module(slow, lambda: RemoteExpert("slow.0", server.endpoint)(torch.ones(1, 1))):
            threads = []
            for backend in backends:
                expert = RemoteExpert(backend.uid, server.endpoint)
                threads.append(threading.Thread(target=expert, args=(torch.ones(2, 1),)))
                threads[-1].start()
                pool = backend.forward_pool
                wait_until(lambda pool=pool: pool.statistics().waiting_tasks == 1)  # type: ignore[misc]
        join(*threads)
    assert order == ["second", "first"]
    assert [rows for _, rows, _ in seen] == [2, 2]
    assert all(caller.startswith("process ") and not backward for caller, _, backward in seen)


def test_a_priority_that_is_not_a_number_is_reported_to_the_caller() -> None:
    class Unsaid(ExpertBackend):
        def prioritize(self, caller: str, rows: int, *, backward: bool) -> int:
            return None  # type: ignore[return-value]

    said = r"Unsaid\.prioritize returned None; return a whole number"
    backend = Unsaid("unsaid.0", nn.Linear(1, 1), args_schema=[TensorSpec(1)])
    with served(backend) as server, pytest.raises(RemoteError, match=said):
        RemoteExpert("unsaid.0", server.endpoint)(torch.ones(1, 1))
