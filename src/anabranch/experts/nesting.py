"""The nesting of an expert's inputs and outputs: containers, their classes, and which leaf is where.

::

    {"x": a, "pair": Point(b, None)}   -->   leaves [a, b, None]   and   dict(x=leaf, pair=named(Point; x=leaf, y=leaf))

Containers are dicts and other mappings with string keys, lists, tuples and named tuples. A given structure is read by
the expected nesting, keys by name, so all mappings with the same keys are equivalent, and a named tuple is equivalent
to a tuple of its length. ``None`` is a leaf: a missing tensor keeps its place.

A class is sent by name. It is looked up among the modules that this process has imported, and nothing is imported for
it: if there is no such class, a mapping becomes a dict, and a named tuple one with the same fields.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from typing import Literal, cast

from anabranch.errors import ProtocolError, SchemaError
from anabranch.tensors import Structure

__all__ = ["Kind", "LEAF", "Mismatch", "Nesting", "find_class", "flatten", "nesting_of"]

Kind = Literal["leaf", "list", "tuple", "named", "mapping"]
_MOST_FIELDS = 64


class Mismatch(ValueError):
    """A structure is nested otherwise than expected."""


@dataclass(frozen=True)
class Nesting:
    """One container and its children, or a leaf.

    Attributes:
        kind: of container.
        made: its class.
        keys: the names of the children of a mapping or named tuple.
        children: in order.
    """

    kind: Kind
    made: type = object
    keys: tuple[str, ...] = ()
    children: tuple[Nesting, ...] = ()

    def leaves_of(self, structure: Structure) -> list[object]:
        """Return the leaves of a structure that is nested like this, in this order.

        Raises:
            Mismatch: it is not.
        """
        leaves: list[object] = []
        self._collect(structure, leaves)
        return leaves

    def rebuild(self, leaves: Sequence[object], *, plain: bool = False) -> Structure:
        """Return the structure that holds ``leaves``; with ``plain`` in dicts, lists and tuples."""
        given = iter(leaves)
        return self._build(lambda: next(given), plain)

    def paths(self) -> list[str]:
        """Return each leaf's path, joined by dots."""
        if self.kind == "leaf":
            return [""]
        names = self.keys if self.kind in ("mapping", "named") else tuple(map(str, range(len(self.children))))
        return [
            f"{name}.{path}" if path else name
            for name, child in zip(names, self.children, strict=True)
            for path in child.paths()
        ]

    def _collect(self, structure: Structure, leaves: list[object]) -> None:
        if self.kind == "leaf":
            if isinstance(structure, (list, tuple, Mapping)):
                raise Mismatch
            leaves.append(structure)
            return
        for child, part in zip(self.children, self._parts_of(structure), strict=True):
            child._collect(part, leaves)

    def _parts_of(self, structure: Structure) -> Sequence[object]:
        if self.kind == "mapping":
            if isinstance(structure, Mapping) and set(structure) == set(self.keys):
                return [structure[key] for key in self.keys]
        elif isinstance(structure, list if self.kind == "list" else tuple):
            fields = getattr(structure, "_fields", self.keys)
            same_fields = self.kind != "named" or tuple(fields) == self.keys
            if len(structure) == len(self.children) and same_fields:
                return cast("Sequence[object]", structure)
        raise Mismatch

    def _build(self, leaf: Callable[[], object], plain: bool) -> Structure:
        if self.kind == "leaf":
            return leaf()
        parts = [child._build(leaf, plain) for child in self.children]
        if self.kind == "list":
            return parts
        if self.kind == "tuple" or (plain and self.kind == "named"):
            return tuple(parts)
        if self.kind == "named":
            return tuple.__new__(self.made, parts)
        return _make_mapping(dict if plain else self.made, dict(zip(self.keys, parts, strict=True)))


LEAF = Nesting("leaf")


def flatten(structure: Structure) -> tuple[list[object], Nesting]:
    """Return the leaves, and the nesting that puts them back.

    >>> leaves, nesting = flatten({"b": (1, None), "a": 2})
    >>> leaves
    [1, None, 2]
    >>> nesting.rebuild(leaves)
    {'b': (1, None), 'a': 2}
    """
    nesting = nesting_of(structure)
    return nesting.leaves_of(structure), nesting


def nesting_of(structure: Structure) -> Nesting:
    """Return how ``structure`` nests.

    Raises:
        SchemaError: a container that cannot be sent.
    """
    if isinstance(structure, Mapping):
        keys = list(structure)
        if not all(isinstance(key, str) for key in keys):
            raise SchemaError(f"only mappings with string keys can be sent to an expert, got keys {keys[:4]}")
        return Nesting("mapping", type(structure), tuple(keys), tuple(nesting_of(structure[key]) for key in keys))
    if isinstance(structure, (list, tuple)):
        made = type(structure)
        children = tuple(map(nesting_of, structure))
        if made is list or made is tuple:
            return Nesting("list" if made is list else "tuple", made, (), children)
        fields = getattr(structure, "_fields", None)
        if isinstance(structure, tuple) and isinstance(fields, tuple):
            return Nesting("named", made, fields, children)
        raise SchemaError(
            "mappings with string keys, lists, tuples, named tuples and None can be sent to an expert, not "
            f"{made.__name__}; wrap the module in one that takes and returns those"
        )
    return LEAF


def find_class(kind: Kind, module: str, name: str, keys: tuple[str, ...]) -> type:
    """Return the class of that name, or the plainest one with these keys.

    Raises:
        ProtocolError: the keys of a named tuple are not names.
    """
    found: object = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if kind == "mapping":
        return found if isinstance(found, type) and issubclass(found, Mapping) else dict
    if isinstance(found, type) and issubclass(found, tuple) and getattr(found, "_fields", None) == keys:
        return found
    if len(keys) > _MOST_FIELDS or not all(key.isidentifier() and not iskeyword(key) for key in keys):
        raise ProtocolError(f"a named tuple has no fields {keys[:4]}")
    return _named_tuple(keys)


@lru_cache(maxsize=256)
def _named_tuple(fields: tuple[str, ...]) -> type:
    return namedtuple("Fields", fields)


def _make_mapping(made: type, items: dict[str, object]) -> Structure:
    if made is dict:
        return items
    if issubclass(made, defaultdict):
        return made(None, items)
    if dataclasses.is_dataclass(made):
        # For example Hugging Face's ModelOutput.
        return made(**items)
    if issubclass(made, OrderedDict):
        return made(list(items.items()))
    return made(items)  # type: ignore[call-arg]
