"""``BackgroundSaves``: writes checkpoints in a thread while training continues, one after the other.

At process exit, saves of an executor that was not closed are finished too, and failures are printed on stderr.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from anabranch import checkpoint
from anabranch.checkpoint.storage import Place
from anabranch.deadline import LONGEST_SLEEP, Deadline
from anabranch.errors import DeadlineExceeded

_LAST_SECONDS = 600.0  # for what is written when the process ends
MOST_IN_FLIGHT = 2
"""Snapshots that wait to be written, or are: each is a copy of the model and of the optimizers' states."""


def copied(groups: Mapping[str, checkpoint.Group]) -> dict[str, checkpoint.Group]:
    """Return a copy in host memory, which training does not change."""
    tensors = {name: group() if callable(group) else group for name, group in groups.items()}
    return {
        name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in group.items()}
        for name, group in tensors.items()
    }


@dataclass(frozen=True, slots=True)
class StartedSave:
    """A save in progress.

    Attributes:
        step: optimizer steps that it holds.
        path: the directory.
        began: ``time.monotonic()`` when it was requested.
    """

    step: int
    path: Place
    began: float


class BackgroundSaves:
    """Runs writes on its own thread, in order.

    >>> saves = BackgroundSaves()
    >>> saves.begin(lambda: None)
    >>> saves.wait(0, Deadline.after(60.0))
    ['']
    >>> saves.close(Deadline.after(60.0))
    []
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="anabranch-save")
        self._writing: list[Future[object]] = []

    def begin(self, write: Callable[[], object]) -> None:
        """Queue ``write``."""
        self._writing.append(self._pool.submit(write))
        _unreported.add(self._writing[-1])

    def wait(self, most: int, deadline: Deadline) -> list[str]:
        """Wait until at most ``most`` are left; return for each finished one the reason of its failure, or ``""``.

        Raises:
            DeadlineExceeded: they take longer.
        """
        while len(left := [future for future in self._writing if not future.done()]) > most:
            if deadline.expired():
                raise deadline.error(peer="the disk", operation="save in the background")
            seconds = min(LONGEST_SLEEP, deadline.remaining())
            concurrent.futures.wait(left, seconds, concurrent.futures.FIRST_COMPLETED)
        ended = []
        while self._writing and self._writing[0].done():
            _unreported.discard(self._writing[0])
            ended.append(_failure(self._writing.pop(0)))
        return ended

    def close(self, deadline: Deadline) -> list[str]:
        """End the thread when all is written or the deadline has passed; return the reasons of failures."""
        try:
            ended = self.wait(0, deadline)
        except DeadlineExceeded as error:
            ended = [str(error)]
        self._pool.shutdown(wait=False)
        return [failure for failure in ended if failure]


def _failure(future: Future[object]) -> str:
    error = future.exception()
    return "" if error is None else f"{type(error).__name__}: {error}"


_unreported: set[Future[object]] = set()
os.register_at_fork(after_in_child=_unreported.clear)  # the parent writes


def _finish_all() -> None:
    done, late = concurrent.futures.wait(_unreported, _LAST_SECONDS)
    _unreported.clear()
    for failure in [*map(_failure, done), *("it takes too long" for _ in late)]:
        if failure:
            print(f"anabranch: a checkpoint could not be saved in the background: {failure}", file=sys.stderr)


# Before `concurrent.futures` ends its pools, which stores that work with asyncio need; `atexit` comes after that.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
