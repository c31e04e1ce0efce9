"""Agreements between callers and servers of experts: schemas, headers, and the tensors of a message.

    expert.info            -> the schema
    expert.forward         inputs -> outputs
    expert.backward        inputs, gradients of outputs -> gradients of inputs; done exactly once
    expert.session_step    inputs -> outputs; the first step opens the session
    expert.session_end     a session's id -> nothing

A schema is nested ``TensorSpec``s of inputs and outputs: mappings with string keys, lists, tuples, named tuples, specs
and ``None``. Packed, it is a tree of the codec of ``tensors/``, in which a class stands by its name: it is looked up
among the modules that this process has imported, and nothing is imported for it. Without such a class a mapping becomes
a dict, and a named tuple a tuple. The two sides compare schemas by hash, so a request carries only
tensors, in the schema's order. A call may have more than one leading dimension: they are sent as rows, and restored in
the outputs.

A missing gradient is left out, and the header lists those present. A forward may carry a ticket; if the answer repeats
it, its activations are kept, and the backward brings it for the inputs. The answer to a backward's retry may be
``GONE``: it was executed, but its gradients are no longer there.

A forward or backward carries the rows of one caller's request, or of several that fit into one batch, which the answer
has in the same order. Its answer may be ``APART``: nothing was executed, because one of them cannot be; each is to be
sent alone, so that only the faulty one fails.

A tensor travels unchanged, rounded to half precision, or as 8-bit integers with a scale for each block. Rounding is
set in the ``TensorSpec``, which both sides know, so a message does not describe it. Ids are integers and cannot be
rounded. A gradient is sent in the format of its tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypedDict, cast

import msgspec
import torch
from torch import Tensor

from anabranch.errors import ProtocolError, SchemaError
from anabranch.tensors import Structure, TensorSpec, from_blocks, in_half, to_blocks
from anabranch.tensors.dtypes import DTYPE_CODES, DTYPES, dtype_name
from anabranch.tensors.tree_codec import Path, decode, encode
from anabranch.transport import RequestHeader, pack, unpack
from anabranch.transport.frame import ReplyHeader

_AUTOCAST = frozenset({torch.float32, torch.float16, torch.bfloat16})
# Below 32,768 values, where torch begins to compute in parallel, and a multiple of a cache line.
_PIECE = 32_704
_LARGEST, _LARGEST_HALF = 1e18, 6e4


class Mismatch(ValueError):
    """A structure is nested otherwise than expected."""


@dataclass(frozen=True)
class Nesting:
    """One container and its children, or a leaf; apart from the leaves, so that Dynamo follows how it is built.

    A structure is read by the expected nesting, keys by name, so all mappings with the same keys are equivalent, and a
    named tuple is equivalent to a tuple of its length. ``None`` is a leaf: a missing tensor keeps its place.

    Attributes:
        made: the container's class; ``None`` for a leaf.
        keys: the names of the children of a mapping or named tuple.
        children: in order.
    """

    made: type | None = None
    keys: tuple[str, ...] = ()
    children: tuple[Nesting, ...] = ()

    @classmethod
    def of(cls, structure: Structure) -> Nesting:
        """Return how ``structure`` nests; a ``SchemaError`` for a container that cannot be sent."""
        if isinstance(structure, Mapping):
            keys = tuple(structure)
            if not all(isinstance(key, str) for key in keys):
                raise SchemaError(f"only mappings with string keys can be sent to an expert, got keys {keys[:4]}")
            return cls(type(structure), keys, tuple([cls.of(structure[key]) for key in keys]))
        if not isinstance(structure, (list, tuple)):
            return cls()
        made, fields = type(structure), getattr(structure, "_fields", ())
        if made not in (list, tuple) and not fields:
            takes = "mappings with string keys, lists, tuples, named tuples and None"
            raise SchemaError(f"experts take and return {takes}, not {made.__name__}; wrap the module in one that does")
        return cls(made, tuple(fields), tuple(map(cls.of, structure)))

    def leaves_of(self, structure: Structure) -> list[object]:
        """Return the leaves of a structure that is nested like this, in this order; raise ``Mismatch`` if it is not."""
        if self.made is None:
            if isinstance(structure, (list, tuple, Mapping)):
                raise Mismatch
            return [structure]
        parts: Sequence[object]
        if issubclass(self.made, (list, tuple)):
            same = isinstance(structure, list if self.made is list else tuple) and len(structure) == len(self.children)
            if not same or (self.keys and getattr(structure, "_fields", self.keys) != self.keys):
                raise Mismatch
            parts = structure
        else:
            if not isinstance(structure, Mapping) or set(structure) != set(self.keys):
                raise Mismatch
            parts = [structure[key] for key in self.keys]
        return [leaf for child, part in zip(self.children, parts, strict=True) for leaf in child.leaves_of(part)]

    def rebuild(self, leaves: Sequence[object]) -> Structure:
        """Return the structure that holds ``leaves``."""
        return self._build(iter(leaves))

    def paths(self) -> list[str]:
        """Return each leaf's path, joined by dots."""
        names = self.keys or tuple(map(str, range(len(self.children))))
        if self.made is None:
            return [""]
        pairs = zip(names, self.children, strict=True)
        return [f"{name}.{path}" if path else name for name, child in pairs for path in child.paths()]

    def _build(self, leaves: Iterator[object]) -> Structure:
        if self.made is None:
            return next(leaves)
        parts = [child._build(leaves) for child in self.children]
        if self.made is list:
            return parts
        if self.made is tuple:
            return tuple(parts)
        if issubclass(self.made, tuple):
            return tuple.__new__(self.made, parts)
        return _mapping(self.made, self.keys, parts)


def _mapping(made: type, keys: Sequence[str], parts: Sequence[object]) -> Structure:
    items = dict(zip(keys, parts, strict=True))
    if made is dict:
        return items
    if dataclasses.is_dataclass(made):  # for example Hugging Face's ModelOutput
        return made(**items)
    return made(list(items.items()) if issubclass(made, OrderedDict) else items)


Layout = list[tuple[str, TensorSpec]]
"""The name and spec of each tensor of a message, before compression."""


class RowInputs(NamedTuple):
    """The inputs of a call, in the schema's order, as rows; and the leading dimensions before flattening."""

    tensors: list[Tensor | None]
    leading: tuple[int, ...]


class ExpertInfo(TypedDict):
    """The schema of an expert, as a caller needs it; see ``ExpertBackend.get_info``."""

    forward_schema: tuple[tuple[Structure, ...], dict[str, Structure]]
    outputs_schema: Structure
    keyword_names: tuple[str, ...]


class Schema:
    """The specs of an expert's inputs and outputs, and what every call needs of them.

    Attributes:
        arguments: the specs of positional arguments, each nested as the argument is.
        keywords: the specs of keyword arguments.
        outputs: the specs of the outputs, nested as they are.
        inputs: the specs of all inputs in order; ``None`` for an argument that is always ``None``.
        output_specs: those of the outputs.
        input_names: a name for each input, for messages: ``args.0``, ``kwargs.mask``; as ``output_names`` and
            ``gradient_names``.
        input_layout: the layout of a forward request, ``output_layout`` that of its answer.
        takes_one: the only input is one tensor, the common case: there is nothing to flatten.
        takes_as_is: each input is sent as one tensor, unchanged; ``gives_as_is``: each output.
        gives_one: the output is one tensor, not a nested structure.
        pads: inputs are padded to the longest of a batch.
        varies: sizes of inputs or outputs vary from call to call.
        floating: all outputs are floating, so that they have a mean.
        joint_rows: the most rows of requests that travel together: few, so that batches of them are nearly full; 0 if
            rows vary in size or are rounded.
        packed: the schema as bytes.
        hash: sixteen bytes that two equal schemas share.

    Raises:
        SchemaError: a leaf is neither a spec nor ``None``, a container cannot be sent, or a message cannot show a key.
    """

    def __init__(
        self,
        arguments: tuple[Structure, ...],
        keywords: Mapping[str, Structure],
        outputs: Structure,
        batch_rows: int = 1,
        *,
        packed: bytes | None = None,
    ) -> None:
        inputs = arguments, dict(keywords)
        if not (shown := outline((*inputs, outputs))).isprintable():  # messages show the keys
            raise SchemaError(f"a key of a mapping holds characters that are not printable: {shown!a}")
        self.arguments, self.keywords, self.outputs = arguments, keywords, outputs
        self.inputs, self.output_specs = specs_of(inputs), specs_of(outputs)
        self.input_nesting, self.output_nesting = Nesting.of(inputs), Nesting.of(outputs)
        self.input_names = [_input_name(path) for path in self.input_nesting.paths()]
        self.output_names = [f"output {index}" for index in range(len(self.output_specs))]
        self.gradient_names = [f"gradient of {name}" for name in self.output_names]
        self.input_layout = _layout(self.input_names, self.inputs)
        self.output_layout = _layout(self.output_names, self.output_specs)
        self.takes_one = not keywords and len(arguments) == 1 and isinstance(arguments[0], TensorSpec)
        self.takes_as_is = all(spec is not None and spec.compression is None for spec in self.inputs)
        self.gives_as_is = all(spec is not None and spec.compression is None for spec in self.output_specs)
        self.gives_one = isinstance(outputs, TensorSpec)
        self.pads = any(spec.pad for _, spec in self.input_layout)
        self.varies = any(spec.varying for _, spec in self.input_layout + self.output_layout)
        self.floating = all(spec.dtype.is_floating_point for _, spec in self.output_layout)
        self.joint_rows = batch_rows // 8 if self.takes_as_is and self.gives_as_is and not self.varies else 0
        try:
            self.packed = packed or pack(encode([*inputs, outputs, batch_rows], _encode_own))
        except ValueError as error:
            raise SchemaError(f"a schema that cannot be sent: {error}") from error
        self.hash = hashlib.sha256(self.packed).digest()[:16]

    @classmethod
    def unpack(cls, payload: bytes) -> Schema:
        """Return the schema with these ``packed`` bytes; a ``ProtocolError`` if they are not a schema.

        Its hash is that of the bytes: a class that is not imported here would not be packed as it came.
        """
        try:
            arguments, keywords, outputs, batch_rows = decode(unpack(payload, object), _OWN)
            if not isinstance(arguments, tuple) or not isinstance(keywords, dict) or not isinstance(batch_rows, int):
                raise ValueError("a schema's arguments are a tuple, its keywords a dict, its batch_rows a number")
            return cls(arguments, keywords, outputs, batch_rows, packed=payload)
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"bytes that are no schema: {error}") from None

    def info(self) -> ExpertInfo:
        """Return the facts about an expert with this schema."""
        keywords = dict(self.keywords)
        return {
            "forward_schema": (self.arguments, keywords),
            "outputs_schema": self.outputs,
            "keyword_names": tuple(sorted(keywords)),
        }

    def nest_outputs(self, outputs: Sequence[Tensor]) -> Structure:
        """Return the outputs nested as by the expert's module; those that are ``None`` are not among ``outputs``."""
        if self.gives_one:
            return outputs[0]
        tensors = iter(outputs)
        return self.output_nesting.rebuild([None if spec is None else next(tensors) for spec in self.output_specs])

    def row_of_zeros(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return one row of zeros for each of ``inputs``, of its sizes."""
        return [
            None if tensor is None or spec is None else spec.zeros(1, spec.sizes_of(tensor.shape))
            for tensor, spec in zip(inputs, self.inputs, strict=True)
        ]

    def length_of(self, inputs: Sequence[Tensor | None]) -> int:
        """Return the positions that ``inputs`` add to a sequence: the first varying size of the first input that has
        one.

        Raises:
            SchemaError: no input has a dimension that varies.
        """
        for tensor, spec in zip(inputs, self.inputs, strict=True):
            if tensor is not None and spec is not None and spec.varying:
                return spec.sizes_of(tensor.shape)[0]
        needs = "an input with a dimension that varies, such as TensorSpec(None, 512)"
        raise SchemaError(f"a session needs {needs}, got {outline((self.arguments, dict(self.keywords)))}")

    def flatten_inputs(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, casting: bool | None = None
    ) -> RowInputs:
        """Return the inputs of a call, in order.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            casting: cast floating inputs to the schema's dtypes; by default those on a device that is under autocast.

        Raises:
            SchemaError: structure, shapes, dtypes or rows differ from the schema's; the message shows both.
        """
        if self.takes_one and not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            one, tensor = cast("TensorSpec", self.arguments[0]), args[0]
            if tensor.dtype is one.dtype and tensor.ndim == 1 + len(one.shape) and tensor.shape[1:] == one.shape:
                return RowInputs([tensor], (tensor.shape[0],))
        try:
            leaves = self.input_nesting.leaves_of((tuple(args), dict(kwargs)))
        except Mismatch:
            takes, came = outline((self.arguments, dict(self.keywords))), outline((tuple(args), dict(kwargs)))
            raise SchemaError(f"expected arguments {takes}, got {came}") from None
        tensors: list[Tensor | None] = []
        leading: dict[str, tuple[int, ...]] = {}
        for leaf, spec, name in zip(leaves, self.inputs, self.input_names, strict=True):
            if spec is None:
                if leaf is not None:
                    raise SchemaError(f"{name}: expected None, got {type(leaf).__name__}")
                tensors.append(None)
                continue
            cast_leaf = _autocast(leaf, spec, casting)
            leading[name] = _leading(cast_leaf, spec, name)
            tensors.append(cast("Tensor", cast_leaf))
        (first, rows), *others = leading.items()
        for name, its in others:
            if its != rows:
                sizes = [str(one[0]) if len(rows) == len(its) == 1 else str(one) for one in (rows, its)]
                raise SchemaError(f"inputs disagree in rows (dim 0): {first} has {sizes[0]}, {name} has {sizes[1]}")
        if len(rows) > 1:
            count = math.prod(rows)
            tensors = [None if one is None else one.reshape(count, *one.shape[len(rows) :]) for one in tensors]
        return RowInputs(tensors, rows)

    def measure(
        self, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None] = ()
    ) -> tuple[tuple[int, ...], int]:
        """Return the sizes that the requests of a batch have in common, and the length of this one if it is padded.

        Args:
            inputs: of the request; all ``None`` if it has none.
            gradients: of the outputs, if it has any.

        Raises:
            SchemaError: tensors that are padded together differ in length.
        """
        names = [*self.input_names, *(self.gradient_names if gradients else ())]
        specs = [*self.inputs, *(self.output_specs if gradients else ())]
        sizes = [
            # For one without a gradient it is unknown whether its output would be as large as others'.
            (name, (-1,) * len(spec.varying) if tensor is None else spec.sizes_of(tensor.shape))
            for tensor, spec, name in zip([*inputs, *gradients], specs, names, strict=True)
            if spec is not None and (tensor is not None or not self.pads)
        ]
        if not self.pads:
            return tuple(size for _, its in sizes for size in its), 0
        lengths = [(name, size) for name, its in sizes for size in its]
        for name, size in lengths:
            if size != lengths[0][1]:
                raise SchemaError(f"{name} has length {size}, {lengths[0][0]} {lengths[0][1]}; they share one mask")
        return (), lengths[0][1] if lengths else 0


def _layout(names: Sequence[str], specs: Sequence[TensorSpec | None]) -> Layout:
    return [(name, spec) for name, spec in zip(names, specs, strict=True) if spec is not None]


def _leading(leaf: object, spec: TensorSpec, name: str) -> tuple[int, ...]:
    """Return the dimensions before those of ``spec``, at least one; raise if the others do not fit."""
    if isinstance(leaf, Tensor):
        count = leaf.ndim - len(spec.shape)
        if count >= 1 and leaf.dtype is spec.dtype and spec.fits(leaf.shape[count:]):
            return tuple(leaf.shape[:count])
    spec.check(leaf, name)
    raise AssertionError("the check rejects what the above does not accept")


def with_leading(outputs: Sequence[Tensor], leading: tuple[int, ...]) -> Sequence[Tensor]:
    """Return the outputs of rows with the leading dimensions that the inputs had."""
    if len(leading) == 1:
        return outputs
    return [output.reshape(*leading, *output.shape[1:]) for output in outputs]


def _autocast(leaf: object, spec: TensorSpec, casting: bool | None) -> object:
    """``leaf`` in the dtype of ``spec`` under autocast, which casts floating tensors but those of double precision."""
    if (
        not isinstance(leaf, Tensor)
        or leaf.dtype is spec.dtype
        or leaf.dtype not in _AUTOCAST
        or not spec.dtype.is_floating_point
        or not (torch.is_autocast_enabled(leaf.device.type) if casting is None else casting)
    ):
        return leaf
    return leaf.to(spec.dtype)


def specs_of(structure: Structure) -> list[TensorSpec | None]:
    """Return the leaves of a structure of specs.

    Raises:
        SchemaError: a leaf is neither a spec nor ``None``.
    """
    nesting = Nesting.of(structure)
    leaves = nesting.leaves_of(structure)
    for name, leaf in zip(nesting.paths(), leaves, strict=True):
        if leaf is not None and not isinstance(leaf, TensorSpec):
            raise SchemaError(f"{name or 'schema'}: a schema holds TensorSpec(...) or None, got {leaf!r}")
    return cast(list[TensorSpec | None], leaves)


def _encode_own(value: object, path: Path) -> object:
    if isinstance(value, TensorSpec):
        shape, dtype = list(value.shape), DTYPE_CODES[value.dtype]
        return {"$spec": [shape, dtype, value.requires_grad, value.compression, value.pad]}
    nesting = Nesting.of(value)
    assert nesting.made is not None
    parts = list(value.values()) if isinstance(value, Mapping) else list(cast("tuple[object, ...]", value))
    tag = "$mapping" if isinstance(value, Mapping) else "$named"
    return {tag: [nesting.made.__module__, nesting.made.__qualname__, list(nesting.keys), parts]}


def _decode_spec(content: list[Any]) -> TensorSpec:
    shape, code, requires_grad, compression, pad = content
    return TensorSpec(*shape, dtype=DTYPES[code], requires_grad=requires_grad, compression=compression, pad=pad)


def _decode_named(content: list[Any]) -> Structure:
    module, name, keys, parts = content
    made = _imported(module, name)
    fields = getattr(made, "_fields", None)
    if isinstance(made, type) and issubclass(made, tuple) and fields == tuple(keys) and len(keys) == len(parts):
        return tuple.__new__(made, parts)
    return tuple(parts)


def _decode_mapping(content: list[Any]) -> Structure:
    module, name, keys, parts = content
    items, made = dict(zip(keys, parts, strict=True)), _imported(module, name)
    if len(items) != len(parts) or not all(isinstance(key, str) for key in items):
        raise ValueError(f"keys {keys[:4]} of a mapping")
    try:
        return _mapping(made, keys, parts) if isinstance(made, type) and issubclass(made, Mapping) else items
    except Exception:  # noqa: BLE001 - from a mapping class that accepts only tensors
        return items


def _imported(module: str, name: str) -> object:
    made: object = sys.modules.get(module)
    for part in name.split("."):
        made = getattr(made, part, None)
    return made


_OWN: dict[str, Callable[[Any], object]] = {"$spec": _decode_spec, "$named": _decode_named, "$mapping": _decode_mapping}


def infer_specs(outputs: Structure, rows: int) -> Structure:
    """Return the specs of a module's outputs for ``rows`` rows; a ``SchemaError`` if they cannot be sent."""
    nesting = Nesting.of(outputs)
    specs: list[object] = []
    for name, leaf in zip(nesting.paths(), nesting.leaves_of(outputs), strict=True):
        if leaf is None:
            specs.append(None)
            continue
        if not isinstance(leaf, Tensor):
            raise SchemaError(f"the module returned {type(leaf).__name__} at {name or 'its output'}, not a tensor")
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            says = "an expert returns as many rows (dim 0) as it receives"
            raise SchemaError(f"the module returned {tuple(leaf.shape)} at {name or 'its output'} for {rows}; {says}")
        specs.append(TensorSpec(*leaf.shape[1:], dtype=leaf.dtype, requires_grad=leaf.requires_grad))
    try:
        return nesting.rebuild(specs)
    except Exception as error:
        why = f"{type(outputs).__name__} cannot be rebuilt from its parts ({type(error).__name__}: {error})"
        raise SchemaError(f"a {why}; wrap the module in one that returns a dict") from error


def first_not_finite(tensors: Sequence[Tensor | None], names: Sequence[str], *, moderate: bool = False) -> str | None:
    """Return the name of the first tensor that holds NaN or Inf, ``None`` if all are finite; computes on this thread
    alone. ``moderate``: or holds a number above 1e18 (float16: 6e4), of which a sum of products overflows.
    """
    for tensor, name in zip(tensors, names, strict=True):
        if tensor is None:
            continue
        values = tensor._values() if tensor.is_sparse else tensor.detach()
        for piece in (values,) if values.numel() <= _PIECE else _pieces(values):
            # A finite sum proves it in one pass; an infinite one proves nothing.
            proved = not moderate and piece.is_floating_point() and math.isfinite(piece.sum().item())
            if not proved and not _within(piece, moderate):
                return name
    return None


def _within(tensor: Tensor, moderate: bool) -> bool:
    """Return True if no number is infinite, NaN or, where all are to be ``moderate``, too large."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    largest = sys.float_info.max if not moderate else _LARGEST_HALF if tensor.dtype is torch.float16 else _LARGEST
    least, most = torch.aminmax(tensor)  # one vectorised pass; NaN is passed on
    return -largest <= least.item() and most.item() <= largest


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Split into parts so small that torch sums each on the calling thread.

    A larger sum would start a team of threads for each connection's thread.
    """
    if torch.get_num_threads() == 1 or not tensor.is_contiguous():
        return [tensor]
    return torch.split(tensor.view(-1), _PIECE)


def _input_name(path: str) -> str:
    head, _, rest = path.partition(".")
    return f"{'args' if head == '0' else 'kwargs'}.{rest}"


def outline(structure: Structure) -> str:
    """Return a structure of tensors or specs as a short string."""
    if isinstance(structure, Tensor):
        return f"{tuple(structure.shape)} {dtype_name(structure.dtype)}"
    if isinstance(structure, TensorSpec):
        return structure.describe()
    if isinstance(structure, Mapping):
        return "{" + ", ".join(f"{key}: {outline(structure[key])}" for key in sorted(structure, key=str)) + "}"
    if isinstance(structure, (list, tuple)):
        return "(" + ", ".join(outline(child) for child in structure) + ")"
    return type(structure).__name__


# --- messages

INFO = "expert.info"
FORWARD = "expert.forward"
BACKWARD = "expert.backward"
SESSION_STEP = "expert.session_step"
SESSION_END = "expert.session_end"

GONE, APART = b"gone", b"apart"
MOST_PARTS = 1024
"""Requests that travel together at most: their tickets fit a header."""

BLOCK = 256
"""Values that share a scale under ``int8``: 1.6 % more bytes, and an outlier spoils only its own block."""

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

Ticket = Annotated[bytes, msgspec.Meta(max_length=32)]


class RequestPart(NamedTuple):
    """One caller's request in a message: its rows, and the name of the activations to keep, or kept; empty for none."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    ticket: Ticket


Parts = Annotated[list[RequestPart], msgspec.Meta(min_length=1, max_length=MOST_PARTS)]


class ForwardHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a forward.

    Attributes:
        parts: the callers' requests, in the order of their rows.
        evaluating: the callers are in eval mode.
        at_once: it has waited with others before, so its batch has no minimum.
    """

    parts: Parts
    evaluating: bool
    at_once: bool = False


class OutputsHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a forward's answer.

    Attributes:
        tickets: those of the forward whose activations are kept.
        changes: how often the expert had changed before this forward.
        changed: the forward itself has changed it.
    """

    tickets: frozenset[bytes]
    changes: int
    changed: bool


class BackwardHeader(msgspec.Struct, array_like=True, frozen=True):
    """The header of a backward.

    Attributes:
        present: which gradients of outputs are sent.
        parts: the callers' requests; without tickets the inputs are sent.
        evaluating: the callers were in eval mode.
        updates: the expert is to update itself.
        at_once: as of a forward.
    """

    present: list[bool]
    parts: Parts
    evaluating: bool
    updates: bool
    at_once: bool = False


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


def backward_layout(schema: Schema, backward: BackwardHeader) -> Layout:
    """Return the layout that a backward with this header must have."""
    gradients = gradient_layout(schema.output_specs, backward.present, "output")
    if backward.parts[0].ticket and not gradients:
        raise SchemaError("a backward without inputs needs a gradient of an output")
    return gradients if backward.parts[0].ticket else schema.input_layout + gradients


def check_rows(parts: Sequence[RequestPart], rows: int, most: int) -> None:
    """Refuse a message of ``rows`` that are not those of its requests; several fit a batch of ``most`` rows."""
    total = 0
    for part in parts:
        total += part.rows
    if total != rows or (len(parts) > 1 and (rows > most or min(parts).rows < 1)):
        raise SchemaError(f"requests of {[part.rows for part in parts[:8]]} rows came in a message of {rows} rows")


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
            parts.append(in_half(tensor.detach(), _HALVES[spec.compression]))
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


def count_parts(layout: Layout) -> int:
    """Return the number of tensors that carry those of ``layout``."""
    return sum(2 if spec.compression == "int8" else 1 for _, spec in layout)


def check_parts(layout: Layout, message: RequestHeader | ReplyHeader, sent: int | None = None) -> int:
    """Check a message's tensors against names and specs; returns the number of rows.

    Args:
        layout: the names and specs.
        message: its header.
        sent: of an answer, the rows of the request.

    Raises:
        SchemaError: the tensors are not rows of the specs; the message shows the expected and the given.
        ProtocolError: an answer has other rows than its request.
    """
    parts = message.tensors
    rows = parts[0].shape[0] if parts and parts[0].shape else 0
    if sent not in (None, rows) and parts:
        raise ProtocolError(f"{sent} rows were sent, but {rows} were received")
    expected = len(layout)  # as count_parts, which every message would call
    for _, spec in layout:
        expected += spec.compression == "int8"
    if len(parts) != expected:
        names = ", ".join(name for name, _ in layout)
        raise SchemaError(f"expected {expected} tensors ({names}), got {len(parts)}")
    left = iter(parts)
    for name, spec in layout:
        part = next(left)
        shape, came, dtype = part.shape, DTYPES[part.code], spec.dtype
        if spec.compression is not None:
            dtype = _HALVES.get(spec.compression, torch.int8)
        if came is not dtype or shape[:1] != (rows,) or (shape[1:] != spec.shape and not spec.fits(shape[1:])):
            raise SchemaError(
                f"{name}: expected {spec.describe()} as {dtype_name(dtype)}, for {rows} rows, got {tuple(shape)} "
                f"{dtype_name(came)}"
            )
        if dtype is torch.int8 is not spec.dtype:
            scales, count = next(left), (-(-torch.Size(shape).numel() // BLOCK),)
            if DTYPES[scales.code] is not torch.float32 or tuple(scales.shape) != count:
                raise SchemaError(f"{name}: expected {count} float32 scales, got {tuple(scales.shape)}")
    return rows
