"""The server of experts: the verbs that answer requests, its devices, its saved states, and its announcements.

::

    thread that reads                                              device thread, or this one (``scheduler.py``)
    header ── check: uid, schema, shapes, room ──> body ──> finite? ──> pool ──> batch ──> answer
             refused before its body has memory            refused before it joins a batch
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

import torch
from torch import Tensor

from anabranch.choices import listed
from anabranch.deadline import Deadline, check_seconds
from anabranch.errors import (
    ActivationsGone,
    AnotherSchema,
    BoundaryError,
    CheckpointError,
    NonFinite,
    NotFound,
    SchemaError,
)
from anabranch.experts import wire
from anabranch.experts.directory import DirectoryLike, as_directory
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.server.persistence import Persistence
from anabranch.experts.server.scheduler import (
    Apart,
    PoolStatistics,
    Runtime,
    StateSeen,
    Task,
    TaskPool,
    Unrepeatable,
    rows_of,
)
from anabranch.experts.server.sessions import Sessions, Step
from anabranch.experts.wire import first_not_finite
from anabranch.periodic import periodic
from anabranch.record.spans import mark
from anabranch.tensors.dtypes import DTYPES
from anabranch.transport import (
    Answer,
    Call,
    Checked,
    Client,
    Request,
    RequestHeader,
    Server,
    ServerStatistics,
    TensorHeader,
    Transport,
    Verb,
    allocate,
    pack,
    unpack,
)
from anabranch.transport.failures import ends_the_program, note_failure
from anabranch.transport.frame import MOST_BODY, bytes_of

_log = logging.getLogger("anabranch.experts")

# Announcements are renewed three times within their time to live.
_RENEWALS = 3
# Seconds between two checks for expired sessions while no request makes one.
_SWEEP = 1.0
# Seconds for asking another server of an announced expert whether it is alive.
_GLANCE = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ExpertServerStatistics:
    """Counters of an expert server since it started.

    Attributes:
        pools: statistics of each pool, by name.
        not_finite: requests refused for NaN or Inf, by peer.
        updates: updates of each expert, by uid.
        transport: requests, errors, bytes.
        sessions: open sessions of each expert, by uid.
        session_bytes: what they count of the budget.
    """

    pools: dict[str, PoolStatistics]
    not_finite: dict[str, int]
    updates: dict[str, int]
    transport: ServerStatistics
    sessions: dict[str, int] = field(default_factory=dict)
    session_bytes: int = 0


class _Round(threading.local):
    """The tasks of the requests that a thread has read, by pool."""

    def __init__(self) -> None:
        self.tasks: dict[TaskPool, list[Task]] = {}


class ExpertVerbs:
    """Answers requests for some experts, and runs them.

    Args:
        backends: the experts, by uid; those on one device share its thread.
        sessions: the open ones.

    Attributes:
        runtimes: the threads of the devices.
        not_finite: requests refused for NaN or Inf, by peer.
        persistence: records what was applied to an expert, with its state.
    """

    def __init__(self, backends: Mapping[str, ExpertBackend], sessions: Sessions) -> None:
        self.backends = backends
        self.schemas = {uid: (backend.schema.packed, backend.schema.hash) for uid, backend in backends.items()}
        self.not_finite: Counter[str] = Counter()
        self.persistence: Persistence | None = None
        self._sessions = sessions
        self._step_numbers = count()
        self._round = _Round()
        by_device: dict[str, list[TaskPool]] = {}
        for backend in backends.values():
            by_device.setdefault(str(backend.device), []).extend(backend.get_pools())
        self.runtimes = [Runtime(pools, name=name) for name, pools in by_device.items()]

    def close(self) -> None:
        """Let go of the experts, whoever still holds a verb."""
        self.backends, self.runtimes, self.persistence = {}, [], None

    def verbs(self) -> list[Verb]:
        """Return the verbs."""
        cuda = any(backend.device.type == "cuda" for backend in self.backends.values())
        into = _allocate_pinned if cuda else allocate
        return [
            Verb(wire.INFO, self._info, quick=True),
            Verb(wire.FORWARD, self._forward, check=self._check, allocate=into, quick=True),
            Verb(
                wire.BACKWARD,
                self._backward,
                check=self._check,
                once=True,
                again=self._backward_again,
                allocate=into,
                quick=True,
            ),
            Verb(wire.SESSION_STEP, self._step, check=self._check, allocate=into, quick=True),
            Verb(wire.SESSION_END, self._end_session, quick=True),
        ]

    def healthy(self) -> bool:
        """Return True unless a device is stuck."""
        return all(runtime.healthy() for runtime in self.runtimes)

    def facts(self) -> dict[str, object]:
        """Return what ``anabranch status`` shows: the queue, and how busy each expert was."""
        experts = {}
        tasks = rows = 0
        for uid, backend in self.backends.items():
            pools = [pool.statistics() for pool in backend.get_pools()]
            tasks += sum(pool.waiting_tasks for pool in pools)
            rows += sum(pool.waiting_rows for pool in pools)
            busy = sum(pool.busy_seconds for pool in pools)
            experts[uid] = {"rows": sum(pool.rows for pool in pools), "busy_seconds": busy}
        return {"queue_tasks": tasks, "queue_rows": rows, "experts": experts}

    # --- checks

    def _find(self, uid: str) -> ExpertBackend:
        backend = self.backends.get(uid)
        if backend is None:
            raise NotFound(f"no expert {uid!r} here; there are {len(self.backends)}: {listed([*self.backends], 8)}")
        return backend

    def _check(self, header: RequestHeader) -> Checked:
        """Refuse a request that does not fit its expert, before memory is allocated for it; return its header."""
        backend = self.backends.get(header.target) or self._find(header.target)
        schema = backend.schema
        if header.schema != self.schemas[header.target][1]:
            raise AnotherSchema(f"{header.target} has a different schema than expected; request its info again")
        message: wire.ForwardHeader | wire.BackwardHeader | wire.StepHeader
        if header.verb == wire.FORWARD:
            message = unpack(header.payload, wire.ForwardHeader)
            pool, layout = backend.forward_pool, schema.input_layout
        elif header.verb == wire.BACKWARD:
            message = unpack(header.payload, wire.BackwardHeader)
            pool, layout = backend.backward_pool, wire.backward_layout(schema, message)
        else:
            message = unpack(header.payload, wire.StepHeader)
            pool, layout = _session_pool(backend), schema.input_layout
        rows, nbytes = wire.check_parts(layout, header), 0
        parts = () if isinstance(message, wire.StepHeader) else message.parts
        if parts and (len(parts) > 1 or parts[0].rows != rows):
            wire.check_rows(parts, rows, pool.max_batch_size)
        if pool.counts.waiting_tasks or pool.closed:
            for tensor in header.tensors:
                nbytes += tensor.nbytes
            pool.check_room(rows, nbytes)
        return Checked(message)

    def _refuse_not_finite(self, call: Call, name: str, requests: int = 1, hint: str = "") -> None:
        """Refuse a request with a tensor that is not finite, and count it; of several each is to come alone."""
        if requests == 1:
            self.not_finite[call.peer.name] += 1
        _fail(call, Apart() if requests > 1 else NonFinite(f"{call.target}: {name} holds NaN or Inf{hint}"))

    # --- requests

    def _info(self, call: Call) -> None:
        self._find(call.target)
        call.reply(payload=self.schemas[call.target][0])

    def _forward(self, call: Call) -> None:
        assert call.checked is not None
        backend, header = self.backends[call.target], cast("wire.ForwardHeader", call.checked.message)
        schema, parts, rows = backend.schema, header.parts, call.tensors[0].shape[0]
        most = backend.forward_pool.max_batch_size
        inputs = call.tensors if schema.takes_as_is else wire.from_wire(call.tensors, schema.inputs)
        if (name := first_not_finite(inputs, schema.input_names)) is not None:
            self._refuse_not_finite(call, name, len(parts))
            return
        seen, evaluating = StateSeen(), header.evaluating
        # A request that is split has no single graph.
        keeps = bool(parts[0].ticket) and rows <= most and 0 < min(parts).rows <= backend.kept.budget
        if not rows:  # the module knows the sizes of its outputs
            inputs, evaluating = schema.row_of_zeros(inputs), True

        def finish(outcome: Sequence[Tensor | None] | BaseException) -> None:
            if isinstance(outcome, BaseException):
                _fail(call, outcome)
                return
            if not rows:
                outcome = rows_of(outcome, 0, 0)
            # A ticket in the answer is valid for a backward.
            valid = frozenset([part.ticket for part in parts if part.ticket in backend.kept] if keeps else ())
            sent = outcome if schema.gives_as_is else wire.to_wire(outcome, schema.output_specs)
            call.reply(cast("Sequence[Tensor]", sent), pack(wire.OutputsHeader(valid, seen.changes, seen.changed)))

        sizes, length = schema.measure(inputs) if schema.varies else ((), 0)
        task = Task(
            inputs, rows or 1, call.deadline, finish, call.drop, requests=len(parts), tickets=parts if keeps else (),
            at_once=header.at_once, sizes=sizes, length=length, evaluating=evaluating, seen=seen,
        )  # fmt: skip
        self._put_aside(call, backend.forward_pool, task)

    def _backward(self, call: Call) -> None:
        assert call.checked is not None
        backend, header = self.backends[call.target], cast("wire.BackwardHeader", call.checked.message)
        schema, parts, rows = backend.schema, header.parts, call.tensors[0].shape[0]
        by_ticket = bool(parts[0].ticket)
        if by_ticket and any(part.ticket not in backend.kept for part in parts):
            gone = ActivationsGone(f"{call.target} has not kept these activations; send the inputs again")
            _fail(call, Apart() if len(parts) > 1 else gone)
            return
        specs = schema.inputs
        tensors: Sequence[Tensor | None] = call.tensors
        if by_ticket or not (schema.takes_as_is and schema.gives_as_is and all(header.present)):
            sent = [not by_ticket] * len(specs) + header.present
            tensors = wire.from_wire(call.tensors, [*specs, *schema.output_specs], sent)
        inputs, gradients = tensors[: len(specs)], tensors[len(specs) :]
        if (name := first_not_finite(tensors, [*schema.input_names, *schema.gradient_names])) is not None:
            hint = ". If an output did too, the cause is the module, not the loss"
            self._refuse_not_finite(call, name, len(parts), hint)
            return
        seen = StateSeen()

        def finish(outcome: Sequence[Tensor | None] | BaseException) -> None:
            changed = not isinstance(outcome, BaseException) or isinstance(outcome, Unrepeatable)
            # One without rows changes nothing, and this is not the thread that may write to the record.
            if changed and rows and self.persistence is not None:
                self.persistence.note_applied(call.target, call.identity, call.settled)
            if isinstance(outcome, BaseException):
                _fail(call, outcome)
            else:
                present = [gradient is not None for gradient in outcome]
                as_is = schema.takes_as_is and all(present)
                received = cast("Sequence[Tensor]", outcome) if as_is else wire.to_wire(outcome, specs)
                call.reply(received, pack(wire.GradientsHeader(present, seen.changes)))

        if not rows:
            # Activations of no rows are never kept, so the inputs are there.
            finish(
                [
                    tensor.clone() if tensor is not None and spec is not None and spec.requires_grad else None
                    for tensor, spec in zip(inputs, specs, strict=True)
                ]
            )
            return
        sizes, length = schema.measure(inputs, gradients) if schema.varies else ((), 0)
        task = Task(
            tensors, rows, call.deadline, finish, call.drop, requests=len(parts), tickets=parts if by_ticket else (),
            at_once=header.at_once, sizes=sizes, length=length, evaluating=header.evaluating,
            updates=header.updates, seen=seen,
        )  # fmt: skip
        self._put_aside(call, backend.backward_pool, task)

    def _backward_again(self, call: Call) -> None:
        """Answer a retry of which only the number is known: the update is made, but its gradients are gone."""
        self._find(call.target)
        call.reply(payload=wire.GONE)

    def _step(self, call: Call) -> None:
        assert call.checked is not None
        backend = self.backends[call.target]
        schema = backend.schema
        inputs = wire.from_wire(call.tensors, schema.inputs)
        if (name := first_not_finite(inputs, schema.input_names)) is not None:
            self._refuse_not_finite(call, name)
            return
        rows, length = call.tensors[0].shape[0], schema.length_of(inputs)
        if not rows or not length:
            raise SchemaError(f"{call.target}: a step has at least one row and one position, got {rows} and {length}")
        nbytes = sum(tensor.nbytes for tensor in call.tensors)
        step = Step(call.checked.message, rows, length, nbytes, _checksum(call.tensors))
        self._sessions.check(step, backend, call.deadline)

        def finish(outcome: Sequence[Tensor | None] | BaseException) -> None:
            if isinstance(outcome, BaseException):
                call.fail(outcome)
            else:
                call.reply(wire.to_wire(outcome, schema.output_specs))

        task = Task(
            inputs, rows * length, call.deadline, finish, call.drop, sizes=(next(self._step_numbers),),
            evaluating=True, step=lambda placed: self._sessions.take(step, backend, placed),
        )  # fmt: skip
        self._put_aside(call, _session_pool(backend), task)

    def _end_session(self, call: Call) -> None:
        self._find(call.target)
        self._sessions.end(call.payload[:32], "the session was ended by its caller")
        call.reply()

    # --- queueing

    def _put_aside(self, call: Call, pool: TaskPool, task: Task) -> None:
        """Queue the task once all requests received so far are read, so that they share a batch."""
        task.caller = call.peer.name
        self._round.tasks.setdefault(pool, []).append(task)

    def submit_round(self, *, one_of_many: bool) -> None:
        """Queue the tasks of all requests that this thread, perhaps ``one_of_many``, has read."""
        if not (aside := self._round.tasks):
            return
        self._round.tasks = {}
        for runtime in self.runtimes:
            mine = aside if len(self.runtimes) == 1 else {pool: own for pool, own in aside.items() if pool in runtime}
            if mine:
                runtime.submit(mine, one_of_many=one_of_many)


class ExpertServer:
    """Serves experts while its ``with`` block runs.

    >>> from anabranch.experts import ExpertBackend, RemoteExpert
    >>> from anabranch.tensors import TensorSpec
    >>> backend = ExpertBackend("same.0", torch.nn.Identity(), args_schema=[TensorSpec(2)])
    >>> with ExpertServer(backend) as server:
    ...     RemoteExpert("same.0", server.endpoint)(torch.ones(1, 2)).detach()
    tensor([[1., 1.]])

    Args:
        backends: the experts, or one; those on one device share its thread.
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
        max_body: bytes of tensors accepted from a caller in one frame.
        drain_seconds: how long leaving the block waits for calls in flight.
        session_bytes: the budget of all inference sessions: what their caches and last answers hold, at least 64 KiB
            each. Beyond it callers get ``Overloaded``.
        clock: seconds for the times to live of sessions.

    Raises:
        ValueError: no backend, two of one uid, an endpoint that is malformed or taken, TCP without keys.
        CheckpointError: a checkpoint that is damaged or of other experts, or another server saves one of them there.

    Entering announces the uids, and warns once in the log ``anabranch.experts`` if the directory lists one of them at
    another server that answers; leaving withdraws them, finishes the calls in flight, and saves.
    """

    def __init__(
        self,
        backends: Iterable[ExpertBackend] | ExpertBackend,
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
        max_body: int = MOST_BODY,
        drain_seconds: float = 5.0,
        session_bytes: int = 4 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backends: dict[str, ExpertBackend] = {}
        for backend in [backends] if isinstance(backends, ExpertBackend) else backends:
            if backend.uid in self._backends:
                raise ValueError(f"two backends are called {backend.uid!r}")
            self._backends[backend.uid] = backend.to(device) if device is not None else backend
        if not self._backends:
            raise ValueError("a server without experts has nothing to serve; give it backends")
        self._directory = (
            None if directory is None else as_directory(directory, role="experts", keys=keys, insecure=insecure)
        )
        self._make_client = partial(
            Client, role="experts", retries=0, keys=keys, insecure=insecure, transport=transport
        )
        self._ttl = ttl
        self._sessions = Sessions(session_bytes, clock)
        self._verbs = ExpertVerbs(self._backends, self._sessions)
        check_seconds(checkpoint_seconds=checkpoint_seconds)
        self._checkpoint_seconds = checkpoint_seconds
        if checkpoint_dir is not None:
            paused = partial(_paused, self._verbs.runtimes)
            self._verbs.persistence = Persistence(Path(checkpoint_dir), self._backends, paused=paused)
        # The last step that may fail: it listens from here on.
        self._server = Server(
            self._verbs.verbs(),
            listen=listen,
            role="experts",
            keys=keys,
            insecure=insecure,
            heartbeat=heartbeat,
            transport=transport,
            max_body=max_body,
            max_connections=max_connections,
            drain_seconds=drain_seconds,
            healthy=self._verbs.healthy,
            after_round=self._verbs.submit_round,
            facts=self._verbs.facts,
        )
        self._stack = ExitStack()

    @property
    def endpoint(self) -> str:
        """The address for ``RemoteExpert``."""
        return self._server.endpoint

    def __enter__(self) -> ExpertServer:
        with ExitStack() as stack:
            stack.callback(self._verbs.close)
            # The server has listened since it was made, so close it if entering fails.
            stack.callback(self._server.close)
            if (persistence := self._verbs.persistence) is not None:
                stack.enter_context(persistence.claim())
                self._server.once.restore(persistence.load())
                stack.callback(persistence.save)
                save = partial(_noting, "experts.not_saved", persistence.save)  # the next one may find room
                saver = periodic(save, self._checkpoint_seconds, name="anabranch-checkpoint", patience=60.0)
                stack.enter_context(saver)
            for runtime in self._verbs.runtimes:
                stack.enter_context(runtime)
            if any(backend.session_pool is not None for backend in self._backends.values()):
                stack.callback(self._sessions.close)
                stack.enter_context(periodic(self._sessions.sweep, _SWEEP, name="anabranch-sessions"))
            stack.enter_context(self._server)
            if self._directory is not None:
                announce = partial(self._directory.announce, self._backends, self.endpoint, self._ttl)
                withdraw = partial(self._directory.withdraw, self._backends, self.endpoint)
                others = _noting("experts.not_looked_up", partial(self._directory.lookup, self._backends)) or {}
                announce()
                # An announcement that is not withdrawn expires.
                stack.callback(_noting, "experts.directory_lost", withdraw)
                renewing = periodic(
                    partial(_noting, "experts.directory_lost", announce),
                    self._ttl / _RENEWALS,
                    name="anabranch-announce",
                    patience=15.0,
                    at_start=partial(_noting, "experts.not_looked_up", partial(self._warn_of_others, others)),
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
            dict(self._verbs.not_finite),
            {uid: backend.updates for uid, backend in self._backends.items()},
            self._server.statistics(),
            {uid: backend.open_sessions for uid, backend in self._backends.items()},
            self._sessions.nbytes,
        )

    def transport_statistics(self) -> ServerStatistics:
        """Counters of its requests and connections since it started."""
        return self._server.statistics()

    def checkpoint(self) -> None:
        """Save every expert that was updated since it was last saved, if there is a directory for that."""
        if (persistence := self._verbs.persistence) is not None:
            persistence.save()

    def _warn_of_others(self, endpoints: Mapping[str, str]) -> None:
        """Warn of uids that other live servers had announced: updates of one expert would go to two places.

        A server restarted at a new address finds its old address listed, but nothing answers there.
        """
        others = [(uid, endpoint) for uid, endpoint in endpoints.items() if endpoint != self.endpoint]
        requests = [Request(endpoint, wire.INFO, uid, role="experts") for uid, endpoint in others]
        with self._make_client() as client:
            # Well before the announcements are to be renewed.
            outcomes = client.gather(requests, Deadline.after(min(_GLANCE, self._ttl / _RENEWALS / 2)))
        twice = [one for one, outcome in zip(others, outcomes, strict=True) if isinstance(outcome, Answer)]
        if twice:
            says = (
                "%s was listed at another live server, %s, when this one announced it at %s; callers find sometimes "
                "one, sometimes the other, so each trains in part: stop one of them, or give them different uids"
            )
            _log.warning(says, listed([uid for uid, _ in twice], 8), twice[0][1], self.endpoint)


@contextmanager
def _paused(runtimes: Iterable[Runtime]) -> Iterator[None]:
    """Run the block while no batch runs."""
    with ExitStack() as stack:
        for runtime in runtimes:
            stack.enter_context(runtime.paused())
        yield


def _noting(what: str, call: Callable[[], _T]) -> _T | None:
    """Return the result of a call; an error is noted as ``what``: a directory or disk that fails stops no server."""
    try:
        return call()
    except (BoundaryError, CheckpointError) as error:
        mark(what, error=str(error))
    except BaseException as error:  # also of a user's own directory, or module's state_dict
        if ends_the_program(error):
            raise
        note_failure(what, error)
    return None


def _fail(call: Call, error: BaseException) -> None:
    if isinstance(error, Apart):
        call.reply(payload=wire.APART)  # kept as any answer, so a retry does not run them together after all
    else:
        call.fail(error)


def _session_pool(backend: ExpertBackend) -> TaskPool:
    if backend.session_pool is None:
        kind = type(backend.module).__name__
        raise SchemaError(f"{backend.uid} has no sessions: its module, a {kind}, has no make_cache(rows, max_length)")
    return backend.session_pool


def _checksum(tensors: Sequence[Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(bytes_of(tensor), zlib.crc32(repr(tuple(tensor.shape)).encode(), checksum))
    return checksum


def _allocate_pinned(headers: Sequence[TensorHeader]) -> Sequence[Tensor]:
    return [torch.empty(header.shape, dtype=DTYPES[header.code], pin_memory=True, device="cpu") for header in headers]
