"""Globals that the code of optimizers reads: an update is captured with their values.

Dynamo does not trace optimizers. A global name that is rebound to another function or number is found by comparing its
value before each step; the contents of a user's dict or object are too costly to compare, and are refused.
"""

from __future__ import annotations

import inspect
import operator
import site
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from anabranch.errors import CaptureError

__all__ = ["OptimizerGlobals", "is_of_a_library", "refuse_mutable_globals"]

_LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    *{*site.getsitepackages(), sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"]},
)
_FIXED = (
    type, FunctionType, BuiltinFunctionType, ModuleType, int, float, complex, str, bytes, bool, type(None), torch.dtype,
    torch.device,
)  # fmt: skip
_Read: TypeAlias = "tuple[dict[str, Any], str, FunctionType]"


class OptimizerGlobals:
    """The values of the global names that the methods of some optimizers read."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        reads = {(id(space), name): (space, name) for space, name, _ in _reads(optimizers)}
        self._spaces = [space for space, _ in reads.values()]
        self._names = [name for _, name in reads.values()]
        self._values = list(map(dict.get, self._spaces, self._names))

    def unchanged(self) -> bool:
        """True if each name still has the identical value."""
        return all(map(operator.is_, map(dict.get, self._spaces, self._names), self._values))


def refuse_mutable_globals(optimizers: Iterable[Optimizer]) -> None:
    """Raises ``CaptureError`` for the user's own optimizer that reads a global whose contents may change."""
    for space, name, function in _reads(optimizers):
        if not _is_libraries(function.__code__) and not _is_fixed(space[name]):
            raise CaptureError(
                f"{function.__qualname__} reads the global {name!r} ({type(space[name]).__name__}), whose changes a "
                "graph would not notice; keep what changes in the parameter groups, or use engine='tape'"
            )


def _is_fixed(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return (
        isinstance(value, _FIXED) or callable(value) or type(value).__module__.partition(".")[0] in ("typing", "torch")
    )


def _reads(optimizers: Iterable[Optimizer]) -> Iterator[_Read]:
    """Each global that a method reads, or a function of the user's that it calls."""
    waiting = [
        value
        for kind in dict.fromkeys(base for optimizer in optimizers for base in type(optimizer).__mro__)
        if kind not in (Optimizer, object)
        for value in vars(kind).values()
        if isinstance(value, FunctionType)
    ]
    waiting = [unwrapped for function in waiting if isinstance(unwrapped := inspect.unwrap(function), FunctionType)]
    seen: set[FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        space = function.__globals__
        for name in _names_in(function.__code__):
            if name in space:
                yield space, name, function
                called = space[name]
                if isinstance(called, FunctionType) and (_is_torchs_own(called) or not _is_libraries(called.__code__)):
                    inner = inspect.unwrap(called)
                    waiting += [called, inner] if isinstance(inner, FunctionType) else [called]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def is_of_a_library(value: object) -> bool:
    """True for a function or a bound method whose code is a library's."""
    code = getattr(value, "__code__", None)
    return isinstance(code, CodeType) and _is_libraries(code)


def _is_torchs_own(function: FunctionType) -> bool:
    """True for the functions that torch's optimizers are made of."""
    return (function.__module__ or "").startswith("torch.optim.")


def _is_libraries(code: CodeType) -> bool:
    return code.co_filename.startswith(_LIBRARIES)
