"""``Group``: ranks of a job that act together, and waits for them that end at a deadline, or when a rank is lost.

The loop behind all waits of ``torch.distributed`` jobs: collectives, messages, a pipeline's turns. Each passes a
function that waits briefly; in between the group checks for lost ranks.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, DeadlineExceeded, PeerLost
from anabranch.liveness.peers import Peers
from anabranch.record.process import process_record
from anabranch.record.spans import Lasting, mark

LOOK_SECONDS = 0.5
"""A signal that comes as a wait begins is seen at its end, and none in the middle of gloo's."""
_SMALLEST_WAIT = 0.001
_PAUSE = 0.01
# Text that gloo puts around an error's message: the place in its source, and advice.
_BACKENDS_OWN = re.compile(r"^\[[^]]*\.cc:\d+\] |\. This is typically caused by.*", re.DOTALL)


class RankLeft(RuntimeError):
    """A rank ended a collective for all, and may live on."""

    def __init__(self, rank: int, operation: str) -> None:
        super().__init__(f"rank {rank} has left the {operation}")
        self.rank = rank


class Group:
    """Ranks that act together, under one membership of their job. Its waits check that the others are alive.

    >>> from torch.distributed import HashStore
    >>> group = Group(Peers(0, HashStore), [0, 1, 2], heartbeat=1.0)
    >>> try:
    ...     group.wait(lambda seconds: False, "all_reduce", Deadline.after(60.0), noticed=lambda: {2: "it fell silent"})
    ... except PeerLost as error:
    ...     print(error.peer)
    rank 2

    Args:
        peers: the job's processes.
        ranks: the members, by their numbers in the job; this process is one of them.
        heartbeat: seconds; it looks twice as often, and at least every half second.
        recovers: the group works on if a rank that was lost comes back.

    Attributes:
        membership: the number of the one that ``ranks`` are numbers of.
        rank: this process's number in the group.
        size: how many members there are.
        others: the members but this one, by their numbers in the job.
        has_left_work: gloo still works on a wait that was given up, or waits for a lost rank.
    """

    def __init__(self, peers: Peers, ranks: Sequence[int], heartbeat: float, *, recovers: bool = False) -> None:
        self.peers = peers
        self.set_members(ranks)
        self.heartbeat = heartbeat
        self.has_left_work = False
        self._recovers = recovers
        process_record()  # tells of waits

    def set_members(self, ranks: Sequence[int]) -> None:
        """Have these members, numbers of the present membership."""
        self.membership = self.peers.membership
        self.ranks = list(ranks)
        self.rank = self.ranks.index(self.peers.rank)
        self.size = len(self.ranks)
        self.others = [rank for rank in self.ranks if rank != self.peers.rank]

    def lost(self, noticed: Callable[[], Mapping[int, str]] = dict) -> dict[int, str]:
        """Return the members that are lost, each with the reason; ``noticed`` returns those of which more is known."""
        if self.membership != self.peers.membership:  # another group of this process has gone on
            return dict.fromkeys(self.others, "the job has other workers since")
        return {**noticed(), **self.peers.lost(self.others, self.heartbeat)}

    def wait(
        self,
        done: Callable[[float], bool],
        operation: str,
        deadline: Deadline,
        *,
        awaited: Sequence[int] | None = None,
        step: int | None = None,
        at_once: bool = False,
        noticed: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """Return when ``done(seconds)``, which waits at most that long, returns true.

        ``awaited`` are the members that are named when the time is over, all others by default. ``at_once``: ``done``
        gets all the remaining time, for waits that cannot be interrupted. ``noticed``: see ``lost``.

        Raises:
            PeerLost: a member died or froze; names it.
            DeadlineExceeded: names those awaited.
        """
        ranks = self.others if awaited is None else awaited
        longest = math.inf if at_once else min(self.heartbeat / 2, LOOK_SECONDS)

        def facts() -> dict[str, object]:
            limit = round(deadline.elapsed() + deadline.remaining(), 1)
            peer = ", ".join(f"rank {rank}" for rank in ranks)
            return {"peer": peer, "operation": operation, "limit": limit} | ({} if step is None else {"step": step})

        with Lasting("wait", "wait", facts) if ranks else nullcontext():
            while not done(max(_SMALLEST_WAIT, min(longest, deadline.remaining()))):
                if lost := self.lost(noticed):
                    raise self._peer_lost(lost, operation, deadline, step)
                if deadline.expired():
                    raise too_late(ranks, operation, deadline, step)

    def check(self, operation: str, deadline: Deadline) -> None:
        """Check once.

        Raises:
            PeerLost: a member died or froze; names it.
        """
        if lost := self.lost():
            raise self._peer_lost(lost, operation, deadline, None)

    def explain(
        self, error: RuntimeError, operation: str, deadline: Deadline, *, step: int | None = None
    ) -> BoundaryError:
        """Return the error to raise for a failed or abandoned connection; it names the lost rank, if one is found."""
        # A killed process closes its sockets a moment before the kernel reports its end, and one that ended because
        # another froze may end before this rank detects the frozen one.
        until = Deadline.after(2 * self.heartbeat)
        while not (lost := self.lost()) and not until.expired() and not deadline.expired():
            time.sleep(_PAUSE)
        message = "the connection failed: " + _BACKENDS_OWN.sub("", str(error))
        if lost:
            return self._peer_lost(lost, operation, deadline, step, message)
        if deadline.expired():
            return too_late(self.others, operation, deadline, step)
        kind = DeadlineExceeded if "timed out" in message.lower() else PeerLost
        known = [error.rank] if isinstance(error, RankLeft) and error.rank in self.others else self.others
        return kind(message, peer=rank_names(known), operation=operation, step=step, elapsed=deadline.elapsed())

    def _peer_lost(
        self, lost: Mapping[int, str], operation: str, deadline: Deadline, step: int | None, message: str = ""
    ) -> PeerLost:
        if not self._recovers:
            self.has_left_work = True
            self.peers.leave_word()
            mark("workers.lost", ranks=sorted(lost), operation=operation)
        what = "; ".join(f"rank {rank} is lost: {lost[rank]}" for rank in sorted(lost))
        return PeerLost(
            "; ".join(filter(None, [what, message])),
            peer=rank_names(sorted(lost)),
            operation=operation,
            step=step,
            elapsed=deadline.elapsed(),
        )


def too_late(ranks: Sequence[int], operation: str, deadline: Deadline, step: int | None) -> DeadlineExceeded:
    """Return the error of a wait for ``ranks`` that the deadline has ended."""
    return DeadlineExceeded(
        "not all ranks arrived", peer=rank_names(ranks), operation=operation, step=step, elapsed=deadline.elapsed()
    )


def rank_names(ranks: Sequence[int]) -> str:
    """Return the ranks as a string.

    >>> rank_names([1]), rank_names([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
