"""``BackgroundSaves``: writes checkpoints in a thread while training continues, one after the other.

At process exit, saves of an executor that was not closed are finished too, and failures are printed on stderr.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import copy
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from anabranch import checkpoint
from anabranch.checkpoint.manifest import Manifest
from anabranch.checkpoint.storage import Place
from anabranch.deadline import LONGEST_SLEEP, Deadline
from anabranch.errors import DeadlineExceeded

_LAST_SECONDS = 600.0  # for what is written when the process ends
MOST_IN_FLIGHT = 2
"""Snapshots that wait to be written, or are: each is a copy of the model and of the optimizers' states."""


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """The content of a checkpoint."""

    groups: Mapping[str, checkpoint.Group]
    state: object
    step: int

    def copied(self) -> CheckpointContent:
        """Return a copy in host memory, which training does not change."""
        groups = {
            name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in _tensors_of(group).items()}
            for name, group in self.groups.items()
        }
        return CheckpointContent(groups, copy.deepcopy(self.state), self.step)

    def write(self, path: Place, check_newest: Callable[[Place, Manifest], None]) -> None:
        """Write it as a checkpoint."""
        checkpoint.write(path, self.groups, self.state, step=self.step, check_newest=check_newest)


def _tensors_of(group: checkpoint.Group) -> Mapping[str, Tensor]:
    return group() if callable(group) else group


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
        self._writing: list[Future[None]] = []
        self._process = os.getpid()
        _open.add(self)

    def begin(self, write: Callable[[], None]) -> None:
        """Queue ``write``."""
        self._writing.append(self._pool.submit(write))

    def wait(self, most: int, deadline: Deadline) -> list[str]:
        """Wait until at most ``most`` are left; return for each finished one the reason of its failure, or ``""``.

        Raises:
            DeadlineExceeded: they take longer.
        """
        while sum(not future.done() for future in self._writing) > most:
            if deadline.expired():
                raise deadline.error(peer="the disk", operation="save in the background")
            concurrent.futures.wait(
                [future for future in self._writing if not future.done()],
                min(LONGEST_SLEEP, deadline.remaining()),
                concurrent.futures.FIRST_COMPLETED,
            )
        ended = []
        while self._writing and self._writing[0].done():
            error = self._writing.pop(0).exception()
            ended.append("" if error is None else f"{type(error).__name__}: {error}")
        return ended

    def close(self, deadline: Deadline) -> list[str]:
        """End the thread when all is written or the deadline has passed; return the reasons of failures."""
        try:
            ended = self.wait(0, deadline)
        except DeadlineExceeded as error:
            ended = [str(error)]
        self._pool.shutdown(wait=False)
        _open.discard(self)
        return [failure for failure in ended if failure]

    def finish(self) -> None:
        """Wait at process exit, and print failures that were not reported yet."""
        if self._process == os.getpid():  # forked: the parent writes
            for failure in self.close(Deadline.after(_LAST_SECONDS)):
                print(f"anabranch: a checkpoint could not be saved in the background: {failure}", file=sys.stderr)


_open: weakref.WeakSet[BackgroundSaves] = weakref.WeakSet()


def _finish_all() -> None:
    for saves in list(_open):
        saves.finish()


# Before `concurrent.futures` ends its pools, which stores that work with asyncio need; `atexit` comes after that.
getattr(threading, "_register_atexit", atexit.register)(_finish_all)
