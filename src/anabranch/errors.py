"""The error tree: possible failures, the peer they concern, and how a caller distinguishes them.

::

    Exception
    ├── AnabranchError             something Anabranch was asked to do did not happen
    │   ├── BoundaryError          failed across a boundary (peer, operation, step, elapsed)
    │   │   ├── DeadlineExceeded   no answer before the deadline
    │   │   ├── PeerLost           the far side died, froze or closed the connection
    │   │   ├── Overloaded         the far side is alive and declined: its queues are full
    │   │   ├── RolledBack         a server lost changes that it had acknowledged (lost)
    │   │   ├── Unauthorized       no certificate, a foreign or expired one, a wrong role
    │   │   ├── ProtocolError      bytes that are not a frame of this protocol
    │   │   └── RemoteError        the far side raised (remote_type, remote_traceback)
    │   ├── CaptureError           the graph engine cannot represent this step faithfully
    │   ├── CheckpointError        a checkpoint is torn, damaged or of another model
    │   ├── PipelineError          another stage failed (stage, microbatch, phase)
    │   └── WorkersDiffer          workers' parameters differ (parameters, ranks, steps)
    ├── ValueError                 a wrong value; the message names it and the cure
    │   ├── ForkedClient           a client of another process, which was forked
    │   ├── LostUpdate             a change by hand that the servers' values would overwrite
    │   ├── NotFound               an unknown uid, table or verb
    │   │   ├── ActivationsGone    an expert has not kept what a backward refers to
    │   │   └── SessionGone        a server no longer keeps an inference session's sequence
    │   ├── NonFinite              NaN or Inf where numbers must be finite
    │   └── SchemaError            structure, shape or dtype differ from what was declared
    │       └── AnotherSchema      an expert came back with another schema than known
    └── TypeError
        └── SkipError              skip connections that do not match

A mistake of the caller is a ``ValueError`` or ``TypeError``; catching ``AnabranchError`` catches what may happen to
a correct program, and nothing else.
"""

from __future__ import annotations

from typing import TypedDict, Unpack


class AnabranchError(Exception):
    """Something Anabranch was asked to do did not happen, through no mistake of the caller."""


class Where(TypedDict, total=False):
    """Facts of a ``BoundaryError``, as its attributes say."""

    peer: str | None
    operation: str | None
    step: int | None
    elapsed: float | None


class BoundaryError(AnabranchError):
    """An operation across a boundary failed.

    >>> facts = {"peer": "rank 1", "operation": "all_reduce", "step": 7, "elapsed": 2.0}
    >>> error = BoundaryError("all peers were busy", **facts)
    >>> str(error)
    'all peers were busy (peer rank 1, operation all_reduce, step 7, after 2.000 s)'

    Attributes:
        peer: the peer that the operation was waiting for: a rank, an endpoint, a uid.
        operation: the verb, such as ``all_reduce`` or ``expert.forward``.
        step: the step of the program that was running, ``None`` outside one.
        elapsed: seconds from the start of the operation to the failure.
    """

    def __init__(self, message: str = "", **where: Unpack[Where]) -> None:
        self.message = message
        self.peer, self.operation = where.get("peer"), where.get("operation")
        self.step, self.elapsed = where.get("step"), where.get("elapsed")
        super().__init__(message)

    def __str__(self) -> str:
        facts = [
            f"{name} {value}"
            for name, value in (("peer", self.peer), ("operation", self.operation), ("step", self.step))
            if value is not None
        ]
        if self.elapsed is not None:
            facts.append(f"after {self.elapsed:.3f} s")
        return f"{self.message} ({', '.join(facts)})" if facts else self.message


class DeadlineExceeded(BoundaryError):
    """No answer came before the deadline; the peer may be slow, or gone."""


class PeerLost(BoundaryError):
    """The far side died, froze, or closed the connection."""


class Overloaded(BoundaryError):
    """The far side is alive and declined the request at once, because its queues are full."""


class RolledBack(BoundaryError):
    """A parameter server recovered without changes that it had acknowledged.

    It holds its last checkpoint, or the readable part of a damaged log. The request that was refused
    with this was not done. The next one is served: a client that can push what is gone again, or do without, continues;
    a job of several workers starts again from its last complete checkpoint, as ``anabranch run --max-restarts`` does.

    Attributes:
        lost: acknowledged pushes of this client that are lost.
    """

    def __init__(self, message: str = "", *, lost: int = 0, **where: Unpack[Where]) -> None:
        super().__init__(message, **where)
        self.lost = lost


class Unauthorized(BoundaryError):
    """The far side refused the caller: no certificate, a foreign or expired one, or one of the wrong role."""


class ProtocolError(BoundaryError):
    """The bytes that arrived are not a frame of this protocol, or break one of its limits."""


class RemoteError(BoundaryError):
    """The far side raised an exception while it served the request.

    Attributes:
        remote_type: qualified name of the exception's class over there.
        remote_traceback: its formatted traceback, as text.
    """

    def __init__(
        self,
        message: str = "",
        *,
        remote_type: str = "",
        remote_traceback: str = "",
        **where: Unpack[Where],
    ) -> None:
        super().__init__(message, **where)
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\nThe remote traceback:\n{self.remote_traceback}" if self.remote_traceback else text


class CaptureError(AnabranchError):
    """The step cannot be captured as a graph without changing what it computes."""


class CheckpointError(AnabranchError):
    """A checkpoint is incomplete, damaged, or does not fit the model it is loaded into."""


class PipelineError(AnabranchError):
    """Another stage of the pipeline failed.

    Attributes:
        stage: index of the stage that raised.
        microbatch: index of the microbatch it was working on.
        phase: ``"forward"``, ``"backward"``, ``"weight"`` or ``"recompute"``.
        remote_type: qualified name of the exception's class over there.
        remote_traceback: its formatted traceback, as text.
    """

    def __init__(
        self,
        message: str = "",
        *,
        stage: int | None = None,
        microbatch: int | None = None,
        phase: str | None = None,
        remote_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        self.stage = stage
        self.microbatch = microbatch
        self.phase = phase
        self.remote_type = remote_type
        self.remote_traceback = remote_traceback
        super().__init__(message)

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n\nThe failing stage's traceback:\n{self.remote_traceback}" if self.remote_traceback else text


class WorkersDiffer(AnabranchError):
    """All-reduced or frozen parameters, or the learning rates of those on servers, are different on the workers.

    Attributes:
        parameters: their names.
        ranks: the workers that differ from rank 0's.
        steps: the optimizer steps at which they were last seen to be equal, and first seen to differ.
    """

    def __init__(
        self,
        message: str = "",
        *,
        parameters: tuple[str, ...] = (),
        ranks: tuple[int, ...] = (),
        steps: tuple[int, int] = (0, 0),
    ) -> None:
        self.parameters = parameters
        self.ranks = ranks
        self.steps = steps
        super().__init__(message)


class ForkedClient(ValueError):
    """A client was used in a forked child of the process that had used it; make a new one there."""


class LostUpdate(ValueError):
    """A copy of what lives on servers was changed by hand; the next read of the servers would overwrite the change."""


class NotFound(ValueError):
    """No uid, table or verb of that name; the message lists those that exist."""


class ActivationsGone(NotFound):
    """An expert has not kept the activations that a backward refers to; it needs the inputs again."""


class SessionGone(NotFound):
    """A server no longer keeps the sequence of an inference session; the message gives the reason. Open another
    session.
    """


class NonFinite(ValueError):
    """NaN or Inf where only finite numbers are accepted, or a number too large for the place or coding it goes to."""


class SchemaError(ValueError):
    """Structure, shape or dtype differ from the declared ones; the message shows the expected and the received."""


class AnotherSchema(SchemaError):
    """An expert has another schema than its caller knows; the caller requests it again."""


class SkipError(TypeError):
    """Skip connections that do not match; every mismatch of the module is in the one message."""
