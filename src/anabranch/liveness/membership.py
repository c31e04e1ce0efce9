"""``Membership``: the processes that are a job's workers, and their ranks; numbered, and decided by the launcher.

The launcher publishes each in the job's private folder. A worker that has lost another reads the next one there, and
meets its members, see ``meeting.py``. A lost one is replaced by a process that runs the script from its top, and waits
in its first training run until the members invite it, between two steps::

    launcher     0: {0: 0, 1: 1, 2: 2, 3: 3}     process 1 is killed     1: {0: 0, 2: 2, 3: 1}     2: {..., 1: 3}
    process 3    rank 3 ── all_reduce ── PeerLost ── reads 1 ── rank 1 ── meets the others ── does the step again
    process 1    (its replacement)       starts ── first training run: ``say("waits")`` ────────────── reads 2 ── rank 3

Processes are known by the rank that they were started with, which is also in the names of their logs.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from anabranch.deadline import Deadline
from anabranch.job import JOINED_VARIABLE, MEETING_VARIABLE
from anabranch.record.process import replace_text

MEMBERS_VARIABLE = "ANABRANCH_MEMBERS"
"""The environment variable with the file beside which this host has what the launcher and the workers publish; its name
ends with ``-MASTER_PORT``."""

MEMBER_VARIABLE = "ANABRANCH_MEMBER"
"""The environment variable with the rank that a worker was started with; of jobs that may lose workers only."""

APART = -1
"""In place of the members' epoch, where they run apart (``ssp``, ``asp``) or have their own batches: nobody joins."""

Word = Literal["waits", "leaves", "closes", "meets", "ends"]
"""A worker to the launcher: it waits to be invited; it ends as its calls were not those of the others; what it does
from now on is done by no other, as it has closed its Executor; it waits for the others of a membership; the job ends
with any worker, as it trains, or as it has failed."""

_PROGRESS, _NUMBER = struct.Struct("=qqd"), struct.Struct("=q")  # optimizer steps, epochs, and seconds of a heartbeat
_SECONDS = struct.Struct("=d")  # written alone: another worker may write the epoch at the same time
_PAUSE = 0.01


class Membership(msgspec.Struct, frozen=True):
    """The workers of a job from one change to the next.

    >>> now = Membership(0, {0: 0, 1: 1, 2: 2}).without(0)
    >>> now.number, now.ranks
    (1, {1: 1, 2: 0})
    >>> now = now.joined_by(0)
    >>> now.number, now.ranks, now.since
    (2, {1: 1, 2: 0, 0: 2}, {0: 2})

    Attributes:
        number: counts the memberships of the job, from 0.
        ranks: of each process, 0 to n - 1.
        since: of the members that have joined, the number of the first membership that they were in.
        closed: how many have ended well.
        least: with fewer, training waits for newcomers.
        over: the job ends, so that nobody meets any more.
    """

    number: int
    ranks: dict[int, int]
    since: dict[int, int] = {}
    closed: int = 0
    least: int = 1
    over: bool = False

    def without(self, process: int, *, ended: bool = False, closed: bool = False) -> Membership:
        """Return the next membership: every member keeps its rank, but the highest takes that of ``process``.

        ``ended``: nobody waits for another in its place; ``closed``: as it has come to the end of its script.
        """
        ranks, since = dict(self.ranks), dict(self.since)
        hole = ranks.pop(process, -1)  # -1: a newcomer that had not joined
        since.pop(process, None)
        ranks = {one: hole if rank == len(ranks) else rank for one, rank in ranks.items()}
        least = max(1, self.least - ended)
        return Membership(self.number + 1, ranks, since, self.closed + closed, least, self.over)

    def joined_by(self, process: int) -> Membership:
        """Return the next membership, in which ``process`` has the next rank."""
        number = self.number + 1
        ranks, since = {**self.ranks, process: len(self.ranks)}, {**self.since, process: number}
        return msgspec.structs.replace(self, number=number, ranks=ranks, since=since)

    def publish(self, meeting: Path) -> None:
        """Let the workers read it beside the file through which they meet first."""
        replace_text(_beside(meeting, "members"), msgspec.json.encode(self).decode())


def published(meeting: Path) -> Membership:
    """Return the newest membership."""
    return msgspec.json.decode(_beside(meeting, "members").read_bytes(), type=Membership)


def _beside(meeting: Path, what: str) -> Path:
    return Path(f"{meeting}.{what}")


class OwnPlace:
    """A worker's place in a job that may lose workers, and what it tells the launcher and newcomers, in files.

    Attributes:
        meeting: the file through which the job's workers meet first.
        process: the rank that this one was started with.
        joins: it was started in place of a lost one, and has joined no membership yet.
        heartbeat: seconds for which a process is stopped before it is lost.
    """

    def __init__(self, meeting: Path, process: int, *, joins: bool, heartbeat: float = 0.0) -> None:
        self.meeting, self.process, self.joins, self.heartbeat = meeting, process, joins, heartbeat
        self._newcomers = str(_beside(meeting, "newcomers"))
        self._progress: mmap.mmap | None = None

    def _word(self, what: Word) -> Path:
        return _beside(self.meeting, f"{what}.{self.process}.{os.getpid()}")

    def invite(self, number: int) -> None:
        """Let the newcomers that wait be in the membership behind ``number``."""
        _beside(self.meeting, f"{number}.invites").touch()

    def newcomers_wait(self) -> bool:
        """Return True if newcomers wait to be invited."""
        return os.path.exists(self._newcomers)

    def say(self, what: Word) -> None:
        """Let the launcher know this."""
        self._word(what).touch()

    def begin(self) -> None:
        """Take back what this worker has let the launcher know as it closed a former Executor."""
        self._word("closes").unlink(missing_ok=True)
        self._word("ends").unlink(missing_ok=True)

    @contextmanager
    def saying(self, what: Word) -> Iterator[None]:
        """Let the launcher know this for as long as the block lasts."""
        self.say(what)
        try:
            yield
        finally:
            self._word(what).unlink(missing_ok=True)

    def wait_until_invited(self, deadline: Deadline) -> None:
        """Return when this newcomer is a member, or the others have ended; they wait for it then."""
        while not deadline.expired():
            now = published(self.meeting)
            if now.over or not now.ranks or self.process in now.ranks:
                return
            time.sleep(_PAUSE)

    def write_progress(self, step: int, epoch: int | None = None) -> None:
        """Let newcomers know how far the members are, and the launcher that the job goes on without any of them.

        The epoch stays where none is given: newcomers look at it once they are invited.
        """
        if self._progress is None:
            file = os.open(_beside(self.meeting, "progress"), os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(file, _PROGRESS.size)
            self._progress = mmap.mmap(file, _PROGRESS.size)
            os.close(file)
            _SECONDS.pack_into(self._progress, 2 * _NUMBER.size, self.heartbeat)
        _NUMBER.pack_into(self._progress, 0, step)
        if epoch is not None:
            _NUMBER.pack_into(self._progress, _NUMBER.size, epoch)


def progress(meeting: Path) -> tuple[int, int] | None:
    """Return the optimizer steps and epochs that the members have done; ``None`` before the first."""
    read = _read_progress(meeting)
    return read and read[:2]


def _read_progress(meeting: Path) -> tuple[int, int, float] | None:
    for what in (_ELSEWHERE, "progress"):
        with suppress(FileNotFoundError, struct.error):
            step, epoch, heartbeat = _PROGRESS.unpack(_beside(meeting, what).read_bytes())
            return step, epoch, heartbeat
    return None


# The launcher's side.


def heartbeat(meeting: Path) -> float:
    """Return the seconds of the members' heartbeat; 0 before their first step."""
    read = _read_progress(meeting)
    return 0.0 if read is None else read[2]


def says(meeting: Path, process: int, pid: int, what: Word) -> bool:
    """Return True if a worker has let the launcher know this."""
    return _beside(meeting, f"{what}.{process}.{pid}").exists()


def call_newcomers(meeting: Path, *, some: bool) -> None:
    """Tell the members whether newcomers wait."""
    path = _beside(meeting, "newcomers")
    if some:
        path.touch()
    else:
        path.unlink(missing_ok=True)


def invited(meeting: Path, number: int) -> bool:
    """Return True if a member of membership ``number`` has invited newcomers."""
    return _beside(meeting, f"{number}.invites").exists()


# Between the launcher's host and those of the workers.

_ELSEWHERE = "progress_elsewhere"  # on the host of a newcomer: that of the members on others


def files_beside(meeting: Path) -> dict[str, bytes]:
    """Return what is published on this host, by name."""
    files: dict[str, bytes] = {}
    for path in meeting.parent.glob(f"{meeting.name}.*"):
        with suppress(FileNotFoundError):  # by now
            files[path.name.removeprefix(f"{meeting.name}.")] = path.read_bytes()
    return files


def put_beside(meeting: Path, before: Mapping[str, bytes], files: Mapping[str, bytes]) -> None:
    """Publish on this host what is published on another; ``before``: what that was the last time."""
    for what in before.keys() - files:
        _beside(meeting, what).unlink(missing_ok=True)
    for what in sorted(files, reverse=True):  # progress, which is read once that is there, before invites and members
        if before.get(what) != files[what]:
            replace_text(_beside(meeting, what), files[what])


def for_workers(meeting: Path, *, joins: bool) -> dict[str, bytes]:
    """Return what the launcher publishes for a worker; one that ``joins`` has no progress of its own."""
    files, names = files_beside(meeting), {"members": "members", "newcomers": "newcomers"}
    names |= {"progress": _ELSEWHERE} if joins else {}
    return {there: files[here] for here, there in names.items() if here in files}


def rank_variables(environment: Mapping[str, str], rank: int, size: int) -> dict[str, str]:
    """Return the variables of a worker's new rank: where all are on one host, it is also that on its host."""
    inner = "LOCAL" if MEETING_VARIABLE in environment else "GROUP"
    ranks = dict.fromkeys(("RANK", "ROLE_RANK", f"{inner}_RANK"), f"{rank}")
    return ranks | dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE", f"{inner}_WORLD_SIZE"), f"{size}")


def own_place(heartbeat: float = 0.0) -> OwnPlace | None:
    """Return this worker's place; ``None`` if no worker may go."""
    meeting, process = os.environ.get(MEMBERS_VARIABLE, ""), os.environ.get(MEMBER_VARIABLE)
    if process is None or not meeting.endswith(f"-{os.environ.get('MASTER_PORT')}"):  # of a job around this one
        return None
    return OwnPlace(Path(meeting), int(process), joins=os.environ.get(JOINED_VARIABLE) == "1", heartbeat=heartbeat)
