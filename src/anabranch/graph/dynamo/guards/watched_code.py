"""Classes and functions used by a trace: Dynamo guards a class's attributes, not the methods that it calls.

Replacing a method of a module's class, of its base or of ``torch.Tensor``, or swapping a function's code, as notebooks
do when they reload code, changes a step's computation. CPython counts the changes of a class and its bases in its
version tag; that one number of each class is compared before each run. On a Python whose tags behave differently, the
contents of the classes are compared instead.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable
from types import CodeType, FunctionType

__all__ = ["WatchedCode"]

_TAG_AT = 384
"""The place of ``tp_version_tag`` in CPython's ``PyTypeObject`` on 64 bits, from 3.8 on."""
_code_of = operator.attrgetter("__code__")
_value_of = operator.attrgetter("value")


def _tag_of(kind: type) -> ctypes.c_uint:
    """Return the tag's memory, valid while the class lives."""
    return ctypes.c_uint.from_address(id(kind) + _TAG_AT)


def _tag(kind: type) -> int:
    return int(_tag_of(kind).value)


def _tags_work() -> bool:
    """Return True if the tag moves when a class or its base changes, and only then."""
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    base = type("Base", (), {"method": lambda self: 1})
    kind = type("Kind", (base,), {})
    kind().method()
    first = _tag(kind)
    kind().method()
    still = _tag(kind)
    base.method = lambda self: 2  # type: ignore[attr-defined]
    return first == still != 0 and _tag(kind) != first


_has_tags = _tags_work()


def _contents(kind: type) -> list[object]:
    return [value for base in kind.__mro__ for value in base.__dict__.values()]


class WatchedCode:
    """The classes of some objects, and their traced methods, in their current state."""

    def __init__(self, kinds: Iterable[type], traced: Iterable[CodeType]) -> None:
        self._kinds = list(dict.fromkeys(kinds))
        codes = set(traced)
        self._functions = [
            value
            for base in dict.fromkeys(base for kind in self._kinds for base in kind.__mro__)
            for value in map(_function_in, base.__dict__.values())
            if value is not None and value.__code__ in codes
        ]
        self._codes = list(map(_code_of, self._functions))
        self._tag_memory = list(map(_tag_of, self._kinds)) if _has_tags else []
        self._tags = self._now()
        self._contents = list(map(_contents, self._kinds))

    def _now(self) -> list[int]:
        for kind in self._kinds:  # a class that has not been accessed since its last change has no tag
            getattr(kind, "__init__", None)
        return list(map(_value_of, self._tag_memory))

    def unchanged(self) -> bool:
        """Return True if no class and no code has changed since."""
        if list(map(_code_of, self._functions)) != self._codes:
            return False
        if _has_tags and list(map(_value_of, self._tag_memory)) == self._tags:
            return True
        # Changed, and perhaps changed back, as by PyTorch's own tracers to nn.Module.
        for kind, contents in zip(self._kinds, self._contents, strict=True):
            now = _contents(kind)
            if len(now) != len(contents) or not all(map(operator.is_, now, contents)):
                return False
        self._tags = self._now()
        return True


def _function_in(value: object) -> FunctionType | None:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    return value if isinstance(value, FunctionType) else None
