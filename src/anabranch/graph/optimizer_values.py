"""Python values that the code of optimizers reads from the optimizer itself: an update has them baked in.

Dynamo looks at no optimizer. torch's own read their groups and their state, which ``BoundState`` and ``GroupNumbers``
compare. A user's optimizer may read anything: attributes of its own, of its class and of parameters, what its methods
close over, containers within its state. Plain values and containers of them are copied at the capture and compared
before each step; an object whose contents nobody can compare is refused.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from anabranch.errors import CaptureError
from anabranch.graph.optimizer_globals import is_of_a_library

__all__ = ["OptimizerValues"]

_MOST_LEAVES = 1000
_ELSEWHERE = {"state", "param_groups", "step", "_opt_called"}  # compared by others, or changed by us
_FIXED = (type, BuiltinFunctionType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_DESCRIPTORS = (property, staticmethod, classmethod, GetSetDescriptorType, MemberDescriptorType)


class OptimizerValues:
    """The attributes of some optimizers as they are now, and of a user's optimizers whatever else its code can read.

    Raises:
        CaptureError: a user's optimizer holds an object whose changes could not be seen.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._kinds = list(map(type, self._optimizers))
        self._attributes = [_attributes(optimizer) for optimizer in self._optimizers]
        self._users = [optimizer for optimizer in self._optimizers if _is_users(optimizer)]
        self._keeps: list[object] = []  # what was compared by its identity, which no other object may take over
        self._values = [_Copy(optimizer, self._keeps).of_everything() for optimizer in self._users]

    def unchanged(self) -> bool:
        """True if every value is what it was."""
        same = operator.is_
        for optimizer, kind, held in zip(self._optimizers, self._kinds, self._attributes, strict=True):
            now = _attributes(optimizer)
            if type(optimizer) is not kind or now.keys() != held.keys():
                return False
            if not all(map(same, map(now.get, held), held.values())):
                return False
        if not self._users:
            return True
        try:
            return [_Copy(optimizer, []).of_everything() for optimizer in self._users] == self._values
        except CaptureError:
            return False


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    found = dict(vars(optimizer))
    for name in _ELSEWHERE:
        found.pop(name, None)
    return found


def _is_users(optimizer: Optimizer) -> bool:
    """True if any of its methods is not torch's."""
    return any(not _is_torchs(function) for function in _methods(type(optimizer)))


def _is_torchs(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"


def _methods(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if base in (Optimizer, object):
            continue
        for value in vars(base).values():
            if isinstance(value, property):
                yield from (each for each in (value.fget,) if isinstance(each, FunctionType))
                continue
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, FunctionType):
                found: Callable[..., Any] = inspect.unwrap(value)
                yield found if isinstance(found, FunctionType) else value


class _Copy:
    """A comparable copy of what one optimizer's code can read.

    Args:
        optimizer: a user's.
        keeps: takes the objects that are compared by identity.
    """

    def __init__(self, optimizer: Optimizer, keeps: list[object]) -> None:
        self._optimizer, self._keeps = optimizer, keeps
        self._leaves = 0
        self._held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def of_everything(self) -> list[object]:
        """The copy, to be compared with another."""
        optimizer = self._optimizer
        kind = type(optimizer)
        found = [self._of(f"self.{name}", value) for name, value in _attributes(optimizer).items() if _is_own(name)]
        for base in kind.__mro__:
            if (base.__module__ or "").partition(".")[0] in ("torch", "builtins"):
                continue
            if "__getattr__" in vars(base) or vars(base).get("__slots__"):
                raise self._refusal(f"__getattr__ or __slots__ of {base.__qualname__}", optimizer)
            for name, value in vars(base).items():
                if not name.startswith("__") and not isinstance(value, (FunctionType, *_DESCRIPTORS)):
                    found.append(self._of_elsewhere(f"{base.__qualname__}.{name}", value))
        for method in _methods(kind):
            if not _is_torchs(method):
                found += self._of_function(method)
        for group in optimizer.param_groups:
            for name, value in group.items():
                if name != "params" and not isinstance(value, (Tensor, float)):
                    found.append(self._of(f"param_groups[...][{name!r}]", value))
            for parameter in group["params"]:
                found.append(self._of("an attribute of a parameter", vars(parameter)))
        for kept in optimizer.state.values():
            if isinstance(kept, Mapping):
                found += [self._of(f"state[...][{k!r}]", v) for k, v in kept.items() if not isinstance(v, Tensor)]
        return found

    def _of_function(self, function: FunctionType) -> list[object]:
        """What the function closes over, and its defaults."""
        name = function.__qualname__
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return [self._of_elsewhere(f"a value that {name} closes over", value) for value in values]

    def _of_elsewhere(self, name: str, value: object) -> object:
        """The copy of a value that a capture does not replace: a parameter in it would not be known again."""
        before = len(self._keeps)
        found = self._of(name, value)
        for each in self._keeps[before:]:
            if id(each) in self._held:
                raise self._refusal(name, value)
        return found

    def _of(self, name: str, value: object) -> object:
        self._leaves += 1
        kind = type(value)
        if kind is float:
            return kind, value.hex()  # type: ignore[attr-defined] # tells -0.0 from 0.0, and is the same for NaN
        if value is None or kind in (bool, int, str, bytes, complex):
            return kind, value
        if kind in (tuple, list, dict, set, frozenset) and self._leaves < _MOST_LEAVES:
            return kind, self._of_items(name, value)
        if isinstance(value, (Tensor, *_FIXED)) or value is self._optimizer or is_of_a_library(value):
            self._keeps.append(value)
            return kind, id(value)
        raise self._refusal(name, value)

    def _of_items(self, name: str, value: Any) -> object:
        if isinstance(value, dict):
            return [(self._of(name, key), self._of(f"{name}[{key!r}]"[:80], item)) for key, item in value.items()]
        if isinstance(value, (set, frozenset)):
            return frozenset(self._of(name, item) for item in value)
        return [self._of(f"{name}[{index}]", item) for index, item in enumerate(value)]

    def _refusal(self, name: str, value: object) -> CaptureError:
        return CaptureError(
            f"{type(self._optimizer).__name__} can read {name} ({type(value).__name__}), whose changes a graph would "
            "not notice; keep plain numbers and tensors there, or use engine='tape'"
        )


def _is_own(name: str) -> bool:
    """False for what torch's base class keeps: hooks, which are refused elsewhere, and names for the profiler."""
    return not name.startswith(("_optimizer_", "_zero_grad_", "_patched", "_warned"))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where it is empty
    except ValueError:
        return False
    return True
