"""``InlinedCode``: the functions whose code a capture has inlined, compared before each run.

Dynamo guards the functions that it finds by name, and a module's class, but neither a method that is replaced on a
class nor a ``__code__`` that is replaced in place, as IPython's autoreload does.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType

from torch import nn

__all__ = ["InlinedCode"]

_code_of = operator.attrgetter("__code__")
_OF_PYTORCH = (nn.Module, object)  # PyTorch's tracers replace methods of nn.Module while they work


class InlinedCode:
    """The methods and functions found so far that hold inlined code."""

    def __init__(self) -> None:
        self._kinds: list[type] = []
        self._names: list[str] = []
        self._members: list[object] = []
        self._functions: list[FunctionType] = []
        self._codes: list[CodeType] = []
        self._variables: list[tuple[dict[str, object], str, object]] = []  # globals that Dynamo guards elsewhere

    def add(self, kinds: Iterable[type], functions: Iterable[FunctionType], inlined: Collection[CodeType]) -> None:
        """Add the methods of these classes and the functions among these whose code is ``inlined``."""
        found = [function for function in functions if function.__code__ in inlined]
        known = set(zip(self._kinds, self._names, strict=True))
        for kind in dict.fromkeys(kinds):
            for base, name, function in _methods_of(kind):
                if function.__code__ not in inlined:
                    continue
                found.append(function)
                for place in {(kind, name), (base, name)} - known:
                    known.add(place)
                    self._kinds.append(place[0])
                    self._names.append(name)
                    self._members.append(getattr(*place))
        for function in set(found).difference(self._functions):
            self._functions.append(function)
            self._codes.append(function.__code__)

    def unchanged(self) -> bool:
        """Return True if the classes still have these methods, and all functions their code."""
        if list(map(_code_of, self._functions)) != self._codes:
            return False
        if any(names.get(name) is not value for names, name, value in self._variables):
            return False
        try:
            return list(map(getattr, self._kinds, self._names)) == self._members
        except AttributeError:
            return False

    def in_no_module(self) -> FunctionType | None:
        """Return a function with other globals than the module has in which Dynamo looks them up by their names.

        Those that are the same objects there, as in a process that was spawned, are watched.
        """
        self._variables = []
        for function in self._functions:
            own = function.__globals__
            module = sys.modules.get(own.get("__name__", ""))
            if module is None or vars(module) is own:
                continue
            for name in function.__code__.co_names:
                if name in own:
                    if own[name] is not getattr(module, name, self):
                        return function
                    self._variables.append((own, name, own[name]))
        return None


def _methods_of(kind: type) -> Iterator[tuple[type, str, FunctionType]]:
    """Yield the functions that a class has or inherits, with the class that defines them and their names."""
    for base in kind.__mro__:
        for name, member in vars(base).items() if base not in _OF_PYTORCH else ():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if isinstance(member, property):
                member = member.fget
            if isinstance(member, FunctionType):
                yield base, name, member
