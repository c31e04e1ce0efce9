"""The order of tasks: each caller in turn, then the oldest; and the futures of submitted tasks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded
from anabranch.experts import Runtime, Task, TaskPool
from anabranch.testing import FakeClock
from waiting import wait_until


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


def test_pools_of_a_device_share_the_turns() -> None:
    order: list[str] = []
    done = threading.Semaphore(0)

    def pool(name: str) -> TaskPool:
        return TaskPool(lambda x: (order.append(name), [x])[1], name=name, max_batch_size=1)

    mine, more, theirs = pool("many"), pool("more of many"), pool("few")
    finish = lambda outcome: done.release()  # noqa: E731
    with Runtime([mine, more, theirs]) as runtime:
        with runtime.paused():
            mine.submit(task("many", finish=finish))
            wait_until(lambda: not runtime.idle())  # the device has taken it, and waits for the pause to end
            for _ in range(3):
                mine.submit(task("many", finish=finish))
            more.submit(task("many", finish=finish))
            theirs.submit(task("few", finish=finish))
        for _ in range(6):
            assert done.acquire(timeout=60)
    assert order.index("few") < 4
    assert order[-1] == "more of many"  # a caller has one turn, in however many pools it waits


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
