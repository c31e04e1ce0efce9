"""State as JSON, exactly: a program's non-tensor state, written so that it is restored unchanged.

JSON alone forgets: ints as keys, tuples, bytes, infinities, whether a dict was ordered. What it cannot say is written
as an object with one key that starts with ``$``::

    (1, 2)                  {"$tuple": [1, 2]}
    float("inf")            {"$float": "7ff0000000000000"}       its 64 bits, so that every NaN is the same NaN
    2**80                   {"$int": "0x100000000000000000000"}  hexadecimal has no limit on digits
    b"ab"                   {"$bytes": "YWI="}
    {1: "a"}                {"$dict": [[1, "a"]]}                also any dict with a key that starts with "$"
    TensorName("model.w")   {"$tensor": "model.w"}

Types are compared exactly: a subclass would come back as its base, which is a change, so it is refused.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from anabranch.errors import CheckpointError

__all__ = ["TensorName", "decode", "encode", "join", "split"]

# Far below Python's own recursion limit, which the JSON codec would meet with a less helpful error; also ends cycles.
_DEEPEST = 100
_PLAIN_INTS = 2**63

_Path = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class TensorName:
    """Stands in a state for a tensor that is kept elsewhere; see ``split``."""

    name: str


def encode(state: object) -> object:
    """``state`` as values that JSON can say, for ``decode`` to turn back.

    >>> encode({"betas": (0.9, 0.999), "step": 3})
    {'betas': {'$tuple': [0.9, 0.999]}, 'step': 3}

    Args:
        state: None, bool, int, float, str, bytes and ``TensorName``, in lists, tuples, dicts, ``OrderedDict`` and
            ``Counter``; keys are anything of these that can be hashed.

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
        if not isinstance(tensor, Tensor):
            return tensor
        plain = name = ".".join(map(str, path)) or "tensor"
        count = 1
        while name in tensors:  # {"a.b": ..., "a": {"b": ...}}
            count += 1
            name = f"{plain}#{count}"
        tensors[name] = tensor
        return TensorName(name)

    return _replace(structure, name, ()), tensors


def join(state: object, tensors: Mapping[str, Tensor]) -> Any:
    """Put the ``tensors`` that ``split`` took out back into ``state``.

    Raises:
        CheckpointError: ``state`` names a tensor that is not in ``tensors``.
    """

    def tensor(value: object, path: _Path) -> object:
        if not isinstance(value, TensorName):
            return value
        if value.name not in tensors:
            raise CheckpointError(f"the state at {_show(path)} names the tensor {value.name!r}, which does not exist")
        return tensors[value.name]

    return _replace(state, tensor, ())


def _replace(value: object, function: Callable[[object, _Path], object], path: _Path) -> object:
    if len(path) > _DEEPEST:
        raise ValueError(
            f"the state at {_show(path)} is nested deeper than {_DEEPEST}; flatten it, or remove the cycle"
        )
    if type(value) in (list, tuple):
        items = [_replace(item, function, (*path, index)) for index, item in enumerate(_iterable(value))]
        return items if type(value) is list else tuple(items)
    if type(value) in (dict, OrderedDict, Counter):
        assert isinstance(value, dict)
        return type(value)({key: _replace(item, function, (*path, key)) for key, item in value.items()})
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
            "does not support; use None, bool, int, float, str, bytes, or a list, tuple or dict of them, and put "
            "tensors into a group"
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


def _encode_items(value: object, path: _Path) -> list[object]:
    return [_encode(item, (*path, index)) for index, item in enumerate(_iterable(value))]


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
    list: _encode_items,
    tuple: lambda value, path: {"$tuple": _encode_items(value, path)},
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
    "$tuple": lambda value: tuple(decode(item) for item in _iterable(value)),
    "$dict": _decode_pairs,
    "$ordered": lambda value: OrderedDict(_decode_pairs(value)),
    "$counter": lambda value: Counter(_decode_pairs(value)),
}


def _show(path: _Path) -> str:
    return ".".join(map(str, path[:8])) + ("..." if len(path) > 8 else "") or "the top"
