"""Values that the Python code of optimizers reads: captured with an update, since Dynamo does not trace optimizers.

The optimizers of torch and of installed libraries are captured if all other values that they read are plain; these are
compared by identity before each step. A user's own code may read anything: such an optimizer steps by itself.
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from anabranch.errors import CaptureError
from anabranch.graph.dynamo.guards.watched_code import WatchedCode
from anabranch.graph.dynamo.origins import LIBRARIES, closed_over, is_of_a_library

__all__ = ["OptimizerCode"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset)
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)
_KEPT_ELSEWHERE = {"state", "param_groups", "step", "_opt_called"}  # compared by others, or changed by us
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_CHANGEABLE = ("random", "numpy", "time", "datetime", "os", "secrets")
_NOT_IN_A_STEP = ("__init__", "__setstate__")
_code_of = operator.attrgetter("__code__")
_defaults_of = operator.attrgetter("__defaults__")


class OptimizerCode:
    """The current code of some optimizers and the values it reads other than their groups and state.

    Raises:
        CaptureError: an optimizer runs the user's own code, or holds an object whose changes cannot be detected.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._kinds = list(map(type, self._optimizers))
        self._classes = WatchedCode(self._kinds, ())
        self._functions = list(_functions_of(self._kinds))
        self._codes = list(map(_code_of, self._functions))
        self._defaults = list(map(_defaults_of, self._functions))
        self._containers: dict[int, Any] = {}
        self._contents: list[list[object]] = []
        for function in self._functions:
            if not function.__code__.co_filename.startswith(LIBRARIES):
                raise CaptureError(
                    f"{function.__qualname__} is your own code, and a graph would not notice when a value that it "
                    "reads changes"
                )
            for value in (*(function.__defaults__ or ()), function.__kwdefaults__):
                self._watch(f"a default of {function.__qualname__}", value)
        self._reads = _Reads(read for function in self._functions for read in _reads(function))
        self._sizes = [len(vars(optimizer)) for optimizer in self._optimizers]
        self._attributes = list(map(_attributes, self._optimizers))
        for optimizer, attributes in zip(self._optimizers, self._attributes, strict=True):
            self._examine(optimizer, attributes)

    def unchanged(self) -> bool:
        """Return True if the code is unchanged and would read the same values."""
        same = operator.is_
        if list(map(_code_of, self._functions)) != self._codes or not self._classes.unchanged():
            return False
        if not all(map(same, map(_defaults_of, self._functions), self._defaults)) or not self._reads.unchanged():
            return False
        for index, optimizer in enumerate(self._optimizers):
            now, before = vars(optimizer), self._attributes[index]
            if type(optimizer) is not self._kinds[index] or not all(map(same, map(now.get, before), before.values())):
                return False
            if len(now) != self._sizes[index]:
                if _attributes(optimizer).keys() != before.keys():
                    return False
                self._sizes[index] = len(now)
        for held, contents in zip(self._containers.values(), self._contents, strict=True):
            found = _contents(held)
            if len(found) != len(contents) or not all(map(same, found, contents)):
                return False
        return True

    def _examine(self, optimizer: Optimizer, attributes: Mapping[str, object]) -> None:
        name = type(optimizer).__name__
        for key, value in attributes.items():
            self._watch(f"{name}.{key}", value)
        for base in type(optimizer).__mro__:
            for key, value in vars(base).items() if not _is_torchs(base) else ():
                if not key.startswith(("__", "_abc_")) and not _functions_in(value) and not isinstance(value, _SLOTS):
                    self._watch(f"{base.__name__}.{key}", value)
        for group in optimizer.param_groups:
            for key, value in group.items():
                if key == "lr" and type(value) not in (float, int) and not isinstance(value, Tensor):
                    raise _unseen(f"{name}.param_groups[...]['lr']", value)
                if key != "params" and not _is_compared(value):
                    raise _unseen(f"{name}.param_groups[...][{key!r}]", value)
            for parameter in group["params"] if not _is_torchs(type(optimizer)) else ():
                self._watch("an attribute of a parameter", vars(parameter))
        for kept in optimizer.state.values():
            for value in kept.values() if isinstance(kept, Mapping) else (kept,):
                self._watch(f"the state of {name}", value)

    def _watch(self, name: str, value: object) -> None:
        if type(value) in (dict, list, set):
            if id(value) not in self._containers:
                self._containers[id(value)] = value
                self._contents.append(_contents(value))
                for item in _contents(value):
                    self._watch(f"what {name} holds", item)
        elif not _is_still(value):
            raise _unseen(name, value)


class _Reads:
    """Names in some dicts and their current values; some may be absent."""

    def __init__(self, reads: Iterable[tuple[dict[str, Any], str]]) -> None:
        names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        for space, name in reads:
            names.setdefault(id(space), (space, set()))[1].add(name)
        spaces = [space for space, _ in names.values()]
        absent = [wanted.difference(space) for space, wanted in names.values()]
        self._absent = [(space.keys(), missing) for space, missing in zip(spaces, absent, strict=True) if missing]
        # Two names at least, so that an itemgetter gives a tuple.
        held = [sorted(wanted.intersection(space)) or ["__name__"] for space, wanted in names.values()]
        readers = [operator.itemgetter(found[0], *found) for found in held]
        self._readers = list(zip(readers, spaces, strict=True))
        self._values = list(self._read())

    def unchanged(self) -> bool:
        """Return True if each name still refers to the identical object."""
        try:
            if not all(map(operator.is_, self._read(), self._values)):
                return False
        except KeyError:
            return False
        return all(held.isdisjoint(missing) for held, missing in self._absent)

    def _read(self) -> Iterator[Any]:
        return chain.from_iterable([read(space) for read, space in self._readers])


def _contents(held: Any) -> list[object]:
    return [*held, *held.values()] if isinstance(held, dict) else [*held]


def _unseen(what: str, value: object) -> CaptureError:
    return CaptureError(f"{what} ({type(value).__name__}) may change in a way that a graph would not notice")


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    """Those that only the optimizer's own code reads: hooks are refused elsewhere."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _KEPT_ELSEWHERE and not (name.startswith("_optimizer_") and name.endswith("_hooks"))
    }


def _is_still(value: object) -> bool:
    """Return True for an immutable value, or one that graphs follow: a tensor, or code of a library."""
    if type(value) in (tuple, frozenset):
        return all(map(_is_still, value))  # type: ignore[call-overload]
    return type(value) in _PLAIN or isinstance(value, Tensor) or is_of_a_library(value)


def _is_compared(value: object) -> bool:
    """Return True for what ``GroupNumbers`` copies and compares."""
    if isinstance(value, Mapping):
        return all(map(_is_compared, value.values()))
    return all(map(_is_compared, value)) if type(value) in _CONTAINERS else _is_still(value)  # type: ignore[call-overload]


def _is_torchs(kind: type) -> bool:
    return (kind.__module__ or "").partition(".")[0] in ("torch", "builtins", "typing")


def _is_a_hint(value: object) -> bool:
    return type(value).__module__ == "typing"


# --- functions and their globals


def _functions_in(value: object) -> list[FunctionType]:
    """Return the functions of a class's member, however it is wrapped."""
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset, value.fdel) if isinstance(each, FunctionType)]
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    value = getattr(value, "__wrapped__", value) if callable(value) and not isinstance(value, FunctionType) else value
    return [value] if isinstance(value, FunctionType) else []


def _functions_of(kinds: Iterable[type]) -> Iterator[FunctionType]:
    """Methods of the classes, and the functions of the same packages that they name or close over."""
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base not in (Optimizer, object))
    packages = {"torch.optim", *((base.__module__ or "").partition(".")[0] for base in bases)} - {"torch"}
    members = [member for base in bases for name, member in vars(base).items() if name not in _NOT_IN_A_STEP]
    waiting = [function for member in members for function in _functions_in(member)]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        yield function
        if not function.__code__.co_filename.startswith(LIBRARIES):
            return  # refused
        waiting += [inner for value in closed_over(function) for inner in _functions_in(value)]
        for space, name in _reads(function):
            value = space.get(name)
            for called in _functions_in(value):
                module = called.__module__ or ""
                near = any(module == package or module.startswith(f"{package}.") for package in packages)
                if near or not called.__code__.co_filename.startswith(LIBRARIES):
                    waiting.append(called)
            if isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _CHANGEABLE:
                raise CaptureError(
                    f"{function.__qualname__} reads {value.__name__}, which a graph would read only once"
                )
            if callable(value) and not (is_of_a_library(value) or _functions_in(value) or _is_a_hint(value)):
                raise _unseen(f"{name}, which {function.__qualname__} calls", value)


def _reads(function: FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the global names that a function reads, attributes of modules, and absent names that would hide a
    built-in.
    """
    for names in _dotted_names(function.__code__):
        space = function.__globals__
        for name in names:
            if name in space or hasattr(builtins, name):
                yield space, name
            held = space.get(name)
            if not isinstance(held, ModuleType):
                break
            space = vars(held)


@functools.lru_cache(maxsize=4096)
def _dotted_names(code: CodeType) -> Sequence[Sequence[str]]:
    """Return the global names in a function's code, each with the attributes that are read from it."""
    found: list[list[str]] = []
    goes_on = False
    for operation in dis.get_instructions(code):
        if operation.opname in _GLOBALS:
            found.append([])
        goes_on = operation.opname in _GLOBALS or (goes_on and operation.opname in _ATTRIBUTES)
        if goes_on:
            found[-1].append(operation.argval)
    inner = [
        names for constant in code.co_consts if isinstance(constant, CodeType) for names in _dotted_names(constant)
    ]
    return [*found, *inner]
