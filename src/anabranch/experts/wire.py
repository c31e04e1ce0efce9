"""Messages between callers and servers of experts: their verbs, and the layout of tensors in a request.

    expert.info            -> the schema
    expert.forward         inputs -> outputs, and how often the expert had changed before
    expert.backward        inputs, gradients of outputs, whether it updates the expert -> gradients of inputs, and how
                           often the expert had changed before it was the one that they belong to; done exactly once
    expert.forward_eval    the same two of a caller in eval mode; a server that is older than these verbs refuses them
    expert.backward_eval   by name, rather than answer in another mode than was asked for
    expert.session_step    a session's id, the number of the step, inputs -> outputs; the first step opens the session
    expert.session_end     a session's id -> nothing
    expert.session_count   -> the number of the expert's open sessions

Tensors come in the schema's order. A missing gradient is left out, and the payload lists those present. A forward
may carry a ticket; if the answer repeats it, its activations are kept, and the backward brings it for the inputs.
The answer to a backward's retry may be ``GONE``: it was executed, but its gradients are no longer there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.experts.compression import compress, count_parts, decompress
from anabranch.experts.schema import Layout, Schema
from anabranch.tensors import TensorSpec
from anabranch.transport import RequestHeader, pack, unpack

__all__ = [
    "BACKWARD",
    "BACKWARDS",
    "BACKWARD_EVAL",
    "FORWARD",
    "FORWARD_EVAL",
    "GONE",
    "INFO",
    "Layout",
    "SESSION_COUNT",
    "SESSION_END",
    "SESSION_STEP",
    "StepHeader",
    "from_wire",
    "gradient_layout",
    "pack",
    "present",
    "read_answer",
    "read_backward",
    "read_count",
    "read_gradients",
    "read_step",
    "read_ticket",
    "request_layout",
    "to_wire",
]

INFO = "expert.info"
FORWARD = "expert.forward"
BACKWARD = "expert.backward"
FORWARD_EVAL = "expert.forward_eval"
BACKWARD_EVAL = "expert.backward_eval"
SESSION_STEP = "expert.session_step"
SESSION_END = "expert.session_end"
SESSION_COUNT = "expert.session_count"

GONE = b"gone"

BACKWARDS = frozenset({BACKWARD, BACKWARD_EVAL})

_LONGEST_TICKET = 32

_unpack_backward = partial(unpack, kind=tuple[list[bool], bytes, bool])
read_answer = partial(unpack, kind=tuple[bytes, int, bool])
"""Unpack a forward's answer: the ticket of activations that are kept for the backward, empty if there are none; how
often the expert had changed before this forward; whether the forward itself has changed it.
"""
read_gradients = partial(unpack, kind=tuple[list[bool], int])
"""Unpack a backward's answer: which gradients are present, and how often the expert had changed before it was the one
that they belong to.
"""
_unpack_step = partial(unpack, kind=tuple[bytes, int, int, float])
read_count = partial(unpack, kind=int)
"""Unpack a number of sessions."""


class StepHeader(NamedTuple):
    """The fields that a step of a session sends beside its inputs.

    Attributes:
        session: the id, drawn by the caller.
        number: of the step, from 0; a retry keeps its number.
        max_length: positions that the session may grow to.
        ttl: seconds without a step after which the server may close the session.
    """

    session: bytes
    number: int
    max_length: int
    ttl: float


def present(tensors: Sequence[Tensor | None]) -> list[bool]:
    """Return which of ``tensors`` are sent."""
    return [tensor is not None for tensor in tensors]


def gradient_layout(specs: Sequence[TensorSpec | None], present: Sequence[bool], what: str) -> Layout:
    """Return the layout of the gradients of ``specs``, of which those ``present`` are sent.

    Raises:
        SchemaError: a gradient is present where none can be, or the count differs.
    """
    if len(present) != len(specs):
        raise SchemaError(f"expected {len(specs)} gradients of {what}s to be listed, got {len(present)}")
    layout: Layout = []
    for index, (spec, there) in enumerate(zip(specs, present, strict=True)):
        if there and (spec is None or not spec.requires_grad):
            raise SchemaError(f"{what} {index} has no gradient, but one was received")
        if there and spec is not None:
            layout.append((f"gradient of {what} {index}", spec))
    return layout


def request_layout(schema: Schema, header: RequestHeader) -> Layout:
    """Return the layout that a forward, a backward or a step with ``header`` must have."""
    layout = schema.input_layout
    if header.verb in BACKWARDS:
        there, ticket, _ = read_backward(header.payload)
        gradients = gradient_layout(schema.output_specs, there, "output")
        if ticket and not gradients:
            raise SchemaError("a backward without inputs needs a gradient of an output")
        return gradients if ticket else layout + gradients
    if header.verb != SESSION_STEP:
        read_ticket(header.payload)
    return layout


def to_wire(tensors: Sequence[Tensor | None], specs: Sequence[TensorSpec | None]) -> list[Tensor]:
    """Return the tensors to send, without those that are ``None``."""
    parts: list[Tensor] = []
    for tensor, spec in zip(tensors, specs, strict=True):
        if tensor is not None and spec is not None:
            if spec.compression is None:
                parts.append(tensor)
            else:
                parts += compress(tensor, spec)
    return parts


def from_wire(
    parts: Sequence[Tensor], specs: Sequence[TensorSpec | None], present: Sequence[bool] | None = None
) -> list[Tensor | None]:
    """Return the tensors in the order of ``specs``, ``None`` for those that are not ``present``."""
    tensors: list[Tensor | None] = []
    position = 0
    for index, spec in enumerate(specs):
        if spec is None or (present is not None and not present[index]):
            tensors.append(None)
            continue
        if spec.compression is None:
            tensors.append(parts[position])
            position += 1
            continue
        count = count_parts(spec)
        tensors.append(decompress(parts[position : position + count], spec))
        position += count
    return tensors


def read_ticket(payload: bytes) -> bytes:
    """Return the ticket in a payload of a forward, empty for none."""
    if len(payload) > _LONGEST_TICKET:
        raise SchemaError(f"a ticket is at most {_LONGEST_TICKET} bytes, got {len(payload)}")
    return payload


def read_backward(payload: bytes) -> tuple[list[bool], bytes, bool]:
    """Unpack a backward: which gradients are present, the ticket of kept activations, empty if the inputs are sent, and
    whether the expert is updated.
    """
    there, ticket, updates = _unpack_backward(payload)
    return there, read_ticket(ticket), updates


def read_step(payload: bytes) -> StepHeader:
    """Unpack the fields of a step; a ``SchemaError`` for values that no session has."""
    header = StepHeader(*_unpack_step(payload))
    if not header.session or len(header.session) > _LONGEST_TICKET:
        raise SchemaError(f"a session's id is 1 to {_LONGEST_TICKET} bytes, got {len(header.session)}")
    if header.number < 0 or header.max_length < 1 or not 0 < header.ttl < float("inf"):
        raise SchemaError(
            f"a step has a number from 0, a max_length above 0 and a finite ttl above 0, got {tuple(header[1:])}"
        )
    return header
