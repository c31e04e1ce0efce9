"""Schemas of experts: nested ``TensorSpec``s of inputs and outputs, packed for the wire, and checked on arrival.

Structures are dicts with text keys, lists, tuples, specs and ``None``; packing them needs no pickle and unpacking them
runs no code. Two sides agree on a schema by its hash, so a request carries tensors only.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from anabranch.errors import ProtocolError, SchemaError
from anabranch.tensors import Structure, TensorSpec, flatten, paths, unflatten
from anabranch.tensors.dtypes import DTYPE_CODES, DTYPES, dtype_name
from anabranch.tensors.spec import Compression
from anabranch.transport import pack, unpack

if TYPE_CHECKING:
    from optree import PyTreeSpec

__all__ = ["Layout", "Schema", "all_finite", "check_leaves", "first_not_finite", "infer_specs", "specs_of"]

_DEEPEST = 16
_AUTOCAST = frozenset({torch.float32, torch.float16, torch.bfloat16})
# Below the 32,768 values from which torch computes in parallel, and a multiple of a cache line.
_PIECE = 32_704

Layout = list[tuple[str, TensorSpec]]
"""The name and spec of each tensor of a message, before compression."""


@dataclass(frozen=True)
class Schema:
    """The specs of an expert's inputs and outputs; derived values are cached, because every call needs them.

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
        return [_input_name(path) for path in paths((self.arguments, dict(self.keywords)))]

    @cached_property
    def input_layout(self) -> Layout:
        """The layout of a forward request."""
        return [(name, spec) for name, spec in zip(self.input_names, self.inputs, strict=True) if spec is not None]

    @cached_property
    def output_layout(self) -> Layout:
        """The layout of a forward's answer."""
        return [(f"output {index}", spec) for index, spec in enumerate(self.output_specs) if spec is not None]

    @cached_property
    def takes_one(self) -> bool:
        """True if the only input is one tensor, as is common: then there is nothing to flatten."""
        return not self.keywords and len(self.arguments) == 1 and isinstance(self.arguments[0], TensorSpec)

    @cached_property
    def takes_as_is(self) -> bool:
        """True if each input travels as one tensor, and as it is."""
        return _travels_as_is(self.inputs)

    @cached_property
    def gives_as_is(self) -> bool:
        """True if each output travels as one tensor, and as it is."""
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
    def input_structure(self) -> PyTreeSpec:
        """The nesting of the inputs."""
        return flatten((self.arguments, dict(self.keywords)))[1]

    def output_form(self) -> Structure:
        """Return the outputs' nesting, with each tensor's index in its place."""
        numbers = itertools.count()
        return unflatten(self.output_structure, [None if spec is None else next(numbers) for spec in self.output_specs])

    @cached_property
    def output_structure(self) -> PyTreeSpec:
        """The nesting of the outputs."""
        return flatten(self.outputs)[1]

    @cached_property
    def packed(self) -> bytes:
        """The schema as bytes; raises ``SchemaError`` if it cannot be packed."""
        return pack([_pack(self.arguments, 0), _pack(dict(self.keywords), 0), _pack(self.outputs, 0)])

    @cached_property
    def hash(self) -> bytes:
        """Sixteen bytes that two equal schemas share."""
        return hashlib.sha256(self.packed).digest()[:16]

    @classmethod
    def unpack(cls, payload: bytes) -> Schema:
        """Return the schema with these ``packed`` bytes; a ``ProtocolError`` if they are not a schema."""
        nodes = unpack(payload, list[object])
        if len(nodes) != 3:
            raise ProtocolError("a schema has three parts: arguments, keywords, outputs")
        arguments, keywords, outputs = (_unpack(node, 0) for node in nodes)
        if not isinstance(arguments, tuple) or not isinstance(keywords, dict):
            raise ProtocolError("a schema's arguments are a tuple and its keywords a dict")
        return cls(arguments, keywords, outputs)

    def flatten_inputs(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, casting: bool | None = None
    ) -> list[Tensor | None]:
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
            given = cast("Tensor", _autocast(args[0], spec, casting))
            # Raises the error with its message.
            spec.check(given, self.input_names[0])
            return [given]
        leaves, came = flatten((tuple(args), dict(kwargs)))
        if came != self.input_structure:
            raise SchemaError(
                f"expected arguments {_describe(self.arguments, self.keywords)}, "
                f"got {_outline((tuple(args), dict(kwargs)))}"
            )
        leaves = [_autocast(leaf, spec, casting) for leaf, spec in zip(leaves, self.inputs, strict=True)]
        return check_leaves(leaves, self.inputs, self.input_names)


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
    leaves, _ = flatten(structure)
    for name, leaf in zip(paths(structure), leaves, strict=True):
        if leaf is not None and not isinstance(leaf, TensorSpec):
            raise SchemaError(f"{name or 'schema'}: a schema holds TensorSpec(...) or None, got {leaf!r}")
    return cast(list[TensorSpec | None], leaves)


def check_leaves(
    leaves: Sequence[object], specs: Sequence[TensorSpec | None], names: Sequence[str]
) -> list[Tensor | None]:
    """``leaves`` if each has the form of its spec, with the same number of rows; a ``SchemaError`` otherwise."""
    rows: int | None = None
    first = ""
    for leaf, spec, name in zip(leaves, specs, names, strict=True):
        if spec is None:
            if leaf is not None:
                raise SchemaError(f"{name}: expected None, got {type(leaf).__name__}")
            continue
        spec.check(leaf, name)
        assert isinstance(leaf, Tensor)
        if rows is None:
            rows, first = leaf.shape[0], name
        elif leaf.shape[0] != rows:
            raise SchemaError(f"inputs disagree in rows (dim 0): {first} has {rows}, {name} has {leaf.shape[0]}")
    return list(leaves)  # type: ignore[arg-type]


def _pack(node: object, depth: int) -> list[object]:
    if depth > _DEEPEST:
        raise SchemaError(f"a schema nests at most {_DEEPEST} deep")
    if node is None:
        return ["none"]
    if isinstance(node, TensorSpec):
        return ["tensor", list(node.shape), DTYPE_CODES[node.dtype], node.requires_grad, node.compression]
    if type(node) is tuple:
        return ["tuple", *(_pack(child, depth + 1) for child in cast(tuple[object, ...], node))]
    if type(node) is list:
        return ["list", *(_pack(child, depth + 1) for child in cast(list[object], node))]
    if type(node) is dict:
        items = cast(dict[object, object], node)
        if all(isinstance(key, str) for key in items):
            return ["dict", {key: _pack(items[key], depth + 1) for key in sorted(cast(dict[str, object], items))}]
    raise SchemaError(
        f"only dicts with text keys, lists, tuples and None cross to an expert, not {type(node).__name__}; "
        "wrap the module in one that takes and returns those"
    )


def _unpack(node: object, depth: int) -> Structure:
    if not isinstance(node, list) or not node or depth > _DEEPEST:
        raise ProtocolError("a schema's node is a short list")
    kind, rest = node[0], node[1:]
    if kind == "none" and not rest:
        return None
    if kind == "tensor" and len(rest) == 4:
        shape, code, requires_grad, compression = rest
        if not isinstance(shape, list) or code not in DTYPES:
            raise ProtocolError("a schema's tensor has a shape and a dtype")
        try:
            return TensorSpec(
                *shape,
                dtype=DTYPES[code],
                requires_grad=bool(requires_grad),
                compression=cast(Compression | None, compression),
            )
        except ValueError as error:
            raise ProtocolError(f"a schema's tensor is none: {error}") from None
    if kind == "tuple":
        return tuple(_unpack(child, depth + 1) for child in rest)
    if kind == "list":
        return [_unpack(child, depth + 1) for child in rest]
    if kind == "dict" and len(rest) == 1 and isinstance(rest[0], dict):
        return {str(key): _unpack(child, depth + 1) for key, child in rest[0].items()}
    raise ProtocolError(f"a schema has no node {kind!r}")


def infer_specs(outputs: Structure, rows: int) -> Structure:
    """Return the specs of a module's outputs for ``rows`` rows; a ``SchemaError`` if they cannot be sent."""
    leaves, treedef = flatten(outputs)
    specs: list[object] = []
    for name, leaf in zip(paths(outputs), leaves, strict=True):
        if leaf is None:
            specs.append(None)
            continue
        if not isinstance(leaf, Tensor):
            raise SchemaError(f"the module returned {type(leaf).__name__} at {name or 'its output'}, not a tensor")
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise SchemaError(
                f"the module returned {tuple(leaf.shape)} at {name or 'its output'} for {rows} rows; an expert returns "
                "as many rows (dim 0) as it takes"
            )
        specs.append(TensorSpec(*leaf.shape[1:], dtype=leaf.dtype, requires_grad=leaf.requires_grad))
    inferred = unflatten(treedef, specs)
    _pack(inferred, 0)
    return inferred


def all_finite(tensor: Tensor) -> bool:
    """Return True if a tensor holds neither NaN nor Inf; always true for integers."""
    floating = tensor.is_floating_point()
    if not (floating or tensor.is_complex()) or tensor.numel() == 0:
        return True
    # A finite sum proves it in one pass; an infinite one proves nothing.
    if floating and math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())


def first_not_finite(tensors: Sequence[Tensor | None], names: Sequence[str]) -> str | None:
    """Return the name of the first tensor that holds NaN or Inf, ``None`` if all are finite; computes on this thread
    alone.
    """
    for tensor, name in zip(tensors, names, strict=True):
        if tensor is None or (tensor.numel() <= _PIECE and all_finite(tensor)):
            continue
        if not all(map(all_finite, _pieces(tensor))):
            return name
    return None


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Split into parts so small that torch sums each on the calling thread.

    A larger sum would start a team of threads, for every connection's thread that ever asked.
    """
    if tensor.numel() <= _PIECE or torch.get_num_threads() == 1 or not tensor.is_contiguous():
        return [tensor]
    return torch.split(tensor.view(-1), _PIECE)


def _input_name(path: str) -> str:
    head, _, rest = path.partition(".")
    return f"{'args' if head == '0' else 'kwargs'}.{rest}"


def _describe(arguments: Structure, keywords: Mapping[str, Structure]) -> str:
    return _outline((arguments, dict(keywords)))


def _outline(structure: Structure) -> str:
    if isinstance(structure, Tensor):
        return f"{tuple(structure.shape)} {dtype_name(structure.dtype)}"
    if isinstance(structure, TensorSpec):
        return f"(rows, {', '.join(map(str, structure.shape))}) {dtype_name(structure.dtype)}"
    if isinstance(structure, dict):
        return "{" + ", ".join(f"{key}: {_outline(structure[key])}" for key in sorted(structure, key=str)) + "}"
    if isinstance(structure, (list, tuple)):
        return "(" + ", ".join(_outline(child) for child in structure) + ")"
    return type(structure).__name__
