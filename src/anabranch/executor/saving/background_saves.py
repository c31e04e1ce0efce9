"""``BackgroundSave``: a checkpoint that is written in a thread while training continues.

At process exit, a save of an executor that was not closed is finished too, and a failure is printed on stderr.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from anabranch import checkpoint
from anabranch.checkpoint.storage import Place
from anabranch.deadline import LONGEST_SLEEP, Deadline

_LAST_SECONDS = 600.0  # for what is written when the process ends


def copied(groups: Mapping[str, checkpoint.Group]) -> dict[str, checkpoint.Group]:
    """Return a copy in host memory, which training does not change."""
    return {
        name: {key: tensor.detach().to("cpu", copy=True) for key, tensor in group.items()}
        for name, group in groups.items()
    }


class BackgroundSave:
    """A save in progress.

    >>> from pathlib import Path
    >>> BackgroundSave(3, Path("checkpoint"), 0.0, lambda: None).wait(Deadline.after(60.0))
    ''

    Args:
        step: optimizer steps that it holds.
        path: the directory.
        began: ``time.monotonic()`` when it was requested.
        write: writes it; ``None`` on a rank that writes nothing.
    """

    def __init__(self, step: int, path: Place, began: float, write: Callable[[], object] | None) -> None:
        self.step, self.path, self.began = step, path, began
        self._written: Future[object] | None = None
        if write is not None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="anabranch-save")
            self._written = pool.submit(write)
            pool.shutdown(wait=False)
            _unreported.add(self._written)

    def wait(self, deadline: Deadline) -> str:
        """Wait until it is written; return the reason of its failure, or ``""``.

        Raises:
            DeadlineExceeded: it takes longer.
        """
        if self._written is None:
            return ""
        while not self._written.done():
            if deadline.expired():
                raise deadline.error(peer="the disk", operation="save in the background")
            concurrent.futures.wait([self._written], min(LONGEST_SLEEP, deadline.remaining()))
        _unreported.discard(self._written)
        return _failure(self._written)


def _failure(written: Future[object]) -> str:
    error = written.exception()
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
