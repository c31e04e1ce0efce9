"""Waits for other ranks that end when one of them is lost, with its name.

Every rank leaves its identity in the store of the job's process group when it first waits for another, so a rank that
waits learns which process to watch. A rank that has left none yet is waited for until the deadline.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import torch.distributed as dist

from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError
from anabranch.liveness.group import PeerWatch, end_without_waiting
from anabranch.liveness.meeting import destroy_group_at_exit
from anabranch.liveness.process_heartbeats import Identity, ProcessHeartbeats, Store

__all__ = ["Peers", "job_store", "peers_of_job"]

_HEARTBEAT = 1.0


def job_store() -> Store:
    """Return the store that the job's processes met through."""
    return cast(Store, dist.distributed_c10d._get_default_store())


class _JobStore:
    """The store of the group of now: one that is held keeps a store of a destroyed group alive, with its keys."""

    def set(self, key: str, value: str) -> None:
        job_store().set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return job_store().multi_get(keys)

    def check(self, keys: list[str]) -> bool:
        return job_store().check(keys)


class Peers:
    """The other ranks of the job's process group, and waits for them.

    Args:
        heartbeat: seconds between two checks of the other ranks.
    """

    def __init__(self, heartbeat: float = _HEARTBEAT) -> None:
        self._store, self._rank = _JobStore(), dist.get_rank()
        own = Identity.of_this_process()
        self._beats = ProcessHeartbeats({self._rank: own}, self._rank, store=self._store, heartbeat=heartbeat)
        self._store.set(_key(self._rank), own.encode())
        self._known = {self._rank}
        self._asked_for: set[int] = set()
        self._lock = threading.Lock()
        self._watch = PeerWatch(self._lost, heartbeat)
        destroy_group_at_exit()
        atexit.register(self._leave)

    def wait(self, done: Callable[[float], bool], ranks: Sequence[int], operation: str, deadline: Deadline) -> None:
        """Return when ``done(seconds)``, which waits so long at most, returns true.

        Raises:
            PeerLost: one of ``ranks`` died or froze; names it.
            DeadlineExceeded: names all of them.
        """
        try:
            # From the start: those elsewhere must beat.
            self._meet([rank for rank in ranks if rank not in self._asked_for])
            self._watch.wait(done, ranks, operation, deadline)
        except BoundaryError:
            raise
        except RuntimeError as error:
            raise self._watch.explain(error, ranks, operation, deadline) from None

    def _meet(self, ranks: Sequence[int]) -> None:
        """Watch those of ``ranks`` that have registered."""
        if self._known.issuperset(ranks):
            return
        with self._lock:
            self._asked_for.update(ranks)
            for rank in set(ranks) - self._known:
                if self._store.check([_key(rank)]):
                    self._beats.watch(rank, Identity.decode(self._store.multi_get([_key(rank)])[0].decode()))
                    self._known.add(rank)

    def _lost(self, ranks: Sequence[int]) -> dict[int, str]:
        with suppress(RuntimeError):  # the process that holds the store may be among the lost
            self._meet(ranks)
        with self._lock:
            lost = self._beats.lost()
        return {rank: lost[rank] for rank in ranks if rank in lost}

    def _leave(self) -> None:
        if self._watch.has_lost:
            end_without_waiting()
        self.close()  # a thread that is at the store while the interpreter ends would abort the process

    def close(self) -> None:
        """Stop watching."""
        self._beats.close()
        if not self._watch.has_lost:
            atexit.unregister(self._leave)


def _key(rank: int) -> str:
    return f"anabranch/identity/{rank}"


_lock = threading.Lock()
_of_group: tuple[weakref.ref[dist.ProcessGroup], Peers] | None = None


def peers_of_job() -> Peers:
    """Those of the default process group; made again after that was."""
    global _of_group
    group = dist.group.WORLD
    assert group is not None
    with _lock:
        if _of_group is None or _of_group[0]() is not group:
            if _of_group is not None:
                _of_group[1].close()
            _of_group = weakref.ref(group), Peers()
        return _of_group[1]
