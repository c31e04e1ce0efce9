"""The scheduler of one device: requests of many callers as batches of its experts, the most urgent first.

::

                            ┌── the device is idle, batches of this size are quick ──> the thread that submits runs it
    submit ──> queues ──────┤
      a heap for each       └── else ──> device thread: concatenate, run, split, answer each
      pool, mode, sizes

Tasks that may share a batch wait in one heap: each caller in turn, row by row, then the oldest. A
task gets a start in a virtual time: the current one, or the end of its caller's earlier tasks if that is later. The
time advances to the start of the running task. So a caller with a thousand waiting rows and one with a single row are
served alternately. A task without a caller starts at the current time.

A batch is due when ``max_batch_size`` rows wait, when ``min_batch_size`` wait and the device is idle, or when the
oldest has waited for ``timeout``. Tasks whose caller has gone or whose deadline has passed are dropped before compute.
Waiting tasks are bounded in rows and bytes; beyond that a task is ``Overloaded`` at once, which costs the caller less
than waiting for a deadline that cannot be met.

Handing a batch to a thread and returning its answers costs tens of microseconds each, and more if both threads need the
interpreter: as much as a small batch takes to compute. So the thread that has read a quick batch runs it. The time of a
batch is estimated from earlier ones; a batch of a size that has never run, or not quickly, goes to the device thread.

``TaskPool`` is the queue of one function of one expert, ``Runtime`` the thread of a device; what waits is in the
scheduler that they share. Source of the turns: start-time fair queueing (Goyal, Vin and Cheng, 1996).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count, repeat

import msgspec
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, DeadlineExceeded, Overloaded, PeerLost, SchemaError
from anabranch.record import spans
from anabranch.tensors import TensorSpec
from anabranch.transport.failures import ends_the_program, note_failure

# Seconds after which an idle runtime wakes up, so that its wait has an end.
_LONGEST_NAP = 60.0
# Seconds of batches that a reading thread may run itself; meanwhile it reads no other request.
_QUICK = 0.0025
# Number of callers above which those without waiting tasks are forgotten.
_MANY = 1024

Outcome = Sequence[Tensor | None] | BaseException
Process = Callable[..., Sequence[Tensor | None]]
"""Runs one batch: the inputs of all its tasks joined along dim 0, ``None`` for an input that the tasks lack."""
ProcessTasks = Callable[[Sequence["Task"]], Sequence[Sequence[Tensor | None]]]
"""Runs one batch given as its tasks; returns the outputs of each."""
Urgency = tuple[float, float, int]
"""Less is more urgent: the start in virtual time, the arrival, a running number."""


class Unrepeatable(RuntimeError):
    """A batch failed after it had changed state, so its tasks must not be rerun one by one."""


class Apart(Exception):
    """A batch of requests that came together failed without a change of state; their client sends each alone."""


class StateSeen(msgspec.Struct, eq=False):
    """The state of the expert that a request has met; apart from its task, whose inputs an answer must not keep.

    Attributes:
        changes: how often the expert had changed before it was the one that the outputs belong to; of parts the latest.
        changed: the request's own forward has changed the expert.
    """

    changes: int = 0
    changed: bool = False


class Task(msgspec.Struct, eq=False):
    """One request, or several that came together, or a part of one that was too large for a batch.

    Attributes:
        inputs: the tensors, agreeing in rows (dim 0).
        rows: the number of rows.
        deadline: after it the answer is useless.
        finish: called once, with the outputs or the error, on the thread that has it; again with the error, if it
            raised one.
        unwanted: returns true if the caller has gone; called before compute, and may abandon the request for good.
        arrived: arrival time, in ``time.monotonic`` seconds.
        nbytes: bytes of the inputs, once it is queued.
        requests: how many requests it is.
        tickets: of each of these the rows, and the name of the activations that ``process_tasks`` keeps, or has kept;
            empty for none.
        at_once: its batch has no minimum.
        evaluating: run in eval mode; only tasks of one mode share a batch.
        updates: a backward that updates the parameters; only those share a batch that do, or that do not.
        sizes: those dimensions of the inputs that tasks of one batch must have in common.
        length: the size of the dimension that is padded to the longest of a batch; 0 for none.
        caller: its name; callers take turns. Empty: served in the order of arrival.
        seen: what it, or a part of it, has met.
        step: computes the task in place of the expert: a step of a session, which shares no batch.
    """

    inputs: Sequence[Tensor | None]
    rows: int
    deadline: Deadline
    finish: Callable[[Outcome], None] = lambda outcome: None
    unwanted: Callable[[], bool] = lambda: False
    arrived: float = msgspec.field(default_factory=time.monotonic)
    requests: int = 1
    tickets: Sequence[tuple[int, bytes]] = ()
    at_once: bool = False
    nbytes: int = 0
    evaluating: bool = False
    updates: bool = True
    sizes: tuple[int, ...] = ()
    length: int = 0
    caller: str = ""
    seen: StateSeen = msgspec.field(default_factory=StateSeen)
    step: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]] | None = None


class PoolStatistics(msgspec.Struct):
    """Counters of a pool since it was made, and its present queue."""

    tasks: int = 0
    batches: int = 0
    rows: int = 0
    dropped: int = 0
    declined: int = 0
    waiting_tasks: int = 0
    waiting_rows: int = 0
    waiting_bytes: int = 0
    busy_seconds: float = 0.0


class _Queue(msgspec.Struct, eq=False):
    """Waiting tasks of one pool that may share a batch."""

    pool: TaskPool
    key: tuple[object, ...]
    heap: list[tuple[Urgency, Task]] = []
    rows: int = 0

    def due_at(self) -> float:
        """Return the ``time.monotonic`` moment at which an idle device should run a batch of this queue."""
        least = self.pool.min_batch_size
        if least <= 1 or self.rows >= least or any(task.at_once for _, task in self.heap):
            return 0.0
        if self.pool.timeout is None:
            return float("inf")
        return min(task.arrived for _, task in self.heap) + self.pool.timeout

    def expected_seconds(self) -> float:
        """Seconds that a batch will take, estimated from batches of its size or, without any, of larger ones."""
        pool = self.pool
        size = min(self.rows, max(pool.max_batch_size, self.heap[0][1].rows)).bit_length()
        return pool.took.get(size) or min(
            (seconds for larger, seconds in pool.took.items() if larger > size), default=float("inf")
        )


class _Scheduler:
    """The tasks that wait for one device. All methods but ``take`` are called with the lock held."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        # Only queues that have tasks: a device may have many experts, of which few are busy at a time.
        self.queues: dict[tuple[object, ...], _Queue] = {}
        self._numbers = count()
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def put(self, pool: TaskPool, task: Task) -> None:
        """Queue a task. Nothing is remembered of callers' turns once nothing waits.

        Raises:
            Overloaded: there is no room.
            PeerLost: the pool is closed.
        """
        counts = pool.counts
        task.nbytes = 0
        for tensor in task.inputs:
            if tensor is not None:
                task.nbytes += tensor.nbytes
        if counts.waiting_tasks or pool.closed:
            pool.check_room(task.rows, task.nbytes)
        if not self.queues:
            self._now = 0.0
            self._ends.clear()
        start = self._now
        if task.caller:
            start = max(start, self._ends.get(task.caller, 0.0))
            self._ends[task.caller] = start + task.rows
            if len(self._ends) > _MANY:
                self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        key = pool, task.evaluating, task.updates, task.sizes
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = _Queue(pool, key)
        heappush(queue.heap, ((start, task.arrived, next(self._numbers)), task))
        queue.rows += task.rows
        counts.tasks += task.requests
        counts.waiting_tasks += task.requests
        counts.waiting_rows += task.rows
        counts.waiting_bytes += task.nbytes

    def most_urgent(self, now: float, pool: TaskPool | None = None) -> _Queue | None:
        """Return the queue with the most urgent task among those with a batch due, of all pools or of one."""
        best = None
        for queue in self.queues.values():
            if (
                (pool is None or queue.pool is pool)
                and (best is None or queue.heap[0][0] < best.heap[0][0])
                and (queue.pool.min_batch_size <= 1 or queue.due_at() <= now)
            ):
                best = queue
        return best

    def next_due(self) -> float:
        """Return the moment at which the next batch is due."""
        due = float("inf")
        for queue in self.queues.values():
            due = 0.0 if queue.pool.min_batch_size <= 1 else min(due, queue.due_at())
        return due

    def take(self, queue: _Queue) -> list[Task]:
        """Return the most urgent task and those that may share its batch, up to ``max_batch_size`` rows, or one larger
        task; fail those past their deadline. A batch that is padded is at most half padding.
        """
        heap, pool, counts = queue.heap, queue.pool, queue.pool.counts
        batch: list[Task] = []
        late: list[Task] = []
        left: list[tuple[Urgency, Task]] = []
        rows = longest = volume = 0
        with self.lock:
            self._now = max(self._now, heap[0][0][0])
            while heap:
                task = heap[0][1]
                if rows and rows + task.rows > pool.max_batch_size:
                    break
                longer, larger = max(longest, task.length), volume + task.rows * task.length
                entry = heappop(heap)
                if (rows + task.rows) * longer > 2 * larger:
                    left.append(entry)
                    continue
                queue.rows -= task.rows
                counts.waiting_tasks -= task.requests
                counts.waiting_rows -= task.rows
                counts.waiting_bytes -= task.nbytes
                if task.unwanted():
                    counts.dropped += task.requests
                elif task.deadline.expired():
                    counts.dropped += task.requests
                    late.append(task)
                else:
                    batch.append(task)
                    rows, longest, volume = rows + task.rows, longer, larger
            if left:
                heap += left
                heapify(heap)
            if not heap:
                del self.queues[queue.key]
        for task in late:
            task.finish(task.deadline.error(peer="client", operation=pool.name))
        return batch

    def clear(self, pool: TaskPool) -> list[Task]:
        """Take all tasks of a pool, in order."""
        mine = [queue for queue in self.queues.values() if queue.pool is pool]
        self.queues = {key: queue for key, queue in self.queues.items() if queue.pool is not pool}
        tasks = [task for queue in mine for _, task in sorted(queue.heap, key=lambda entry: entry[0])]
        pool.counts.waiting_tasks = pool.counts.waiting_rows = pool.counts.waiting_bytes = 0
        return tasks


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
        max_batch_size: rows above which a batch is not made; a larger request runs in parts, one after the other.
        timeout: seconds until a batch below ``min_batch_size`` runs anyway; ``None``: never.
        max_queue_rows: rows that may wait; by default 16 batches.
        max_queue_bytes: bytes that may wait.
        process_tasks: runs batches in place of ``process``, where the tasks of a batch must be told apart.
        whole: ``process_tasks`` gets a larger request whole, and divides it itself.

    Raises:
        ValueError: sizes that are not whole numbers above 0, or a minimum over the maximum.
    """

    def __init__(
        self,
        process: Process | None = None,
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
            sizes = f"{min_batch_size} and {max_batch_size}"
            raise ValueError(f"batch sizes are 1 <= min_batch_size <= max_batch_size, got {sizes}")
        if timeout is not None and not 0 <= timeout < float("inf"):
            raise ValueError(f"timeout is a finite number of seconds or None, got {timeout!r}")
        self.name = name
        self._process_tasks = process_tasks or partial(_run_joined, process)
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        self.timeout = timeout
        self.whole = whole
        self.max_queue_rows = 16 * max_batch_size if max_queue_rows is None else max_queue_rows
        self.max_queue_bytes = max_queue_bytes
        self.tasks_in_batch = 1
        """Number of requests in the running batch, for ``process``."""
        self.took: dict[int, float] = {}
        """Seconds that batches of this many rows (by powers of two) have taken recently."""
        self.scheduler = _Scheduler()
        self.counts = PoolStatistics()
        self.closed = False

    # --- queueing

    def check_room(self, rows: int, nbytes: int) -> None:
        """Raise ``Overloaded`` if there is no room now for a request of this many rows and bytes."""
        if self.closed:
            raise PeerLost(f"{self.name} is closed")
        counts = self.counts
        # An empty queue accepts any request; otherwise one beyond the bound would never be served.
        if counts.waiting_tasks and (
            counts.waiting_rows + rows > self.max_queue_rows or counts.waiting_bytes + nbytes > self.max_queue_bytes
        ):
            with self.scheduler.lock:
                counts.declined += 1
            raise Overloaded(
                f"{self.name}: {counts.waiting_rows} rows and {counts.waiting_bytes} bytes are queued; {rows} more "
                f"rows exceed {self.max_queue_rows} rows or {self.max_queue_bytes} bytes"
            )

    def submit(self, task: Task) -> Future[Sequence[Tensor | None]]:
        """Queue ``task``.

        Returns:
            A future of the outputs; it fails as the batch does. Cancelling it withdraws the task if its batch has not
            begun; a task that is ``unwanted`` cancels it. ``task.finish`` is called too. The task's deadline is checked
            when its batch is due: without a ``timeout``, give ``result`` one.

        Raises:
            Overloaded: there is no room.
            PeerLost: the pool is closed.
        """
        future = _future_of(task)
        with self.scheduler.lock:
            self.scheduler.put(self, task)
            self.scheduler.changed.notify_all()
        return future

    def take_batch(self) -> list[Task]:
        """Return the tasks of the next batch, in order; it need not be due."""
        with self.scheduler.lock:
            queue = self.scheduler.most_urgent(time.monotonic(), self) or self.scheduler.most_urgent(float("inf"), self)
            return [] if queue is None else self.scheduler.take(queue)

    def close(self) -> None:
        """Refuse further tasks and fail those that wait."""
        with self.scheduler.lock:
            self.closed = True
            left = self.scheduler.clear(self)
        for task in left:
            task.finish(PeerLost(f"{self.name} is closed"))

    # --- running

    def run(self, batch: Sequence[Task]) -> None:
        """Run a batch and answer its tasks; if it fails, each is run alone, so that only the faulty one fails; of one
        that is several requests, each is to come again alone.
        """
        rows = requests = 0
        for task in batch:
            rows += task.rows
            requests += task.requests
        try:
            self.counts.batches += 1
            self.counts.rows += rows
            self.tasks_in_batch = requests
            with spans.span(self.name, "compute", tasks=requests, rows=rows):
                if batch[0].rows > self.max_batch_size and not self.whole:
                    outputs: Sequence[Sequence[Tensor | None]] = [
                        in_parts(batch[0], self.max_batch_size, self.name, self._process_tasks)
                    ]
                else:
                    outputs = self._process_tasks(batch)
        except BaseException as error:
            if ends_the_program(error):
                for task in batch:
                    task.finish(error)
                raise
            if requests == 1 or isinstance(error, Unrepeatable):
                for task in batch:
                    _finish(task, error)
            elif len(batch) == 1:
                _finish(batch[0], Apart())
            else:
                for task in batch:
                    self.run([task])
            return
        for task, outcome in zip(batch, outputs, strict=True):
            _finish(task, outcome)

    def note_seconds(self, rows: int, seconds: float) -> None:
        """Record a batch's seconds: a longer time raises the estimate at once, a shorter one lowers it by averaging."""
        self.counts.busy_seconds += seconds
        size = rows.bit_length()
        self.took[size] = max(seconds, (seconds + self.took.get(size, 0.0)) / 2)

    def statistics(self) -> PoolStatistics:
        """Counters since the pool was made, and its present queue."""
        with self.scheduler.lock:
            return msgspec.structs.replace(self.counts)


class Runtime:
    """Runs the batches of several pools on one thread while its ``with`` block runs.

    >>> import torch
    >>> from anabranch.experts import Task
    >>> pool = TaskPool(lambda x: [2 * x])
    >>> with Runtime([pool]):
    ...     pool.submit(Task([torch.ones(1)], 1, Deadline.after(60.0))).result(timeout=60.0)
    [tensor([2.])]

    Among the pools with a batch due, the one with the most urgent task goes first. Leaving the block ends the running
    batch and fails what still waits.

    Args:
        pools: all on one device.
        name: of the thread.
    """

    def __init__(self, pools: Iterable[TaskPool], *, name: str = "device") -> None:
        self._pools = list(pools)
        self._scheduler = _Scheduler()
        for pool in self._pools:
            mine = {key: queue for key, queue in pool.scheduler.queues.items() if queue.pool is pool}
            self._scheduler.queues |= mine  # what waits already
            pool.scheduler = self._scheduler
        self._name = f"anabranch-{name}"
        self._stopped = False
        self._threads = torch.get_num_threads()
        self._running: Deadline | None = None
        # The time until which the device thread sleeps, and whether another thread runs batches in its place.
        self._sleeps_until = 0.0
        self._helped = False
        self._prepared = threading.local()
        self._batch = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Runtime:
        for pool in self._pools:
            pool.closed = False  # a backend may be served again
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        return self

    def __contains__(self, pool: TaskPool) -> bool:
        return pool.scheduler is self._scheduler

    def __exit__(self, *_: object) -> None:
        """End the thread after the running batch, for which it waits at most ten seconds."""
        with self._scheduler.lock:
            self._stopped = True
            self._scheduler.changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        for pool in self._pools:
            pool.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the block between two batches, while none runs."""
        if not self._batch.acquire(timeout=_LONGEST_NAP):
            raise DeadlineExceeded("a batch did not end", peer=self._name, operation="pause", elapsed=_LONGEST_NAP)
        try:
            yield
        finally:
            self._batch.release()

    def idle(self) -> bool:
        """Return True while the device thread sleeps and no other runs batches: a quick batch runs where it is
        submitted.
        """
        with self._scheduler.lock:
            return self._sleeps_until > 0 and not self._helped

    def healthy(self) -> bool:
        """Return True unless the running batch has overrun all its tasks' deadlines: the device is stuck, or far too
        slow.
        """
        running = self._running
        return running is None or not running.expired()

    def submit(self, tasks: Mapping[TaskPool, Iterable[Task]], *, one_of_many: bool = False) -> None:
        """Queue tasks of its pools; fail those without room. Run them on this thread if that is fastest.

        ``one_of_many`` is true on one of many such threads, which must not start a team of torch's threads each.
        """
        declined: list[tuple[Task, BoundaryError]] = []
        scheduler = self._scheduler
        with scheduler.lock:
            for pool, its_tasks in tasks.items():
                for task in its_tasks:
                    try:
                        scheduler.put(pool, task)
                    except BoundaryError as error:
                        declined.append((task, error))
            now = time.monotonic()
            quick = None if one_of_many and self._threads > 1 else self._find_quick(now)
            if quick is None and not self._helped and scheduler.next_due() < self._sleeps_until:
                scheduler.changed.notify_all()
        try:
            for task, reason in declined:
                task.finish(reason)
        finally:
            if quick is not None:
                self._help(quick, now + _QUICK)

    def _find_quick(self, now: float) -> _Queue | None:
        """Reserve a queue whose batch this thread may run, safe from the device thread and pauses; else ``None``."""
        if self._stopped or self._helped or not self._sleeps_until:
            return None
        queue = self._scheduler.most_urgent(now)
        if queue is None or queue.expected_seconds() > _QUICK:
            return None
        self._helped = self._batch.acquire(blocking=False)
        return queue if self._helped else None

    def _help(self, queue: _Queue | None, until: float) -> None:
        scheduler = self._scheduler
        try:
            if not hasattr(self._prepared, "done"):
                self._prepare_thread()
            while queue is not None:
                self._run_batch(queue)
                queue = None
                if scheduler.queues:
                    with scheduler.lock:
                        now = time.monotonic()
                        queue = scheduler.most_urgent(now)
                        if queue is not None and now + queue.expected_seconds() > until:
                            queue = None
        finally:
            with scheduler.lock:
                self._batch.release()
                self._helped = False
                if scheduler.queues and scheduler.next_due() < self._sleeps_until:
                    scheduler.changed.notify_all()

    def _prepare_thread(self) -> None:
        # OpenMP keeps the number per thread: without this, a new thread's matrix products use all cores, however few
        # the process was given, and wait for one another.
        torch.set_num_threads(self._threads)
        self._prepared.done = True

    def _run(self) -> None:
        self._prepare_thread()
        while True:
            with self._scheduler.lock:
                queue = self._next_queue()
            if queue is None:
                return
            try:
                with self._batch:
                    self._run_batch(queue)
            except BaseException as error:  # noqa: BLE001 - the device's other callers must not wait for a dead thread
                note_failure("experts.batch_failed", error)
            del queue  # of a pool, which is not to outlive its server while this thread sleeps

    def _run_batch(self, queue: _Queue) -> None:
        pool = queue.pool
        batch = self._scheduler.take(queue)
        if not batch:
            return
        started = time.monotonic()
        last = batch[0].deadline
        rows = 0
        for task in batch:
            rows += task.rows
            if task.deadline is not last and last < task.deadline:
                last = task.deadline
        self._running = last
        try:
            pool.run(batch)
        finally:
            self._running = None
        pool.note_seconds(rows, time.monotonic() - started)

    def _next_queue(self) -> _Queue | None:
        """Return the queue to serve, as soon as one has a batch due; ``None`` when the thread should end."""
        while not self._stopped:
            now = time.monotonic()
            next_due = float("inf")
            if self._scheduler.queues and not self._helped:
                queue = self._scheduler.most_urgent(now)
                if queue is not None:
                    return queue
                next_due = self._scheduler.next_due()
            self._sleeps_until = min(next_due, now + _LONGEST_NAP)
            self._scheduler.changed.wait(timeout=self._sleeps_until - now)
            self._sleeps_until = 0.0
        return None


def _run_joined(process: Process | None, batch: Sequence[Task]) -> Sequence[Sequence[Tensor | None]]:
    assert process is not None
    if len(batch) == 1:
        return [process(*batch[0].inputs)]
    return split_outputs(process(*join_rows([task.inputs for task in batch], [task.rows for task in batch])), batch)


def _finish(task: Task, outcome: Outcome) -> None:
    """Answer; an error in doing so does not end the thread, and is the answer in place of outputs."""
    try:
        task.finish(outcome)
    except BaseException as error:
        if ends_the_program(error):
            raise
        note_failure("experts.answer_failed", error)
        if not isinstance(outcome, BaseException):
            _finish(task, error)


def _future_of(task: Task) -> Future[Sequence[Tensor | None]]:
    """Return a future that ``task`` sets when it is finished, and that withdraws it when cancelled."""
    future: Future[Sequence[Tensor | None]] = Future()
    finish, unwanted = task.finish, task.unwanted

    def settle(outcome: Outcome) -> None:
        with suppress(InvalidStateError):  # cancelled
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        finish(outcome)

    def is_unwanted() -> bool:
        if unwanted():
            future.cancel()
        # A running one cannot be cancelled; one that is done is of an earlier submission of the task.
        return future.cancelled() if future.done() else not future.set_running_or_notify_cancel()

    task.finish, task.unwanted = settle, is_unwanted
    return future


def join_rows(requests: Sequence[Sequence[Tensor | None]], rows: Sequence[int]) -> list[Tensor | None]:
    """Return each of the tensors that some requests of so many ``rows`` have in common as one tensor."""
    joined: list[Tensor | None] = []
    for column in zip(*requests, strict=True):
        like = next((tensor for tensor in column if tensor is not None), None)
        if like is None:
            joined.append(None)
            continue
        # A gradient of only some requests is zero for the others.
        pairs = zip(rows, column, strict=True)
        joined.append(torch.cat([like.new_zeros(n, *like.shape[1:]) if one is None else one for n, one in pairs]))
    return joined


def rows_of(tensors: Sequence[Tensor | None], start: int, rows: int) -> list[Tensor | None]:
    """Return of each tensor the ``rows`` that begin at ``start``."""
    return [None if tensor is None else tensor[start : start + rows] for tensor in tensors]


def split_outputs(outputs: Sequence[Tensor | None], batch: Sequence[Task]) -> list[Sequence[Tensor | None]]:
    """Return the outputs of each task of a batch."""
    if len(batch) == 1:
        return [outputs]
    sizes = [task.rows for task in batch]
    columns = [[None] * len(sizes) if output is None else torch.split(output, sizes) for output in outputs]
    return [[column[index] for column in columns] for index in range(len(batch))]


def in_parts(task: Task, size: int, name: str, process_tasks: ProcessTasks) -> list[Tensor | None]:
    """Return the outputs of a task of more rows than ``size``, computed in parts until its deadline."""
    parts: list[Sequence[Tensor | None]] = []
    starts = range(0, task.rows, size)
    rows = [min(size, task.rows - start) for start in starts]
    for start, its_rows in zip(starts, rows, strict=True):
        task.deadline.check(peer="client", operation=name)
        part = msgspec.structs.replace(task, inputs=rows_of(task.inputs, start, size), rows=its_rows)
        parts += process_tasks([part])
    return join_rows(parts, rows)


# --- requests of unequal lengths, padded to the longest
#
#     lengths 2 and 4     x x 0 0      mask  1 1 0 0      outputs and gradients are cut back to each request's length
#                         x x x x            1 1 1 1
#
# All dimensions that vary in a padded schema are this one length. Gradients of outputs are padded with zeros too, so
# padding adds nothing to any gradient, if the module's outputs at values do not depend on masked positions.


def fill(tensor: Tensor | None, spec: TensorSpec | None, length: int) -> Tensor | None:
    """Return ``tensor`` with the dimensions that vary padded with zeros at the ends to ``length``."""
    if tensor is None or spec is None or all(size == length for size in spec.sizes_of(tensor.shape)):
        return tensor
    shape = spec.with_sizes([length] * len(spec.varying))
    filled = tensor.new_zeros(len(tensor), *shape)
    filled[tuple(slice(size) for size in tensor.shape)] = tensor
    return filled


def cut(tensor: Tensor | None, spec: TensorSpec | None, length: int) -> Tensor | None:
    """Return ``tensor`` with the dimensions that vary cut to ``length``."""
    if tensor is not None and spec is not None:
        for dimension in spec.varying:
            tensor = tensor.narrow(1 + dimension, 0, length)
    return tensor


def make_mask(batch: Sequence[Task], device: torch.device) -> Tensor:
    """Return the bool mask of the values of a padded batch."""
    lengths = torch.tensor([task.length for task in batch], device=device)
    each = lengths.repeat_interleave(torch.tensor([task.rows for task in batch], device=device))
    return torch.arange(_longest(batch), device=device) < each[:, None]


def join_padded(batch: Sequence[Task], specs: Sequence[TensorSpec | None]) -> list[list[Tensor | None]]:
    """Return the inputs of each task of a batch, of the longest one's length; the tasks keep their own, to be run one
    by one if the batch fails.
    """
    return [list(map(fill, task.inputs, specs, repeat(_longest(batch)))) for task in batch]


def split_padded(
    outputs: Sequence[Sequence[Tensor | None]],
    batch: Sequence[Task],
    specs: Sequence[TensorSpec | None],
    names: Sequence[str],
) -> list[list[Tensor | None]]:
    """Return the outputs of each task of a batch, of its own length.

    Raises:
        SchemaError: a size that varies is not the length of the batch.
    """
    longest = _longest(batch)
    for output, spec, name in zip(outputs[0], specs, names, strict=True):
        if output is not None and spec is not None and any(n != longest for n in spec.sizes_of(output.shape)):
            says = f"expected length {longest}, as its inputs were padded to, got {tuple(output.shape)}"
            raise SchemaError(f"{name}: {says}; sizes of outputs that vary are those of the inputs")
    return [list(map(cut, mine, specs, repeat(task.length))) for task, mine in zip(batch, outputs, strict=True)]


def _longest(batch: Sequence[Task]) -> int:
    return max(task.length for task in batch)
