"""A queue that batches one expert's requests, and hands the batches to the device.

::

    threads that read ─── submit ──> [ task | task | task ] ── take_batch ──> device thread: concatenate, run, split,
                                     in their order                                           answer each

A batch is due when ``max_batch_size`` rows wait, when ``min_batch_size`` wait and the device is idle, or when the
oldest has waited for ``timeout``. Tasks whose caller has gone or whose deadline has passed are dropped before compute.
Which tasks may share a batch, and whose turn it is, is in ``waiting_tasks.py`` and ``fair_order.py``.
Waiting tasks are bounded in rows and bytes; beyond that a task is ``Overloaded`` at once, which costs the caller less
than waiting for a deadline that cannot be met.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from threading import RLock

import torch
from torch import Tensor

from anabranch.errors import BoundaryError, NonFinite, Overloaded, PeerLost
from anabranch.experts.server.batching.device_copies import DeviceCopies
from anabranch.experts.server.batching.fair_order import FairOrder
from anabranch.experts.server.batching.task import Task
from anabranch.experts.server.batching.waiting_tasks import Choice, Urgency, WaitingTasks
from anabranch.record import spans
from anabranch.transport.failures import ends_the_program, note_failure

__all__ = [
    "PoolStatistics",
    "Process",
    "ProcessTasks",
    "Task",
    "TaskPool",
    "Unrepeatable",
    "join_tasks",
    "split_outputs",
]

Process = Callable[..., Sequence[Tensor | None]]
"""Runs one batch: the inputs of all its tasks joined along dim 0, ``None`` for an input that the tasks lack."""


class Unrepeatable(RuntimeError):
    """A batch failed after it had changed state, so its tasks must not be rerun one by one."""


class _NonFiniteLater(NonFinite, Unrepeatable):
    """A part of a request met NaN or Inf after earlier parts had changed state."""


ProcessTasks = Callable[[Sequence[Task]], Sequence[Sequence[Tensor | None]]]
"""Runs one batch given as its tasks; returns the outputs of each."""


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """Counters of a pool since it was made, and its present queue."""

    tasks: int
    batches: int
    rows: int
    dropped: int
    declined: int
    waiting_tasks: int
    waiting_rows: int
    waiting_bytes: int
    busy_seconds: float = 0.0


class TaskPool:
    """The queue of one function of one expert.

    >>> from anabranch.deadline import Deadline
    >>> pool = TaskPool(lambda x: [2 * x], name="ffn.0_forward")
    >>> few = pool.submit(Task([torch.ones(1, 2)], 1, Deadline.after(60.0)))
    >>> more = pool.submit(Task([torch.zeros(2, 2)], 2, Deadline.after(60.0)))
    >>> pool.run(pool.take_batch())
    >>> few.result()[0].shape, more.result()[0].shape, pool.statistics().batches
    (torch.Size([1, 2]), torch.Size([2, 2]), 1)

    Args:
        process: runs one batch.
        name: the pool's name in errors and events.
        min_batch_size: rows below which a batch waits for more, at most for ``timeout``.
        max_batch_size: rows above which a batch is not made; a larger request is split.
        timeout: seconds until a batch below ``min_batch_size`` runs anyway; ``None``: never.
        max_queue_rows: rows that may wait; by default 16 batches.
        max_queue_bytes: bytes that may wait.
        process_tasks: runs batches instead of ``process``, where the tasks of a batch must be told apart.
        whole: runs the parts of a larger request one directly after the other, whether or not its caller still waits:
            for a ``process`` that changes state, so that no pause or retry sees a request that is half done.

    Raises:
        ValueError: sizes that are not whole numbers above 0, or a minimum over the maximum.
    """

    def __init__(
        self,
        process: Process,
        *,
        name: str = "pool",
        min_batch_size: int = 1,
        max_batch_size: int = 4096,
        timeout: float | None = None,
        max_queue_rows: int | None = None,
        max_queue_bytes: int = 1 << 30,
        process_tasks: ProcessTasks | None = None,
        whole: bool = False,
    ) -> None:
        if not 1 <= min_batch_size <= max_batch_size:
            raise ValueError(
                f"batch sizes are 1 <= min_batch_size <= max_batch_size, got {min_batch_size} and {max_batch_size}"
            )
        if timeout is not None and not 0 <= timeout < float("inf"):
            raise ValueError(f"timeout is a finite number of seconds or None, got {timeout!r}")
        self.name = name
        self.process = process
        self._process_tasks = process_tasks or self._join_and_process
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        self.timeout = timeout
        self._whole = whole
        self.max_queue_rows = 16 * max_batch_size if max_queue_rows is None else max_queue_rows
        self.max_queue_bytes = max_queue_bytes
        self.copies: DeviceCopies | None = None
        """Copies to and from the device on which ``process`` computes; ``None`` if it computes in main memory."""
        self.tasks_in_batch = 1
        """Number of tasks in the running batch, for ``process``."""
        self._queue = WaitingTasks()
        self.share(RLock(), {})
        self._busy_seconds = 0.0
        self._tasks = self._batches = self._rows_run = self._dropped = self._declined = 0
        # Seconds that batches of this many rows (by powers of two) have taken recently.
        self._took: dict[int, float] = {}
        self._closed = False

    def share(
        self,
        lock: RLock,
        filled: dict[TaskPool, None],
        changed: threading.Condition | None = None,
        order: FairOrder | None = None,
    ) -> None:
        """Set the state that the pool shares with the other pools of its runtime.

        Args:
            lock: held while a queue is read or changed.
            filled: the pools that have tasks, so that the others need not be searched.
            changed: over ``lock``; notified when a task arrives.
            order: the turns of the callers.
        """
        if self._queue:
            filled[self] = None
        self.lock = lock
        self.changed = changed or threading.Condition(lock)
        self._filled = filled
        self._order = order or FairOrder()

    def check_room(self, rows: int, nbytes: int) -> None:
        """Raise ``Overloaded`` if there is no room now for a request of this many rows and bytes."""
        # Checked again under the lock when the task is queued.
        if self._queue or self._closed:
            with self.lock:
                self._check_room(rows, nbytes)

    def _check_room(self, rows: int, nbytes: int) -> None:
        if self._closed:
            raise PeerLost(f"{self.name} is closed")
        # An empty queue accepts any request; otherwise one beyond the bound would never be served.
        waiting = self._queue
        if waiting and (waiting.rows + rows > self.max_queue_rows or waiting.nbytes + nbytes > self.max_queue_bytes):
            self._declined += 1
            raise Overloaded(
                f"{self.name}: {waiting.rows} rows and {waiting.nbytes} bytes are queued; {rows} more rows exceed "
                f"{self.max_queue_rows} rows or {self.max_queue_bytes} bytes"
            )

    def submit(self, task: Task) -> Future[Sequence[Tensor | None]]:
        """Queue ``task``, split if it is larger than a batch.

        Returns:
            A future of the outputs; it fails as the batch does. Cancelling it withdraws the task, or returns False if
            its batch has begun; a task that is ``unwanted`` cancels it. ``task.finish`` is called too. The task's
            deadline is checked when its batch is due: without a ``timeout``, give ``result`` one.

        Raises:
            Overloaded: there is no room.
            PeerLost: the pool is closed.
        """
        future = _future_of(task)
        with self.lock:
            self._put(task)
            self.changed.notify_all()
        return future

    def submit_all(self, tasks: Iterable[Task]) -> None:
        """Queue tasks that may share a batch; fail those without room."""
        declined: list[tuple[Task, BoundaryError]] = []
        with self.lock:
            self.put_all(tasks, declined)
            self.changed.notify_all()
        for task, reason in declined:
            task.finish(reason)

    def put_all(self, tasks: Iterable[Task], declined: list[tuple[Task, BoundaryError]]) -> None:
        """``submit_all`` for a caller that holds ``lock`` and wakes the device; appends declined tasks with reasons."""
        for task in tasks:
            try:
                self._put(task)
            except BoundaryError as error:
                declined.append((task, error))

    def _put(self, task: Task) -> None:
        if self._queue or self._closed:
            self._check_room(task.rows, task.nbytes)
        if not self._filled:
            self._order.forget()
        self._tasks += 1
        self._filled[self] = None
        in_one = self._whole or task.rows <= self.max_batch_size
        for part in [task] if in_one else _split(task, self.max_batch_size):
            self._queue.add(part, self._order)

    # --- called by the runtime, which holds ``changed`` meanwhile

    def due_at(self) -> float:
        """Return the ``time.monotonic`` moment at which an idle device should run a batch of this pool."""
        return self._queue.due_at(self.min_batch_size, self.timeout)

    def urgency(self) -> Urgency:
        """Return the urgency of the next batch: less is more urgent."""
        return self._next()[1]

    def expected_seconds(self) -> float:
        """Seconds that the next batch will take, estimated from batches of its size or, without any, of larger ones."""
        rows = self._next()[2]
        size = (rows if self._whole else min(rows, self.max_batch_size)).bit_length()
        return self._took.get(size) or min(
            (seconds for larger, seconds in self._took.items() if larger > size), default=float("inf")
        )

    def _next(self) -> tuple[object, Urgency, int]:
        late = float("inf")
        if self.min_batch_size > 1:
            late = float("-inf") if self.timeout is None else time.monotonic() - self.timeout
        found = self._queue.first(self.min_batch_size, late)
        return self._queue.first() if found[0] is None else found

    def note_seconds(self, rows: int, seconds: float) -> None:
        """Record a batch's seconds: a longer time raises the estimate at once, a shorter one lowers it by averaging."""
        self._busy_seconds += seconds
        size = rows.bit_length()
        self._took[size] = max(seconds, (seconds + self._took.get(size, 0.0)) / 2)

    def take_batch(self) -> list[Task]:
        """Return the most urgent task and those that may share its batch, in order, up to ``max_batch_size`` rows, or
        one larger task that is to run ``whole``; drops those that are unwanted or past their deadline.

        A batch that is padded to its longest is at most half padding.
        """
        batch: list[Task] = []
        late: list[Task] = []
        rows = longest = volume = 0

        def choose(task: Task) -> Choice:
            nonlocal rows, longest, volume
            if rows and rows + task.rows > self.max_batch_size:
                return Choice.STOP
            longer, larger = max(longest, task.length), volume + task.rows * task.length
            if (rows + task.rows) * longer > 2 * larger:
                return Choice.LEAVE
            if task.unwanted():
                self._dropped += 1
            elif task.deadline.expired():
                self._dropped += 1
                late.append(task)
            else:
                batch.append(task)
                rows, longest, volume = rows + task.rows, longer, larger
            return Choice.TAKE

        with self.lock:
            if self._queue:
                key, urgency, _ = self._next()
                self._queue.take(key, choose)
                self._order.serve(urgency[1])
            if not self._queue:
                self._filled.pop(self, None)
        for task in late:
            task.finish(task.deadline.error(peer="client", operation=self.name))
        return batch

    def open(self) -> None:
        """Accept tasks, also after ``close``: a backend may be served again."""
        with self.lock:
            self._closed = False

    def close(self) -> None:
        """Refuse further tasks and fail those that wait."""
        with self.lock:
            self._closed = True
            left = self._queue.clear()
            self._filled.pop(self, None)
        for task in left:
            task.finish(PeerLost(f"{self.name} is closed"))

    def run(self, batch: Sequence[Task]) -> None:
        """Run a batch and answer its tasks; if it fails, each is run alone, so that only the faulty one fails."""
        if not batch:
            return
        if batch[0].rows > self.max_batch_size:
            for part in _split(batch[0], self.max_batch_size, whole=True):
                if not part.unwanted():
                    self.run([part])
            return
        rows = 0
        for task in batch:
            rows += task.rows
        try:
            self._batches += 1
            self._rows_run += rows
            self.tasks_in_batch = len(batch)
            with spans.span(self.name, "compute", tasks=len(batch), rows=rows):
                outputs = self._process_tasks(batch) if self.copies is None else self._process_there(batch, self.copies)
        except BaseException as error:
            if ends_the_program(error):
                for task in batch:
                    task.finish(error)
                raise
            if len(batch) > 1 and not isinstance(error, Unrepeatable):
                for task in batch:
                    self.run([task])
            else:
                for task in batch:
                    _finish(task, error)
            return
        for task, its_outputs in zip(batch, outputs, strict=True):
            _finish(task, its_outputs)

    def _join_and_process(self, batch: Sequence[Task]) -> Sequence[Sequence[Tensor | None]]:
        if len(batch) == 1:
            return [self.process(*batch[0].inputs)]
        outputs = self.process(*join_tasks(batch))
        return split_outputs(outputs, batch)

    def _process_there(self, batch: Sequence[Task], copies: DeviceCopies) -> Sequence[Sequence[Tensor | None]]:
        for task in batch:
            if task.copied is not None:
                copies.await_arrival(task.inputs, task.copied)
        return copies.take(self._process_tasks(batch))

    def statistics(self) -> PoolStatistics:
        """Counters since the pool was made, and its present queue."""
        with self.lock:
            return PoolStatistics(
                self._tasks,
                self._batches,
                self._rows_run,
                self._dropped,
                self._declined,
                len(self._queue),
                self._queue.rows,
                self._queue.nbytes,
                self._busy_seconds,
            )


def _finish(task: Task, outcome: Sequence[Tensor | None] | BaseException) -> None:
    """Set a task's outcome; an error in doing so is its caller's answer, and does not end the thread."""
    try:
        task.finish(outcome)
    except BaseException as error:
        if ends_the_program(error):
            raise
        note_failure("experts.answer_failed", error)
        task.finish(error)


def _future_of(task: Task) -> Future[Sequence[Tensor | None]]:
    """Return a future that ``task`` sets when it is finished, and that withdraws it when cancelled."""
    future: Future[Sequence[Tensor | None]] = Future()
    finish, unwanted = task.finish, task.unwanted

    def settle(outcome: Sequence[Tensor | None] | BaseException) -> None:
        try:
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        except InvalidStateError:
            spans.mark("experts.cancelled_late")
        finish(outcome)

    def is_unwanted() -> bool:
        # Called again for each part of a split task, whose first part may have run.
        if future.running():
            if unwanted():
                future.set_exception(CancelledError())
            return future.done()
        if unwanted():
            future.cancel()
        return future.cancelled() or not future.set_running_or_notify_cancel()

    def notify(future: Future[Sequence[Tensor | None]]) -> None:
        if future.cancelled():
            # Callers in ``concurrent.futures.wait`` would not notice until the task's turn comes.
            future.set_running_or_notify_cancel()

    future.add_done_callback(notify)
    task.finish, task.unwanted = settle, is_unwanted
    return future


def split_outputs(outputs: Sequence[Tensor | None], batch: Sequence[Task]) -> list[list[Tensor | None]]:
    """Return the outputs of each task of a batch."""
    sizes = [task.rows for task in batch]
    columns = [[None] * len(sizes) if output is None else torch.split(output, sizes) for output in outputs]
    return [[column[index] for column in columns] for index in range(len(batch))]


def join_tasks(batch: Sequence[Task], inputs: Sequence[Sequence[Tensor | None]] | None = None) -> list[Tensor | None]:
    """Return the inputs of a batch, each as one tensor; ``inputs`` instead of the tasks' own if given."""
    joined: list[Tensor | None] = []
    for column in zip(*(inputs or [task.inputs for task in batch]), strict=True):
        present = [tensor for tensor in column if tensor is not None]
        if not present:
            joined.append(None)
            continue
        like = present[0]
        # A gradient of only some requests is zero for the others.
        filled = [
            like.new_zeros(task.rows, *like.shape[1:]) if tensor is None else tensor
            for task, tensor in zip(batch, column, strict=True)
        ]
        joined.append(torch.cat(filled))
    return joined


def _split(task: Task, size: int, *, whole: bool = False) -> list[Task]:
    """Parts of at most ``size`` rows that together finish ``task``, with its first error if there is one.

    ``whole``: they run in order, and only an error leaves out the later ones, not a caller who has gone.
    """
    starts = range(0, task.rows, size)
    answers: list[Sequence[Tensor | None]] = [()] * len(starts)
    lock = threading.Lock()
    state = {"left": len(starts), "failed": 0}

    def finisher(index: int) -> Callable[[Sequence[Tensor | None] | BaseException], None]:
        def finish(outcome: Sequence[Tensor | None] | BaseException) -> None:
            with lock:
                state["left"] -= 1
                if isinstance(outcome, BaseException):
                    if whole and index:
                        outcome = _failed_later(outcome, range(index * size, min((index + 1) * size, task.rows)))
                    state["failed"] += 1
                    first, last = state["failed"] == 1, False
                else:
                    answers[index] = outcome
                    first, last = False, state["left"] == 0 and not state["failed"]
            if first and isinstance(outcome, BaseException):
                task.finish(outcome)
            elif last:
                columns = zip(*answers, strict=True)
                task.finish([_concatenate(column) for column in columns])

        return finish

    def unwanted() -> bool:
        return state["failed"] > 0 or (not whole and task.unwanted())

    return [
        Task(
            [None if tensor is None else tensor[start : start + size] for tensor in task.inputs],
            min(size, task.rows - start),
            task.deadline,
            finisher(index),
            unwanted,
            task.arrived,
            copied=task.copied,
            evaluating=task.evaluating,
            updates=task.updates,
            sizes=task.sizes,
            length=task.length,
            caller=task.caller,
            priority=task.priority,
            seen=task.seen,
        )
        for index, start in enumerate(starts)
    ]


def _failed_later(error: BaseException, rows: range) -> BaseException:
    """``error`` of these rows of a request whose earlier rows have changed state; such a request is not run again."""
    if ends_the_program(error):
        return error
    which = f"rows {rows[0]} to {rows[-1]} of the request; those before them have been applied"
    if isinstance(error, NonFinite):
        return _NonFiniteLater(f"{error} ({which})")
    later = Unrepeatable(f"{type(error).__name__}: {error} ({which})")
    later.__cause__ = error
    return later


def _concatenate(column: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in column if tensor is not None]
    return torch.cat(present) if present else None
