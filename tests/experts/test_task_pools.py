"""Pools and the runtime: which batch runs when, made of which tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, Overloaded, PeerLost
from anabranch.experts import Runtime, Task, TaskPool
from anabranch.experts.task_pool import Unrepeatable
from anabranch.testing import FakeClock

Outcome = Sequence[Tensor | None] | BaseException


def task(rows: int, answers: list[Outcome], value: float = 1.0, **options: object) -> Task:
    options.setdefault("deadline", Deadline.after(20.0))
    return Task([torch.full((rows, 1), value)], rows, finish=answers.append, **options)  # type: ignore[arg-type]


def test_what_nobody_wants_is_dropped_before_compute_and_what_is_late_is_told() -> None:
    clock, computed, answers = FakeClock(), [], []  # type: ignore[var-annotated]

    def process(x: Tensor) -> list[Tensor]:
        computed.append(x.shape[0])
        return [x]

    pool = TaskPool(process)
    pool.submit(task(1, answers))
    pool.submit(task(2, answers, unwanted=lambda: True))
    pool.submit(task(4, answers, deadline=Deadline.after(1.0, clock)))
    clock.advance(2.0)
    pool.run(pool.take_batch())
    assert computed == [1]
    assert len(answers) == 2
    assert isinstance(answers[0], DeadlineExceeded)
    assert pool.statistics().dropped == 2
    assert pool.statistics().waiting_rows == 0


def test_batches_are_filled_oldest_first_up_to_the_maximum() -> None:
    answers: list[Outcome] = []
    pool = TaskPool(lambda x: [x], max_batch_size=4)
    for value in range(5):
        pool.submit(task(1, answers, float(value)))
    batches = []
    while batch := pool.take_batch():
        batches.append([float(one.inputs[0][0, 0]) for one in batch])  # type: ignore[index]
    assert batches == [[0.0, 1.0, 2.0, 3.0], [4.0]]


def test_a_request_over_the_maximum_is_split_and_answered_once() -> None:
    answers: list[Outcome] = []
    pool = TaskPool(lambda x: [2 * x, None], max_batch_size=3)
    pool.submit(Task([torch.arange(8.0)[:, None]], 8, Deadline.after(20.0), answers.append))
    while batch := pool.take_batch():
        pool.run(batch)
    assert len(answers) == 1
    outputs = answers[0]
    assert not isinstance(outputs, BaseException)
    assert torch.equal(outputs[0], 2 * torch.arange(8.0)[:, None])  # type: ignore[arg-type]
    assert outputs[1] is None
    assert pool.statistics().batches == 3


def test_a_split_request_fails_once_and_its_other_parts_are_not_run() -> None:
    answers: list[Outcome] = []
    calls: list[int] = []

    def process(x: Tensor) -> list[Tensor]:
        calls.append(1)
        raise ArithmeticError("no")

    pool = TaskPool(process, max_batch_size=2)
    pool.submit(task(6, answers))
    while batch := pool.take_batch():
        pool.run(batch)
    assert [type(answer) for answer in answers] == [ArithmeticError]
    assert len(calls) == 1


def test_queues_are_bounded_in_rows_and_in_bytes_but_take_one_request_of_any_size() -> None:
    answers: list[Outcome] = []
    pool = TaskPool(lambda x: [x], max_batch_size=10, max_queue_rows=5)
    pool.submit(task(8, answers))
    with pytest.raises(Overloaded, match="8 rows and 32 bytes wait"):
        pool.submit(task(1, answers))
    narrow = TaskPool(lambda x: [x], max_queue_bytes=16)
    narrow.submit(task(3, answers))
    with pytest.raises(Overloaded):
        narrow.submit(task(2, answers))
    narrow.submit(task(1, answers))
    assert narrow.statistics().declined == 1


def test_the_pool_whose_task_waited_longest_goes_first() -> None:
    order: list[str] = []
    answers: list[Outcome] = []

    def process(name: str) -> TaskPool:
        return TaskPool(lambda x: (order.append(name), [x])[1], name=name)

    a, b, c = (process(name) for name in "abc")
    now = time.monotonic()
    for pool, age in ((a, 1.0), (b, 3.0), (c, 2.0)):
        pool.submit(task(1, answers, arrived=now - age))
    done = threading.Event()
    last = Task([torch.ones(1, 1)], 1, Deadline.after(20.0), lambda outcome: done.set())
    with Runtime([a, b, c]):
        c.submit(last)
        assert done.wait(timeout=10)
    assert order[:3] == ["b", "c", "a"]


def test_an_update_that_failed_half_way_is_not_repeated_task_by_task() -> None:
    calls: list[int] = []
    answers: list[Outcome] = []

    def process(x: Tensor) -> list[Tensor]:
        calls.append(1)
        raise Unrepeatable("the optimizer broke")

    pool = TaskPool(process)
    for _ in range(3):
        pool.submit(task(1, answers))
    pool.run(pool.take_batch())
    assert len(calls) == 1
    assert [type(answer) for answer in answers] == [Unrepeatable] * 3


def test_no_batch_runs_while_the_runtime_is_paused() -> None:
    ran = threading.Event()
    pool = TaskPool(lambda x: (ran.set(), [x])[1])
    answers: list[Outcome] = []
    with Runtime([pool]) as runtime:
        with runtime.paused():
            pool.submit(task(1, answers))
            assert not ran.wait(timeout=0.1)
        assert ran.wait(timeout=10)


def test_pools_without_tasks_are_not_looked_at_however_many_there_are() -> None:
    looked: list[str] = []
    done = threading.Semaphore(0)

    class Watched(TaskPool):
        def due_at(self) -> float:
            looked.append(self.name)
            return super().due_at()

    pools = [Watched(lambda x: [x], name=str(index)) for index in range(50)]

    def one() -> Task:
        return Task([torch.ones(1, 1)], 1, Deadline.after(20.0), lambda outcome: done.release())

    pools[3].submit(one())  # before there is a runtime
    with Runtime(pools) as runtime:
        assert done.acquire(timeout=10)
        runtime.submit({pools[7]: [one()], pools[9]: [one()]})
        pools[8].submit(one())
        for _ in range(3):
            assert done.acquire(timeout=10)
    assert set(looked) == {"3", "7", "8", "9"}


def test_what_is_known_to_be_quick_runs_where_it_is_submitted_and_all_else_on_the_device_thread() -> None:
    ran: list[tuple[str, int]] = []
    done = threading.Semaphore(0)
    pause = threading.Event()
    seconds = [0.0]

    def process(x: Tensor) -> list[Tensor]:
        pause.wait(timeout=seconds[0])
        ran.append((threading.current_thread().name, x.shape[0]))
        return [x]

    pool = TaskPool(process, min_batch_size=2, timeout=20.0)
    here = threading.current_thread().name

    def submit(*rows: int, one_of_many: bool = False) -> None:
        tasks = [Task([torch.ones(n, 1)], n, Deadline.after(20.0), lambda outcome: done.release()) for n in rows]
        idle()
        runtime.submit({pool: tasks}, one_of_many=one_of_many)

    def idle() -> None:
        until = time.monotonic() + 10
        while not runtime._sleeps_until and time.monotonic() < until:  # the device thread is about to look for work
            time.sleep(0.001)

    def known_as_quick() -> None:
        idle()
        pool._took.clear()
        pool.note_seconds(2, 1e-6)

    def finished(count: int) -> None:
        for _ in range(count):
            assert done.acquire(timeout=10)

    with Runtime([pool]) as runtime:
        submit(2)  # has never run
        finished(1)
        known_as_quick()
        submit(1)
        assert not done.acquire(blocking=False)  # too few rows are no batch, whoever looks
        submit(1)
        finished(2)
        with runtime.paused():
            submit(2)
            assert not done.acquire(timeout=0.05)
        finished(1)
        submit(100)  # larger than anything that was quick
        finished(1)
        known_as_quick()
        runtime._threads = 2
        submit(2, one_of_many=True)
        finished(1)
        known_as_quick()
        seconds[0] = 0.01
        submit(2)
        finished(1)
        submit(2)  # not so quick any more
        finished(1)
    device = "anabranch-device"
    assert ran == [(device, 2), (here, 2), (device, 2), (device, 100), (device, 2), (here, 2), (device, 2)]


def test_leaving_a_runtime_fails_what_still_waits() -> None:
    answers: list[Outcome] = []
    pool = TaskPool(lambda x: [x], min_batch_size=10)
    with Runtime([pool]):
        pool.submit(task(1, answers))
    assert [type(answer) for answer in answers] == [PeerLost]
    with pytest.raises(PeerLost, match="closed"):
        pool.submit(task(1, answers))


@pytest.mark.parametrize(
    "options", [{"min_batch_size": 0}, {"min_batch_size": 5, "max_batch_size": 4}, {"timeout": -1.0}]
)
def test_sizes_that_contradict_each_other_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="batch sizes|timeout"):
        TaskPool(lambda x: [x], **options)  # type: ignore[arg-type]
