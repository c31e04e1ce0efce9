"""A sequence that an expert continues step by step, whose earlier positions its server keeps.

::

    step(x) ── fits max_length? ──> session id, number n, x ──> server ──> outputs for x's positions, n becomes n + 1
                                          └── no answer: n stays, and the same step may be asked for again
"""

from __future__ import annotations

import os
import threading
from typing import NoReturn, Protocol

from torch import Tensor

from anabranch.autodiff.boundary.crossing import current_tracer
from anabranch.deadline import LONGEST_SLEEP, Deadline, check_seconds
from anabranch.errors import BoundaryError, CaptureError, NotFound, SchemaError, SessionGone
from anabranch.experts import wire
from anabranch.experts.client.calls import expect
from anabranch.experts.schema import RowInputs, Schema, with_leading
from anabranch.record.spans import mark
from anabranch.tensors import Structure
from anabranch.transport import Client, Request, pack

__all__ = ["InferenceSession", "SessionExpert"]

_ID_BYTES = 16
# Seconds for telling the server that the session has ended; otherwise the session expires there.
_FAREWELL = 5.0


class SessionExpert(Protocol):
    """The part of ``RemoteExpert`` that a session uses."""

    uid: str
    forward_timeout: float

    @property
    def client(self) -> Client: ...

    def find(self, deadline: Deadline) -> tuple[str, Schema]:
        """Return the endpoint and the schema of the expert."""

    def forget_if_changed(self, error: Exception, deadline: Deadline) -> bool:
        """Return True if a retry may help."""


class InferenceSession:
    """Sequences that an expert continues; created by ``RemoteExpert.session``, and used as a context manager.

    >>> import torch
    >>> from torch import nn
    >>> from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
    >>> from anabranch.tensors import TensorSpec
    >>> class RunningSum(nn.Module):
    ...     def make_cache(self, rows, max_length):
    ...         return {"sum": torch.zeros(rows, 1, 2)}
    ...     def forward(self, x, cache=None):
    ...         sums = x.cumsum(1) if cache is None else cache["sum"] + x.cumsum(1)
    ...         if cache is not None:
    ...             cache["sum"] = sums[:, -1:]
    ...         return sums
    >>> backend = ExpertBackend("sum.0", RunningSum(), args_schema=[TensorSpec(None, 2)])
    >>> with ExpertServer([backend]) as server:
    ...     with RemoteExpert("sum.0", server.endpoint).session(max_length=8) as session:
    ...         _ = session.step(torch.ones(1, 3, 2))
    ...         session.step(torch.ones(1, 1, 2)), session.length
    (tensor([[[4., 4.]]]), 4)

    Its first step opens it on the server, which keeps the cache that the expert's module makes for this many rows.
    Steps run in eval mode and without gradients, and change nothing of the expert. Several threads may share a session;
    their steps come one after the other.

    Where a step raises ``DeadlineExceeded``, ``PeerLost`` or ``Overloaded``, whether it was taken is not known, and it
    may be requested again with the same inputs: it is never taken twice.
    """

    def __init__(self, expert: SessionExpert, max_length: int, ttl: float = 60.0) -> None:
        if isinstance(max_length, bool) or not isinstance(max_length, int) or not 1 <= max_length < 1 << 62:
            raise ValueError(f"max_length is a whole number of positions above 0, got {max_length!r}")
        check_seconds(ttl=ttl)
        self.max_length = max_length
        """Positions that the sequences may grow to."""
        self.length = 0
        """Positions of the sequences so far."""
        self.ttl = ttl
        """Seconds without a step after which the server frees the cache."""
        self._expert = expert
        self._id = os.urandom(_ID_BYTES)
        self._lock = threading.Lock()
        self._where: tuple[str, Schema] | None = None
        self._steps = 0
        self._rows = -1
        self._ended = False

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{self.length} of {self.max_length} positions"
        return f"InferenceSession({self._expert.uid!r}, {state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a session of {self._expert.uid} belongs to the process that opened it and cannot be copied or pickled; "
            "send the expert, and open another session there"
        )

    def step(self, *args: object, **kwargs: object) -> Structure:
        """Return the expert's outputs for the next positions of the sequences.

        Args:
            args: as of the expert; the first size that varies of the first input that has one is the number of
                positions. Every step has as many rows as the first.
            kwargs: the same.

        Raises:
            ValueError: the session was ended here.
            SchemaError: the inputs do not fit the expert's schema, have another number of rows than before, no row or
                no position, or exceed ``max_length``; nothing was sent. Or the expert keeps no sequences.
            SessionGone: the server no longer has the session: its time to live has passed, the server was restarted, a
                step has failed there.
            Overloaded: the server has no room.
            BoundaryError: as of a call of the expert.
            CaptureError: a graph is captured, which cannot advance a sequence each time it runs.
        """
        if current_tracer() is not None:
            raise CaptureError(
                f"a step of a session of {self._expert.uid} cannot be part of a graph; use engine='tape'"
            )
        deadline = Deadline.after(self._expert.forward_timeout)
        while not self._lock.acquire(timeout=min(LONGEST_SLEEP, deadline.remaining())):
            if deadline.expired():
                raise deadline.error(peer=self._expert.uid, operation="wait for another thread's step of the session")
        try:
            return self._take(args, kwargs, deadline)
        finally:
            if self._ended:
                # Another thread ended it meanwhile, perhaps before this step had opened it there.
                self._tell_server()
            self._lock.release()

    def end(self) -> None:
        """End the session: its server frees the cache at once. Ending it again does nothing.

        An unreachable server frees it after the time to live; that raises nothing.
        """
        self._ended = True
        self._tell_server()

    def _tell_server(self) -> None:
        where, self._where = self._where, None
        if where is None:
            return
        request = Request(where[0], wire.SESSION_END, self._expert.uid, payload=self._id, role="experts")
        try:
            self._expert.client.call(request, Deadline.after(min(_FAREWELL, self._expert.forward_timeout)))
        except (BoundaryError, ValueError) as error:
            mark("experts.session_not_ended", uid=self._expert.uid, error=str(error))

    def _take(self, args: tuple[object, ...], kwargs: dict[str, object], deadline: Deadline) -> Structure:
        if self._ended:
            raise ValueError(f"this session of {self._expert.uid} was ended; open another with expert.session(...)")
        endpoint, schema = self._where or self._expert.find(deadline)
        given = schema.flatten_inputs(args, kwargs)
        length = self._check(schema, given)
        try:
            outputs = self._ask(endpoint, schema, given, deadline)
        except (BoundaryError, ValueError) as error:
            if deadline.expired() or not self._may_be_elsewhere(error, deadline):
                raise
            if self._steps:
                # The expert's current server knows whether the session still exists.
                endpoint, _ = self._expert.find(deadline)
            else:
                # Before the first answer nothing is lost by calling another server.
                self._where = None
                endpoint, schema = self._expert.find(deadline)
                given = schema.flatten_inputs(args, kwargs)
                length = self._check(schema, given)
            outputs = self._ask(endpoint, schema, given, deadline)
        self._steps += 1
        self.length += length
        return schema.nest_outputs(with_leading(outputs, given.leading))

    def _may_be_elsewhere(self, error: Exception, deadline: Deadline) -> bool:
        """Return True if the expert has moved or changed its schema, so that a retry may help."""
        if isinstance(error, SessionGone):
            return False
        try:
            return self._expert.forget_if_changed(error, deadline)
        except NotFound:
            return False  # not served now; the same step may be requested once its server is back

    def _check(self, schema: Schema, given: RowInputs) -> int:
        """Return the positions of a step that fits the session."""
        length = schema.length_of(given.tensors)
        rows = next(len(tensor) for tensor in given.tensors if tensor is not None)
        if not rows or not length:
            raise SchemaError(f"a step has at least one row and one position, got {rows} rows of {length}")
        if self._steps and rows != self._rows:
            raise SchemaError(f"the session has {self._rows} rows, but this step has {rows}")
        if self.length + length > self.max_length:
            raise SchemaError(
                f"the session has {self.length} positions; {length} more exceed its max_length, {self.max_length}; "
                "open it with a larger one"
            )
        self._rows = rows
        return length

    def _ask(self, endpoint: str, schema: Schema, given: RowInputs, deadline: Deadline) -> list[Tensor]:
        self._where = endpoint, schema
        tensors = [None if tensor is None else tensor.detach() for tensor in given.tensors]
        request = Request(
            endpoint,
            wire.SESSION_STEP,
            self._expert.uid,
            wire.to_wire(tensors, schema.inputs),
            payload=pack(wire.Step(self._id, self._steps, self.max_length, self.ttl)),
            schema=schema.hash,
            check=expect(schema.output_layout, self._rows),
            role="experts",
        )
        answer = self._expert.client.call(request, deadline)
        device = next(tensor.device for tensor in tensors if tensor is not None)
        outputs = wire.from_wire(answer.tensors, schema.output_specs)
        return [output.to(device) for output in outputs if output is not None]
