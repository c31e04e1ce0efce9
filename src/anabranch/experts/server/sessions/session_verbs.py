"""The verbs of inference sessions: a step, the end, and the number of open sessions."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.experts import wire
from anabranch.experts.server.backend import ExpertBackend
from anabranch.experts.server.batching.task_pool import Task, TaskPool
from anabranch.experts.server.sessions.open_sessions import Sessions, Step
from anabranch.experts.server.sessions.step_tasks import StepTask
from anabranch.transport import Call, RequestHeader, TensorHeader, Verb
from anabranch.transport.frame import bytes_of

__all__ = ["SessionVerbs"]


class _CheckFinite(Protocol):
    def __call__(self, call: Call, tensors: Sequence[Tensor | None], names: Sequence[str]) -> None:
        """Raise ``NonFinite`` if a tensor holds NaN or Inf."""


class SessionVerbs:
    """Serves the sessions of a server.

    Args:
        sessions: the open ones.
        find: returns the expert of a uid, or raises.
        check_request: returns the rows of a request that fits its expert, or raises.
        check_finite: raises for tensors that are not finite.
        put_aside: queues a task once all requests received so far are read.
        allocate: makes the memory for requests.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        find: Callable[[str], ExpertBackend],
        check_request: Callable[[RequestHeader, ExpertBackend], int],
        check_finite: _CheckFinite,
        put_aside: Callable[[Call, ExpertBackend, TaskPool, Task], None],
        allocate: Callable[[Sequence[TensorHeader]], Sequence[Tensor]],
    ) -> None:
        self._sessions = sessions
        self._find = find
        self._check_request = check_request
        self._check_finite = check_finite
        self._put_aside = put_aside
        self._allocate = allocate
        self._numbers = count()

    def verbs(self) -> list[Verb]:
        """Return the verbs to serve."""
        return [
            Verb(wire.SESSION_STEP, self._step, check=self._check, allocate=self._allocate, quick=True),
            Verb(wire.SESSION_END, self._end, quick=True),
            Verb(wire.SESSION_COUNT, self._count, quick=True),
        ]

    def _check(self, header: RequestHeader) -> None:
        """Refuse a step that cannot be taken, before memory is allocated for it."""
        backend = self._find(header.target)
        pool = _pool_of(backend)
        asked = wire.read_step(header.payload)
        # First whether it still exists: a restarted server may also have another schema.
        if asked.number:
            self._sessions.find(asked, backend)
        rows = self._check_request(header, backend)
        self._sessions.check(Step(asked, rows), backend)
        pool.check_room(rows, sum(tensor.nbytes for tensor in header.tensors))

    def _step(self, call: Call) -> None:
        backend = self._find(call.target)
        schema = backend.schema
        inputs = wire.from_wire(call.tensors, schema.inputs)
        self._check_finite(call, inputs, schema.input_names)
        rows, length = next(len(tensor) for tensor in inputs if tensor is not None), schema.length_of(inputs)
        if not rows or not length:
            raise SchemaError(f"{call.target}: a step has at least one row and one position, got {rows} and {length}")
        step = Step(wire.read_step(call.payload), rows, length, _checksum(call.tensors))
        self._sessions.check(step, backend)
        self._sessions.hold(step.header.session, call.deadline)

        def finish(outcome: Sequence[Tensor | None] | BaseException) -> None:
            if isinstance(outcome, BaseException):
                call.fail(outcome)
            else:
                call.reply(wire.to_wire(outcome, schema.output_specs))

        task = StepTask(
            inputs, rows * length, call.deadline, finish, call.drop, sizes=(next(self._numbers),), evaluating=True,
            take=lambda placed: self._sessions.take(step, backend, placed),
        )  # fmt: skip
        self._put_aside(call, backend, _pool_of(backend), task)

    def _end(self, call: Call) -> None:
        self._find(call.target)
        self._sessions.end(wire.read_ticket(call.payload), "the session was ended by its caller")
        call.reply()

    def _count(self, call: Call) -> None:
        call.reply(payload=wire.pack_count(self._find(call.target).open_sessions))


def _pool_of(backend: ExpertBackend) -> TaskPool:
    if backend.session_pool is None:
        raise SchemaError(
            f"{backend.uid} has no sessions: its module, a {type(backend.module).__name__}, has no "
            "make_cache(rows, max_length); see 'Generate step by step' in the guide of experts"
        )
    return backend.session_pool


def _checksum(tensors: Sequence[Tensor]) -> int:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(bytes_of(tensor), zlib.crc32(repr(tuple(tensor.shape)).encode(), found))
    return found
