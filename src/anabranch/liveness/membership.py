"""``Membership``: the processes that are a job's workers, and their ranks; numbered, and decided by the launcher.

The launcher publishes each in the job's private folder. A worker that has lost another reads the next one there, and
meets its members, see ``meeting.py``::

    launcher     0: {0: 0, 1: 1, 2: 2, 3: 3}     process 1 is killed     1: {0: 0, 2: 2, 3: 1}
    process 3    rank 3 ── all_reduce ── PeerLost ── reads 1 ── rank 1 ── meets the others ── does the step again

Processes are known by the rank that they were started with, which is also in the names of their logs.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from anabranch.job import MEETING_VARIABLE
from anabranch.record.process import replace_text

MEMBER_VARIABLE = "ANABRANCH_MEMBER"
"""The environment variable with the rank that a worker was started with; of jobs that may lose workers only."""


class Membership(msgspec.Struct, frozen=True):
    """The workers of a job from one loss to the next.

    >>> Membership(0, {0: 0, 1: 1, 2: 2}).without(0)
    Membership(number=1, ranks={1: 1, 2: 0}, over=False)

    Attributes:
        number: counts the memberships of the job, from 0.
        ranks: of each process, 0 to n - 1.
        over: the job ends, so that nobody meets any more.
    """

    number: int
    ranks: dict[int, int]
    over: bool = False

    def without(self, process: int) -> Membership:
        """Return the next membership: every member keeps its rank, but the highest takes that of ``process``."""
        ranks = dict(self.ranks)
        hole = ranks.pop(process)
        return Membership(self.number + 1, {one: hole if rank == len(ranks) else rank for one, rank in ranks.items()})

    def publish(self, meeting: Path) -> None:
        """Let the workers read it beside the file through which they meet first."""
        replace_text(_published_at(meeting), msgspec.json.encode(self).decode())


def published(meeting: Path) -> Membership:
    """Return the newest membership."""
    return msgspec.json.decode(_published_at(meeting).read_bytes(), type=Membership)


def _published_at(meeting: Path) -> Path:
    return Path(f"{meeting}.members")


def own_place() -> tuple[Path, int] | None:
    """Return the file through which this worker's job meets, and its process's number; ``None`` if no worker may go."""
    meeting, process = os.environ.get(MEETING_VARIABLE, ""), os.environ.get(MEMBER_VARIABLE)
    if process is None or not meeting.endswith(f"-{os.environ.get('MASTER_PORT')}"):  # of a job around this one
        return None
    return Path(meeting), int(process)
