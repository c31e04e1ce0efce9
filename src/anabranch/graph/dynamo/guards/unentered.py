"""Functions of torch that Dynamo calls without reading their code: the names they use and their defaults may change.

``F.multi_head_attention_forward`` finds ``scaled_dot_product_attention`` by name in ``torch.nn.functional``, where a
user may put their own function. Names are looked up again in the modules of ``_READ`` and ``_NAMED``, not in others,
such as ``math``: the lookup runs before each run, with a budget of a microsecond or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter, itemgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any

from anabranch.graph.dynamo.origins import OURS, closed_over

__all__ = ["look_at"]

_READ = ("torch.nn.functional", "torch.functional", "torch.nn._reduction", "torch._jit_internal")
"""Modules whose functions are followed into those that they call."""

_NAMED = ("torch", "torch._C._nn", "torch._VF")

_EVERYWHERE = frozenset(
    {"has_torch_function", "has_torch_function_unary", "has_torch_function_variadic", "handle_torch_function"}
)
_form = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def look_at(functions: Iterable[FunctionType]) -> tuple[Callable[[], object], object]:
    """Return a check of the names these functions use and of their defaults, and its current result."""
    named: dict[int, tuple[dict[str, Any], set[str]]] = {}
    found: dict[int, FunctionType] = {}
    for function in functions:
        _follow(function, named, found)
    spaces = [(itemgetter(*names), space) for space, names in named.values() if names]
    followed = list(found.values())

    def look() -> list[object]:
        try:
            seen: list[object] = [pick(space) for pick, space in spaces]
        except KeyError:  # a name that is gone
            return []
        seen += map(_form, followed)
        return seen

    now = [pick(space) for pick, space in spaces]
    forms = [(code, defaults, kwargs and dict(kwargs)) for code, defaults, kwargs in map(_form, followed)]
    return look, [*now, *forms]


def _follow(
    function: FunctionType, named: dict[int, tuple[dict[str, Any], set[str]]], found: dict[int, FunctionType]
) -> None:
    if id(function) in found:
        return
    found[id(function)] = function
    names = set(_names_in(function.__code__)) - _EVERYWHERE
    values = [*closed_over(function), *_read(function.__globals__, names, named, set())]
    for value in values:
        if (
            isinstance(value, FunctionType)
            and value.__module__ in _READ
            and value.__code__.co_filename.startswith(OURS)
        ):
            _follow(value, named, found)


def _read(
    space: dict[str, Any], names: set[str], named: dict[int, tuple[dict[str, Any], set[str]]], seen: set[int]
) -> Iterator[object]:
    """Yield the values of these names in a module, and in the modules among them."""
    if id(space) in seen:
        return
    seen.add(id(space))
    for name in names & space.keys():
        value = space[name]
        if isinstance(value, ModuleType):
            yield from _read(vars(value), names, named, seen)
        elif space["__name__"] in (*_READ, *_NAMED) and not isinstance(value, type):
            named.setdefault(id(space), (space, set()))[1].add(name)
            yield value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)
