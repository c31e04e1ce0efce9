"""State as JSON, exactly: a program's non-tensor state, written so that it is restored unchanged.

JSON alone forgets: ints as keys, tuples, bytes, infinities, whether a dict was ordered. What it cannot say is written
as an object with one key that starts with ``$``::

    (1, 2)                  {"$tuple": [1, 2]}
    float("inf")            {"$float": "7ff0000000000000"}       its 64 bits, so that every NaN is the same NaN
    2**80                   {"$int": "0x100000000000000000000"}  hexadecimal has no limit on digits
    b"ab"                   {"$bytes": "YWI="}
    {1: "a"}                {"$dict": [[1, "a"]]}                also any dict with a key that starts with "$"
    numpy.float32(1)        {"$numpy": ["<f4", "AACAPw=="]}      an array has its shape, too
    TensorName("model.w")   {"$tensor": "model.w"}
    Custom("Phase", 2)      {"$custom": ["Phase", 2]}            a value of a class that the reader knows

Types are compared exactly: a subclass would come back as its base, which is a change, so it is refused.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from anabranch.errors import CheckpointError

__all__ = ["Custom", "TensorName", "decode", "encode", "join", "map_leaves", "split"]

# Far below Python's own recursion limit, which the JSON codec would meet with a less helpful error; also ends cycles.
_DEEPEST = 100
_PLAIN_INTS = 2**63
_NUMPY = re.compile(r"[<>|][biufc]\d{1,2}")  # no objects, and nothing that NumPy would parse as a list of fields

_Path = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class TensorName:
    """Stands in a state for a tensor that is kept elsewhere; see ``split``."""

    name: str


@dataclass(frozen=True, slots=True)
class Custom:
    """Stands in a state for a value of a class of the program's own, which no file names a module of."""

    kind: str
    value: object


def encode(state: object) -> object:
    """``state`` as values that JSON can say, for ``decode`` to turn back.

    >>> encode({"betas": (0.9, 0.999), "step": 3})
    {'betas': {'$tuple': [0.9, 0.999]}, 'step': 3}

    Args:
        state: None, bool, int, float, str, bytes, paths, NumPy's numbers and arrays of them, ``TensorName`` and
            ``Custom``, in lists, tuples, sets, deques, dicts, ``OrderedDict`` and ``Counter``; keys are anything of
            these that can be hashed.

    Raises:
        ValueError: a value of another type, text that is not valid Unicode, or nesting deeper than 100; names its path.
    """
    return _encode(state, ())


def decode(encoded: object) -> object:
    """Return the state that ``encode`` was given.

    >>> decode(encode({3: (1, float("inf"))}))
    {3: (1, inf)}

    Raises:
        CheckpointError: ``encoded`` is nothing that ``encode`` makes.
    """
    if isinstance(encoded, list):
        return [decode(value) for value in encoded]
    if not isinstance(encoded, dict):
        return encoded
    for tag, value in encoded.items():
        if tag.startswith("$"):
            return _decode_tagged(tag, value, len(encoded))
    return {key: decode(value) for key, value in encoded.items()}


def split(structure: object) -> tuple[object, dict[str, Tensor]]:
    """Take the tensors out of a nested structure; a ``TensorName`` stays in the place of each.

    >>> import torch
    >>> state, tensors = split({"lr": 0.1, "moments": [torch.ones(2)]})
    >>> state
    {'lr': 0.1, 'moments': [TensorName(name='moments.0')]}
    >>> join(state, tensors)["moments"]
    [tensor([1., 1.])]
    """
    tensors: dict[str, Tensor] = {}

    def name(tensor: object, path: _Path) -> object:
        if isinstance(tensor, Custom):
            return Custom(tensor.kind, map_leaves(name, tensor.value, path))
        if not isinstance(tensor, Tensor):
            return tensor
        plain = unique = ".".join(map(str, path)) or "tensor"
        count = 1
        while unique in tensors:  # {"a.b": ..., "a": {"b": ...}}
            count += 1
            unique = f"{plain}#{count}"
        tensors[unique] = tensor
        return TensorName(unique)

    return map_leaves(name, structure), tensors


def join(state: object, tensors: Mapping[str, Tensor]) -> Any:
    """Put the ``tensors`` that ``split`` took out back into ``state``.

    Raises:
        CheckpointError: ``state`` names a tensor that is not in ``tensors``.
    """

    def tensor(value: object, path: _Path) -> object:
        if isinstance(value, Custom):
            return Custom(value.kind, map_leaves(tensor, value.value, path))
        if not isinstance(value, TensorName):
            return value
        if value.name not in tensors:
            raise CheckpointError(f"the state at {_show(path)} names the tensor {value.name!r}, which does not exist")
        return tensors[value.name]

    return map_leaves(tensor, state)


def map_leaves(function: Callable[[object, _Path], object], value: object, path: _Path = ()) -> object:
    """Return the nested structure ``value`` with ``function(leaf, path)`` in place of each leaf, also in keys."""
    if len(path) > _DEEPEST:
        raise ValueError(
            f"the state at {_show(path)} is nested deeper than {_DEEPEST}; flatten it, or remove the cycle"
        )
    if type(value) in (list, tuple, set, frozenset, deque):
        assert isinstance(value, Iterable)
        items = [map_leaves(function, item, (*path, index)) for index, item in enumerate(value)]
        return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)  # type: ignore[call-arg]
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        return type(value)(
            {map_leaves(function, key, path): map_leaves(function, item, (*path, key)) for key, item in value.items()}
        )
    return function(value, path)


def _encode(value: object, path: _Path) -> object:
    if len(path) > _DEEPEST:
        raise ValueError(
            f"the state at {_show(path)} is nested deeper than {_DEEPEST}; flatten it, or remove the cycle"
        )
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise ValueError(
            f"the state at {_show(path)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
            "does not support; use None, bool, int, float, str, bytes, a path, NumPy's numbers, or a list, tuple, set "
            "or dict of them, and put tensors into a group"
        )
    return encoder(value, path)


def _same(value: object, path: _Path) -> object:
    return value


def _encode_text(value: object, path: _Path) -> object:
    assert isinstance(value, str)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the state at {_show(path)} is a string with half a surrogate pair, {value!r}; encode it to bytes"
        ) from None
    return value


def _encode_int(value: object, path: _Path) -> object:
    assert isinstance(value, int)
    return value if -_PLAIN_INTS <= value < _PLAIN_INTS else {"$int": hex(value)}


def _encode_float(value: object, path: _Path) -> object:
    assert isinstance(value, float)
    return value if isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_bytes(value: object, path: _Path) -> object:
    assert isinstance(value, bytes)
    return {"$bytes": base64.b64encode(value).decode()}


def _encode_tensor_name(value: object, path: _Path) -> object:
    assert isinstance(value, TensorName)
    return {"$tensor": _encode_text(value.name, path)}


def _encode_numpy(value: object, path: _Path) -> object:
    assert isinstance(value, np.generic | np.ndarray)
    if not _NUMPY.fullmatch(value.dtype.str):
        raise ValueError(f"the state at {_show(path)} is an array of {value.dtype}; use one of numbers")
    shape = [list(value.shape)] if isinstance(value, np.ndarray) else []
    return {"$numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode(), *shape]}


def _encode_items(value: object, path: _Path) -> list[object]:
    assert isinstance(value, Iterable)
    return [_encode(item, (*path, index)) for index, item in enumerate(value)]


def _encode_dict(value: object, path: _Path) -> object:
    assert isinstance(value, dict)
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {_encode_text(key, path): _encode(item, (*path, key)) for key, item in value.items()}
    return {"$dict": _encode_pairs(value, path)}


def _encode_pairs(value: object, path: _Path) -> list[object]:
    assert isinstance(value, dict)
    return [[_encode(key, path), _encode(item, (*path, key))] for key, item in value.items()]


_ENCODERS: dict[type, Callable[[object, _Path], object]] = {
    type(None): _same,
    bool: _same,
    int: _encode_int,
    float: _encode_float,
    str: _encode_text,
    bytes: _encode_bytes,
    TensorName: _encode_tensor_name,
    Custom: lambda value, path: {"$custom": _encode_items((value.kind, value.value), path)},  # type: ignore[attr-defined]
    type(Path()): lambda value, path: {"$path": _encode_text(str(value), path)},
    np.ndarray: _encode_numpy,
    **{np.dtype(code).type: _encode_numpy for code in "?bhilqBHILQefdgFDG"},
    list: _encode_items,
    tuple: lambda value, path: {"$tuple": _encode_items(value, path)},
    set: lambda value, path: {"$set": _encode_items(value, path)},
    frozenset: lambda value, path: {"$frozenset": _encode_items(value, path)},
    deque: lambda value, path: {"$deque": [_encode_items(value, path), value.maxlen]},  # type: ignore[attr-defined]
    dict: _encode_dict,
    OrderedDict: lambda value, path: {"$ordered": _encode_pairs(value, path)},
    Counter: lambda value, path: {"$counter": _encode_pairs(value, path)},
}


def _decode_tagged(tag: str, value: object, keys: int) -> object:
    decoder = _DECODERS.get(tag)
    if decoder is None or keys != 1:
        raise CheckpointError(f"the state has an object with the key {tag!r}, which this version does not know")
    try:
        return decoder(value)
    except (TypeError, ValueError, struct.error, binascii.Error) as error:
        raise CheckpointError(f"the state has a {tag!r} that cannot be read: {error}") from error


def _decode_int(value: object) -> object:
    return int(_text(value), 16)


def _decode_float(value: object) -> object:
    return struct.unpack(">d", bytes.fromhex(_text(value)))[0]


def _decode_pairs(value: object) -> dict[object, object]:
    found = {}
    for pair in _iterable(value):
        key, item = _iterable(pair)
        found[decode(key)] = decode(item)
    return found


def _decode_numpy(value: object) -> object:
    dtype, data, *shape = _iterable(value)
    if not _NUMPY.fullmatch(_text(dtype)):
        raise ValueError(f"{dtype!r} is no dtype of numbers")
    flat = np.frombuffer(base64.b64decode(_text(data), validate=True), _text(dtype))
    return flat.reshape(cast("list[int]", shape[0])).copy() if shape else flat.reshape(())[()]


def _iterable(value: object) -> Iterable[object]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return value


_DECODERS: dict[str, Callable[[object], object]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$bytes": lambda value: base64.b64decode(_text(value), validate=True),
    "$tensor": lambda value: TensorName(_text(value)),
    "$path": lambda value: Path(_text(value)),
    "$numpy": _decode_numpy,
    "$custom": lambda value: Custom(*map(decode, _iterable(value))),  # type: ignore[arg-type]
    "$deque": lambda value: deque(*map(decode, _iterable(value))),
    "$tuple": lambda value: tuple(map(decode, _iterable(value))),
    "$set": lambda value: set(map(decode, _iterable(value))),
    "$frozenset": lambda value: frozenset(map(decode, _iterable(value))),
    "$dict": _decode_pairs,
    "$ordered": lambda value: OrderedDict(_decode_pairs(value)),
    "$counter": lambda value: Counter(_decode_pairs(value)),
}


def _show(path: _Path) -> str:
    return ".".join(map(str, path[:8])) + ("..." if len(path) > 8 else "") or "the top"
