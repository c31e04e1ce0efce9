"""Schemas of experts: nested ``TensorSpec``s of inputs and outputs, packed for the wire, and checked on arrival.

Structures are mappings with string keys, lists, tuples, named tuples, specs and ``None`` (``nesting.py``); packing them
needs no pickle. The two sides compare schemas by hash, so a request carries only tensors.

A call may have more than one leading dimension: they are sent as rows, and restored in the outputs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from anabranch.errors import ProtocolError, SchemaError
from anabranch.experts.nesting import LEAF, Kind, Mismatch, Nesting, find_class, flatten, nesting_of
from anabranch.tensors import Structure, TensorSpec
from anabranch.tensors.dtypes import DTYPE_CODES, DTYPES, dtype_name
from anabranch.tensors.tree_codec import Path, decode, encode
from anabranch.transport import pack, unpack

__all__ = [
    "Layout",
    "RowInputs",
    "Schema",
    "all_finite",
    "first_not_finite",
    "infer_specs",
    "outline",
    "specs_of",
    "with_leading",
]

_AUTOCAST = frozenset({torch.float32, torch.float16, torch.bfloat16})
# Below 32,768 values, where torch begins to compute in parallel, and a multiple of a cache line.
_PIECE = 32_704
_LARGEST, _LARGEST_HALF = 1e18, 6e4

Layout = list[tuple[str, TensorSpec]]
"""The name and spec of each tensor of a message, before compression."""


class RowInputs(NamedTuple):
    """The inputs of a call, in the schema's order, as rows; and the leading dimensions before flattening."""

    tensors: list[Tensor | None]
    leading: tuple[int, ...]


@dataclass(frozen=True)
class Schema:
    """The specs of an expert's inputs and outputs; derived values are cached, as every call needs them.

    Attributes:
        arguments: the specs of positional arguments, each nested as the argument is.
        keywords: the specs of keyword arguments.
        outputs: the specs of the outputs, nested as they are.
    """

    arguments: tuple[Structure, ...]
    keywords: Mapping[str, Structure]
    outputs: Structure

    @cached_property
    def inputs(self) -> list[TensorSpec | None]:
        """The specs of all inputs in order; ``None`` for an argument that is always ``None``."""
        return specs_of((self.arguments, dict(self.keywords)))

    @cached_property
    def output_specs(self) -> list[TensorSpec | None]:
        """The specs of all outputs in order."""
        return specs_of(self.outputs)

    @cached_property
    def input_names(self) -> list[str]:
        """A name for each input, for messages: ``args.0``, ``kwargs.mask``."""
        return [_input_name(path) for path in self.input_nesting.paths()]

    @cached_property
    def input_layout(self) -> Layout:
        """The layout of a forward request."""
        return [(name, spec) for name, spec in zip(self.input_names, self.inputs, strict=True) if spec is not None]

    @cached_property
    def output_layout(self) -> Layout:
        """The layout of a forward's answer."""
        return [(f"output {index}", spec) for index, spec in enumerate(self.output_specs) if spec is not None]

    @cached_property
    def input_parts(self) -> int:
        """The number of tensors that carry the inputs."""
        return sum(2 if spec.compression == "int8" else 1 for _, spec in self.input_layout)

    @cached_property
    def gradient_names(self) -> list[str]:
        """A name for the gradient of each output, for messages."""
        return [f"gradient of output {index}" for index in range(len(self.output_specs))]

    @cached_property
    def takes_one(self) -> bool:
        """True if the only input is one tensor, the common case: there is nothing to flatten."""
        return not self.keywords and len(self.arguments) == 1 and isinstance(self.arguments[0], TensorSpec)

    @cached_property
    def takes_as_is(self) -> bool:
        """True if each input is sent as one tensor, unchanged."""
        return _travels_as_is(self.inputs)

    @cached_property
    def gives_as_is(self) -> bool:
        """True if each output is sent as one tensor, unchanged."""
        return _travels_as_is(self.output_specs)

    @cached_property
    def gives_gradients(self) -> bool:
        """True if every output may have a gradient."""
        return all(spec is None or spec.requires_grad for spec in self.output_specs)

    @cached_property
    def gives_one(self) -> bool:
        """True if the output is one tensor, not a nested structure."""
        return isinstance(self.outputs, TensorSpec)

    @cached_property
    def input_nesting(self) -> Nesting:
        """The nesting of the inputs."""
        return nesting_of((self.arguments, dict(self.keywords)))

    @cached_property
    def output_nesting(self) -> Nesting:
        """The nesting of the outputs."""
        return nesting_of(self.outputs)

    def nest_outputs(self, outputs: Sequence[Tensor]) -> Structure:
        """Return the outputs nested as by the expert's module; those that are ``None`` are not among ``outputs``."""
        if self.gives_one:
            return outputs[0]
        given = iter(outputs)
        return self.output_nesting.rebuild([None if spec is None else next(given) for spec in self.output_specs])

    def length_of(self, inputs: Sequence[Tensor | None]) -> int:
        """Return the positions that ``inputs`` add to a sequence: the first varying size of the first input that has
        one.

        Raises:
            SchemaError: no input has a dimension that varies.
        """
        for tensor, spec in zip(inputs, self.inputs, strict=True):
            if tensor is not None and spec is not None and spec.varying:
                return spec.sizes_of(tensor.shape)[0]
        raise SchemaError(
            f"a session needs an input with a dimension that varies, such as TensorSpec(None, 512), for its positions; "
            f"the expert takes {_describe(self.arguments, self.keywords)}"
        )

    @cached_property
    def pads(self) -> bool:
        """True if inputs are padded to the longest of a batch."""
        return any(spec is not None and spec.pad for spec in self.inputs)

    @cached_property
    def varies(self) -> bool:
        """True if sizes of inputs or outputs vary from call to call."""
        return any(spec is not None and spec.varying for spec in (*self.inputs, *self.output_specs))

    @cached_property
    def packed(self) -> bytes:
        """The schema as bytes; raises ``SchemaError`` if it cannot be packed."""
        return _pack([self.arguments, dict(self.keywords), self.outputs])

    @cached_property
    def hash(self) -> bytes:
        """Sixteen bytes that two equal schemas share."""
        return hashlib.sha256(self.packed).digest()[:16]

    @classmethod
    def unpack(cls, payload: bytes) -> Schema:
        """Return the schema with these ``packed`` bytes; a ``ProtocolError`` if they are not a schema."""
        try:
            arguments, keywords, outputs = decode(unpack(payload, object), _OWN)
            schema = cls(arguments, keywords, outputs)
            _ = schema.inputs, schema.output_specs
            if not isinstance(arguments, tuple) or not isinstance(keywords, dict):
                raise ValueError("a schema's arguments are a tuple and its keywords a dict")
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"bytes that are no schema: {error}") from None
        return schema

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
            spec = cast("TensorSpec", self.arguments[0])
            rows = args[0]
            if rows.dtype is spec.dtype and rows.ndim == 1 + len(spec.shape) and rows.shape[1:] == spec.shape:
                return RowInputs([rows], (rows.shape[0],))
            rows = cast("Tensor", _autocast(rows, spec, casting))
            leading = _leading(rows, spec, self.input_names[0])
            return RowInputs([rows if len(leading) == 1 else _as_rows(rows, leading)], leading)
        try:
            leaves = self.input_nesting.leaves_of((tuple(args), dict(kwargs)))
        except Mismatch:
            raise SchemaError(
                f"expected arguments {_describe(self.arguments, self.keywords)}, "
                f"got {outline((tuple(args), dict(kwargs)))}"
            ) from None
        return self._checked([_autocast(leaf, spec, casting) for leaf, spec in zip(leaves, self.inputs, strict=True)])

    def _checked(self, leaves: Sequence[object]) -> RowInputs:
        """Return ``leaves`` if each has the form of its spec, and all the same leading dimensions."""
        found: tuple[int, ...] | None = None
        first = ""
        for leaf, spec, name in zip(leaves, self.inputs, self.input_names, strict=True):
            if spec is None:
                if leaf is not None:
                    raise SchemaError(f"{name}: expected None, got {type(leaf).__name__}")
                continue
            leading = _leading(leaf, spec, name)
            if found is None:
                found, first = leading, name
            elif leading != found:
                said = [str(one[0]) if len(found) == len(leading) == 1 else str(one) for one in (found, leading)]
                raise SchemaError(f"inputs disagree in rows (dim 0): {first} has {said[0]}, {name} has {said[1]}")
        assert found is not None, "a schema has an input"
        tensors = cast("list[Tensor | None]", list(leaves))
        if len(found) > 1:
            tensors = [None if tensor is None else _as_rows(tensor, found) for tensor in tensors]
        return RowInputs(tensors, found)

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
        if not self.varies:
            return (), 0
        sizes: list[int] = []
        length, first = -1, ""
        names = [*self.input_names, *(f"gradient of output {index}" for index in range(len(gradients)))]
        specs = [*self.inputs, *(self.output_specs if gradients else ())]
        for tensor, spec, name in zip([*inputs, *gradients], specs, names, strict=True):
            if spec is None or not spec.varying:
                continue
            # For one without a gradient it is unknown whether its output would be as large as others'.
            mine = [-1] * len(spec.varying) if tensor is None else spec.sizes_of(tensor.shape)
            if not self.pads:
                sizes += mine
            elif tensor is not None:
                if length < 0:
                    length, first = mine[0], name
                if any(size != length for size in mine):
                    raise SchemaError(f"{name} has length {max(mine)}, {first} {length}; they share one mask")
        return tuple(sizes), max(length, 0)


def _leading(leaf: object, spec: TensorSpec, name: str) -> tuple[int, ...]:
    """Return the dimensions before those of ``spec``, at least one; raise if the others do not fit."""
    if isinstance(leaf, Tensor):
        count = leaf.ndim - len(spec.shape)
        if count >= 1 and leaf.dtype is spec.dtype and spec.fits(leaf.shape[count:]):
            return tuple(leaf.shape[:count])
    spec.check(leaf, name)
    raise AssertionError("the check rejects what the above does not accept")


def _as_rows(tensor: Tensor, leading: tuple[int, ...]) -> Tensor:
    return tensor.reshape(math.prod(leading), *tensor.shape[len(leading) :])


def with_leading(outputs: Sequence[Tensor], leading: tuple[int, ...]) -> Sequence[Tensor]:
    """Return the outputs of rows with the leading dimensions that the inputs had."""
    if len(leading) == 1:
        return outputs
    return [output.reshape(*leading, *output.shape[1:]) for output in outputs]


def _autocast(leaf: object, spec: TensorSpec | None, casting: bool | None) -> object:
    """``leaf`` in the dtype of ``spec`` under autocast, which casts floating tensors but those of double precision."""
    if (
        spec is None
        or not isinstance(leaf, Tensor)
        or leaf.dtype is spec.dtype
        or leaf.dtype not in _AUTOCAST
        or not spec.dtype.is_floating_point
        or not (torch.is_autocast_enabled(leaf.device.type) if casting is None else casting)
    ):
        return leaf
    return leaf.to(spec.dtype)


def _travels_as_is(specs: Sequence[TensorSpec | None]) -> bool:
    return all(spec is not None and spec.compression is None for spec in specs)


def specs_of(structure: Structure) -> list[TensorSpec | None]:
    """Return the leaves of a structure of specs.

    Raises:
        SchemaError: a leaf is neither a spec nor ``None``.
    """
    leaves, nesting = flatten(structure)
    for name, leaf in zip(nesting.paths(), leaves, strict=True):
        if leaf is not None and not isinstance(leaf, TensorSpec):
            raise SchemaError(f"{name or 'schema'}: a schema holds TensorSpec(...) or None, got {leaf!r}")
    return cast(list[TensorSpec | None], leaves)


def _pack(structure: Structure) -> bytes:
    specs_of(structure)  # raises for what is not sent
    try:
        return pack(encode(structure, _encode_own))
    except ValueError as error:
        raise SchemaError(f"a schema that cannot be sent: {error}") from error


def _encode_own(value: object, path: Path) -> object:
    if isinstance(value, TensorSpec):
        shape, dtype = list(value.shape), DTYPE_CODES[value.dtype]
        return {"$spec": [shape, dtype, value.requires_grad, value.compression, value.pad]}
    nesting = nesting_of(value)
    parts = list(value.values()) if isinstance(value, Mapping) else list(cast("tuple[object, ...]", value))
    return {f"${nesting.kind}": [nesting.made.__module__, nesting.made.__qualname__, list(nesting.keys), parts]}


def _decode_spec(content: list[Any]) -> TensorSpec:
    shape, code, requires_grad, compression, pad = content
    return TensorSpec(*shape, dtype=DTYPES[code], requires_grad=requires_grad, compression=compression, pad=pad)


def _decode_container(kind: Kind, content: list[Any]) -> Structure:
    module, name, keys, parts = content
    if len(keys) != len(set(keys)) or len(keys) != len(parts) or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{len(keys)} keys name {len(parts)} parts of a schema")
    nesting = Nesting(kind, find_class(kind, module, name, tuple(keys)), tuple(keys), (LEAF,) * len(parts))
    try:
        return nesting.rebuild(parts)
    except Exception:  # noqa: BLE001 - from a mapping class that accepts only tensors
        return nesting.rebuild(parts, plain=True)


_OWN: dict[str, Callable[[Any], object]] = {
    "$spec": _decode_spec,
    "$named": partial(_decode_container, "named"),
    "$mapping": partial(_decode_container, "mapping"),
}


def infer_specs(outputs: Structure, rows: int) -> Structure:
    """Return the specs of a module's outputs for ``rows`` rows; a ``SchemaError`` if they cannot be sent."""
    leaves, nesting = flatten(outputs)
    specs: list[object] = []
    for name, leaf in zip(nesting.paths(), leaves, strict=True):
        if leaf is None:
            specs.append(None)
            continue
        if not isinstance(leaf, Tensor):
            raise SchemaError(f"the module returned {type(leaf).__name__} at {name or 'its output'}, not a tensor")
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise SchemaError(
                f"the module returned {tuple(leaf.shape)} at {name or 'its output'} for {rows} rows; an expert returns "
                "as many rows (dim 0) as it receives"
            )
        specs.append(TensorSpec(*leaf.shape[1:], dtype=leaf.dtype, requires_grad=leaf.requires_grad))
    try:
        inferred = nesting.rebuild(specs)
    except Exception as error:
        raise SchemaError(
            f"a {type(outputs).__name__} cannot be rebuilt from its parts ({type(error).__name__}: {error}); wrap the "
            "module in one that returns a dict"
        ) from error
    _pack(inferred)
    return inferred


def all_finite(tensor: Tensor) -> bool:
    """Return True if a tensor holds neither NaN nor Inf; always true for integers."""
    return _within(tensor, float("inf"))


def first_not_finite(tensors: Sequence[Tensor | None], names: Sequence[str], *, moderate: bool = False) -> str | None:
    """Return the name of the first tensor that holds NaN or Inf, ``None`` if all are finite; computes on this thread
    alone. ``moderate``: or holds a number above 1e18 (float16: 6e4), of which a sum of products overflows.
    """
    for tensor, name in zip(tensors, names, strict=True):
        if tensor is not None:
            largest = float("inf") if not moderate else _LARGEST_HALF if tensor.dtype is torch.float16 else _LARGEST
            if tensor.numel() <= _PIECE:
                if not _within(tensor, largest):
                    return name
            elif not all(_within(piece, largest) for piece in _pieces(tensor)):
                return name
    return None


def _within(tensor: Tensor, largest: float) -> bool:
    """Return True if no number is infinite, NaN or above ``largest``."""
    floating = tensor.is_floating_point()
    if not (floating or tensor.is_complex()) or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    if not floating or largest == float("inf"):
        # A finite sum proves it in one pass; an infinite one proves nothing.
        return (floating and math.isfinite(tensor.sum().item())) or bool(torch.isfinite(tensor).all())
    if tensor.dtype in (torch.float32, torch.float64):
        # As fast as a sum, and no square is larger than the sum of all.
        flat = tensor.reshape(-1)
        if torch.dot(flat, flat).item() <= largest**2:
            return True
    return bool(tensor.abs().max() <= largest)


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


def _describe(arguments: Structure, keywords: Mapping[str, Structure]) -> str:
    return outline((arguments, dict(keywords)))


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
