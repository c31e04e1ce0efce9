"""Messages between callers and servers of experts: their verbs, their headers, and the tensors in them.

    expert.info            -> the schema
    expert.forward         inputs -> outputs
    expert.backward        inputs, gradients of outputs -> gradients of inputs; done exactly once
    expert.session_step    inputs -> outputs; the first step opens the session
    expert.session_end     a session's id -> nothing

Tensors come in the schema's order. A missing gradient is left out, and the header lists those present. A forward may
carry a ticket; if the answer repeats it, its activations are kept, and the backward brings it for the inputs. The
answer to a backward's retry may be ``GONE``: it was executed, but its gradients are no longer there.

A tensor travels unchanged, rounded to half precision, or as 8-bit integers with a scale for each block. Rounding is
set in the ``TensorSpec``, which both sides know, so a message does not describe it. Ids are integers and cannot be
rounded. A gradient is sent in the format of its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from anabranch.errors import SchemaError
from anabranch.experts.schema import Layout, Schema
from anabranch.tensors import TensorSpec, from_blocks, to_blocks
from anabranch.tensors.dtypes import dtype_name
from anabranch.tensors.packing import all_finite
from anabranch.transport import RequestHeader, TensorHeader, unpack

INFO = "expert.info"
FORWARD = "expert.forward"
BACKWARD = "expert.backward"
SESSION_STEP = "expert.session_step"
SESSION_END = "expert.session_end"

GONE = b"gone"

BLOCK = 256
"""Values that share a scale under ``int8``: 1.6 % more bytes, and an outlier spoils only its own block."""

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

Ticket = Annotated[bytes, msgspec.Meta(max_length=32)]


class ForwardHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a forward.

    Attributes:
        ticket: names the activations to keep for the backward; empty for none.
        evaluating: the caller is in eval mode.
    """

    ticket: Ticket
    evaluating: bool


class OutputsHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a forward's answer.

    Attributes:
        ticket: of the forward if its activations are kept, else empty.
        changes: how often the expert had changed before this forward.
        changed: the forward itself has changed it.
    """

    ticket: bytes
    changes: int
    changed: bool


class BackwardHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a backward.

    Attributes:
        present: which gradients of outputs are sent.
        ticket: of kept activations; empty if the inputs are sent.
        evaluating: the caller was in eval mode.
        updates: the expert is to update itself.
    """

    present: list[bool]
    ticket: Ticket
    evaluating: bool
    updates: bool


class GradientsHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a backward's answer.

    Attributes:
        present: which gradients of inputs are sent.
        changes: how often the expert had changed before it was the one that they belong to.
    """

    present: list[bool]
    changes: int


class StepHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a session's step.

    Attributes:
        session: the id, drawn by the caller.
        number: of the step, from 0; a retry keeps its number.
        max_length: positions that the session may grow to.
        ttl: seconds without a step after which the server may close the session.
    """

    session: Annotated[Ticket, msgspec.Meta(min_length=1)]
    number: Annotated[int, msgspec.Meta(ge=0)]
    max_length: Annotated[int, msgspec.Meta(ge=1)]
    ttl: float


def gradient_layout(
    specs: Sequence[TensorSpec | None], present: Sequence[bool], what: str, of: Sequence[Tensor | None] = ()
) -> Layout:
    """Return the layout of the gradients of ``specs``, of which those ``present`` are sent, ``of`` tensors of this
    form.

    Raises:
        SchemaError: a gradient is present where none can be, or the count differs.
    """
    if len(present) != len(specs):
        raise SchemaError(f"expected {len(specs)} gradients of {what}s to be listed, got {len(present)}")
    layout: Layout = []
    for index, (spec, there) in enumerate(zip(specs, present, strict=True)):
        if not there:
            continue
        if spec is None or not spec.requires_grad:
            raise SchemaError(f"{what} {index} has no gradient, but one was received")
        if of and spec.varying and (tensor := of[index]) is not None:
            spec = TensorSpec(*tensor.shape[1:], dtype=spec.dtype, compression=spec.compression)
        layout.append((f"gradient of {what} {index}", spec))
    return layout


def backward_layout(schema: Schema, header: RequestHeader) -> Layout:
    """Return the layout that a backward with ``header`` must have."""
    backward = unpack(header.payload, BackwardHeader)
    gradients = gradient_layout(schema.output_specs, backward.present, "output")
    if backward.ticket and not gradients:
        raise SchemaError("a backward without inputs needs a gradient of an output")
    return gradients if backward.ticket else schema.input_layout + gradients


# --- tensors


def to_wire(tensors: Sequence[Tensor | None], specs: Sequence[TensorSpec | None]) -> list[Tensor]:
    """Return the tensors to send, without those that are ``None``."""
    parts: list[Tensor] = []
    for tensor, spec in zip(tensors, specs, strict=True):
        if tensor is None or spec is None:
            continue
        if spec.compression is None:
            parts.append(tensor)
        elif spec.compression == "int8":
            parts += to_blocks(tensor.detach(), BLOCK)
        else:
            parts.append(_rounded(tensor.detach(), _HALVES[spec.compression]))
    return parts


def from_wire(
    parts: Sequence[Tensor], specs: Sequence[TensorSpec | None], present: Sequence[bool] | None = None
) -> list[Tensor | None]:
    """Return the tensors in the order of ``specs``, up to rounding, ``None`` for those that are not ``present``."""
    tensors: list[Tensor | None] = []
    left = iter(parts)
    for index, spec in enumerate(specs):
        if spec is None or (present is not None and not present[index]):
            tensors.append(None)
        elif spec.compression is None:
            tensors.append(next(left))
        elif spec.compression == "int8":
            tensors.append(from_blocks(next(left), next(left), BLOCK).to(spec.dtype))
        else:
            tensors.append(next(left).to(spec.dtype))
    return tensors


def _rounded(tensor: Tensor, half: torch.dtype) -> Tensor:
    # To the largest number rather than to infinity; NaN and Inf travel, and the other side refuses them.
    limit = torch.finfo(half).max
    rounded = tensor.clamp(-limit, limit).to(half)
    return rounded if all_finite([tensor]) else torch.where(torch.isfinite(tensor), rounded, tensor.to(half))


def count_parts(layout: Layout) -> int:
    """Return the number of tensors that carry those of ``layout``."""
    return sum(2 if spec.compression == "int8" else 1 for _, spec in layout)


def check_parts(parts: Sequence[TensorHeader | Tensor], layout: Layout) -> int:
    """Check a message's tensors, or their headers, against names and specs; returns the number of rows.

    Raises:
        SchemaError: the tensors are not rows of the specs; the message shows the expected and the given.
    """
    rows = parts[0].shape[0] if parts and parts[0].shape else 0
    if len(parts) == len(layout):
        for part, (_, spec) in zip(parts, layout, strict=True):
            shape = part.shape
            if spec.compression is not None or part.dtype is not spec.dtype or not shape or shape[0] != rows:
                break
            if shape[1:] != spec.shape and not spec.fits(shape[1:]):
                break
        else:
            return rows
    if len(parts) != count_parts(layout):
        names = ", ".join(name for name, _ in layout)
        raise SchemaError(f"expected {count_parts(layout)} tensors ({names}), got {len(parts)}")
    left = iter(parts)
    for name, spec in layout:
        part = next(left)
        shape = tuple(part.shape)
        dtype = torch.int8 if spec.compression == "int8" else _HALVES.get(spec.compression or "", spec.dtype)
        if part.dtype is not dtype or shape[:1] != (rows,) or not spec.fits(shape[1:]):
            raise SchemaError(
                f"{name}: expected {spec.describe()} as {dtype_name(dtype)}, for {rows} rows, got {shape} "
                f"{dtype_name(part.dtype)}"
            )
        if spec.compression == "int8":
            scales, count = next(left), (-(-torch.Size(shape).numel() // BLOCK),)
            if scales.dtype is not torch.float32 or tuple(scales.shape) != count:
                raise SchemaError(f"{name}: expected {count} float32 scales, got {tuple(scales.shape)}")
    return rows
