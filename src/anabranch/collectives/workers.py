"""The workers of a job as one group: collectives that start at once, and waits that end with a name.

Gloo alone waits its whole timeout for a stopped peer and reports a dead one by address. Here a thread waits half a
heartbeat at a time, checks in between that all ranks are alive, and raises ``PeerLost`` with the rank. A collective
that was not done when ``work.wait(timeout)`` gave up continues undisturbed (only a point-to-point wait breaks its
connection). A callback on the operation's future would wake us too, but gloo's thread then needs the interpreter's lock
to let go of it, and ends the process if the interpreter is gone by then.

Collectives are matched by their order alone. So these have a gloo group of their own: in the model's group they would
meet those of its forward on a worker that runs none.

When a worker has died, the others become the workers of the next membership, in the same object. Their old connections
stay open while a collective is unfinished there: gloo's threads may wait for one another, and would be joined. It fails
once those are gone that it waits for: the dead, or living workers that have freed theirs. A newcomer is alone until it
joins one.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import platform
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]  # defined in C++
from torch.distributed.distributed_c10d import PrefixStore, Store

from anabranch.collectives.messages import ended_within
from anabranch.collectives.rowless import Rowless
from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError, PeerLost
from anabranch.liveness.group import Group, rank_names
from anabranch.liveness.meeting import (
    BACKEND_GRACE,
    SAID_AFTER,
    begin_call,
    connect_world,
    interruptible,
    meet_members,
    meet_peers,
    reminder,
    set_world,
)
from anabranch.liveness.membership import Membership, own_place, published
from anabranch.liveness.peers import Peers, end_without_waiting, peers_of_job
from anabranch.record import spans

_T = TypeVar("_T")
_log = logging.getLogger("anabranch.executor")
_MOST_SHARING = 64
_SHARING = f"2 to {_MOST_SHARING} processes of one user on one host"


class Pending:
    """A collective in progress; ``finish`` returns when its tensors hold the result.

    ``done(seconds)`` waits at most that long, and returns whether it is complete. ``work`` is gloo's, and what it uses.
    ``began`` is before that of others can end.
    """

    work: tuple[dist.Work, object, object]

    def __init__(
        self, done: Callable[[float], bool], workers: Workers, operation: str, step: int | None, tensor: Tensor
    ) -> None:
        self._done, self._workers, self._operation, self._step = done, workers, operation, step
        self._nbytes, self._on_host = tensor.nbytes, tensor.is_cpu
        self.began = spans.begin()
        workers.started += 1
        self._number = workers.started  # the same on every rank
        self._deadline = Deadline.after(workers.timeout)

    def finish(self) -> None:
        """Return when the result is available.

        Raises:
            PeerLost: a rank died or froze; names it.
            DeadlineExceeded: the workers' ``timeout`` passed since the operation started.
        """
        workers, step = self._workers, self._step
        comparison = _Comparison(workers, self._number, self._operation)
        workers.wait_for(self._done, self._deadline, self._operation, step, on_host=self._on_host, noticed=comparison)
        workers.begun.discard(self)
        if self.began and workers.others:
            facts: dict[str, object] = {"peer": rank_names(workers.others), "bytes": self._nbytes}
            flow: spans.Flow = "meet", f"{workers.name}/{self._number}"
            facts |= {} if step is None else {"step": step}
            spans.complete(self.began, self._operation, "crossing", track="workers", flow=flow, facts=facts)


class _Comparison:
    """Compares a long wait with that of the next rank: where they are in other calls, one was made alone.

    On threads, since a store whose process is frozen never answers.
    """

    def __init__(self, workers: Workers, number: int, operation: str) -> None:
        self._workers, self._number, self._operation = workers, number, operation
        self._next = workers.ranks[(workers.rank + 1) % len(workers.ranks)]
        self._began = time.monotonic()
        self._answer: Future[str] | None = None

    def __call__(self) -> Mapping[int, str]:
        """Raise ``BoundaryError`` if the next rank waits in another call; the result names nobody lost."""
        if self._answer is not None and self._answer.done():
            self._raise(self._answer)
        elif self._answer is None and time.monotonic() - self._began >= SAID_AFTER:
            self._answer = self._look()
        return {}

    def last(self) -> None:
        """Raise ``BoundaryError`` if the rank that is lost, or has left, was in another call."""
        answer = self._look()
        if answer is not None and wait([answer], timeout=1.0).done:
            self._raise(answer)

    def _raise(self, answer: Future[str]) -> None:
        self._answer = None  # another look behind one that has seen nothing
        if there := answer.result(timeout=0):
            raise self._workers.apart(self._next, self._operation, f"waits in {there!r}") from None

    def _look(self) -> Future[str] | None:
        """Begin to look for the call of the next rank that is not this one."""
        store, mine, theirs = self._workers.store, f"waits/{self._workers.peers.rank}", f"waits/{self._next}"
        if store is None:
            return None

        def look() -> str:
            with suppress(RuntimeError):  # the process that holds the store has ended
                store.set(mine, f"{self._number} {self._operation}")
                if store.check([theirs]):
                    number, _, there = store.get(theirs).decode().partition(" ")
                    if number == str(self._number) and there != self._operation:
                        return there
            return ""

        return begin_call(look, "anabranch-comparison")[1]


class Workers(Group):
    """A process group whose waits are bounded and name the missing ranks; a context manager.

    Args:
        group: the members; ``None`` is the job's group, initialised from the usual environment if necessary.
        ranks: members without a group of their own, in place of ``group``; only for tensors on the CPU.
        name: given to those: on each of them, and to no other group.
        device: where the gradients live: gloo serves CPU, NCCL serves CUDA.
        timeout: seconds that one wait may last.
        heartbeat: seconds between two checks of the other ranks.

    Attributes:
        name: what the group is called on each of its ranks, and no other group.
        started: how many collectives have begun.
        store: of this group alone; ``None`` in a group of one.
        between_hosts: a group of the first worker of each of several ``hosts``, on these alone.
        begun: collectives that are not finished.
        segments: memory that the workers share; ``give_up`` of each tells the others that this one has left.
        rowless: names the workers that have no rows; ``None`` in a group of one.
        joins: this is a newcomer, alone until it has joined the others.
        roll: the present membership, once there is another than the first.

    Raises:
        ValueError: the environment names no job (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``), or this
            process is not a member of ``group``.
        DeadlineExceeded, PeerLost: not everyone came.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        ranks: Sequence[int] | None = None,
        name: str = "",
        device: torch.device | None = None,
        timeout: float = 600.0,
        heartbeat: float = 1.0,
    ) -> None:
        self.timeout = timeout
        self.on_host = device is None or device.type == "cpu"
        self._owns_job = group is None and not dist.is_initialized()
        place = own_place()
        self.joins = self._owns_job and self.on_host and place is not None and place.joins
        self.roll: Membership | None = None
        if self._owns_job and not self.joins:
            backend = "gloo" if self.on_host else "nccl"
            meet_peers(backend, timeout)
        self._group: dist.ProcessGroup | None = dist.group.WORLD if group is None and ranks is None else group
        self.device = torch.device("cpu") if device is None else device
        if self.joins:
            super().__init__(Peers(0, HashStore), [0], heartbeat)
        elif dist.get_rank(self._group) < 0:
            raise ValueError(f"rank {dist.get_rank()} is not a member of the process group; only members may use it")
        else:
            super().__init__(peers_of_job(), ranks or dist.get_process_group_ranks(self._group), heartbeat)
        self.bytes_sent = 0
        self.wait_seconds = 0.0
        self.started = 0
        self.name = name or f"workers {','.join(map(str, self.ranks))}"
        self._own: dist.ProcessGroup | None = None
        self.between_hosts: dist.ProcessGroup | None = None
        self.store: PrefixStore | None = None
        self.rowless: Rowless | None = None
        self.segments: WeakSet[Any] = WeakSet()
        self.begun = set[Pending]()
        if self.joins:
            self._own = self._connect(HashStore(), 0, 1)
        elif self.size > 1:
            if ranks is None:
                self._meet()
            self.store = PrefixStore(f"anabranch/{self.name}", dist.distributed_c10d._get_default_store())
            self._own = self._connect(self.store, self.rank, self.size)
            self.peers.look_up(self.others, heartbeat)
            self.rowless = Rowless(self.store, self, timeout)
        atexit.register(self._end)

    def _meet(self) -> None:
        """Meet the others, and take what makes the group's name unique from the first."""
        mine = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=self.device)
        everyone = mine.new_empty(self.size, len(mine))
        work = dist.all_gather(list(everyone.unbind(0)), mine, group=self._group, async_op=True)
        done = partial(ended_within, cast(dist.Work, work))
        deadline, look = Deadline.after(self.timeout), reminder(self.others)
        self.wait_for(done, deadline, "meet", None, on_host=self.on_host, noticed=look)
        self.name += f"/{bytes(everyone[0].tolist()).hex()}"
        self.peers.look_up(self.others, self.heartbeat)

    def _connect(self, store: Store, rank: int, size: int) -> dist.ProcessGroup:
        """Return a gloo group of some members; c10d does not know it, so the model's code cannot use it."""
        limit, deadline = timedelta(seconds=self.timeout + BACKEND_GRACE), Deadline.after(self.timeout)
        try:
            group = interruptible(partial(dist.ProcessGroupGloo, store, rank, size, limit))
        except RuntimeError as error:
            raise self.explain(error, "meet", deadline) from None
        return cast(dist.ProcessGroup, group)  # a backend, of which c10d's functions use what a group has, too

    # Another membership.

    @property
    def several(self) -> bool:
        """True if there are, or will be, others."""
        return self.size > 1 or self.joins

    @property
    def why_fixed(self) -> str | None:
        """The reason why these workers do not go on without one of them; ``None`` if they do."""
        if own_place() is None:
            return "it was not started by anabranch run"
        if not self._owns_job:
            return "the script made a process group of torch.distributed itself"
        return None if self.on_host else "its tensors are not on the CPU"

    def has_lost(self) -> bool:
        """Return True if a worker has died or froze; the launcher kills a frozen one."""
        return self.peers.have_ended(self.others) or bool(self.lost())

    def meet_again(self, *, awaited: bool) -> bool:
        """Become the workers of the next membership, once its members have come; return False if the job ends.

        ``awaited``: there will be one, although none of the others may be lost.

        Raises:
            PeerLost: one of them has died since: call it again.
            DeadlineExceeded: names those who have not come.
        """
        if not awaited:
            for segment in self.segments:
                segment.give_up()
        self._keep_work()
        after = self.membership if not self.joins or self.roll is not None else -1
        met = meet_members(after, self.timeout, (lambda: True) if awaited else self.has_lost)
        if met is None:
            return False
        self.roll, rank, store, identities = met
        self.peers.become(self.roll.number, rank, store, identities, self.heartbeat)
        self.set_members(range(len(identities)))
        self.started, self.has_left_work = 0, False
        self.segments, self.begun = WeakSet(), set()
        self.between_hosts = None
        vars(self).pop("hosts", None)
        self.name = f"workers of membership {self.roll.number}"
        self.store = own_store = PrefixStore(f"anabranch/{self.name}", store)
        self.rowless = Rowless(self.store, self, self.timeout)
        limit, number, size = timedelta(seconds=self.timeout + BACKEND_GRACE), self.roll.number, self.size

        def connect() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
            own = dist.ProcessGroupGloo(own_store, rank, size, limit)
            return cast(dist.ProcessGroup, own), connect_world(number, store, rank, size, limit)

        self._own, self._group = self._made(connect, "meet")
        set_world(self._group, self.peers)
        return True

    def _made(self, connect: Callable[[], _T], operation: str) -> _T:
        """Return ``connect()``, for which gloo waits for members that may be lost meanwhile."""
        answer = begin_call(connect, "anabranch-meeting")[1]

        def done(seconds: float) -> bool:
            return bool(wait([answer], seconds).done) and answer.result(0) is not None

        def left() -> dict[int, str]:  # a newcomer of another host that has ended before it was heard
            place, roll = own_place(), self.roll
            now = {} if place is None else published(place.meeting).ranks
            ranks = {} if roll is None or not now else roll.ranks
            return {rank: "its process has ended" for process, rank in ranks.items() if process not in now}

        self.wait_for(done, Deadline.after(self.timeout), operation, None, on_host=True, noticed=left)
        return answer.result(0)

    def _keep_work(self) -> None:
        """Keep the groups of unfinished collectives, and free those of earlier memberships that have ended since."""
        _unfinished.update(self.begun)
        _unfinished.difference_update([one for one in [*_unfinished] if one.work[0].is_completed()])

    def have_closed(self) -> bool:
        """Return True if all others have closed theirs."""
        return self.store is not None and all(self.store.check([f"closed/{rank}"]) for rank in self.others)

    # Collectives. Each starts at once and in the same order on every rank; `finish` what they return.

    def _start(
        self, collective: Callable[..., object], tensor: Tensor, operation: str, step: int | None = None, **more: object
    ) -> Pending:
        self.bytes_sent += tensor.nbytes
        more.setdefault("group", self._own if self._own is not None and tensor.is_cpu else self._group)
        began = spans.begin()
        work = cast(dist.Work, collective(tensor=tensor, async_op=True, **more))
        pending = Pending(partial(ended_within, work), self, operation, step, tensor)
        pending.work, pending.began = (work, tensor, more), began
        self.begun.add(pending)
        return pending

    def start_all_reduce(
        self, tensor: Tensor, *, operation: str = "all_reduce", step: int | None = None, **group: object
    ) -> Pending:
        """Start summing ``tensor``, in place, over the workers, or those of another ``group``."""
        return self._start(dist.all_reduce, tensor, operation, step, **group)

    def start_all_gather(
        self, tensor: Tensor, into: Tensor, *, operation: str = "all_gather", step: int | None = None
    ) -> Pending:
        """Start gathering the workers' tensors into ``into``, of shape ``(workers, *tensor.shape)``."""
        return self._start(dist.all_gather, tensor, operation, step, tensor_list=list(into.unbind(0)))

    def all_reduce(self, tensor: Tensor, *, operation: str = "all_reduce", step: int | None = None) -> Tensor:
        """``tensor``, summed in place over the workers."""
        self.start_all_reduce(tensor, operation=operation, step=step).finish()
        return tensor

    def all_gather(self, tensor: Tensor, *, operation: str = "all_gather", step: int | None = None) -> Tensor:
        """Every worker's ``tensor``, stacked in rank order."""
        into = tensor.new_empty(self.size, *tensor.shape)
        self.start_all_gather(tensor, into, operation=operation, step=step).finish()
        return into

    def all_gather_bytes(self, data: bytes, *, operation: str = "all_gather") -> list[bytes]:
        """Every worker's ``data``, in rank order; lengths may differ."""
        lengths, mine = self._padded(data, operation)
        return _cut(self.all_gather(mine, operation=operation).unbind(0), lengths)

    def gather_bytes(self, data: bytes, *, operation: str = "gather") -> list[bytes]:
        """Every worker's ``data`` on rank 0, in rank order; nothing on the others."""
        lengths, mine = self._padded(data, operation)
        into = [torch.empty_like(mine) for _ in lengths] if self.rank == 0 else None
        self._start(dist.gather, mine, operation, gather_list=into, group_dst=0).finish()
        return _cut(into or (), lengths)

    def _padded(self, data: bytes, operation: str) -> tuple[list[int], Tensor]:
        """Return the lengths of every worker's ``data``, and this one's with zeros up to the longest."""
        mark = zlib.crc32(operation.encode())
        everyone = self.all_gather(torch.tensor([len(data), mark], device=self.device), operation=operation).tolist()
        for rank, (_, theirs) in zip(self.ranks, everyone, strict=True):
            if theirs != mark:
                raise self.apart(rank, operation, "is in another call")
        lengths = [length for length, _ in everyone]
        padded = bytearray(data.ljust(max(1, *lengths), b"\0"))
        return lengths, torch.frombuffer(padded, dtype=torch.uint8).to(self.device)

    def broadcast(self, tensors: Sequence[Tensor], *, source: int = 0, operation: str = "broadcast") -> None:
        """Copy the tensors of rank ``source`` over everyone's, all in progress at once."""
        several = [self._start(dist.broadcast, each, operation, group_src=source) for each in tensors]
        for pending in several:
            pending.finish()

    def broadcast_bytes(self, data: bytes, source: int, *, operation: str = "broadcast") -> bytes:
        """Return the ``data`` of rank ``source``."""
        length = torch.tensor([len(data)], device=self.device)
        self.broadcast([length], source=source, operation=operation)
        content = torch.frombuffer(bytearray(data.ljust(int(length.item()), b"\0")), dtype=torch.uint8).to(self.device)
        self.broadcast([content], source=source, operation=operation)
        return content.cpu().numpy().tobytes()

    @cached_property
    def hosts(self) -> list[list[int]]:
        """The numbers in the group of each host's processes of one user; none if no memory is shared. All ask alike."""
        mine = f"{self.peers.identity.host} {os.getuid()} {platform.machine()}"
        hosts: dict[bytes, list[int]] = {}
        for number, host in enumerate(self.all_gather_bytes(mine.encode(), operation="comparison of hosts")):
            hosts.setdefault(host, []).append(number)
        if 1 < max(map(len, hosts.values())) <= _MOST_SHARING:
            first = [numbers[0] for numbers in hosts.values()]
            if len(first) > 1 and self.rank in first:
                assert self.store is not None
                store, limit = PrefixStore("between hosts", self.store), timedelta(seconds=self.timeout + BACKEND_GRACE)
                connect = partial(dist.ProcessGroupGloo, store, first.index(self.rank), len(first), limit)
                self.between_hosts = cast(dist.ProcessGroup, self._made(connect, "meet between hosts"))
            return list(hosts.values())
        if self.size > 1:
            _log.info("gradients go through gloo's sockets: shared memory is for %s", _SHARING)
        return []

    # Waits and their outcomes.

    def check_present(self) -> None:
        """Check that every rank is still there, for a caller that waits for the others in another way.

        Raises:
            PeerLost: a rank died or froze; names it.
        """
        self.check("wait for the other workers", Deadline.after(self.timeout))

    def apart(self, rank: int, operation: str, where: str) -> BoundaryError:
        """Return the error of a call that not all workers make."""
        self.has_left_work = True
        text = f"rank {rank} {where} and this rank in {operation!r}; each worker makes the same calls in the same order"
        return BoundaryError(
            f"{text}: none calls run, evaluate, save, load, export or state_dict alone",
            peer=f"rank {rank}",
            operation=operation,
        )

    def wait_for(
        self,
        done: Callable[[float], bool],
        deadline: Deadline,
        operation: str,
        step: int | None,
        *,
        on_host: bool,
        noticed: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        """Return when a collective is ``done``, or raise the reason why it will not be.

        Gloo's, of tensors ``on_host``, is looked at again and again; NCCL's wait is over once it is queued.
        """
        began = time.monotonic()
        try:
            self.wait(done, operation, deadline, step=step, at_once=not on_host, noticed=noticed)
        except (PeerLost, RuntimeError) as error:
            if isinstance(noticed, _Comparison):
                noticed.last()
            if isinstance(error, PeerLost):
                raise
            raise self.explain(error, operation, deadline, step=step) from None
        except BaseException:  # the deadline, or Ctrl-C: gloo goes on
            self.has_left_work = True
            raise
        self.wait_seconds += time.monotonic() - began

    def _end(self) -> None:
        self.close()
        if self._waits_for_lost:
            end_without_waiting()

    @property
    def _waits_for_lost(self) -> bool:
        """True if gloo waits for workers that are lost, and the job has not gone on without them."""
        return self.has_left_work and self.membership == self.peers.membership

    def close(self) -> None:
        """Let go of the connections, and destroy the process group if it was initialised here."""
        for segment in self.segments:
            segment.give_up()  # as a closed connection would tell the others
        if self._waits_for_lost:
            return
        self._keep_work()
        if self.roll is not None and self.store is not None:
            self.store.set(f"closed/{self.peers.rank}", "yes")
        atexit.unregister(self._end)
        if self.rowless is not None:
            self.rowless.close()
        # Their threads end with the last reference, see meeting.py.
        self._group = self._own = self.between_hosts = None
        if self._owns_job and dist.is_initialized():
            self._owns_job = False
            self.peers.close()
            dist.destroy_process_group()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(rows: Sequence[Tensor], lengths: Sequence[int]) -> list[bytes]:
    return [row.cpu().numpy()[:length].tobytes() for row, length in zip(rows, lengths, strict=False)]


# Collectives of earlier memberships, with their groups. Not freed at the end either: gloo's threads take the
# interpreter's lock to free a tensor.
_unfinished = set[Pending]()
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_unfinished))
