"""Waits for what gloo and NCCL move between ranks, outside the groups of ``Workers``.

Gloo breaks the connection when a wait for a message is given up, so a thread waits to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from anabranch.deadline import Deadline
from anabranch.liveness.group import Group
from anabranch.liveness.meeting import begin_call
from anabranch.liveness.peers import peers_of_job

_HEARTBEAT = 1.0
_T = TypeVar("_T")


def move_message(move: Callable[[], _T], rank: int, operation: str, timeout: float) -> _T:
    """Return the result of ``move``, which sends a message to ``rank`` or receives one.

    Raises:
        PeerLost: the rank died or froze.
        DeadlineExceeded: ``timeout`` seconds have passed; the connection is of no more use.
    """
    if dist.get_backend() == "nccl":  # its waits are for the waiting thread's stream and check no peer
        answer: Future[_T] = Future()

        def done(seconds: float) -> bool:
            answer.set_result(move())
            return True
    else:
        _, answer = begin_call(move, "anabranch-message")

        def done(seconds: float) -> bool:
            over = bool(wait([answer], seconds).done)
            if over:
                answer.result(0)  # raises its error
            return over

    _wait(done, [rank], operation, timeout)
    return answer.result(0)


def ended_within(work: dist.Work, seconds: float) -> bool:
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

    def done(seconds: float) -> bool:
        return ended_within(work, seconds if on_host else timeout)

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
