"""Runs the most urgent batch of a device's experts, one at a time, the experts taking turns.

::

                           ┌── the device is idle, batches of this size are quick ──> the thread that submits runs it
    submit ──> pools ──────┤
                           └── else ──> device thread

Handing a batch to a thread and returning its answers costs tens of microseconds each, and more if both threads need the
interpreter: as much as a small batch takes to compute. So the thread that has read a quick batch runs it. The time of a
batch is estimated from earlier ones; a batch of a size that has never run, or not quickly, goes to the device thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, DeadlineExceeded
from anabranch.experts.server.batching.fair_order import FairOrder
from anabranch.experts.server.batching.task_pool import Task, TaskPool
from anabranch.experts.server.batching.waiting_tasks import LEAST_URGENT
from anabranch.transport.failures import note_failure

__all__ = ["Runtime"]

# Seconds after which an idle runtime wakes up, so that its wait has an end.
_LONGEST_NAP = 60.0
# Seconds of batches that a reading thread may run itself; meanwhile it reads no other request.
_QUICK = 0.0025


class Runtime:
    """Runs the batches of several pools on one thread while its ``with`` block runs.

    >>> import torch
    >>> from anabranch.experts import Task
    >>> pool = TaskPool(lambda x: [2 * x])
    >>> with Runtime([pool]):
    ...     pool.submit(Task([torch.ones(1)], 1, Deadline.after(60.0))).result(timeout=60.0)
    [tensor([2.])]

    Among the pools with a batch due, the one with the most urgent task goes first: the task of the highest priority, of
    these the one whose caller's turn it is (``fair_order.py``), of these the oldest. Leaving the block ends the running
    batch and fails what still waits.

    Args:
        pools: all on one device.
        name: of the thread.
    """

    def __init__(
        self,
        pools: Iterable[TaskPool],
        *,
        name: str = "device",
    ) -> None:
        self._pools = list(pools)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        # Only the pools that have tasks: a device may have many experts, of which few are busy at a time.
        self._filled: dict[TaskPool, None] = {}
        order = FairOrder()
        for pool in self._pools:
            pool.share(self._lock, self._filled, self._changed, order)
        self._stopped = False
        self._threads = torch.get_num_threads()
        self._running: Deadline | None = None
        # The time until which the device thread sleeps, and whether another thread runs batches in its place.
        self._sleeps_until = 0.0
        self._helped = False
        self._prepared = threading.local()
        self._batch = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"anabranch-{name}", daemon=True)

    def __enter__(self) -> Runtime:
        for pool in self._pools:
            pool.open()
        self._threads = torch.get_num_threads()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, pool: TaskPool) -> bool:
        return pool.changed is self._changed

    def close(self) -> None:
        """End the thread after the running batch, for which it waits at most ten seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)
        for pool in self._pools:
            pool.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the block between two batches, while none runs."""
        if not self._batch.acquire(timeout=_LONGEST_NAP):
            raise DeadlineExceeded(
                "a batch did not end", peer=self._thread.name, operation="pause", elapsed=_LONGEST_NAP
            )
        try:
            yield
        finally:
            self._batch.release()

    def idle(self) -> bool:
        """Return True while the device thread sleeps and no other runs batches: a quick batch runs where it is
        submitted.
        """
        with self._lock:
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
        if not tasks:
            return
        declined: list[tuple[Task, BoundaryError]] = []
        with self._lock:
            for pool, its_tasks in tasks.items():
                pool.put_all(its_tasks, declined)
            now = time.monotonic()
            quick = None if one_of_many and self._threads > 1 else self._find_quick(now)
            if quick is None and not self._helped and any(pool.due_at() < self._sleeps_until for pool in tasks):
                self._changed.notify_all()
        try:
            for task, reason in declined:
                task.finish(reason)
        finally:
            if quick is not None:
                self._help(quick, now + _QUICK)

    def _find_quick(self, now: float) -> TaskPool | None:
        """Reserve a pool whose batch this thread may run, safe from the device thread and pauses; else ``None``."""
        if self._stopped or self._helped or not self._sleeps_until:
            return None
        pool = self._most_urgent(now)
        if pool is None or pool.copies is not None or pool.expected_seconds() > _QUICK:
            return None
        self._helped = self._batch.acquire(blocking=False)
        return pool if self._helped else None

    def _help(self, first: TaskPool, until: float) -> None:
        try:
            self._prepare_thread()
            self._run_batch(first)
            while self._filled:
                with self._lock:
                    now = time.monotonic()
                    pool = self._most_urgent(now)
                    if pool is None or pool.copies is not None or now + pool.expected_seconds() > until:
                        break
                self._run_batch(pool)
        finally:
            with self._lock:
                self._batch.release()
                self._helped = False
                if self._filled and any(pool.due_at() < self._sleeps_until for pool in self._filled):
                    self._changed.notify_all()

    def _prepare_thread(self) -> None:
        # # OpenMP keeps the number per thread: without this, a new thread's matrix products use all cores, however few
        # the process was given, and wait for one another.
        if not hasattr(self._prepared, "done"):
            torch.set_num_threads(self._threads)
            self._prepared.done = True

    def _run(self) -> None:
        self._prepare_thread()
        while True:
            with self._changed:
                pool = self._next_pool()
            if pool is None:
                return
            try:
                with self._batch:
                    self._run_batch(pool)
            except BaseException as error:  # noqa: BLE001 - the device's other callers must not wait for a dead thread
                note_failure("experts.batch_failed", error)

    def _run_batch(self, pool: TaskPool) -> None:
        batch = pool.take_batch()
        if not batch:
            return
        started = time.monotonic()
        last = batch[0].deadline
        rows = 0
        for task in batch:
            rows += task.rows
            if last < task.deadline:
                last = task.deadline
        if rows > pool.max_batch_size:
            # A request that runs whole continues after its deadline, which does not mean that the device is stuck.
            last = Deadline.after(max(last.remaining(), _LONGEST_NAP))
        self._running = last
        try:
            pool.run(batch)
        finally:
            self._running = None
        pool.note_seconds(rows, time.monotonic() - started)

    def _next_pool(self) -> TaskPool | None:
        """Return the pool to serve, as soon as one has a batch due; ``None`` when the thread should end."""
        while not self._stopped:
            now = time.monotonic()
            pool = None if self._helped else self._most_urgent(now)
            if pool is not None:
                return pool
            next_due = (
                now + _LONGEST_NAP
                if self._helped
                else min((pool.due_at() for pool in self._filled), default=float("inf"))
            )
            self._sleeps_until = min(next_due, now + _LONGEST_NAP)
            self._changed.wait(timeout=self._sleeps_until - now)
            self._sleeps_until = 0.0
        return None

    def _most_urgent(self, now: float) -> TaskPool | None:
        """Return the pool with the most urgent task among those with a batch due."""
        if len(self._filled) == 1:
            for pool in self._filled:
                return pool if pool.due_at() <= now else None
        found, least = None, LEAST_URGENT
        for pool in self._filled:
            if pool.due_at() <= now and (urgency := pool.urgency()) < least:
                found, least = pool, urgency
        return found
