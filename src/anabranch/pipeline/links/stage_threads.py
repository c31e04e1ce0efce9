"""The worker threads of a pipeline in one process: one for each rank, living as long as the pipeline.

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


class StageThreads:
    """Threads that each run a task; tasks must not raise.

    >>> threads, seen = StageThreads(2), []
    >>> threads.start([lambda: seen.append(0), lambda: seen.append(1)])
    >>> threads.wait(60.0), sorted(seen)
    (True, [0, 1])
    >>> threads.close()

    Args:
        count: how many.

    Attributes:
        hurried: ``wait`` returns although tasks are running.
    """

    def __init__(self, count: int) -> None:
        self._queues: list[queue.SimpleQueue[_Task | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._changed = threading.Condition()
        self._running: list[_Task] = []
        self.hurried = False
        self._threads = [
            threading.Thread(
                target=_work, args=(tasks, self._changed, self._running), name=f"anabranch-stage-{index}", daemon=True
            )
            for index, tasks in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end_threads, self._queues)

    def start(self, tasks: Sequence[_Task]) -> None:
        """Give each thread a task."""
        self.hurried = False
        self._running += tasks
        for queue_, task in zip(self._queues, tasks, strict=True):
            queue_.put(task)

    def hurry(self) -> None:
        """Wake the thread that waits: the tasks have failed, whatever some are still doing."""
        with self._changed:
            self.hurried = True
            self._changed.notify_all()

    def wait(self, seconds: float, *, all_ended: bool = True) -> bool:
        """Wait for the tasks to end, or ``hurry`` unless for ``all_ended``; return True if all tasks have ended."""
        deadline = Deadline(max(seconds, 1e-3))
        with self._changed:
            while self._running and (all_ended or not self.hurried) and not deadline.expired():
                # A signal in the moment before the wait begins wakes nobody.
                self._changed.wait(min(LONGEST_SLEEP, deadline.remaining()))
            return not self._running

    def are_here(self) -> bool:
        """Return True on one of these threads."""
        return threading.current_thread() in self._threads

    def close(self) -> None:
        """End the threads, each after its current task, and wait briefly for them."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)


def _work(tasks: queue.SimpleQueue[_Task | None], changed: threading.Condition, running: list[_Task]) -> None:
    while (task := tasks.get()) is not None:
        task()
        with changed:
            running.remove(task)
            changed.notify_all()
        del task  # with what it refers to, while the thread waits


def _end_threads(queues: Sequence[queue.SimpleQueue[_Task | None]]) -> None:
    for tasks in queues:
        tasks.put(None)
