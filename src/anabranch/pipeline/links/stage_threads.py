"""The worker threads of a pipeline in one process: one for each device, living as long as the pipeline.

They live that long because PyTorch's per-thread state, built at a thread's first computation, is costly. They hold no
reference to the pipeline, and end when it is collected or closed.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence

from anabranch.deadline import LONGEST_SLEEP, Deadline

__all__ = ["StageThreads"]

_Task = Callable[[], None]
_IDLE_SECONDS = 60.0


class StageThreads:
    """Threads that each run the tasks given to them, in order.

    >>> seen = []
    >>> with StageThreads(2, "example") as workers:
    ...     tasks = [lambda: seen.append(0), lambda: seen.append(1)]
    ...     workers.run(tasks, Deadline.after(60.0), on_interrupt=lambda: None)
    >>> sorted(seen)
    [0, 1]

    Args:
        count: how many.
        name: their name in stack dumps.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queues: list[queue.SimpleQueue[_Task | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._threads = [
            threading.Thread(target=_work, args=(tasks,), name=f"{name}-{index}", daemon=True)
            for index, tasks in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end_threads, self._queues)
        self._round = _Round(0)

    def run(
        self, tasks: Sequence[_Task], deadline: Deadline, on_interrupt: Callable[[], None], step: int | None = None
    ) -> None:
        """Run one task on each worker, and return when all have ended, or half a second after ``abandon``.

        Tasks must not raise. An interrupt of the waiting thread calls ``on_interrupt``, which must make the tasks end.
        """
        # A task of a failed step may still be computing, which cannot be stopped.
        if not self._round.wait(deadline.remaining()):
            raise deadline.error(peer="a worker still busy with a failed step", operation="pipeline", step=step)
        self._round = here = _Round(len(tasks))
        for tasks_of_worker, task in zip(self._queues, tasks, strict=True):
            tasks_of_worker.put(here.wrap(task))
        try:
            finished = here.wait_unless_hurried(deadline.remaining())
        except BaseException:
            on_interrupt()
            here.wait(0.5)
            raise
        if not finished:
            here.wait(0.5)
            on_interrupt()
            raise deadline.error(peer="the pipeline's workers", operation="pipeline step", step=step)

    def run_here(self) -> bool:
        """Return True on one of these threads."""
        return threading.current_thread() in self._threads

    def abandon(self) -> None:
        """Let ``run`` return within half a second, whatever its tasks are doing, because the step has failed."""
        self._round.hurry(0.5)

    def close(self) -> None:
        """End the threads, each after its current task, and wait briefly for them."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def __enter__(self) -> StageThreads:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Round:
    """Counts the tasks of one ``run`` that have not ended."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._changed = threading.Condition()
        self._hurried: Deadline | None = None

    def wrap(self, task: _Task) -> _Task:
        def run() -> None:
            try:
                task()
            finally:
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()

        return run

    def hurry(self, seconds: float) -> None:
        with self._changed:
            if self._hurried is None:
                self._hurried = Deadline.after(seconds)
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait for all tasks to end; false if ``timeout`` seconds pass first."""
        return self._wait_for(lambda: not self._left, timeout)

    def wait_unless_hurried(self, timeout: float) -> bool:
        """Like ``wait``, but returns true early after ``hurry``."""
        self._wait_for(lambda: not self._left or self._hurried is not None, timeout)
        if self._hurried is None:
            return not self._left
        self.wait(self._hurried.remaining())
        return True

    def _wait_for(self, predicate: Callable[[], bool], timeout: float) -> bool:
        deadline = Deadline.after(max(timeout, 1e-3))
        with self._changed:
            while not self._changed.wait_for(predicate, min(LONGEST_SLEEP, deadline.remaining())):
                if deadline.expired():
                    return False
            return True


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while True:
        try:
            task = tasks.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            continue
        if task is None:
            return
        task()
        del task


def _end_threads(queues: Sequence[queue.SimpleQueue[_Task | None]]) -> None:
    for tasks in queues:
        tasks.put(None)
