"""The processes of a job, and which of them are lost.

A frozen peer keeps its sockets open and acknowledges data, so gloo waits for its whole timeout. Ranks therefore
watch each other outside the collectives::

    a peer on this host      /proc says whether it runs, is stopped, or is gone; asked while waiting, no thread needed
    a peer elsewhere         has a process beside it that beats for it, see ``watcher.py``; one that was silent for two
                             heartbeats is lost, and so is one that says that its worker has ended

A peer that merely holds its interpreter's lock (a long import, a compilation) counts as running and is waited for until
the deadline; if it is stopped in two checks, one heartbeat apart, between which the one that checks was awake, it is
lost. Two ranks share a host if they have the same kernel boot id and pid namespace; names are not compared.

The process group is ended before the interpreter is. Gloo's threads take the interpreter's lock to free a tensor. One
that waits for it when the interpreter is taken apart is ended by Python in the middle of C++ code, and with it the
whole process: SIGABRT, "terminate called without an active exception". On a busy machine a thread may come so late. The
threads end with the last reference to their group, so that is let go of while Python still runs.
"""

from __future__ import annotations

import atexit
import functools
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from anabranch.liveness.watcher import Watcher, own_socket
from anabranch.record.process import flush, process_stat, process_state


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, distinct from any other that ever had its pid: its host, its pid, and its start time.

    ``beats_at``: where it hears the beats of those on other hosts.
    """

    host: str
    pid: int
    started: int
    beats_at: str = ""

    @classmethod
    def of_this_process(cls) -> Identity:
        """Return the identity of the calling process."""
        return _identity_of(os.getpid())

    @property
    def name(self) -> str:
        """All but its address."""
        return f"{self.host} {self.pid} {self.started}"

    def encode(self) -> str:
        """Return the identity as a string, for another rank to ``decode``."""
        return f"{self.name} {self.beats_at}"

    @classmethod
    def decode(cls, text: str) -> Identity:
        """Return the identity written by ``encode``."""
        host, pid, started, beats_at = text.split(" ")
        return cls(host, int(pid), int(started), beats_at)

    def has_ended(self) -> bool:
        """Return True for a process of this host that has ended."""
        return self.host == Identity.of_this_process().host and process_state(self.pid, self.started) == "gone"


@functools.lru_cache(maxsize=1)
def _identity_of(pid: int) -> Identity:
    """Return the identity of the calling process, which has this number: a fork has another."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    beats = own_socket(pid) if "MASTER_ADDR" in os.environ or dist.is_initialized() else None  # else in no job
    where = "" if beats is None else beats[1]
    return Identity(f"{boot}/{os.readlink('/proc/self/ns/pid')}", pid, process_stat(pid)[1], where)


class Peers:
    """The processes of a job as one of them sees the others: who they are, and which are lost.

    Args:
        rank: this process's.
        store: returns the job's store, where ranks leave their identities.
        clock: seconds that never run backwards.

    Attributes:
        membership: the number of the job's membership, 0 until a worker has left; of this whole process.
        rank: as given.
        identity: this process's.
        has_left_work: gloo still waits for a lost rank, so that the process ends without waiting for gloo.
    """

    membership = 0

    def __init__(self, rank: int, store: Callable[[], Store], clock: Callable[[], float] = monotonic) -> None:
        self.rank = rank
        self.identity = Identity.of_this_process()
        self.has_left_work = False
        self._store = store
        self._clock = clock
        self._identities = {rank: self.identity}
        self._stopped_since: dict[int, float] = {}
        self._looked = clock()
        self._lock = threading.Lock()
        self._watcher: Watcher | None = None
        store().set(self._key("identity", rank), self.identity.encode())

    def _key(self, what: str, rank: int) -> str:
        return f"anabranch/{self.membership}/{what}/{rank}"

    def become(self, number: int, rank: int, store: Store, identities: dict[int, Identity], heartbeat: float) -> None:
        """Be those of another membership, as ``meet_members`` has met them."""
        with self._lock:
            Peers.membership, self.rank, self._store = number, rank, lambda: store
            self._identities, self._stopped_since = {}, {}
            self.has_left_work = False
        self.know(identities, heartbeat)

    @property
    def identities(self) -> dict[int, Identity]:
        """Those that are known, by rank."""
        with self._lock:
            return dict(self._identities)

    def have_ended(self, ranks: Sequence[int]) -> bool:
        """Return True if the process of one of ``ranks`` on this host has ended, and is not only frozen."""
        return any(self._identities[rank].has_ended() for rank in self._identities.keys() & ranks)

    def know(self, identities: Mapping[int, Identity], heartbeat: float) -> None:
        """Watch these ranks; if any is on another host, this process beats at least so often from now on."""
        with self._lock:
            self._identities |= identities
            elsewhere = [who for who in self._identities.values() if who.host != self.identity.host and who.beats_at]
            if elsewhere:
                self._watcher = self._watcher or Watcher(self.identity.name)
                self._watcher.watch({who.name: who.beats_at for who in elsewhere}, heartbeat)

    def look_up(self, ranks: Sequence[int], heartbeat: float) -> None:
        """Watch those of ``ranks`` that have left their identity in the store."""
        unknown = [rank for rank in ranks if rank not in self._identities]
        identities: dict[int, Identity] = {}
        if unknown:
            store = self._store()
            there = [rank for rank in unknown if store.check([self._key("identity", rank)])]
            texts = store.multi_get([self._key("identity", rank) for rank in there]) if there else []
            identities = {rank: Identity.decode(text.decode()) for rank, text in zip(there, texts, strict=True)}
        self.know(identities, heartbeat)

    def lost(self, ranks: Sequence[int], heartbeat: float) -> dict[int, str]:
        """Return those of ``ranks`` that are known to be lost, each with the reason.

        If one is frozen, only that is reported: those that ended in the meantime may have ended because of it. While a
        rank is stopped, or silent, and may or may not have frozen, no rank is reported, for a heartbeat at most.
        """
        now, frozen, gone, quiet = self._clock(), {}, {}, False
        with self._lock:
            if now - self._looked > max(2 * heartbeat, 1.0):  # stopped itself, perhaps, and woken before the others
                self._stopped_since.clear()
            self._looked = now
            for rank in self._identities.keys() & ranks:
                who = self._identities[rank]
                if who.host != self.identity.host:
                    silent, most = (0.0, 1.0) if self._watcher is None else self._watcher.silence(who.name, heartbeat)
                    if silent == math.inf:
                        gone[rank] = "its process has ended"
                    elif silent > most:
                        frozen[rank] = f"sent no beat for {silent:.1f} s"
                    elif silent > most / 2:
                        quiet = True
                    continue
                state = process_state(who.pid, who.started)
                if state != "stopped":
                    self._stopped_since.pop(rank, None)
                elif now - self._stopped_since.setdefault(rank, now) >= heartbeat:
                    frozen[rank] = "its process is stopped"
                if state == "gone":
                    gone[rank] = "its process has ended"
            if frozen or quiet or self._stopped_since.keys() & ranks:
                return frozen
        return self._not_to_another(gone) if len(gone) > 1 else gone

    def _not_to_another(self, lost: dict[int, str]) -> dict[int, str]:
        """Return those of ``lost`` that had lost no other themselves, if there are any."""
        with suppress(RuntimeError):
            store = self._store()
            return {r: why for r, why in lost.items() if not store.check([self._key("lost-another", r)])} or lost
        return lost

    def leave_word(self) -> None:
        """Tell the others that this process is about to end because it has lost another."""
        with suppress(RuntimeError):
            self._store().set(self._key("lost-another", self.rank), "yes")

    def close(self) -> None:
        """Stop beating."""
        if self._watcher is not None:
            self._watcher.close()

    def leave(self) -> None:
        """End with the interpreter."""
        if self.has_left_work:
            end_without_waiting()
        self.close()


def job_store() -> Store:
    """Return the store that the job's processes met through.

    It is asked for again each time: a reference to it would keep a destroyed group's store alive, with its keys.
    """
    return dist.distributed_c10d._get_default_store()


_of_group: tuple[weakref.ref[dist.ProcessGroup], Peers] | None = None
_lock = threading.Lock()


def peers_of_job(next_ones: Peers | None = None) -> Peers:
    """Return the processes of the default process group: one object until another group takes its place.

    ``next_ones``: the processes of a group that has taken it.
    """
    global _of_group
    group = dist.group.WORLD
    assert group is not None
    with _lock:
        if _of_group is not None and _of_group[0]() is group:
            return _of_group[1]
        before, peers = _of_group and _of_group[1], next_ones or Peers(dist.get_rank(), job_store)
        if before is not None and before is not peers:
            before.close()
        if before is not None and not before.has_left_work:
            atexit.unregister(before.leave)
        _of_group = weakref.ref(group), peers
        atexit.register(_destroy, os.getpid())
        atexit.register(peers.leave)
        return peers


def _destroy(pid: int) -> None:
    """Destroy the process group; functions given to ``atexit`` later run before, with the group in place."""
    if pid == os.getpid() and dist.is_initialized():  # a fork has none of the threads
        dist.destroy_process_group()


def end_without_waiting() -> None:
    """End the process: gloo's threads would wait for a lost rank, and the interpreter for them."""
    logging.shutdown()
    flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
