"""``PeerWatch``: waits for other ranks that end at a deadline, or when a rank is lost, with its name.

The loop behind all waits of ``torch.distributed`` jobs: collectives, messages, a pipeline's turns. Each passes a
function that waits briefly; in between the watch checks for lost ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from anabranch import spans, waits
from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, DeadlineExceeded, PeerLost

__all__ = ["PeerWatch", "end_without_waiting", "interruptible", "rank_names"]

_T = TypeVar("_T")
_log = logging.getLogger("anabranch")
_SAID_AFTER = 5.0
_LOOK_SECONDS = 0.5  # a signal that comes as a wait begins is seen at its end, and none in the middle of gloo's
_SMALLEST_WAIT = 0.001
_PAUSE = 0.01
# Text that gloo puts around an error's message: the place in its source, and advice.
_BACKENDS_OWN = re.compile(r"^\[[^]]*\.cc:\d+\] |\. This is typically caused by.*", re.DOTALL)


class PeerWatch:
    """Waits for ranks of a job, and checks while waiting that they are alive.

    >>> watch = PeerWatch(lambda ranks: {2: "its process has ended"}, heartbeat=1.0)
    >>> try:
    ...     watch.wait(lambda seconds: False, [1, 2], "all_reduce", Deadline.after(60.0))
    ... except PeerLost as error:
    ...     print(error.peer)
    rank 2

    Args:
        lost: returns those of the given ranks that are lost, each with the reason.
        heartbeat: seconds; it looks twice as often, and at least every half second.
        on_loss: called with those that are lost before ``PeerLost`` is raised; returns those to name.

    Attributes:
        has_lost: True once a rank was found to be lost.
    """

    def __init__(
        self,
        lost: Callable[[Sequence[int]], Mapping[int, str]],
        heartbeat: float,
        on_loss: Callable[[Mapping[int, str], str], Mapping[int, str]] = lambda lost, operation: lost,
    ) -> None:
        self._lost = lost
        self._heartbeat = heartbeat
        self._on_loss = on_loss
        self.has_lost = False

    def wait(
        self,
        done: Callable[[float], bool],
        ranks: Sequence[int],
        operation: str,
        deadline: Deadline,
        *,
        step: int | None = None,
        at_once: bool = False,
    ) -> None:
        """Return when ``done(seconds)``, which waits at most that long, returns true.

        ``at_once``: ``done`` gets all the remaining time, for waits that cannot be interrupted.

        Raises:
            PeerLost: one of ``ranks`` died or froze; names it.
            DeadlineExceeded: names all of them.
        """
        span = spans.begin()
        began, number = time.monotonic(), None
        patience = self._patience(deadline, at_once=at_once)
        try:
            while not done(max(_SMALLEST_WAIT, patience)):
                if number is None and time.monotonic() - began >= waits.LONG:
                    limit = time.monotonic() - began + deadline.remaining()
                    number = waits.begin([f"rank {rank}" for rank in ranks], operation, began, limit)
                self.check(ranks, operation, deadline, step=step)
                if deadline.expired():
                    raise _too_late(ranks, operation, deadline, step)
                patience = self._patience(deadline, at_once=at_once)
        finally:
            waits.end(number)
            if span and ranks:
                facts: dict[str, object] = {"peer": rank_names(ranks), "operation": operation}
                if step is not None:
                    facts["step"] = step
                spans.complete(span, "wait", "wait", facts=facts)

    def check(self, ranks: Sequence[int], operation: str, deadline: Deadline, *, step: int | None = None) -> None:
        """Check once.

        Raises:
            PeerLost: one of ``ranks`` died or froze; names it.
        """
        lost = self._lost(ranks)
        if lost:
            raise self._peer_lost(lost, operation, deadline, step)

    def explain(
        self, error: RuntimeError, ranks: Sequence[int], operation: str, deadline: Deadline, *, step: int | None = None
    ) -> BoundaryError:
        """Return the error to raise for a failed or abandoned connection; it names the lost rank, if one is found."""
        # # A killed process closes its sockets a moment before the kernel reports its end, and one that ended because
        # another froze may end before this rank detects the frozen one.
        until = Deadline.after(2 * self._heartbeat)
        while not (lost := self._lost(ranks)) and not until.expired() and not deadline.expired():
            time.sleep(_PAUSE)
        message = "the connection failed: " + _BACKENDS_OWN.sub("", str(error))
        if lost:
            return self._peer_lost(lost, operation, deadline, step, message)
        if deadline.expired():
            return _too_late(ranks, operation, deadline, step)
        kind = DeadlineExceeded if "timed out" in message.lower() else PeerLost
        return kind(message, peer=rank_names(ranks), operation=operation, step=step, elapsed=deadline.elapsed())

    def _patience(self, deadline: Deadline, *, at_once: bool) -> float:
        return deadline.remaining() if at_once else min(self._heartbeat / 2, _LOOK_SECONDS, deadline.remaining())

    def _peer_lost(
        self, lost: Mapping[int, str], operation: str, deadline: Deadline, step: int | None, message: str = ""
    ) -> PeerLost:
        self.has_lost = True
        named = self._on_loss(lost, operation)
        what = "; ".join(f"rank {rank} is lost: {named[rank]}" for rank in sorted(named))
        return PeerLost(
            "; ".join(filter(None, [what, message])),
            peer=rank_names(sorted(named)),
            operation=operation,
            step=step,
            elapsed=deadline.elapsed(),
        )


def interruptible(call: Callable[[], _T], waiting: str = "") -> _T:
    """Return ``call()``, made on another thread: no signal reaches Python while gloo waits for a rank.

    Where Ctrl-C ends the wait the thread is left behind, and the process ends without waiting for it. ``waiting`` is
    said once after five seconds.
    """
    answer: Future[_T] = Future()
    inference = torch.is_inference_mode_enabled()  # a thread's own

    def run() -> None:
        try:
            with torch.inference_mode(inference):
                answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            answer.set_exception(error)

    thread = threading.Thread(target=run, name="anabranch-meeting", daemon=True)
    thread.start()
    say_at = time.monotonic() + _SAID_AFTER
    try:
        while not wait([answer], timeout=_LOOK_SECONDS).done:
            if waiting and time.monotonic() >= say_at:
                _log.warning("%s", waiting)
                waiting = ""
    except BaseException:
        atexit.register(end_without_waiting)
        raise
    thread.join(timeout=10.0)
    return answer.result(timeout=0)


def end_without_waiting() -> None:
    """End the process: gloo's threads would wait for a lost rank, and the interpreter for them."""
    logging.shutdown()
    spans.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _too_late(ranks: Sequence[int], operation: str, deadline: Deadline, step: int | None) -> DeadlineExceeded:
    return DeadlineExceeded(
        "not all ranks arrived", peer=rank_names(ranks), operation=operation, step=step, elapsed=deadline.elapsed()
    )


def rank_names(ranks: Sequence[int]) -> str:
    """Return the ranks as a string.

    >>> rank_names([1]), rank_names([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
