"""The loop that runs the most urgent batch on its device: one thread a device, all experts on it taking turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

import torch

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded
from anabranch.events import report
from anabranch.experts.task_pool import TaskPool

__all__ = ["Runtime"]

# A runtime with nothing to do looks up this often, in seconds, so that its wait has an end.
_LONGEST_NAP = 60.0


class Runtime:
    """Runs the batches of several pools on one thread while its ``with`` block runs.

    >>> import torch
    >>> from anabranch.experts import Task
    >>> pool = TaskPool(lambda x: [2 * x])
    >>> done = threading.Event()
    >>> with Runtime([pool]):
    ...     pool.submit(Task([torch.ones(1)], 1, Deadline.after(5.0), lambda outputs: done.set()))
    ...     done.wait(timeout=5.0)
    True

    Among the pools with a batch due, the one whose oldest task has waited longest goes first. Leaving the block ends
    the running batch and fails what still waits.

    Args:
        pools: all on one device.
        name: of the thread.
        answering: makes a context in which a batch's tasks are answered.
    """

    def __init__(
        self,
        pools: Iterable[TaskPool],
        *,
        name: str = "device",
        answering: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._pools = list(pools)
        self._changed = threading.Condition()
        for pool in self._pools:
            pool.changed = self._changed
        self._answering = answering
        self._stopped = False
        self._threads = torch.get_num_threads()
        self._running: Deadline | None = None
        self._batch = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"anabranch-{name}", daemon=True)

    def __enter__(self) -> Runtime:
        for pool in self._pools:
            pool.open()
        self._threads = torch.get_num_threads()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after the batch that runs, for which it waits at most ten seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=10.0)
            if self._thread.is_alive():
                report("experts.thread_left_behind", thread=self._thread.name)
        for pool in self._pools:
            pool.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Between two batches: none runs while the block does."""
        if not self._batch.acquire(timeout=_LONGEST_NAP):
            raise DeadlineExceeded(
                "a batch did not end", peer=self._thread.name, operation="pause", elapsed=_LONGEST_NAP
            )
        try:
            yield
        finally:
            self._batch.release()

    def healthy(self) -> bool:
        """Whether no batch has overrun the last of its tasks' deadlines: then the device is stuck, or far too slow."""
        running = self._running
        return running is None or not running.expired()

    def _run(self) -> None:
        # OpenMP keeps the number for each thread by itself: without this a new thread's matrix products take all cores,
        # however few the process was given, and wait for one another.
        torch.set_num_threads(self._threads)
        while True:
            with self._changed:
                pool = self._next_pool()
            if pool is None:
                return
            batch = pool.take_batch()
            if batch:
                self._running = max((task.deadline for task in batch), key=Deadline.remaining)
                with self._batch:
                    pool.run(batch, self._answering)
                self._running = None

    def _next_pool(self) -> TaskPool | None:
        """The pool to serve, as soon as one has a batch due; ``None`` when it is time to end."""
        while not self._stopped:
            now = time.monotonic()
            due = [pool for pool in self._pools if pool.due_at() <= now]
            if due:
                return min(due, key=TaskPool.oldest)
            next_due = min((pool.due_at() for pool in self._pools), default=float("inf"))
            self._changed.wait(timeout=min(next_due - now, _LONGEST_NAP))
        return None
