"""The Python values that a capture baked into its graph, and whether they still are what they were.

They are looked at before every step, so the look is one loop in C: an ``itemgetter`` a holder, compared by identity.
Only where an identity differs are values compared.
"""

from __future__ import annotations

import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from anabranch.graph.surroundings import Surroundings

__all__ = ["GONE", "PythonValues", "contents", "freeze"]

GONE = object()
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_CONTAINERS = (list, dict, set)
_FEW = 64
_DEPTH = 4


@dataclass(slots=True)
class _Group:
    """Some names in one namespace."""

    owner: str
    space: Mapping[str, object]
    names: list[str]
    read: Callable[[Mapping[str, object]], tuple[object, ...]]
    values: tuple[object, ...]


class PythonValues:
    """What the code in ``surroundings`` reads: a temperature, a dropout probability, a helper, a list of weights.

    Attributes:
        key: equal for equal values; it keeps those alive that are told apart by identity.
    """

    def __init__(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings
        self._groups: list[_Group] = []
        for holder in surroundings.holders:
            self._add(holder.name, holder.values, surroundings.mentioned(holder))
        spaces: dict[int, tuple[dict[str, object], list[str]]] = {}
        for name, space in surroundings.globals:
            spaces.setdefault(id(space), (space, []))[1].append(name)
        for space, names in spaces.values():
            self._add("", space, [name for name in dict.fromkeys(names) if name in space])
        self._cells = [cell for _, cell in surroundings.cells]
        self._cell_names = [name for name, _ in surroundings.cells]
        self._sized = [
            holder.values for holder in surroundings.holders if holder.is_object and isinstance(holder.values, dict)
        ]
        self._remember()

    def _add(self, owner: str, space: Mapping[str, object], names: list[str]) -> None:
        if names:
            padded = names if len(names) > 1 else names * 2  # so that an itemgetter gives a tuple
            read = operator.itemgetter(*padded)
            self._groups.append(_Group(owner, space, padded, read, read(space)))

    def _remember(self) -> None:
        for group in self._groups:
            group.values = group.read(group.space)
        self._readers = [group.read for group in self._groups]
        self._spaces = [group.space for group in self._groups]
        self._values = list(chain.from_iterable(group.values for group in self._groups))
        self._cell_values = tuple(map(contents, self._cells))
        self._sizes = list(map(len, self._sized))
        found = [value for group in self._groups for value in group.values] + list(self._cell_values)
        unique = {id(value): value for value in found if isinstance(value, _CONTAINERS) and len(value) <= _FEW}
        self._containers = [(value, freeze(value)) for value in unique.values()]
        self.key: object = _Key(tuple(map(freeze, found)), found)

    def unchanged(self) -> bool:
        """Whether all of them are the very values that they were; the look before every step."""
        same = operator.is_
        try:
            if not all(map(same, chain.from_iterable(map(operator.call, self._readers, self._spaces)), self._values)):
                return False
        except KeyError:
            return False
        if self._cells and not all(map(same, map(contents, self._cells), self._cell_values)):
            return False
        if list(map(len, self._sized)) != self._sizes:
            return False
        return all(freeze(value) == frozen for value, frozen in self._containers)

    def changed(self) -> tuple[str, bool] | None:
        """The name of one that is no longer what it was, and whether only its value is another, nothing around it."""
        for group in self._groups:
            for name, before in zip(group.names, group.values, strict=True):
                now = group.space.get(name, GONE)
                if not _equal(before, now):
                    return (f"{group.owner}.{name}" if group.owner else name), _is_plain(before) and _is_plain(now)
        for name, before, cell in zip(self._cell_names, self._cell_values, self._cells, strict=True):
            now = contents(cell)
            if not _equal(before, now):
                return name, _is_plain(before) and _is_plain(now)
        for space, size in zip(self._sized, self._sizes, strict=True):
            if len(space) != size:
                owner = next(h for h in self._surroundings.holders if h.values is space)
                return f"{owner.name}.{next(reversed(space), '')}", False
        for value, frozen in self._containers:
            if freeze(value) != frozen:
                return self._name_of(value), _is_flat(value)
        return None

    def _name_of(self, value: object) -> str:
        for group in self._groups:
            for name, held in zip(group.names, group.values, strict=True):
                if held is value:
                    return f"{group.owner}.{name}" if group.owner else name
        return next(n for n, held in zip(self._cell_names, self._cell_values, strict=True) if held is value)

    def accept(self) -> None:
        """From here on they are what they are now."""
        self._remember()


class _Key:
    """Compared by what the values were, which are kept alive."""

    __slots__ = ("_frozen", "_values")

    def __init__(self, frozen: tuple[object, ...], values: list[object]) -> None:
        self._frozen, self._values = frozen, values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._frozen == other._frozen

    def __hash__(self) -> int:
        return hash(self._frozen)


def contents(cell: types.CellType) -> object:
    """What a variable that is closed over holds."""
    try:
        return cell.cell_contents
    except ValueError:
        return GONE


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, (tuple, frozenset)) and all(map(_is_plain, value)))


def _is_flat(value: object) -> bool:
    items: Iterable[object] = value.values() if isinstance(value, dict) else value  # type: ignore[assignment]
    return all(map(_is_plain, items))


def _equal(before: object, now: object) -> bool:
    return before is now or (_is_plain(before) and _is_plain(now) and freeze(before) == freeze(now))


def freeze(value: object, depth: int = 0) -> object:
    """Something hashable that is equal to what it was as long as ``value`` is unchanged."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)
    if depth < _DEPTH and isinstance(value, (list, tuple)) and len(value) <= 10_000:
        return type(value), tuple([freeze(item, depth + 1) for item in value])
    if depth < _DEPTH and isinstance(value, (set, frozenset)) and len(value) <= 10_000:
        return type(value), frozenset([freeze(item, depth + 1) for item in value])
    if depth < _DEPTH and isinstance(value, dict) and len(value) <= 10_000:
        return type(value), tuple([(freeze(k, depth + 1), freeze(v, depth + 1)) for k, v in value.items()])
    if isinstance(value, random.Random):
        return type(value), id(value), value.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState)):
        bits = value.bit_generator if isinstance(value, numpy.Generator) else value._bit_generator
        return type(value), id(value), repr(bits.state)
    return type(value), id(value)
