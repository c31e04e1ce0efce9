"""Pools and the runtime: which batch runs when, made of which tasks, in which order; futures of submitted tasks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, NonFinite, Overloaded, PeerLost
from anabranch.experts import Runtime, Task, TaskPool
from anabranch.experts.server.scheduler import Unrepeatable
from anabranch.testing import FakeClock
from waiting import wait_until

Outcome = Sequence[Tensor | None] | BaseException


def task(rows: int = 1, answers: list[Outcome] | None = None, **options: object) -> Task:
    options.setdefault("deadline", Deadline.after(600.0))
    if answers is not None:
        options["finish"] = answers.append
    return Task([torch.ones(rows, 1)], rows, **options)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("error", [NonFinite("w is NaN"), PeerLost("a part of the module is away")])
def test_a_later_part_that_fails_tells_that_those_before_it_are_applied(error: Exception) -> None:
    """A ``PeerLost`` would mean that nothing was done, and the caller would send all of it again."""
    answers: list[Outcome] = []

    def process(x: Tensor) -> list[Tensor]:
        if x.max() > 2:
            raise error
        return [x]

    pool = TaskPool(process, max_batch_size=2, whole=True)
    pool.submit(Task([torch.arange(6.0)[:, None]], 6, Deadline.after(600.0), answers.append))
    pool.run(pool.take_batch())
    (told,) = answers
    assert isinstance(told, Unrepeatable)
    assert isinstance(told, NonFinite) == isinstance(error, NonFinite)
    assert str(error) in str(told)
    assert "rows 2 to 3 of the request; those before them have been applied" in str(told)
    assert pool.statistics().batches == 2


def test_queues_are_bounded_in_rows_and_in_bytes_but_take_one_request_of_any_size() -> None:
    answers: list[Outcome] = []
    pool = TaskPool(lambda x: [x], max_batch_size=10, max_queue_rows=5)
    pool.submit(task(8, answers))
    with pytest.raises(Overloaded, match="8 rows and 32 bytes are queued"):
        pool.submit(task(1, answers))
    narrow = TaskPool(lambda x: [x], max_queue_bytes=16)
    narrow.submit(task(3, answers))
    with pytest.raises(Overloaded):
        narrow.submit(task(2, answers))
    narrow.submit(task(1, answers))
    assert narrow.statistics().declined == 1


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

    def tasks(self, *rows: int) -> list[Task]:
        return [Task([torch.ones(n, 1)], n, Deadline.after(600.0), lambda _: self._done.release()) for n in rows]

    def submit(self, runtime: Runtime, *rows: int, one_of_many: bool = False) -> None:
        wait_until(runtime.idle)
        runtime.submit({self.pool: self.tasks(*rows)}, one_of_many=one_of_many)

    def finished(self, count: int = 1) -> None:
        for _ in range(count):
            assert self._done.acquire(timeout=60)

    def nothing_finished(self) -> bool:
        return not self._done.acquire(blocking=False)

    def known_as_quick(self, runtime: Runtime) -> None:
        wait_until(runtime.idle)
        for _ in range(60):  # what is quicker is believed by half
            self.pool.note_seconds(2, 1e-6)


DEVICE = "anabranch-device"


def test_quick_batches_run_on_the_submitting_thread_and_others_on_the_device_thread() -> None:
    quick, here = QuickPool(), threading.current_thread().name
    with Runtime([quick.pool]) as runtime:
        quick.submit(runtime, 2)  # has never run
        quick.finished()
        quick.known_as_quick(runtime)
        quick.submit(runtime, 1)
        assert quick.nothing_finished()  # too few rows are not a batch, whoever looks
        quick.submit(runtime, 1)
        quick.finished(2)
        quick.known_as_quick(runtime)
        with runtime.paused():
            quick.submit(runtime, 2)
            assert quick.nothing_finished()
        quick.finished()
        quick.submit(runtime, 100)  # larger than anything that was quick
        quick.finished()
        quick.known_as_quick(runtime)
        quick.seconds = 0.01
        quick.submit(runtime, 2)
        quick.finished()
        quick.submit(runtime, 2)  # not so quick any more
        quick.finished()
    assert quick.ran == [(DEVICE, 2), (here, 2), (DEVICE, 2), (DEVICE, 100), (here, 2), (DEVICE, 2)]


def test_tasks_that_were_queued_before_their_runtime_are_run_by_it() -> None:
    pool = TaskPool(lambda x: [x])
    future = pool.submit(task(1))
    with Runtime([pool]):
        assert future.result(timeout=60.0)[0].shape == (1, 1)  # type: ignore[union-attr]


def test_leaving_a_runtime_fails_waiting_tasks() -> None:
    answers: list[Outcome] = []
    pool = TaskPool(lambda x: [x], min_batch_size=10)
    with Runtime([pool]):
        pool.submit(task(1, answers))
    assert [type(answer) for answer in answers] == [PeerLost]
    with pytest.raises(PeerLost, match="closed"):
        pool.submit(task(1, answers))


# --- the order of tasks: each caller in turn, then the oldest; and the futures of submitted tasks


def callers(pool: TaskPool) -> list[list[str]]:
    batches = []
    while batch := pool.take_batch():
        batches.append([one.caller for one in batch])
    return batches


def test_a_caller_with_many_tasks_and_one_with_few_take_turns_row_by_row() -> None:
    pool = TaskPool(lambda x: [x], max_batch_size=4)
    for _ in range(8):
        pool.submit(task(caller="many"))
    for _ in range(2):
        pool.submit(task(caller="few"))
    pool.submit(task(caller="late", rows=2))
    assert callers(pool) == [["many", "few", "late"], ["many", "few", "many", "many"], ["many", "many", "many", "many"]]


def test_pools_of_a_device_share_the_turns() -> None:
    order: list[str] = []
    done = threading.Semaphore(0)

    def pool(name: str) -> TaskPool:
        return TaskPool(lambda x: (order.append(name), [x])[1], name=name, max_batch_size=1)

    mine, more, theirs = pool("many"), pool("more of many"), pool("few")
    finish = lambda outcome: done.release()  # noqa: E731
    with Runtime([mine, more, theirs]) as runtime:
        with runtime.paused():
            mine.submit(task(caller="many", finish=finish))
            wait_until(lambda: not runtime.idle())  # the device has taken it, and waits for the pause to end
            for _ in range(3):
                mine.submit(task(caller="many", finish=finish))
            more.submit(task(caller="many", finish=finish))
            theirs.submit(task(caller="few", finish=finish))
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
