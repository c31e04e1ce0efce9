"""The server of experts: checks each request against its expert's schema before queueing it, and announces experts.

::

    thread that reads                                              device thread, or this one (``runtime.py``)
    header ── check: uid, schema, shapes, room ──> body ──> finite? ──> pool ──> batch ──> answer
             refused before its body has memory            refused before it joins a batch
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypedDict

import torch
from torch import Tensor

from anabranch.deadline import Deadline
from anabranch.errors import ActivationsGone, AnotherSchema, BoundaryError, NonFinite, NotFound
from anabranch.experts import wire
from anabranch.experts.compression import check_parts, count_parts
from anabranch.experts.directory import DirectoryLike, as_directory
from anabranch.experts.schema import first_not_finite
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.server.batching.runtime import Runtime
from anabranch.experts.server.batching.task import StateSeen, Task
from anabranch.experts.server.batching.task_pool import PoolStatistics, TaskPool, Unrepeatable
from anabranch.experts.server.persistence import Persistence
from anabranch.experts.server.sessions.open_sessions import SessionLimits, Sessions
from anabranch.experts.server.sessions.session_verbs import SessionVerbs
from anabranch.periodic import periodic
from anabranch.record.spans import mark
from anabranch.transport import (
    Answer,
    Call,
    Client,
    Limits,
    Request,
    RequestHeader,
    Server,
    ServerStatistics,
    TensorHeader,
    Transport,
    Verb,
    allocate,
)
from anabranch.transport.failures import note_failure

__all__ = ["ExpertServer", "ExpertServerStatistics"]

_log = logging.getLogger("anabranch.experts")

# Announcements are renewed three times within their time to live.
_RENEWALS = 3
# Seconds for asking another server of an announced expert whether it is alive.
_GLANCE = 2.0


@dataclass(frozen=True, slots=True)
class ExpertServerStatistics:
    """Counters of an expert server since it started.

    Attributes:
        pools: statistics of each pool, by name.
        not_finite: requests refused for NaN or Inf, by peer.
        updates: updates of each expert, by uid.
        transport: requests, errors, bytes.
        sessions: open sessions of each expert, by uid.
        session_bytes: bytes of their caches, and of the answers kept beside them.
    """

    pools: dict[str, PoolStatistics]
    not_finite: dict[str, int]
    updates: dict[str, int]
    transport: ServerStatistics
    sessions: dict[str, int] = field(default_factory=dict)
    session_bytes: int = 0


class _ClientOptions(TypedDict):
    keys: str | os.PathLike[str] | None
    insecure: bool
    transport: Transport | None


class ExpertServer:
    """Serves experts while its ``with`` block runs.

    >>> from anabranch.experts import ExpertBackend, RemoteExpert
    >>> from anabranch.tensors import TensorSpec
    >>> backend = ExpertBackend("double.0", torch.nn.Identity(), args_schema=[TensorSpec(2)])
    >>> with ExpertServer([backend]) as server:
    ...     RemoteExpert("double.0", server.endpoint)(torch.ones(1, 2)).detach()
    tensor([[1., 1.]])

    Args:
        backends: the experts; those on one device share its thread.
        listen: ``unix:PATH``, ``tcp://HOST:PORT``, or ``None`` for a new Unix socket.
        directory: the place to announce them: a ``Directory``, the endpoint of a ``DirectoryServer``, or the URL of a
            Redis.
        checkpoint_dir: the directory of their saved states, loaded after a restart; ``None``: no checkpoints.
        device: moves all experts there.
        checkpoint_seconds: between two savings.
        ttl: seconds for which an announcement holds; renewed three times as often.
        keys: the directory of certificates, for TCP.
        insecure: allow TCP without certificates.
        heartbeat: seconds between the beats that tell a waiting caller that the server lives.
        transport: the network; sockets by default.
        max_connections: a caller beyond it gets ``Overloaded``.
        limits: the sizes accepted from a caller in one frame.
        drain_seconds: how long leaving the block waits for calls in flight.
        session_limits: the bounds of inference sessions.
        clock: seconds for the times to live of sessions.

    Raises:
        ValueError: no backend, two of one uid, an endpoint that is malformed or taken, TCP without keys.
        CheckpointError: a checkpoint that is damaged or of other experts, or another server saves one of them there.

    Entering announces the uids, and warns once in the log ``anabranch.experts`` if the directory lists one of them at
    another server that answers; leaving withdraws them, finishes the calls in flight, and saves.
    """

    def __init__(
        self,
        backends: Iterable[ExpertBackend],
        *,
        listen: str | None = None,
        directory: DirectoryLike | str | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str | None = None,
        checkpoint_seconds: float = 60.0,
        ttl: float = 30.0,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        heartbeat: float = 1.0,
        transport: Transport | None = None,
        max_connections: int = 512,
        limits: Limits | None = None,
        drain_seconds: float = 5.0,
        session_limits: SessionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backends: dict[str, ExpertBackend] = {}
        for backend in backends:
            if backend.uid in self._backends:
                raise ValueError(f"two backends are called {backend.uid!r}")
            self._backends[backend.uid] = backend.to(device) if device is not None else backend
        if not self._backends:
            raise ValueError("a server without experts has nothing to serve; give it backends")
        _warn_of_waits(self._backends.values())
        if not 0 < ttl < float("inf"):
            raise ValueError(f"ttl is a finite number of seconds above 0, got {ttl!r}")
        self._schemas = {uid: (backend.schema.packed, backend.schema.hash) for uid, backend in self._backends.items()}
        self._directory = (
            None if directory is None else as_directory(directory, role="experts", keys=keys, insecure=insecure)
        )
        self._as_client = _ClientOptions(keys=keys, insecure=insecure, transport=transport)
        self._ttl = ttl
        any_cuda = any(backend.device.type == "cuda" for backend in self._backends.values())
        place = _allocate_pinned if any_cuda else allocate
        self._not_finite: Counter[str] = Counter()
        self._round = threading.local()
        pools_by_device = self._pools_by_device()
        self._runtimes = [Runtime(pools, name=name) for name, pools in pools_by_device.items()]
        self._persistence = (
            None
            if checkpoint_dir is None
            else Persistence(Path(checkpoint_dir), self._backends, paused=self._paused, every=checkpoint_seconds)
        )
        self._sessions = Sessions(session_limits or SessionLimits(), clock)
        session_verbs = SessionVerbs(
            self._sessions,
            find=self._find,
            check_request=self._check_request,
            check_finite=self._check_finite,
            put_aside=self._put_aside,
            allocate=place,
        )
        # The last step that may fail: it listens from here on.
        self._server = Server(
            [
                Verb(wire.INFO, self._info, quick=True),
                *(
                    Verb(name, self._forward, check=self._check, allocate=place, quick=True)
                    for name in (wire.FORWARD, wire.FORWARD_EVAL)
                ),
                *(
                    Verb(
                        name,
                        self._backward,
                        check=self._check,
                        once=True,
                        again=self._backward_again,
                        allocate=place,
                        quick=True,
                    )
                    for name in (wire.BACKWARD, wire.BACKWARD_EVAL)
                ),
                *session_verbs.verbs(),
            ],
            listen=listen,
            role="experts",
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
            transport=transport,
            limits=limits,
            max_connections=max_connections,
            drain_seconds=drain_seconds,
            healthy=lambda: all(runtime.healthy() for runtime in self._runtimes),
            after_round=self._submit_round,
            facts=self._facts,
        )
        self._stack = ExitStack()

    def __repr__(self) -> str:
        """Return where it listens."""
        return f"ExpertServer({self.endpoint!r})"

    @property
    def endpoint(self) -> str:
        """The address for ``RemoteExpert``."""
        return self._server.endpoint

    def __enter__(self) -> ExpertServer:
        with ExitStack() as stack:
            # The server has listened since it was made, so close it if entering fails.
            stack.callback(self._server.close)
            if self._persistence is not None:
                stack.enter_context(self._persistence.claim())
                self._server.once.restore(self._persistence.load())
                stack.enter_context(self._persistence)
            for runtime in self._runtimes:
                stack.enter_context(runtime)
            if any(backend.session_pool is not None for backend in self._backends.values()):
                stack.enter_context(self._sessions)
            stack.enter_context(self._server)
            if self._directory is not None:
                others = self._look_for_others()
                self._announce()
                stack.callback(self._withdraw)
                renewing = periodic(
                    self._renew,
                    self._ttl / _RENEWALS,
                    name="anabranch-announce",
                    patience=15.0,
                    at_start=partial(self._warn_if_possible, others),
                )
                stack.enter_context(renewing)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def statistics(self) -> ExpertServerStatistics:
        """Counters since the start."""
        pools = [pool for backend in self._backends.values() for pool in backend.get_pools()]
        return ExpertServerStatistics(
            {pool.name: pool.statistics() for pool in pools},
            dict(self._not_finite),
            {uid: backend.updates for uid, backend in self._backends.items()},
            self._server.statistics(),
            {uid: backend.open_sessions for uid, backend in self._backends.items()},
            self._sessions.nbytes,
        )

    def _facts(self) -> dict[str, object]:
        """Return what ``anabranch status`` shows: the queue, and how busy each expert was."""
        experts = {}
        tasks = rows = 0
        for uid, backend in self._backends.items():
            pools = [pool.statistics() for pool in backend.get_pools()]
            tasks += sum(pool.waiting_tasks for pool in pools)
            rows += sum(pool.waiting_rows for pool in pools)
            busy = sum(pool.busy_seconds for pool in pools)
            experts[uid] = {"rows": sum(pool.rows for pool in pools), "busy_seconds": busy}
        return {"queue_tasks": tasks, "queue_rows": rows, "experts": experts}

    # --- announcing

    def _announce(self) -> None:
        assert self._directory is not None
        self._directory.announce(self._backends, self.endpoint, self._ttl)

    def _look_for_others(self) -> dict[str, str]:
        """Return the uids of ours that the directory lists at other endpoints, with these."""
        assert self._directory is not None
        try:
            found = self._directory.lookup(self._backends)
        except Exception as error:  # noqa: BLE001 - a missing warning must not fail the start
            note_failure("experts.no_look_for_others", error)
            return {}
        return {uid: endpoint for uid, endpoint in found.items() if endpoint != self.endpoint}

    def _warn_of_others(self, others: Mapping[str, str]) -> None:
        """Warn of uids that other live servers have announced: updates of one expert would go to two places.

        A server restarted at a new address finds its old address listed, but nothing answers there.
        """
        uids_at: dict[str, list[str]] = {}
        for uid, endpoint in others.items():
            uids_at.setdefault(endpoint, []).append(uid)
        for endpoint in self._alive({endpoint: uids[0] for endpoint, uids in uids_at.items()}):
            uids = uids_at[endpoint]
            mark("experts.announced_twice", uids=uids, other=endpoint, endpoint=self.endpoint)
            _log.warning(
                "%s: the directory listed %s at another live server, %s, when this one announced it at %s; "
                "callers will find sometimes one, sometimes the other, and each trains on its own callers only: stop "
                "one of them, or give them different uids",
                ", ".join(uids[:8]) + (f" and {len(uids) - 8} more" if len(uids) > 8 else ""),
                "it" if len(uids) == 1 else "them",
                endpoint,
                self.endpoint,
            )  # fmt: skip

    def _alive(self, uids: Mapping[str, str]) -> list[str]:
        """Return the endpoints that serve their uid now."""
        if not uids:
            return []
        requests = [Request(endpoint, wire.INFO, uid, role="experts") for endpoint, uid in uids.items()]
        # Well before the announcements are to be renewed.
        deadline = Deadline.after(min(_GLANCE, self._ttl / _RENEWALS / 2))
        with Client(role="experts", retries=0, **self._as_client) as client:
            outcomes = client.gather(requests, deadline)
        return [endpoint for endpoint, outcome in zip(uids, outcomes, strict=True) if isinstance(outcome, Answer)]

    def _withdraw(self) -> None:
        assert self._directory is not None
        try:
            self._directory.withdraw(self._backends, self.endpoint)
        except BoundaryError as error:
            # An announcement that is not withdrawn expires.
            mark("experts.directory_lost", error=str(error))

    def _warn_if_possible(self, others: Mapping[str, str]) -> None:
        try:
            self._warn_of_others(others)
        except BaseException as error:  # noqa: BLE001 - a missing warning must not stop the announcements
            note_failure("experts.no_look_for_others", error)

    def _renew(self) -> None:
        try:
            self._announce()
        except BoundaryError as error:
            mark("experts.directory_lost", error=str(error))
        except BaseException as error:  # noqa: BLE001 - a user's own directory; the next renewal may work
            note_failure("experts.directory_lost", error)

    # --- serving

    def _pools_by_device(self) -> dict[str, list[TaskPool]]:
        pools: dict[str, list[TaskPool]] = {}
        for backend in self._backends.values():
            pools.setdefault(str(backend.device), []).extend(backend.get_pools())
        return pools

    @contextmanager
    def _paused(self) -> Iterator[None]:
        with ExitStack() as stack:
            for runtime in self._runtimes:
                stack.enter_context(runtime.paused())
            yield

    def _find(self, uid: str) -> ExpertBackend:
        backend = self._backends.get(uid)
        if backend is None:
            some = ", ".join(list(self._backends)[:8])
            raise NotFound(f"no expert {uid!r} here; there are {len(self._backends)}: {some}")
        return backend

    def _info(self, call: Call) -> None:
        self._find(call.target)
        call.reply(payload=self._schemas[call.target][0])

    def _check(self, header: RequestHeader) -> None:
        """Refuse a request that does not fit its expert, before memory is allocated for it."""
        backend = self._find(header.target)
        pool = backend.backward_pool if wire.is_backward(header.verb) else backend.forward_pool
        rows = self._check_request(header, backend)
        pool.check_room(rows, sum(tensor.nbytes for tensor in header.tensors))

    def _check_request(self, header: RequestHeader, backend: ExpertBackend) -> int:
        """Return the rows of a request whose tensors fit its expert."""
        if header.schema != self._schemas[header.target][1]:
            raise AnotherSchema(
                f"{header.target} has a different schema than the caller expects; request its info again"
            )
        return check_parts(header.tensors, wire.request_layout(backend.schema, header))

    def _forward(self, call: Call) -> None:
        # The check has already found the expert.
        backend = self._backends[call.target]
        schema = backend.schema
        inputs = call.tensors if schema.takes_as_is else wire.from_wire(call.tensors, schema.inputs)
        self._check_finite(call, inputs, schema.input_names)

        def finish(outcome: Sequence[Tensor | None] | BaseException) -> None:
            if isinstance(outcome, BaseException):
                call.fail(outcome)
            else:
                # The ticket in the answer says that it is valid for a backward.
                valid = ticket if ticket in backend.kept else b""
                payload = wire.pack_answer(valid, seen.changes, changed=seen.changed)
                call.reply(wire.to_wire(outcome, schema.output_specs), payload=payload)

        seen = StateSeen()
        ticket = call.payload
        rows = _rows(inputs)
        sizes, length = schema.measure(inputs)
        # A request that is split has no single graph.
        ticket = ticket if rows <= min(backend.kept.budget, backend.forward_pool.max_batch_size) else b""
        task = Task(
            inputs, rows, call.deadline, finish, call.drop, ticket=ticket, sizes=sizes, length=length,
            evaluating=wire.is_evaluation(call.verb), seen=seen,
        )  # fmt: skip
        if rows:
            self._put_aside(call, backend, backend.forward_pool, task)
        elif schema.varies:
            self._answer_nothing(call, backend, inputs, finish)
        else:
            finish([None if spec is None else spec.zeros(0) for spec in schema.output_specs])

    def _answer_nothing(
        self,
        call: Call,
        backend: ExpertBackend,
        inputs: Sequence[Tensor | None],
        finish: Callable[[Sequence[Tensor | None] | BaseException], None],
    ) -> None:
        """Answer a request of no rows; output sizes that only the module knows are found with a row of zeros."""
        one = [
            None if tensor is None or spec is None else spec.zeros(1, spec.sizes_of(tensor.shape))
            for tensor, spec in zip(inputs, backend.schema.inputs, strict=True)
        ]

        def finish_none(outcome: Sequence[Tensor | None] | BaseException) -> None:
            if isinstance(outcome, BaseException):
                finish(outcome)
            else:
                finish([None if tensor is None else tensor[:0] for tensor in outcome])

        sizes, length = backend.schema.measure(one)
        task = Task(one, 1, call.deadline, finish_none, call.drop, sizes=sizes, length=length, evaluating=True)
        self._put_aside(call, backend, backend.forward_pool, task)

    def _backward(self, call: Call) -> None:
        backend = self._find(call.target)
        inputs, gradients, ticket, updates = self._read_backward(call, backend)
        specs = backend.schema.inputs

        def finish(outcome: Sequence[Tensor | None] | BaseException) -> None:
            changed = not isinstance(outcome, BaseException) or isinstance(outcome, Unrepeatable)
            if changed and self._persistence is not None:
                self._persistence.note_applied(call.target, call.identity, call.settled)
            if isinstance(outcome, BaseException):
                call.fail(outcome)
                return
            call.reply(wire.to_wire(outcome, specs), payload=wire.pack_gradients(outcome, seen.changes))

        seen = StateSeen()
        rows = _rows([*inputs, *gradients])
        sizes, length = backend.schema.measure(inputs, gradients)
        task = Task(
            [*inputs, *gradients], rows, call.deadline, finish, call.drop, ticket=ticket, sizes=sizes,
            length=length, evaluating=wire.is_evaluation(call.verb), updates=updates, seen=seen,
        )  # fmt: skip
        if rows:
            self._put_aside(call, backend, backend.backward_pool, task)
        else:
            # Activations of no rows are never kept, so the inputs are there.
            finish(
                [
                    tensor.clone() if tensor is not None and spec is not None and spec.requires_grad else None
                    for tensor, spec in zip(inputs, specs, strict=True)
                ]
            )

    def _put_aside(self, call: Call, backend: ExpertBackend, pool: TaskPool, task: Task) -> None:
        """Queue the task once all requests received so far are read, so that they share a batch."""
        task.caller = call.peer.name
        priority = backend.prioritize(task.caller, task.rows, backward=pool is backend.backward_pool)
        if not isinstance(priority, int):
            raise TypeError(f"{type(backend).__name__}.prioritize returned {priority!r}; return a whole number")
        task.priority = priority
        if backend.copies is not None:
            task.inputs, task.copied = backend.copies.bring(task.inputs)
        aside: dict[TaskPool, list[Task]] | None = getattr(self._round, "tasks", None)
        if aside is None:
            aside = self._round.tasks = {}
        aside.setdefault(pool, []).append(task)

    def _submit_round(self) -> None:
        aside: dict[TaskPool, list[Task]] | None = getattr(self._round, "tasks", None)
        if aside:
            self._round.tasks = None
            of_many = not self._server.on_loop()
            if len(self._runtimes) == 1:
                self._runtimes[0].submit(aside, one_of_many=of_many)
                return
            for runtime in self._runtimes:
                mine = {pool: tasks for pool, tasks in aside.items() if pool in runtime}
                runtime.submit(mine, one_of_many=of_many)

    def _backward_again(self, call: Call) -> None:
        """Answer a retry of which only the number is known: the update is made, but its gradients are gone."""
        self._find(call.target)
        call.reply(payload=wire.GONE)

    def _read_backward(
        self, call: Call, backend: ExpertBackend
    ) -> tuple[list[Tensor | None], list[Tensor | None], bytes, bool]:
        schema = backend.schema
        present, ticket, updates = wire.read_backward(call.payload)
        inputs: list[Tensor | None] = [None] * len(schema.inputs)
        count = 0
        if not ticket:
            count = sum(count_parts(spec) for spec in schema.inputs if spec is not None)
            inputs = wire.from_wire(call.tensors[:count], schema.inputs)
        elif ticket not in backend.kept:
            raise ActivationsGone(f"{call.target} has not kept these activations; send the inputs again")
        gradients = wire.from_wire(call.tensors[count:], schema.output_specs, present)
        names = [f"gradient of output {index}" for index in range(len(gradients))]
        self._check_finite(call, inputs, schema.input_names)
        self._check_finite(call, gradients, names, ". If that output did too, the cause is the module, not the loss")
        return inputs, gradients, ticket, updates

    def _check_finite(self, call: Call, tensors: Sequence[Tensor | None], names: Sequence[str], hint: str = "") -> None:
        name = first_not_finite(tensors, names)
        if name is not None:
            self._not_finite[call.peer.name] += 1
            raise NonFinite(f"{call.target}: {name} holds NaN or Inf{hint}")


def _allocate_pinned(headers: Sequence[TensorHeader]) -> Sequence[Tensor]:
    return [torch.empty(header.shape, dtype=header.dtype, pin_memory=True, device="cpu") for header in headers]


def _rows(tensors: Sequence[Tensor | None]) -> int:
    for tensor in tensors:
        if tensor is not None:
            return tensor.shape[0]
    raise AssertionError("a schema without inputs is rejected when it is created")


def _warn_of_waits(backends: Iterable[ExpertBackend]) -> None:
    """Warn of experts that keep a small request waiting until its caller's deadline."""
    pools = {backend.uid: backend.forward_pool for backend in backends}
    if waiting := [uid for uid, pool in pools.items() if pool.min_batch_size > 1 and pool.timeout is None]:
        _log.warning(
            "%s: min_batch_size is %d and there is no timeout, so fewer rows wait for more until their callers get "
            "DeadlineExceeded; give timeout=, in seconds, after which a smaller batch runs anyway",
            ", ".join(waiting[:8]) + (f" and {len(waiting) - 8} more" if len(waiting) > 8 else ""),
            pools[waiting[0]].min_batch_size,
        )
