"""Containers of tensors as models pass them around: flattened, compared and rebuilt.

Unlike those of ``anabranch.tensors``, they include dataclasses, subclasses of dict and the named results of PyTorch's
functions, and their types must be the same when a model's code runs in parts.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

__all__ = ["Tree", "build", "take_apart"]


@dataclass(frozen=True, slots=True)
class Tree:
    """One container: its type, the names of what is in it, and the containers in it (``None`` for a leaf)."""

    kind: type
    names: tuple[object, ...]
    children: tuple[Tree | None, ...]


def take_apart(value: object, leaves: list[object]) -> Tree | None:
    """Append the leaves of ``value``; returns the containers around them."""
    kind = type(value)
    found = _contents(value)
    if found is None:
        leaves.append(value)
        return None
    names, contents = found
    return Tree(kind, names, tuple(take_apart(item, leaves) for item in contents))


def build(tree: Tree | None, leaves: Iterator[object]) -> object:
    """Return the value of these containers with the next of ``leaves`` in them."""
    if tree is None:
        return next(leaves)
    contents = [build(child, leaves) for child in tree.children]
    kind = tree.kind
    if kind is slice:
        return slice(*contents)
    make = cast("Callable[..., object]", kind)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return make(*contents)
    if issubclass(kind, tuple | list):
        return make(contents)
    named = dict(zip(tree.names, contents, strict=True))
    if dataclasses.is_dataclass(kind):
        return make(**{str(name): item for name, item in named.items()})
    return defaultdict(None, named) if kind is defaultdict else make(named)


def _contents(value: object) -> tuple[tuple[object, ...], list[object]] | None:
    """Return the names and contents of a container; ``None`` for a leaf."""
    kind = type(value)
    if isinstance(value, Tensor | torch.Size):
        return None
    if isinstance(value, slice):
        return (), [value.start, value.stop, value.step]
    if kind in (list, tuple) or (isinstance(value, tuple) and _is_named(kind)):
        return (), list(cast("Sequence[object]", value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        if all(field.init for field in fields):
            return tuple(field.name for field in fields), [getattr(value, field.name) for field in fields]
        return None
    if kind in (dict, OrderedDict, defaultdict) or isinstance(value, UserDict):
        named = cast("Mapping[object, object]", value)
        return tuple(named), list(named.values())
    return None


def _is_named(kind: type) -> bool:
    return hasattr(kind, "_fields") or kind.__module__ == "torch.return_types"
