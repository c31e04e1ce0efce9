"""The Python values that a capture baked into its graph, and whether they still are what they were.

They are looked at before every step, so the look is loops in C: an ``itemgetter`` a holder, and the items of
containers, compared by identity. Only where an identity differs are values compared.
"""

from __future__ import annotations

import array
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from anabranch.graph.surroundings import Surroundings

__all__ = ["GONE", "PythonValues", "contents", "freeze", "is_mutable", "mutables"]

GONE = object()
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_SEQUENCES = (list, deque, set)
_BUFFERS = (bytearray, array.array)
_MOST_ITEMS = 10_000
_MOST_BYTES = 1 << 20
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
        unique = {id(value): value for value in found if isinstance(value, tuple) or is_mutable(value)}
        self._containers = [(value, freeze(value)) for value in unique.values()]
        self._contents = [_Contents(value) for value in mutables(unique.values())]
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
        return all(map(_Contents.unchanged, self._contents))

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
                return self._name_of(value), not isinstance(value, (list, tuple, deque, dict)) or _is_flat(value)
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


class _Contents:
    """What a container held, or the bytes of an array, in the form that is compared soonest."""

    __slots__ = ("_items", "_keys", "_value")

    def __init__(self, value: object) -> None:
        self._value = value
        self._keys: tuple[object, ...] = ()
        self._items: object
        if isinstance(value, dict):
            self._keys, self._items = tuple(value), tuple(value.values())
        elif isinstance(value, _SEQUENCES):
            self._items = tuple(value)
        else:
            self._items = freeze(value)

    def unchanged(self) -> bool:
        """Whether the very same items are in it."""
        value, items, same = self._value, self._items, operator.is_
        try:
            if isinstance(value, dict):
                assert isinstance(items, tuple)
                return (
                    len(value) == len(items)
                    and all(map(same, value, self._keys))
                    and all(map(same, value.values(), items))
                )
            if isinstance(value, _SEQUENCES):
                assert isinstance(items, tuple)
                return len(value) == len(items) and all(map(same, value, items))
        except RuntimeError:  # another thread is changing it
            return False
        return freeze(value) == items


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


def is_mutable(value: object) -> bool:
    """Whether what ``value`` holds can change and is looked at: a container, an array, of no excessive size."""
    if isinstance(value, (dict, *_SEQUENCES)):
        return len(value) <= _MOST_ITEMS
    return isinstance(value, _BUFFERS) or _is_array(value)


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and not value.dtype.hasobject


def mutables(values: Iterable[object], depth: int = 0) -> Iterator[object]:
    """All containers and arrays among ``values`` and within them, each once."""
    seen: set[int] = set()

    def walk(value: object, depth: int) -> Iterator[object]:
        changes = is_mutable(value)
        if depth > _DEPTH or id(value) in seen or not (changes or isinstance(value, (tuple, frozenset))):
            return
        seen.add(id(value))
        if changes:
            yield value
        if isinstance(value, (list, tuple, deque)):
            for item in list(value)[:_MOST_ITEMS]:
                yield from walk(item, depth + 1)
        elif isinstance(value, dict):
            for item in list(value.values()):
                yield from walk(item, depth + 1)

    for value in values:
        yield from walk(value, depth)


def freeze(value: object, depth: int = 0) -> object:
    """Something hashable that is equal to what it was as long as ``value`` is unchanged."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)
    if isinstance(value, (list, tuple, deque, set, frozenset, dict)):
        return _freeze_items(value, depth)
    if isinstance(value, _BUFFERS):
        return type(value), bytes(value)
    if _is_array(value) and value.nbytes <= _MOST_BYTES:  # type: ignore[attr-defined]
        return type(value), id(value), value.shape, value.tobytes()  # type: ignore[attr-defined]
    if isinstance(value, random.Random):
        return type(value), id(value), value.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState)):
        bits = value.bit_generator if isinstance(value, numpy.Generator) else value._bit_generator
        return type(value), id(value), repr(bits.state)
    return type(value), id(value)


def _freeze_items(
    value: list[object] | tuple[object, ...] | deque[object] | set[object] | frozenset[object] | dict[object, object],
    depth: int,
) -> object:
    if depth >= _DEPTH or len(value) > _MOST_ITEMS:
        return type(value), id(value), len(value)
    if isinstance(value, dict):
        return type(value), tuple([(freeze(k, depth + 1), freeze(v, depth + 1)) for k, v in value.items()])
    frozen = [freeze(item, depth + 1) for item in value]
    return type(value), frozenset(frozen) if isinstance(value, (set, frozenset)) else tuple(frozen)
