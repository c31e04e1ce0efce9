"""``ParameterClient``: tables and parameters on the shards, by name and id.

A request that concerns several shards goes to all at once, in one message each. Rows are placed by ``Placement``; a
dense parameter is stored whole on the shard that its name hashes to. Changes are numbered and applied exactly once, so
a lost connection does not fail the call: the transport retries until the deadline.

``shards.py`` sends requests to the shards and keeps names and placements, ``row_messages.py`` turns rows into messages,
and ``saved_tables.py`` into checkpoints. The public verbs come first. The file is long because it is the whole
interface, call by call, and the order of pulls and pushes, which decides when a worker may no longer go on.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Literal, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from anabranch import checkpoint
from anabranch.checkpoint.tensor_file import Blocks
from anabranch.deadline import Deadline, check_seconds
from anabranch.errors import BoundaryError, NonFinite, NotFound, Overloaded, RolledBack, SchemaError, Unauthorized
from anabranch.job import RETURN_VARIABLE, job
from anabranch.parameter_server.client.row_messages import Pull, Pulled, Push, VersionClock
from anabranch.parameter_server.client.saved_tables import CHUNK, SavedTables, chunks, gathered, restore, write_rows
from anabranch.parameter_server.client.shards import KnownTables, ShardCalls
from anabranch.parameter_server.messages import (
    BarrierMessage,
    Compression,
    ExportMessage,
    JoinMessage,
    Merging,
    NormMessage,
    PullMessage,
    PullReply,
    PushMessage,
    ReleaseMessage,
    WorkerProgress,
    acceptable,
    check_compression,
)
from anabranch.parameter_server.server.contents import ShardStatistics
from anabranch.parameter_server.server.shard_server import ParameterServer
from anabranch.tables.optimizers.row_optimizers import OptimizerFactory, ParameterState, RowOptimizer
from anabranch.tables.table_spec import Constant, Initial, TableSpec
from anabranch.transport import Client, MemoryTransport, Request, Transport, pack, unpack

REFUSALS = (NonFinite, NotFound, Overloaded, RolledBack, SchemaError, Unauthorized)
"""The errors of a shard that has not applied a push; after any other it may have."""

_PATIENCE = 10.0  # seconds; the launcher kills a frozen server after two of its looks, which a busy machine delays
_BLOCK_BYTES = 32 << 20  # of a table that is read a few rows at a time
_ALONE = Merging()
_SGD: OptimizerFactory = functools.partial(torch.optim.SGD, lr=0.01)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of a job, for a client whose reads and pushes are ordered with those of the other workers.

    Attributes:
        rank, world: the worker's number, and the number of workers.
        consistency: ``"bsp"``, ``"ssp:K"`` or ``"asp"``, the same for all.
        leads: its initial values of shared parameters are used by all workers; by default rank 0's are.
        membership: the number of the job's membership that rank and world are of.
    """

    rank: int
    world: int
    consistency: str = "bsp"
    leads: bool | None = None
    membership: int = 0


@dataclass(slots=True)
class Traffic:
    """Counters of one client's messages about one table or parameter.

    Attributes:
        pulls, pushes: messages that read and changed it; one to several shards at once counts as one.
        bytes: of ids, versions, rows and gradients, both ways.
        wait_seconds: time that the caller waited for answers; a message about several is shared between them.
    """

    pulls: int = 0
    pushes: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0


class ParameterClient(KnownTables):
    """Reads and changes tables and parameters on the shards.

    >>> with ParameterClient() as client:  # no servers in this job: a shard in this process
    ...     client.init("users", (1000, 2), kind="rows", init=1.0)
    ...     client.sparse_push("users", torch.tensor([7, 9, 7]), torch.ones(3, 2))
    ...     client.sparse_pull("users", torch.tensor([[7], [8]]))
    tensor([[[0.9800, 0.9800]],
    <BLANKLINE>
            [[1.0000, 1.0000]]])

    Args:
        endpoints: of all shards, in their order; by default those of the job, and if it has none a shard in this
            process.
        worker: orders this client's steps with those of the job's other workers; a bare client's push is applied at
            once, and it reads the present values.
        timeout: seconds that a call may take.
        watch: called now and then while other workers are waited for; raises if one of them is known to be lost.
        retries, keys, insecure, heartbeat, transport: as ``anabranch.transport.Client`` takes them. A shard that is
            restarted is rejoined while there are retries and time.
        compression: rounding of rows and their gradients on the way: ``None`` for none, ``"bfloat16"`` to half
            their bytes, ``"int8"`` to 17 bytes for 16 numbers, each off by 1/177 of the largest of them at most: one
            above 4.5e18 is ``NonFinite``, those below 1.5e-22 come to 0. Ids, versions, dense parameters and
            checkpoints are exact.

    Attributes:
        shards, endpoints: the number of shards, and their addresses.
        compression: of rows on the way.
        in_process: true if the one shard is in this process, and ends with this client.
        worker, rank: this worker of a job, and its rank; ``None`` and 0 for a bare client.
        leads: true if all workers use this worker's initial values; always true for a bare client.
        made: the tables that this client has made or learned of, and their optimizers.
        full: the tables that had no room for an id of a push, as far as their answers have said.
        pushed: the number of steps that every worker had pushed when the last pull was answered.

    Every call raises a kind of ``BoundaryError`` where a shard does not answer, ``NotFound`` for an unknown name or
    id, ``SchemaError`` for shapes and dtypes that do not fit and for an endpoint of another shard, ``NonFinite`` for
    NaN or Inf.

    Source: the push and pull of Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014), and
    the fused forms of HET (Miao et al., 2022).
    """

    def __init__(
        self,
        endpoints: Sequence[str] | None = None,
        *,
        worker: Worker | None = None,
        timeout: float = 60.0,
        watch: Callable[[], None] | None = None,
        retries: int = 60,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        transport: Transport | None = None,
        compression: Compression | None = None,
    ) -> None:
        self.compression = check_compression(compression)
        check_seconds(timeout=timeout, heartbeat=heartbeat)
        addresses = _checked_endpoints(
            job().servers if endpoints is None else endpoints, explicit=endpoints is not None
        )
        self._stack = ExitStack()
        self.worker: Worker | None = None
        self.rank, self.leads = 0, True
        self._barriers = 0
        self._traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._counting = threading.Lock()  # rows may be requested ahead, in a thread
        self._uncounted: int | None = None
        in_process = not addresses
        if in_process:
            transport = MemoryTransport()
            addresses = [self._stack.enter_context(ParameterServer(transport=transport)).endpoint]
        self._clocks = [VersionClock()] * len(addresses)
        self._partial_step: int | None = None  # whose push some shards have applied and one has refused
        self.pushed = 0
        self._joins = -1
        self._turn = WorkerProgress()
        self._uninformed: set[int] = set()  # shards that have not heard of it
        self._client = self._stack.enter_context(
            Client(
                role="worker", keys=keys, insecure=insecure, heartbeat=heartbeat, transport=transport, retries=retries
            )
        )
        if RETURN_VARIABLE in os.environ:
            self._client.patience = _PATIENCE
        calls = ShardCalls(self._client, addresses, timeout, watch, heartbeat)
        super().__init__(calls, in_process=in_process)
        self.shards, self.endpoints, self.full = len(addresses), tuple(addresses), calls.full
        if worker is not None:
            self.join(0, worker)

    def __repr__(self) -> str:
        """Return its shards."""
        return f"ParameterClient({'in this process' if self.in_process else self.calls.endpoints})"

    # --- the verbs --------------------------------------------------------------------------------------------------

    def init(
        self,
        name: str,
        shape: Sequence[int],
        kind: Literal["dense", "rows"] = "dense",
        dtype: torch.dtype = torch.float32,
        init: float | Tensor | Initial | Callable[[Sequence[int]], Tensor] = 0.0,
        optimizer: OptimizerFactory = _SGD,
    ) -> None:
        """Create a dense parameter, or a table whose first dimension is its rows; an existing one stays unchanged.

        Only the rows of a table that nothing has been pushed to are set again, if ``init`` is a tensor or a function:
        whoever created it may have died before it had set them.

        Args:
            name: letters, digits, ``_ - .``; never a path.
            shape: of the whole.
            kind: ``"dense"``: one tensor on one shard; ``"rows"``: rows over all shards, read and changed by id.
            dtype: float32, float64, bfloat16 or float16.
            init: a number, a tensor, a function of the shape, or ``Constant``, ``Uniform`` or ``Normal``, which the
                shards draw themselves, so that no worker ever holds the whole tensor.
            optimizer: makes the optimizer of a parameter; the shards run it.

        Raises:
            SchemaError: there is one of that name and another shape, dtype or optimizer.
            ValueError, TypeError: an optimizer that shards cannot run, or an invalid name, shape, dtype or first value.
        """
        shape = _checked_shape(shape)
        if not isinstance(name, str):
            raise TypeError(f"name is a string, got {name!r}")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is torch.float32, torch.float64, torch.bfloat16 or torch.float16, got {dtype!r}")
        if not (isinstance(init, (int, float, Tensor, Initial)) or callable(init)):
            raise TypeError(f"init is a number, a tensor, a function of the shape or an Initial, got {init!r}")
        rule = RowOptimizer.from_factory(optimizer)
        if kind == "rows":
            self._init_rows(name, shape, dtype, init, rule)
        elif kind == "dense":
            self.init_dense(name, _first_value(init, shape, dtype), rule)
        else:
            raise ValueError(f"kind={kind!r} is neither 'dense' nor 'rows'")

    def drop(self, name: str) -> None:
        """Drop one table or parameter from all shards, with its optimizer's state.

        Raises:
            NotFound: no shard holds one of that name.
        """
        if not isinstance(name, str):
            raise TypeError(f"drop takes the name of one table or parameter, got {name!r}")
        if not self.drop_some([name]):
            raise NotFound(f"no table or parameter {name!r}; there are: {', '.join(self.steps()) or 'none'}")

    def pull(self, name: str) -> Tensor:
        """Return the parameter, or the whole table of a fixed vocabulary."""
        entry = self.entry(name)
        if entry.placement is not None:
            return self.sparse_pull(name, self.every_id(name, entry)).view(entry.shape)
        return self.pull_many({name: torch.empty(0, dtype=torch.int64, device="cpu")})[name].rows

    def push(self, name: str, grad: Tensor) -> None:
        """One optimizer step with the whole gradient."""
        entry = self.entry(name)
        if entry.placement is not None:
            self.sparse_push(name, self.every_id(name, entry), grad)
            return
        _check_gradient(grad, name)
        if tuple(grad.shape) != entry.shape:
            raise SchemaError(f"{name} is {entry.shape}, its gradient {tuple(grad.shape)}; nothing was pushed")
        self.push_many({name: (torch.empty(0, dtype=torch.int64, device="cpu"), grad)})

    def push_pull(self, name: str, grad: Tensor) -> Tensor:
        """``push``, then ``pull``."""
        self.push(name, grad)
        return self.pull(name)

    def sparse_pull(self, name: str, ids: Tensor) -> Tensor:
        """Return the rows of ``ids``: ``[*ids.shape, *row]``."""
        entry = self.entry(name, rows=True)
        _check_ids(ids, name)
        rows = self.pull_many({name: ids})[name].rows
        return rows.view(*ids.shape, *entry.shape[1:])

    def sparse_push(self, name: str, ids: Tensor, rows: Tensor) -> None:
        """One optimizer step with a gradient for each of ``ids``; those of one id are added up."""
        width, count = self.entry(name, rows=True).width, ids.numel()
        _check_ids(ids, name)
        _check_gradient(rows, name)
        if rows.numel() != count * width or count not in accumulate(rows.shape, operator.mul, initial=1):
            raise SchemaError(
                f"table {name}: {count} ids need {width} numbers each, got gradients {tuple(rows.shape)}; give "
                f"({count}, {width})"
            )
        self.push_many({name: (ids, rows)})

    def ss_push_pull(self, name: str, push_ids: Tensor, rows: Tensor, pull_ids: Tensor) -> Tensor:
        """``sparse_push``, then ``sparse_pull`` of other ids."""
        self.sparse_push(name, push_ids, rows)
        return self.sparse_pull(name, pull_ids)

    def sd_push_pull(self, name: str, ids: Tensor, rows: Tensor) -> Tensor:
        """``sparse_push``, then ``pull`` of the whole table."""
        self.sparse_push(name, ids, rows)
        return self.pull(name)

    def barrier(self) -> None:
        """Wait until every worker of the job has called this as often; a bare client does not wait."""
        if self.worker is None:
            return
        self._barriers += 1
        message = BarrierMessage(self.worker.rank, self.worker.world, self._barriers)
        self.calls.all([self.calls.request(0, "barrier", pack(message))], watched=True)

    def save(self, path: str | os.PathLike[str], *, step: int = 0) -> None:
        """Write all tables and parameters, with states and versions, into the directory ``path`` of this machine.

        Of each shard it is one moment, while others train. Rows are read and written a few megabytes at a time. No path
        is sent to the shards.
        """
        with self.collect() as saved:
            checkpoint.write(path, {}, saved.state, more=saved.groups(), step=step)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace all tables and parameters by those of a checkpoint, written by any number of shards.

        A table that this client has created stays in memory or in a file.
        """
        saved = checkpoint.read(path)
        restore(self, saved.state, saved.readers())

    def statistics(self) -> list[ShardStatistics]:
        """Statistics of each shard since it started."""
        return [unpack(answer, ShardStatistics) for answer in self.calls.ask_at_length("statistics")]

    def close(self) -> None:
        """Close the connections, and the shard in this process if there is one."""
        self._stack.close()

    def __enter__(self) -> ParameterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the connection ---------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """True in a forked child of the process that has used the client: every request raises ``ForkedClient``."""
        return self._client.forked

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""
        return self.calls.timeout

    # --- making -----------------------------------------------------------------------------------------------------

    def _init_rows(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        init: float | Tensor | Initial | Callable[[Sequence[int]], Tensor],
        rule: RowOptimizer,
    ) -> None:
        if len(shape) < 2:
            raise ValueError(f"a table of rows has at least 2 dimensions, got shape {shape}")
        drawn = init if isinstance(init, Initial) else Constant(0.0)
        if isinstance(init, (int, float)):
            drawn = Constant(float(init))
        spec = TableSpec(name, shape[0], int(np.prod(shape[1:], dtype=np.int64)), dtype, drawn)
        self.init_table(spec, rule, row_shape=shape[1:])
        if isinstance(init, Tensor) or (callable(init) and not isinstance(init, Initial)):
            write_rows(self, name, _first_value(init, shape, dtype), rule)

    def read_state(self, name: str, rule: RowOptimizer, *, until: Deadline | None = None) -> ParameterState:
        """Return a fixed table or a dense parameter with its optimizer's state, with every row up to date.

        Args:
            name: of the table or parameter.
            rule: its optimizer.
            until: the end of this client's last calls; see ``end_by``.
        """
        entry = self.entry(name)
        self.end_by(until)
        if entry.placement is None:
            most = math.prod(entry.shape) * 8 * (2 + len(rule.state_names))
            answer = self.calls.call(self.home(name), "export", pack(ExportMessage(name)), answer_bytes=most)
            return ParameterState(answer.tensors[0], answer.tensors[1:], unpack(answer.payload, int))

        def rows() -> Iterator[tuple[Tensor, Tensor]]:
            for ids in chunks(entry.shape[0]):
                self.end_by(until)
                yield ids, self.pull_many({name: ids}, with_state=True, exact=True)[name].rows

        state = gathered(rule, entry.dtype, entry.shape, rows())
        self.end_by(until)
        return replace(state, step=self.steps()[name])

    def value_blocks(self, name: str) -> tuple[Blocks | None, Blocks]:
        """Return what reads the ids of a dynamic vocabulary, else ``None``, and the exact values of all rows."""
        entry = self.entry(name)
        dtype, width = entry.dtype, entry.width
        if entry.placement is None:
            return None, Blocks(dtype, entry.shape, lambda: [self.pull(name)])
        each = max(1, min(CHUNK, _BLOCK_BYTES // (width * dtype.itemsize)))
        known: list[Tensor] = []  # ids of a dynamic vocabulary: 8 bytes a row

        def ids() -> list[Tensor]:
            if entry.shape[0] < 0 and not known:
                with self.collect([name]) as saved:
                    known.extend(piece.rows.ids for piece in saved.pieces())
            return known

        def values() -> Iterator[Tensor]:
            rows = max(entry.shape[0], 0)
            fixed = (torch.arange(at, min(at + each, rows), device="cpu") for at in range(0, rows, each))
            for some in chain(fixed, (part for one in ids() for part in torch.split(one, each))):
                yield self.pull_many({name: some}, exact=True)[name].rows.reshape(-1, *entry.shape[1:])

        if entry.shape[0] >= 0:
            return None, Blocks(dtype, entry.shape, values)
        tables = [table for shard in self.calls.describe() for table in shard["tables"]]
        count = sum(table["rows"] for table in tables if table["spec"]["name"] == name)
        return Blocks(torch.int64, (count,), ids), Blocks(dtype, (count, width), values)

    def end_by(self, until: Deadline | None) -> None:
        """Let no call that begins now take longer than ``until``; the client is closed next."""
        if until is not None:
            self.calls.timeout = max(until.remaining(), 1e-3)

    def joined(self) -> str:
        """Return which client was the last to join the first shard as worker 0, as no other is called."""
        return str(self.calls.describe()[0]["joined"])

    # --- a step of several tables -----------------------------------------------------------------------------------

    def pull_many(
        self,
        wanted: Mapping[str, Tensor],
        *,
        training: bool = False,
        step: int | None = None,
        known: Mapping[str, Tensor] | None = None,
        with_state: bool = False,
        ahead: bool = False,
        exact: bool = False,
    ) -> dict[str, Pulled]:
        """Rows of several tables, and dense parameters (no ids), in one message per shard.

        Args:
            wanted: flat int64 ids by table; none for a dense parameter.
            training: admits ids to dynamic tables.
            step: the worker's step; the read waits until it may start. ``None`` reads the present values.
            known: for each table the version known of each id, from ``Pulled``, -1 for none; a row with a version is
                sent only if it has changed since. Without it rows come without their positions and versions.
            with_state: rows known as ``WITH_STATE``, or all without ``known``, come with their optimizer's state; that
                of the others is left zero.
            ahead: true if no caller waits for the answer yet.
            exact: rows are not rounded, whatever ``compression`` says.
        """
        began = time.monotonic()
        compression = None if exact else self.compression
        layout, rank = self.layout(wanted), self._rank_at(step)
        ids, clocks = list(map(wanted.__getitem__, layout.tables)), list(self._clocks)
        versions = None if known is None else list(map(known.__getitem__, layout.tables))
        pull = Pull(layout, ids, versions, clocks, compression, with_state=with_state)
        requests, shards = list[Request](), list[int]()
        at = -1 if step is None else step
        for shard in range(len(clocks)):
            parts, tensors = pull.message(shard)
            if parts:
                turn = None if step is None else self._turn_for(shard)
                message = PullMessage(parts, training, clocks[shard].generation, rank, at, compression, turn)
                most = pull.most(shard)
                requests.append(self.calls.request(shard, "pull", pack(message), tensors, step=step, answer_bytes=most))
                shards.append(shard)
        pushed = []
        for shard, answer in zip(shards, self.calls.all(requests, watched=True), strict=True):
            reply = unpack(answer.payload, PullReply)
            with self._counting:
                clock = self._clocks[shard] = self._clocks[shard].after(reply.generation, reply.steps)
            pull.take(shard, reply, answer.tensors, clock.base)
            pushed.append(reply.pushed)
        if not ahead:
            self.pushed = min(pushed, default=0)
        pulled = pull.pulled()
        self._count(pull.bytes(), 0.0 if ahead else time.monotonic() - began, pulls=1)
        return pulled

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave this thread's calls in the block out of ``traffic``: they only measure."""
        self._uncounted = threading.get_ident()
        try:
            yield
        finally:
            self._uncounted = None

    def _count(self, sizes: Mapping[str, int], waited: float, *, pulls: int = 0, pushes: int = 0) -> None:
        """Count a message about several names, of so many bytes each."""
        if self._uncounted == threading.get_ident():
            return
        with self._counting:
            for name, size in sizes.items():
                traffic = self._traffic[name]
                traffic.pulls += pulls
                traffic.pushes += pushes
                traffic.bytes += size
                traffic.wait_seconds += waited / len(sizes)

    def traffic(self) -> dict[str, Traffic]:
        """Counters of this client so far, by table and parameter."""
        with self._counting:
            return {name: replace(traffic) for name, traffic in self._traffic.items()}

    def push_many(
        self,
        gradients: Mapping[str, tuple[Tensor, Tensor]],
        *,
        rules: Mapping[str, RowOptimizer] | None = None,
        step: int | None = None,
        merging: Merging = _ALONE,
        squares: Mapping[str, Tensor] | None = None,
        unordered: bool = False,
        awaited: bool = True,
    ) -> None:
        """Gradients of several tables (ids, rows) and dense parameters (no ids, gradient), in one message per shard.

        Args:
            gradients: ids and a gradient for each by table; those of one id are added up.
            rules: the optimizers with the numbers of this step; by default those that the shards have.
            step: the step of the worker's push; without one the push is applied at once.
            merging: of the workers' gradients; they are held, until each worker has called ``release``, under ``bsp``
                only.
            squares: of tables whose gradients are sums over several steps.
            unordered: apply a worker's push at once, like a bare client's, but weighted by the worker's share in the
                last step.
            awaited: whether to count the wait in the statistics.
        """
        if merging.hold and (self.worker is None or self.worker.consistency != "bsp"):
            raise ValueError(
                "only under bsp are the workers' gradients combined into one whose norm is known before it is applied"
            )
        began = time.monotonic()
        deadline = Deadline(self.calls.timeout)
        layout, rank = self.layout(gradients), self._rank_at(step)
        kinds: dict[RowOptimizer, int] = {}
        rule_of: dict[str, int] = {}
        if rules is not None:
            for name in gradients:
                rule_of[name] = kinds.setdefault(rules[name], len(kinds))
        numbers = [rule.to_dict() for rule in kinds]
        push = Push(layout, gradients, squares or {}, self.shards, self.compression)
        if unordered and self.worker is not None:
            rank = self.worker.rank
        at = -1 if step is None else step
        requests: list[Request] = []
        refused: list[Request] = []
        for shard in range(self.shards):
            parts, tensors = push.message(shard, rule_of)
            if parts or step is not None:
                turn = None if step is None else self._turn_for(shard)
                message = PushMessage(parts, numbers, rank, at, merging, self.compression, turn)
                requests.append(self.calls.request(shard, "push", pack(message), tensors, step=step))
                if self.shards > 1 and not acceptable(tensors):
                    refused.append(requests[-1])
        # A shard whose part has no NaN would apply it although the whole is refused, so only the others are asked.
        outcomes = self.calls.outcomes(refused or requests, deadline)
        if failures := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            # A push that was not answered may have been applied: worse than a refusal.
            failures.sort(key=lambda failure: isinstance(failure, REFUSALS))
            applied = 0 if refused or merging.hold else len(outcomes) - len(failures)
            raise self._partial_push_error(failures[0], applied, step) if applied else failures[0]
        self._count(push.bytes(), time.monotonic() - began if awaited else 0.0, pushes=1)

    def _partial_push_error(self, error: Exception, taken: int, step: int | None) -> Exception:
        """Return the error of a push that ``taken`` shards have applied and one has refused."""
        if not isinstance(error, REFUSALS):
            return error
        if step is not None:
            self._partial_step = step
        error.add_note(f"{taken} other shards had already applied their parts of this push")
        return error

    def check_whole(self) -> None:
        """Raise ``BoundaryError`` if the shards are no longer at this worker's step, all of them."""
        lost = self.worker is not None and self.calls.rolled_back
        if self._partial_step is not None or lost:
            why = "a server has lost pushes of this worker, so the servers are at an earlier step than the worker"
            if self._partial_step is not None:
                why = f"the push of step {self._partial_step} was refused by one shard and applied by others"
            raise BoundaryError(
                f"{why}; load the last checkpoint with executor.load, or restart the job from its last checkpoint",
                peer="the servers",
                operation="push",
                step=self._partial_step,
            )

    def squared_norm(self, step: int) -> float:
        """Return the sum of squares of the held merged gradients of ``step``, over all shards."""
        rank = self._rank_at(step)
        requests = [
            self.calls.request(shard, "norm", pack(NormMessage(rank, step, self._turn_for(shard))), step=step)
            for shard in range(self.shards)
        ]
        return sum(unpack(answer.payload, float) for answer in self.calls.all(requests, watched=True))

    def release(self, step: int, scale: float = 1.0) -> None:
        """Apply the held pushes of ``step``, times ``scale``, once all workers have; they pass the same scale."""
        self.decide(step, scale)
        self.calls.all([self._word(shard) for shard in range(self.shards)])

    def decide(self, step: int, scale: float | None) -> None:
        """Release ``step`` with the next message to each shard: to be applied, times ``scale``, or dropped."""
        last, factor = (self._turn.last, self._turn.scale) if scale is None else (step, scale)
        self._turn = WorkerProgress(self._turn.number, self._turn.world, step + 1, last, factor)
        self._uninformed = set(range(self.shards))

    def tell(self) -> None:
        """Send what was decided to the shards that no message has told, without waiting for their answers."""
        if self._uninformed:
            # A word that does not arrive is repeated by the next message.
            words = []
            for shard in sorted(self._uninformed):
                words.append(self._word(shard))  # noqa: PERF401 - a comprehension is one more call
            self.calls.post(words)

    def leave(self, ranks: Iterable[int]) -> None:
        """Let no read of a job whose workers run apart wait for these, which have closed or are lost."""
        message = pack(ReleaseMessage(self.rank, self._turn, [*ranks]))
        words = [self.calls.request(shard, "release", message) for shard in range(self.shards)]
        self.calls.outcomes(words, Deadline(self.calls.timeout))  # a shard that has not heard it is told again

    def settle(self) -> None:
        """Apply on all shards the last step that any worker of a job has had the outcome of; its workers have gone.

        That all shards hold it whole was agreed before anybody had the outcome.
        """
        heard = [unpack(shard["turn"], WorkerProgress) for shard in self.calls.describe() if shard["turn"]]
        if heard:
            furthest = max(heard, key=lambda turn: (turn.number, turn.done))
            self.calls.everywhere("release", pack(ReleaseMessage(-1, furthest)))

    def _word(self, shard: int) -> Request:
        self._uninformed.discard(shard)
        return self.calls.request(shard, "release", pack(ReleaseMessage(self.rank, self._turn)))

    def _turn_for(self, shard: int) -> WorkerProgress:
        """Return what a worker's message to ``shard`` says of it."""
        self._uninformed.discard(shard)
        return self._turn

    # --- the job ----------------------------------------------------------------------------------------------------

    def wait_until_served(self) -> None:
        """Wait until every shard answers."""
        self.calls.incarnations()

    def join(self, step: int, worker: Worker | None = None) -> None:
        """Register this worker, for a bare client ``worker``, with the shards; its next push is for ``step``."""
        worker = self._be(worker or self.worker)
        self._renew()
        self._joins += 1  # so that late messages of before are of a lower number
        number = self._joins + worker.membership
        self._turn = WorkerProgress(number, worker.world, step)
        self.calls.everywhere("join", pack(JoinMessage(worker.rank, worker.world, worker.consistency, step, number)))

    def _renew(self) -> None:
        self._partial_step, self.calls.rolled_back = None, False
        self._uninformed.clear()
        for pushes in self.calls.acknowledged.values():
            pushes.incarnation = 0
        incarnations = self.calls.incarnations()
        for endpoint, incarnation in zip(self.calls.endpoints, incarnations, strict=True):
            self.calls.acknowledged[endpoint].incarnation = unpack(incarnation.payload, int)

    def _be(self, worker: Worker | None) -> Worker:
        assert worker is not None
        self.worker, self.rank = worker, worker.rank
        self.leads = worker.rank == 0 if worker.leads is None else worker.leads
        return worker

    def decided(self) -> tuple[int, float, int]:
        """Return the newest step that is to be applied, -1 for none yet, its scale, and how often all have joined."""
        return self._turn.last, self._turn.scale, self._joins

    def begin_again(self, worker: Worker, done: int, last: int, scale: float, joins: int) -> None:
        """Be ``worker`` of a later membership, whose members have the outcome of ``done`` steps, and tell the shards.

        With the first word of it a shard drops what it holds of later steps, and takes no message of an earlier one.
        Of a newcomer that is the word with which it joins.
        """
        joined, number = self.worker is not None, joins + worker.membership
        self._be(worker)
        self._turn, self._joins = WorkerProgress(number, worker.world, done, last, scale), joins
        if joined:
            self._partial_step, self._uninformed = None, set(range(self.shards))
            self.tell()
        else:
            self._renew()
            message = JoinMessage(worker.rank, worker.world, worker.consistency, done, number, self._turn)
            self.calls.everywhere("join", pack(message))

    def wait_for_turn(self, step: int) -> None:
        """Wait until the job's consistency lets this worker read at ``step``, on every shard.

        Raises:
            SchemaError: another client has joined the shards as this worker since.
        """
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        rank, requests = self._rank_at(step), []
        for shard in range(self.shards):
            message = PullMessage([], False, 0, rank, step, None, self._turn_for(shard))
            requests.append(self.calls.request(shard, "pull", pack(message), [none], step=step))
        self.calls.all(requests, watched=True)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def collect(self, names: Iterable[str] | None = None) -> SavedTables:
        """Begin to read one moment of each shard, which ``save`` writes; of ``names`` only, if there are any."""
        self.check_whole()
        return SavedTables(self, names)

    def _rank_at(self, step: int | None) -> int:
        """Return what a message of ``step`` says of who sends it: this worker's rank, or -1 without a step."""
        if step is None:
            return -1
        if self.worker is None:
            raise ValueError("a client without a worker has no steps; give ParameterClient a worker")
        self.check_whole()
        return self.worker.rank


def check_plain(tensor: Tensor, what: str) -> None:
    """Raise for a tensor that is not dense, real and in memory: converting it would lose something or fail.

    >>> check_plain(torch.ones(2), "the gradient of w")
    >>> check_plain(torch.ones(2, dtype=torch.complex64), "the gradient of w")
    Traceback (most recent call last):
    ...
    anabranch.errors.SchemaError: the gradient of w is of another kind (torch.complex64 on cpu) than servers keep; \
give a dense tensor of real numbers

    Raises:
        TypeError: no tensor.
        SchemaError: a complex, sparse, quantised, nested or meta tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a tensor, got {type(tensor).__name__}; use torch.as_tensor")
    if tensor.is_nested or tensor.is_quantized or tensor.is_complex() or tensor.is_meta:
        kind = f"{tensor.dtype} on {tensor.device}"
        raise SchemaError(f"{what} is of another kind ({kind}) than servers keep; give a dense tensor of real numbers")
    if tensor.layout is not torch.strided:
        raise SchemaError(f"{what} is {tensor.layout}; give its ids and rows to sparse_push, or tensor.to_dense()")


def _check_ids(ids: Tensor, name: str) -> None:
    check_plain(ids, f"the ids of {name}")
    if ids.dtype != torch.int64:
        raise SchemaError(f"table {name}: ids must be int64, got {ids.dtype}; convert with ids.long()")


def _check_gradient(grad: Tensor, name: str) -> None:
    check_plain(grad, f"the gradient of {name}")
    if not grad.is_floating_point():
        raise SchemaError(f"the gradient of {name} is {grad.dtype}; gradients are floating: give grad.float()")


def _checked_endpoints(endpoints: Sequence[str], *, explicit: bool) -> list[str]:
    """Return the endpoints that a caller gave as a list of at least one."""
    alike = isinstance(endpoints, Sequence) and all(isinstance(endpoint, str) for endpoint in endpoints)
    if isinstance(endpoints, str) or not alike:
        raise TypeError(f"endpoints is a list of strings such as unix:PATH or tcp://HOST:PORT, got {endpoints!r}")
    if len(set(endpoints)) < len(endpoints):
        raise ValueError(f"endpoints names one more than once, {endpoints}; name each shard once, in the shards' order")
    if explicit and not endpoints:
        raise ValueError("endpoints is empty; name the shards, or leave it out to use the job's")
    return list(endpoints)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise TypeError(f"shape is a tuple of sizes, got {shape!r}")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, SupportsIndex):
            raise TypeError(f"shape is a tuple of sizes, which are whole numbers, got {shape!r}")
        if operator.index(size) < 0:
            raise ValueError(f"shape is a tuple of sizes of at least 0, got {shape!r}")
    return tuple(map(operator.index, shape))


def _first_value(
    init: float | Tensor | Initial | Callable[[Sequence[int]], Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    if isinstance(init, Initial):
        if not isinstance(init, Constant):
            raise ValueError("the init of a dense parameter is a number, a tensor or a function of its shape")
        init = init.value
    if isinstance(init, (int, float)):
        try:
            return torch.full(shape, float(init), dtype=dtype, device="cpu")
        except (RuntimeError, TypeError, OverflowError) as error:  # torch has no kind of its own for it
            raise ValueError(
                f"this process does not have enough memory for a parameter of shape {shape}; kind='rows' with a "
                "Constant, Uniform or Normal is created on the shards only"
            ) from error
    value = init if isinstance(init, Tensor) else init(shape)
    check_plain(value, "init")
    if tuple(value.shape) != shape:
        raise ValueError(f"init has the shape {tuple(value.shape)}, not {shape}")
    return value.detach().to("cpu", dtype)
