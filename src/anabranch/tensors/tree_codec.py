"""The tree codec: containers, plain values and tensors as values that JSON or MessagePack can say, and exactly back.

JSON alone forgets: ints as keys, tuples, bytes, infinities, whether a dict was ordered. What it cannot say is written
as an object with one key that starts with ``$``::

    (1, 2)                  {"$tuple": [1, 2]}
    float("inf")            {"$float": "7ff0000000000000"}       its 64 bits, so that every NaN is the same NaN
    2**80                   {"$int": "0x100000000000000000000"}  hexadecimal has no limit on digits
    b"ab"                   {"$bytes": "YWI="}
    {1: "a"}                {"$dict": [[1, "a"]]}                also any dict with a key that starts with "$"
    numpy.float32(1)        {"$numpy": ["<f4", "AACAPw=="]}      an array has its shape, too
    torch.ones(2)           {"$tensor": 0}                       the first of the tensors, which travel beside it

Types are compared exactly: a subclass would come back as its base, which is a change, so it is refused. Users add tags
for values of their own; nothing that is decoded is evaluated, and no class is imported.
"""

from __future__ import annotations

import base64
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
from torch import Tensor

# Far below Python's own recursion limit, which the JSON codec would meet with a less helpful error; also ends cycles.
_DEEPEST = 100
_PLAIN_INTS = 2**63
_NUMPY = re.compile(r"[<>|][biufc]\d{1,2}")  # no objects, and nothing that NumPy would parse as a list of fields

# The keys and indices that lead to a value in a tree.
Path = tuple[object, ...]
# Returns what stands for a value of a class that the codec does not know: another tree, or {"$tag": tree}; else raises
# ValueError.
Own = Callable[[Any, Path], object]


def refuse(value: object, path: Path) -> object:
    """Raise ``ValueError`` for a value of a class that is not known, which names its path."""
    kind = type(value)
    raise ValueError(
        f"the state at {show(path)} is a {kind.__module__}.{kind.__qualname__}; only plain values can be written, in "
        "lists, tuples, sets and dicts"
    )


def encode(tree: object, own: Own = refuse, *, tensors: list[Tensor] | None = None) -> object:
    """``tree`` as plain values, for ``decode`` to turn back.

    >>> encode({"betas": (0.9, 0.999), "step": 3})
    {'betas': {'$tuple': [0.9, 0.999]}, 'step': 3}

    Args:
        tree: None, bool, int, float, str, bytes, NumPy's numbers and arrays of them, in lists, tuples, sets, deques,
            dicts, ``OrderedDict`` and ``Counter``; keys are anything of these that can be hashed.
        own: stands for values of other classes.
        tensors: gets the tensors in ``tree``, which are written by their number; left out, ``own`` gets them.

    Raises:
        ValueError: a value of another type, or nesting deeper than 100; names its path.
    """
    return _fold(tree, (), partial(_encode_leaf, own, tensors), _described)


def _encode_leaf(own: Own, tensors: list[Tensor] | None, value: Any, path: Path) -> object:
    if isinstance(value, Tensor) and tensors is not None:
        tensors.append(value)
        return {"$tensor": len(tensors) - 1}
    if (plain := _PLAIN.get(type(value))) is not None:
        return plain(value, path)
    stands, leaf = own(value, path), partial(_encode_leaf, own, tensors)
    if not isinstance(stands, dict):
        return _fold(stands, path, leaf, _described)
    ((tag, content),) = stands.items()
    return {tag: _fold(content, path, leaf, _described)}


def decode(
    encoded: object, own: Mapping[str, Callable[[Any], object]] | None = None, *, tensors: Sequence[Tensor] = ()
) -> Any:
    """Return the tree that ``encode`` was given; ``own`` makes the values of the tags that its ``own`` added.

    >>> decode(encode({3: (1, float("inf"))}))
    {3: (1, inf)}

    Raises:
        ValueError: ``encoded`` is nothing that ``encode`` makes.
    """
    return _decode(encoded, {**_MAKERS, "$tensor": tensors.__getitem__, **(own or {})})


def _decode(value: object, makers: Mapping[str, Callable[[Any], object]]) -> Any:
    # Not a function inside the other: its cycle of references would keep the tensors alive.
    if isinstance(value, list):
        return [_decode(item, makers) for item in value]
    if not isinstance(value, dict):
        return value
    if not all(isinstance(key, str) for key in value):
        raise ValueError("there is an object with a key that is no string")
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, makers) for key, item in value.items()}
    if tag not in makers or len(value) != 1:
        raise ValueError(f"there is an object with the key {tag!r}, which this version does not know")
    content = _decode(value[tag], makers)
    try:
        if tag in _TAGS and not isinstance(content, list):
            raise TypeError(f"expected a list, got {type(content).__name__}")
        return makers[tag](content)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
        raise ValueError(f"there is a {tag!r} that cannot be read: {error}") from error


def map_leaves(function: Callable[[object, Path], object], value: object, path: Path = ()) -> object:
    """Return the tree ``value`` with ``function(leaf, path)`` in place of each leaf, also in keys."""
    return _fold(value, path, function, lambda kind, parts: _CONTAINERS[kind][1](parts))


def show(path: Path) -> str:
    """Return a path for messages."""
    return ".".join(map(str, path[:8])) + ("..." if len(path) > 8 else "") or "the top"


def _fold(
    value: Any, path: Path, leaf: Callable[[Any, Path], object], node: Callable[[type, list[Any]], object]
) -> object:
    """Return ``node`` of the contents of each container, from the inside out, with ``leaf`` of the leaves.

    The contents of a dict are pairs, those of a deque its items and its longest length.
    """
    if len(path) > _DEEPEST:
        raise ValueError(f"the state at {show(path)} is nested deeper than {_DEEPEST}; flatten it, or remove the cycle")
    kind = type(value)
    if kind not in _CONTAINERS:
        return leaf(value, path)
    if issubclass(kind, dict):
        pairs = value.items()
        return node(
            kind, [[_fold(key, path, leaf, node), _fold(item, (*path, key), leaf, node)] for key, item in pairs]
        )
    items = [_fold(item, (*path, index), leaf, node) for index, item in enumerate(value)]
    return node(kind, [items, value.maxlen] if kind is deque else items)


_CONTAINERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    list: ("$list", list),
    tuple: ("$tuple", tuple),
    set: ("$set", set),
    frozenset: ("$frozenset", frozenset),
    deque: ("$deque", lambda parts: deque(*parts)),
    dict: ("$dict", dict),
    OrderedDict: ("$ordered", OrderedDict),
    Counter: ("$counter", lambda pairs: Counter(dict(pairs))),
}


_TAGS = {tag for tag, _ in _CONTAINERS.values()}


def _described(kind: type, parts: list[Any]) -> object:
    if kind is list:
        return parts
    if kind is dict and all(isinstance(key, str) and not key.startswith("$") for key, _ in parts):
        return dict(parts)
    return {_CONTAINERS[kind][0]: parts}


def _numpy(value: Any, path: Path) -> object:
    if not _NUMPY.fullmatch(value.dtype.str):
        raise ValueError(f"the state at {show(path)} is an array of {value.dtype}; use one of numbers")
    shape = [list(value.shape)] if isinstance(value, np.ndarray) else []
    return {"$numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode(), *shape]}


def _made_numpy(content: list[Any]) -> object:
    dtype, data, *shape = content
    if not _NUMPY.fullmatch(dtype):
        raise ValueError(f"{dtype!r} is no dtype of numbers")
    flat = np.frombuffer(base64.b64decode(data, validate=True), dtype)
    return flat.reshape(shape[0]).copy() if shape else flat.reshape(())[()]


_PLAIN: dict[type, Callable[[Any, Path], object]] = {
    **dict.fromkeys((type(None), bool, str), lambda value, path: value),
    int: lambda value, path: value if -_PLAIN_INTS <= value < _PLAIN_INTS else {"$int": hex(value)},
    float: lambda value, path: value if isfinite(value) else {"$float": struct.pack(">d", value).hex()},
    bytes: lambda value, path: {"$bytes": base64.b64encode(value).decode()},
    np.ndarray: _numpy,
    **{np.dtype(code).type: _numpy for code in "?bhilqBHILQefdgFDG"},
}

_MAKERS: dict[str, Callable[[Any], object]] = {
    "$int": lambda content: int(content, 16),
    "$float": lambda content: struct.unpack(">d", bytes.fromhex(content))[0],
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$numpy": _made_numpy,
    **dict(_CONTAINERS.values()),
}
