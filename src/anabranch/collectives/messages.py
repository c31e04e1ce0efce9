"""Waits for what gloo and NCCL move between ranks, outside the groups of ``Workers``.

Gloo breaks the connection when a wait for a message is given up, so a thread waits to the end.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch.distributed as dist

from anabranch.deadline import Deadline
from anabranch.liveness.group import Group
from anabranch.liveness.peers import peers_of_job

_HEARTBEAT = 1.0
_IDLE_SECONDS = 60.0
_lock = threading.Lock()


class _MessageThread:
    """A thread that moves one message at a time."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], object], Future[object]]] = queue.SimpleQueue()
        self.abandoned = False
        threading.Thread(target=self._run, name="anabranch-message", daemon=True).start()

    def begin(self, move: Callable[[], object]) -> Future[object]:
        """Call ``move`` on the thread."""
        future: Future[object] = Future()
        self._asked.put((move, future))
        return future

    def _run(self) -> None:
        while not self.abandoned:
            try:
                move, future = self._asked.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                continue
            try:
                future.set_result(move())
            except Exception as error:  # noqa: BLE001 - raised where the future is asked
                future.set_exception(error)
            del move, future


_idle: list[_MessageThread] = []
_T = TypeVar("_T")


def move_message(move: Callable[[], _T], rank: int, operation: str, timeout: float) -> _T:
    """Return the result of ``move``, which sends a message to ``rank`` or receives one.

    Raises:
        PeerLost: the rank died or froze.
        DeadlineExceeded: ``timeout`` seconds have passed; the connection is of no more use.
    """
    if dist.get_backend() == "nccl":  # its waits are for the waiting thread's stream and check no peer
        found: list[_T] = []

        def move_at_once(_: float) -> bool:
            found.append(move())
            return True

        _wait(move_at_once, [rank], operation, timeout)
        return found[0]
    with _lock:
        mover = _idle.pop() if _idle else None
    mover = mover or _MessageThread()
    future = mover.begin(move)
    given_back = False

    def done(seconds: float) -> bool:
        nonlocal given_back
        if not concurrent.futures.wait([future], seconds).done:
            return False
        with _lock:
            _idle.append(mover)
        given_back = True
        future.result(0)
        return True

    try:
        _wait(done, [rank], operation, timeout)
    finally:
        if not given_back:
            mover.abandoned = True
    return cast(_T, future.result(0))


def ended_within(seconds: float, work: dist.Work) -> bool:
    """Wait so long at most, and return whether ``work`` has ended.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        # The deadline may have passed just before the work ended, for example in a process that was frozen meanwhile.
        work.wait(timedelta(seconds=seconds))
    return True


def wait_until_reduced(
    work: dist.Work, group: dist.ProcessGroup | None, operation: str, timeout: float, *, on_host: bool
) -> None:
    """Return when a collective of ``group`` is done.

    Raises:
        PeerLost: a rank died or froze.
        DeadlineExceeded: ``timeout`` seconds have passed.
    """
    at_once = not on_host

    def done(seconds: float) -> bool:
        return ended_within(timeout if at_once else seconds, work)

    _wait(done, dist.get_process_group_ranks(group), operation, timeout)


def _wait(done: Callable[[float], bool], ranks: Sequence[int], operation: str, timeout: float) -> None:
    peers, deadline = peers_of_job(), Deadline.after(timeout)
    group = Group(peers, sorted({peers.rank, *ranks}), _HEARTBEAT)

    def meet() -> dict[int, str]:
        with suppress(RuntimeError):  # the process that holds the store may be among the lost
            peers.look_up(group.others, _HEARTBEAT)
        return {}

    try:
        meet()  # from the start: those elsewhere must beat
        group.wait(done, operation, deadline, noticed=meet)
    except RuntimeError as error:
        meet()
        raise group.explain(error, operation, deadline) from None
    finally:
        peers.has_left_work |= group.has_left_work
