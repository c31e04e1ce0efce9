"""``Shard``: the tables and parameters of one server, and the order in which workers change them.

::

    init, join, push, pull ──check──> log ──> do ──> (durable) ──> answer
                                       │       │
                                       │       └── bsp: held until every worker's push of the step is there and released
                                       └── a shard that was killed does the log again, in the same order

Every change to a shard is a record of verb, message and tensors, applied under one lock by ``_do``. Applying the same
records in the same order gives the same bits; the log relies on that. ``bsp`` applies a step once, to the mean (or sum)
of all workers' gradients, added up in the order of their ranks; ``ssp:K`` and ``asp`` apply each push as it comes. A
read that is too early waits: under ``bsp`` for earlier steps, under ``ssp:K`` for workers that are more than K steps
behind.

The tables themselves are in ``contents.py``, the order of the steps in ``worker_order.py``; this file joins them, under
one lock.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import msgspec
import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import DeadlineExceeded, NonFinite, Overloaded, SchemaError
from anabranch.parameter_server.messages import (
    MESSAGES,
    BarrierMessage,
    DropMessage,
    ExportMessage,
    InitMessage,
    JoinMessage,
    NormMessage,
    PullMessage,
    PullPart,
    PullReply,
    PushMessage,
    ReleaseMessage,
    RestoreMessage,
    StepMessage,
    WorkerProgress,
)
from anabranch.parameter_server.server.contents import ShardContents, ShardSnapshot, ShardStatistics
from anabranch.parameter_server.server.requests import (
    RowRequest,
    admit,
    apply,
    arrived,
    check_body,
    read,
    renewed,
    squared_sum,
    without,
)
from anabranch.parameter_server.server.worker_order import Consistency, HeldStep, WorkerOrder
from anabranch.record import spans
from anabranch.tables.kernels.rows import KernelThreads
from anabranch.tables.row_block import Group, parts_of
from anabranch.tables.snapshot import RowSnapshot
from anabranch.tables.table import Table
from anabranch.tables.table_spec import check_name
from anabranch.transport import unpack


class Shard:
    """The part of all tables and parameters on one server. Safe to use from several threads.

    Args:
        shard, shards: the shard's number, and the number of shards.
        pool: threads that share a table's work; by default the caller's alone.
        journal: called with every change before it is applied.
        take_back: called when the last journaled change was refused while it was applied, and changed nothing.
        scratch: the directory of memory-mapped tables' files.

    Attributes:
        contents: the tables and parameters; a request's header is checked against them without the lock.
    """

    def __init__(
        self,
        shard: int = 0,
        shards: int = 1,
        *,
        pool: KernelThreads | None = None,
        journal: Callable[[str, msgspec.Struct, Sequence[Tensor]], None] | None = None,
        take_back: Callable[[], None] | None = None,
        scratch: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0 <= shard < shards:
            raise ValueError(f"shard={shard} is out of range for shards={shards}")
        self.shard, self.shards = shard, shards
        self.contents = ShardContents(shard, shards, pool or KernelThreads(1), scratch)
        self._journal = journal or (lambda verb, message, tensors: None)
        self._take_back = take_back or (lambda: None)
        self._state = threading.Condition(threading.RLock())
        self._job: WorkerOrder | None = None
        self._clients: dict[int, bytes] = {}  # the last to join, by rank
        self._members: set[bytes] = set()  # those of the job, which may come to have other ranks
        self._barriers: dict[int, int] = {}
        self._refused_values: dict[str, int] = {}
        self._replayed = self._spills = 0
        self._snapshots: list[RowSnapshot] = []

    # --- requests ---------------------------------------------------------------------------------------------------

    def request(self, message: PullMessage | PushMessage, tensors: Sequence[Tensor], client: bytes = b"") -> RowRequest:
        """Return the request of a message whose tensors are here."""
        return arrived(self.contents, message, tensors, client)

    def init(self, message: InitMessage, tensors: Sequence[Tensor] = ()) -> None:
        """Create a table or a parameter; an existing one of the same shape stays unchanged.

        Raises:
            SchemaError: one of that name has another shape, dtype or optimizer.
            ValueError: an invalid table, or numbers that are not finite.
        """
        check_name(message.name)
        with self._state:
            if self.contents.is_there(message, tensors):
                return
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                raise NonFinite(f"the initial value of parameter {message.name} holds NaN or Inf")
            made = self.contents.parse(message, tensors)  # a message that cannot be done must not reach the journal
            self._record("init", message, tensors, self.contents.add, *made)

    def join(self, message: JoinMessage, client: bytes = b"") -> None:
        """Register a worker of a job, or a restarted one: its steps count from ``message.step``.

        From then on only ``client`` is that worker.

        Raises:
            SchemaError: another worker has given another world or consistency.
        """
        if not message.rank < message.world:
            raise SchemaError(f"rank {message.rank} is out of range for a world of {message.world}")
        Consistency.parse(message.consistency)
        with self._state:
            self._barriers.pop(message.rank, None)  # a new client counts them from 1 again
            job = self._job
            if job is not None and client in self._members:
                job.check_number(message.number)
            if message.turn is not None:
                if job is None or job.consistency.name != message.consistency:
                    raise SchemaError(
                        f"rank {message.rank} joins a job under {message.consistency}: there is none here"
                    )
                self._record("join", message, (), self._do_join, message, client)
                self._apply_due()
                return
            if job is not None and (job.world, job.consistency.name) != (message.world, message.consistency):
                moved = any(clock > message.step for clock in job.clocks) or job.held
                if moved and message.step:
                    raise SchemaError(
                        f"this job has {job.world} workers under {job.consistency.name}; rank {message.rank} says "
                        f"{message.world} under {message.consistency}"
                    )
            self._record("join", message, (), self._do_join, message, client)

    def _check_client(self, rank: int, client: bytes) -> None:
        """Raise ``SchemaError`` if another client has joined as worker ``rank`` since this one did."""
        joined, is_member = self.joined_as(rank), self._job is None or client in self._members
        if client and (not is_member or (joined and client != joined)):
            raise SchemaError(
                f"another client has joined this server as worker {rank} since, so its parameters are those of another "
                "Executor or job; close one Executor before the next is made, and give each job its own servers"
            )

    def release(self, message: ReleaseMessage, client: bytes = b"") -> None:
        """Take note of how far a worker is, or at the end of a job how far the furthest was, and apply what is due.

        Raises:
            NonFinite: a scale that is NaN or Inf.
        """
        with self._state:
            if message.rank >= 0:
                job = self._hear(message.rank, message.turn, client)
                if job is not None and not job.gone.issuperset(message.gone):
                    self._record("release", message, (), job.gone.update, message.gone)
                    self._state.notify_all()
            elif self._job is not None and self._job.consistency.merges:
                self._job.hear(0, message.turn)  # which may say of another number how many its workers are
                for rank in range(1, self._job.world):
                    self._job.hear(rank, message.turn)
                self._apply_due()
                self._job.held.clear()

    def _hear(self, rank: int, turn: WorkerProgress | None, client: bytes) -> WorkerOrder | None:
        """Take note of how far the worker is that sends a message, and apply what is due; returns its job."""
        if rank < 0:
            return None
        job = self._job
        if job is not None and turn is not None and turn.number >= job.number and client in self._members:
            self._clients[rank] = client  # which may have another rank than before
        self._check_client(rank, client)
        if job is None or turn is None or turn.number <= job.number:
            job = self._joined(rank)
        job.check_whole()
        if turn is not None:
            before = job.number
            job.hear(rank, turn)
            if job.number != before or turn.last < turn.done - 1:
                self._state.notify_all()  # for some requests of the last membership, or of a dropped step, nobody comes
            self._apply_due()
        return job

    def _apply_due(self) -> None:
        """Apply the steps that every worker has released."""
        job, before = self._job, None if self._job is None else self._job.applied
        while job is not None and job.consistency.merges and (due := job.due()) is not None:
            held, scale = due
            job.check_whole()
            self._do_step(job, job.applied, scale, log=held is not None and held.waits)
        if job is not None and job.applied != before:
            self._state.notify_all()

    def _do_step(self, job: WorkerOrder, step: int, scale: float | None, *, log: bool = False) -> None:
        def begin() -> None:
            if log:
                self._journal("step", StepMessage(step, scale), ())
                job.broken = f"step {step} was applied in part"

        if scale is None:
            begin()
        else:
            apply(self.contents, job.held[step].in_order(), scale, begin=begin)
        job.past(step, scale)
        job.broken = ""

    def joined_as(self, rank: int) -> bytes:
        """Return the last client to join as worker ``rank``, if it is known. Without the lock."""
        return self._clients.get(rank, b"")

    def pull(self, request: RowRequest, deadline: Deadline | None = None) -> tuple[PullReply, list[Tensor]]:
        """Rows and parameters, once the job's consistency allows them to be read.

        Returns:
            The reply and its tensors, as ``PullReply`` describes them.

        Raises:
            NotFound: an id does not exist.
            DeadlineExceeded: other workers' pushes have not arrived; names them.
        """
        message: PullMessage = request.message
        with self._state:
            job, pushed = self._hear(message.rank, message.turn, request.client), 0
            if job is not None:
                if job.consistency.lag is not None:
                    self._wait_for_steps(message, message.step - job.consistency.lag, deadline, "pull")
                pushed = self._joined(message.rank).slowest
            if request.parts.version != self.contents.version:
                request = renewed(self.contents, request)
            check_body(request)
            admits = message.training and any(map(itemgetter(2), request.parts.groups))
            if admits:
                ids_only = [PullPart(part.name, part.count) for part in message.parts]
                self._journal("pull", PullMessage(ids_only, message.training), request.tensors[:1])
            try:
                return read(self.contents, request, pushed)
            except BaseException:  # such as no memory for the answer
                if admits:
                    admit(request)  # which is what a replay will do
                raise

    def push(self, request: RowRequest, *, peer: str = "", deadline: Deadline | None = None) -> list[str]:
        """Take gradients: applied at once, or under ``bsp`` when every worker's gradients of that step have arrived,
        and with ``hold`` every worker has released it.

        Returns:
            Those of its tables that have had no room for an id so far.

        Raises:
            NotFound, SchemaError: an id, or its step, does not exist; nothing is changed.
            NonFinite: NaN, Inf or a number too large among the gradients; counted by ``peer``, nothing is changed.
            DeadlineExceeded: a worker's push outside the steps is weighted by its share in its last step, which not all
                have pushed; names them.
        """
        message: PushMessage = request.message
        with self._state:
            job = self._hear(message.rank, message.turn, request.client)
            if job is not None and message.step < 0 and job.consistency.merges:
                self._wait_for_steps(message, job.clocks[message.rank], deadline, "push")
            if request.parts.version != self.contents.version:
                request = renewed(self.contents, request)
            try:
                check_body(request)
            except NonFinite:
                self._refused_values[peer] = self._refused_values.get(peer, 0) + 1
                raise
            if job is not None:
                self._check_turn(message)
            self._record("push", message, request.tensors, self._do_push, request)
            full = []
            for name, holder in zip(request.parts.names, request.parts.holders, strict=True):
                if isinstance(holder, Table) and holder.unadmitted:
                    full.append(name)
            return full

    def squared_norm(self, message: NormMessage, deadline: Deadline, client: bytes = b"") -> float:
        """Return the sum of squares, in float64, of the merged gradients of a held step, once all workers' have
        arrived.

        Raises:
            DeadlineExceeded: some are not; names them.
            SchemaError: nothing is held of that step, or a worker has dropped it.
        """
        with self._state:
            self._hear(message.rank, message.turn, client)

            def late() -> list[int]:
                self._check_client(message.rank, client)
                job = self._joined(message.rank)
                if max(job.released) > message.step:
                    return []
                held = job.held.get(message.step)
                return [rank for rank in range(job.world) if held is None or rank not in held.pushes]

            self._wait_for(late, deadline, "norm", message.step)
            held = self._joined(message.rank).held.get(message.step)
            if held is None or not held.complete:
                raise SchemaError(f"not every worker's push of step {message.step} is held here")
            if held.norm is None:
                held.norm = squared_sum(self.contents, held.in_order())
            return held.norm

    def replay(self, verb: str, payload: bytes, tensors: Sequence[Tensor], client: bytes = b"") -> None:
        """Replays a journaled change, which ``client`` requested."""
        with self._state:
            message: Any = unpack(payload, MESSAGES[verb])
            if verb == "init":
                self.contents.add(*self.contents.parse(message, tensors))
            elif verb == "join":
                self._do_join(message, client)
            elif verb == "pull":
                admit(self.request(message, tensors))
            elif verb == "push":
                if message.rank >= 0 and message.turn is not None and self._job is not None:
                    self._job.hear(message.rank, message.turn)
                    self._clients[message.rank] = client
                self._do_push(self.request(message, tensors))
            elif verb == "restore":
                self.contents.check_restored(message, tensors)
                self.contents.restore(message, tensors)
            elif verb == "drop":
                self._do_drop(message)
            elif verb == "release":
                assert self._job is not None, "a worker of it says this"
                self._job.gone.update(message.gone)
            elif self._job is not None and message.step >= self._job.applied:
                self._do_step(self._job, message.step, message.scale)
            self._replayed += 1

    def _check_turn(self, message: PushMessage) -> None:
        """Raise for a push of a worker that has not joined, or for a step that is not its next."""
        job = self._joined(message.rank)
        hold = message.merging.hold
        if hold and 0 <= message.step < max(job.applied, job.released[message.rank]):  # held for ever
            raise SchemaError(f"worker {message.rank} pushes step {message.step}, which it has the outcome of")
        # Of a step that another shard refused, this one may never have heard.
        ahead = hold and message.step == job.released[message.rank] > job.clocks[message.rank]
        if 0 <= message.step != job.clocks[message.rank] and not ahead:
            raise SchemaError(
                f"worker {message.rank} pushes step {message.step}; its next is step {job.clocks[message.rank]}"
            )

    # --- order of the workers' steps --------------------------------------------------------------------------------

    def _joined(self, rank: int) -> WorkerOrder:
        if self._job is None or rank >= self._job.world:
            raise SchemaError(
                f"worker {rank} has not joined this server's job"
                + (f", which is one of {self._job.world} since another Executor has joined" if self._job else "")
                + "; close one Executor before the next is made, and give each job its own servers"
            )
        return self._job

    def _wait_for_steps(
        self, message: PullMessage | PushMessage, step: int, deadline: Deadline | None, operation: str
    ) -> None:
        """Wait until all steps before ``step`` are done: pushed by every worker, and under ``bsp`` applied."""

        def late() -> list[int]:
            job = self._joined(message.rank)
            if message.turn is not None:
                job.check_number(message.turn.number)  # which may have come to be an older one
            return job.late(step)

        self._wait_for(late, deadline, operation, step)

    def _wait_for(self, late: Callable[[], list[int]], deadline: Deadline | None, operation: str, step: int) -> None:
        """Wait until no rank is ``late``.

        Raises:
            DeadlineExceeded: some are at the deadline; names them.
        """
        ranks = late()
        if not ranks:
            return
        patience = _patience(deadline)
        facts = lambda: {"peer": ", ".join(f"rank {rank}" for rank in ranks), "operation": operation}  # noqa: E731
        with spans.Lasting("wait", "wait", facts):
            while self._state.wait(timeout=patience.remaining()):
                if not (now := late()):
                    return
                ranks = now
        names = ", ".join(f"worker {rank}" for rank in ranks)
        raise DeadlineExceeded(
            f"nothing arrived from {names} before the deadline", peer=names, operation=operation, step=step,
            elapsed=patience.elapsed(),
        )  # fmt: skip

    # --- changes ----------------------------------------------------------------------------------------------------

    def _record(
        self, verb: str, message: Any, tensors: Sequence[Tensor], do: Callable[..., None], *arguments: object
    ) -> None:
        self._journal(verb, message, tensors)
        try:
            do(*arguments)
        except BaseException:
            self._take_back()
            raise

    def _do_join(self, message: JoinMessage, client: bytes) -> None:
        consistency = Consistency.parse(message.consistency)
        if message.turn is not None:
            assert self._job is not None, "a newcomer joins others"
            self._job.hear(message.rank, message.turn)
            self._clients[message.rank] = client
            self._members.add(client)
        else:
            if self._job is None or self._job.world != message.world or self._job.consistency != consistency:
                self._job = WorkerOrder(message.world, consistency, message.step, message.number)
            self._job.join(message.rank, message.step, message.number)
            self._clients[message.rank] = client
            self._members = {one for rank, one in self._clients.items() if rank < message.world}
        self._state.notify_all()

    def _do_push(self, push: RowRequest) -> None:
        message: PushMessage = push.message
        job = self._joined(message.rank) if message.rank >= 0 else None
        merges = job is not None and job.consistency.merges
        if job is None or message.step < 0:
            apply(self.contents, [push], total=job.total if job is not None and merges else None)
            return
        if merges:
            self._hold(job, push)
        else:
            apply(self.contents, [push])
            job.clocks[message.rank] = message.step + 1
        self._state.notify_all()

    def _hold(self, job: WorkerOrder, push: RowRequest) -> None:
        """Keep a worker's push until its step may be applied; if it cannot be, the push is not kept."""
        held = job.hold(push)
        try:
            if not held.waits:
                self._apply_due()
        except BaseException:
            del held.pushes[push.message.rank]
            job.clocks[push.message.rank] = push.message.step
            raise

    # --- saving and loading -----------------------------------------------------------------------------------------

    def export(self, message: ExportMessage) -> tuple[int, list[Tensor]]:
        """Return a parameter's steps, and its value and states."""
        with self._state:
            return self.contents.export(message)

    def restore(self, message: RestoreMessage, tensors: Sequence[Tensor]) -> None:
        """Restores part of what a snapshot of this or another shard holds.

        Raises:
            NotFound, SchemaError: it does not fit this table or parameter; nothing is changed.
        """
        with self._state:
            self.contents.check_restored(message, tensors)
            self._record("restore", message, tensors, self.contents.restore, message, tensors)

    def drop(self, message: DropMessage) -> None:
        """Drop a table or a parameter."""
        with self._state:
            self.contents.holder(message.name)
            self._record("drop", message, (), self._do_drop, message)

    def _do_drop(self, message: DropMessage) -> None:
        for held in self._job.held.values() if self._job is not None else ():
            held.norm = None
            for rank, push in held.pushes.items():
                if message.name in push.parts.names:  # or nothing of its step could be applied
                    held.pushes[rank] = without(self.contents, push, message.name)
        self.contents.drop(message.name)

    def barrier(self, message: BarrierMessage, deadline: Deadline, client: bytes = b"") -> None:
        """Wait until all workers are at this barrier.

        Raises:
            DeadlineExceeded: some are not; names them.
        """
        self._check_client(message.rank, client)
        with self._state:
            if not message.rank < message.world:
                raise SchemaError(f"rank {message.rank} is out of range for a world of {message.world}")
            self._barriers[message.rank] = max(message.number, self._barriers.get(message.rank, 0))
            self._state.notify_all()

            def late() -> list[int]:
                return [rank for rank in range(message.world) if self._barriers.get(rank, 0) < message.number]

            self._wait_for(late, deadline, "barrier", message.number)

    def snapshot(self, names: Sequence[str] | None = None, seconds: float = math.inf) -> ShardSnapshot:
        """Begin to read this moment; of ``names``, or of everything with the order of the workers and held pushes.

        Raises:
            Overloaded: two others are being read, and this one is a client's, which ends after ``seconds``.
        """
        with self._state:
            if self._job is not None:
                self._job.check_whole()
            for rows in [rows for rows in self._snapshots if rows.ended]:
                self._snapshots.remove(rows)
                self._spills += rows.spills
            if len(self._snapshots) > 1 and seconds < math.inf:
                raise Overloaded("two snapshots of this shard are being read; save again once one has ended")
            snapshot = self.contents.snapshot(self._state, names, seconds)
            self._snapshots.append(snapshot.rows)
            return snapshot

    def snapshot_of_all(self) -> ShardSnapshot:
        """Begin to read this moment of everything, the order of the workers and the held pushes included."""
        with self._state:
            snapshot, job = self.snapshot(), self._job
            pushes = [push for _, step in sorted(job.held.items()) for push in step.pushes.values()] if job else []
            for k, push in enumerate(pushes):
                snapshot.groups[f"push-{k}"] = {str(at): tensor for at, tensor in enumerate(push.tensors)}
            snapshot.state |= {
                "clients": dict(self._clients), "members": sorted(self._members),
                "pushes": [msgspec.msgpack.encode(push.message) for push in pushes],
                "job": None,
            }  # fmt: skip
            if job is not None:
                snapshot.state["job"] = {
                    "world": job.world, "number": job.number, "consistency": job.consistency.name,
                    "clocks": list(job.clocks), "applied": job.applied, "total": job.total,
                    "turn": msgspec.structs.astuple(job.turn), "gone": sorted(job.gone), "moved": job.moved,
                    "held": {step: (held.world, held.waits) for step, held in job.held.items()},
                }  # fmt: skip
            return snapshot

    def load(self, state: Mapping[str, Any], groups: Mapping[str, Group]) -> None:
        """Load the result of ``snapshot_of_all`` into an empty shard."""
        with self._state:
            self.contents.load(state, groups)
            self._clients = dict(state["clients"])
            self._members = set(state["members"])
            if (kept := state["job"]) is None:
                return
            consistency = Consistency.parse(kept["consistency"])
            job = self._job = WorkerOrder(kept["world"], consistency, kept["applied"], kept["number"])
            job.clocks, job.total, job.turn = list(kept["clocks"]), kept["total"], WorkerProgress(*kept["turn"])
            job.gone, job.moved = set(kept["gone"]), kept["moved"]
            job.held = {step: HeldStep(*facts) for step, facts in kept["held"].items()}
            for k, push in enumerate(state["pushes"]):
                message = unpack(push, PushMessage)
                request = self.request(message, parts_of(groups, f"push-{k}"))
                job.held[message.step].pushes[message.rank] = request
                # One of an older membership waits, too, and says nothing of this one.
                if message.turn is not None and message.turn.number == job.number:
                    job.hear(message.rank, message.turn)

    def statistics(self) -> ShardStatistics:
        """Counters since the start."""
        with self._state:
            spills = self._spills + sum(rows.spills for rows in self._snapshots)
            return ShardStatistics(self.contents.statistics(), dict(self._refused_values), self._replayed, spills)

    def describe(self) -> dict[str, object]:
        """Tables and parameters, their optimizers and steps, without the values; who has joined as worker 0, and how
        far the furthest worker is of a job whose steps are held.
        """
        with self._state:
            merges = self._job is not None and self._job.consistency.merges
            turn = msgspec.msgpack.encode(self._job.turn) if self._job is not None and merges else b""
            return {**self.contents.describe(), "joined": self.joined_as(0).hex(), "turn": turn}

    def clocks(self) -> dict[str, object]:
        """Return the steps that each worker has pushed, and the most that one may be behind; ``None`` for no limit."""
        with self._state:
            if self._job is None:
                return {"clocks": [], "lag": None}
            return {"clocks": list(self._job.clocks), "lag": self._job.consistency.lag}

    def current_step(self) -> int:
        """Return the step that every worker of the job has pushed; without a job, the highest step of any table.

        Without the lock.
        """
        job = self._job
        return self.contents.step() if job is None else job.slowest

    def locked(self) -> threading.Condition:
        """Return the lock under which every change is made, for callers whose several steps must be atomic."""
        return self._state


def _patience(deadline: Deadline | None) -> Deadline:
    """Return a little less than the client's remaining time, so that the error naming the missing workers arrives
    first.
    """
    return Deadline.after(1e-3) if deadline is None else deadline.sooner(max(0.8 * deadline.remaining(), 1e-3))
