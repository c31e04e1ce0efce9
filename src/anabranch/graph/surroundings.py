"""What a step's Python code can read: found by following the names that it mentions, from the loss and the modules on.

A value counts if some reachable code mentions its name: a counter that the training loop keeps beside the loss does
not. Code that looks names up by itself (``getattr``, ``vars``, a ``__getattr__``) may read anything within reach.
"""

from __future__ import annotations

import dis
import functools
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from anabranch.graph.tracing import is_library

__all__ = ["Holder", "Surroundings", "codes_of", "from_library", "global_names", "is_state"]

_NOT_STATE = {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"}
_NOT_STATE |= {"_is_full_backward_hook"}  # hooks are looked at by themselves
# How torch's recurrent modules remember their parameters, which are swapped during a capture.
_NOT_STATE |= {"_flat_weights", "_flat_weight_refs"}
_UNREAD = {"in_features", "out_features"}  # by the forward of a plain Linear, which small models are full of
_NEVER_RUN = {"__init__", "__repr__", "extra_repr", "reset_parameters", "__setstate__", "__del__"}
_LOOKUPS = {"getattr", "vars", "__dict__", "locals", "globals", "attrgetter", "methodcaller"}
_FEW = 64
_DEPTH = 6
_PYTHON = sysconfig.get_paths()["stdlib"]
_PACKAGES = tuple({sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")})


def is_state(name: str) -> bool:
    """Whether a module's attribute of this name is the user's, and none of those that a graph knows anyway."""
    return name not in _NOT_STATE and not name.endswith("_hooks") and "hooks_" not in name


def _answers_for_itself(kind: type[Tensor]) -> bool:
    asked = kind.__torch_function__
    plain = (getattr(Tensor.__torch_function__, "__func__", None), nn.Parameter.__torch_function__)
    return getattr(asked, "__func__", asked) not in plain


def from_library(value: object) -> bool:
    """Whether a function is torch's, Python's or ours."""
    code = value if isinstance(value, types.CodeType) else getattr(getattr(value, "__func__", value), "__code__", None)
    return isinstance(code, types.CodeType) and (is_library(code.co_filename) or _is_pythons(code.co_filename))


def _is_pythons(filename: str) -> bool:
    return filename.startswith(_PYTHON) and not filename.startswith(_PACKAGES)


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """Something with attributes: a module of the model, another object, a class or a Python module within reach.

    Attributes:
        name: what errors call it.
        owner: the thing itself.
        values: its attributes.
        whole: whether all attributes count, mentioned or not.
    """

    name: str
    owner: object
    values: Mapping[str, object]
    whole: bool

    @property
    def is_object(self) -> bool:
        """Whether its attributes are an instance's own, which code may add to."""
        return not isinstance(self.owner, type | types.ModuleType)


class Surroundings:
    """What ``function`` and the forwards of ``modules`` can read.

    Attributes:
        holders: things with attributes, the modules first.
        cells: name and cell of each variable that is closed over.
        globals: name, namespace of each global that is mentioned.
        containers: short lists, dicts and sets among the values, whose contents can change.
        codes: the code that was followed.
        tensors: those within reach that are no state of ``modules``, by what they are called.
    """

    def __init__(self, function: object, modules: Mapping[nn.Module, str]) -> None:
        self.holders: list[Holder] = []
        self.cells: list[tuple[str, types.CellType]] = []
        self.globals: list[tuple[str, dict[str, object]]] = []
        self.codes: list[types.CodeType] = []
        self.tensors: dict[str, Tensor] = {}
        self._modules = modules
        self._names: set[str] = set()
        self._looks_up = False
        self._seen: set[int] = set()
        self._kept: list[object] = []  # so that no id is used again
        self._follow("", function, 0)
        for module, name in modules.items():
            self._module(name or type(module).__name__, module, 0)
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                self._follow("", hook, 0)
        self._spread()

    def mentioned(self, holder: Holder) -> list[str]:
        """The names of the holder's attributes that count."""
        everything = holder.whole or (self._looks_up and holder.is_object)
        unread = _UNREAD if type(holder.owner) is nn.Linear else ()
        return [
            name
            for name in holder.values
            if is_state(name) and name not in unread and (everything or name in self._names)
        ]

    def mentions(self, *names: str) -> bool:
        """Whether some of the code mentions one of these names."""
        return not self._names.isdisjoint(names)

    # One value.

    def _follow(self, name: str, value: object, depth: int) -> None:
        if depth > _DEPTH or id(value) in self._seen:
            return
        if isinstance(value, functools.partial):
            self._remember(value)
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow(name, part, depth + 1)
        elif isinstance(value, types.MethodType):
            self._follow(type(value.__self__).__name__, value.__self__, depth + 1)
            self._follow(name, value.__func__, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, (staticmethod, classmethod)):
            self._follow(name, value.__func__, depth + 1)
        elif isinstance(value, property):
            self._follow(name, value.fget, depth + 1)
        elif isinstance(value, Tensor):
            self._tensor(name, value)
        elif isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._module(f"{name}.{path}" if path else name, module, depth)
        elif isinstance(value, (list, tuple, dict)):
            if len(value) <= _FEW:
                self._remember(value)
                for item in value.values() if isinstance(value, dict) else value:
                    self._follow(name, item, depth + 1)
        elif isinstance(value, (type, types.ModuleType)):
            self._namespace(name, value)
        else:
            self._object(name, value)

    def _remember(self, value: object) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def _function(self, function: types.FunctionType, depth: int) -> None:
        self._remember(function)
        if from_library(function):
            return
        self._code(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if self._remember(cell):
                self.cells.append((name, cell))
                self._follow(name, _contents(cell), depth + 1)
        for name in dict.fromkeys(global_names(function.__code__)):
            if name in function.__globals__:
                self.globals.append((name, function.__globals__))
                self._follow(name, function.__globals__[name], depth + 1)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow("", value, depth + 1)

    def _code(self, code: types.CodeType) -> None:
        self.codes.append(code)
        for each in _nested(code):
            self._names.update(each.co_names)
            if not self._looks_up and not _LOOKUPS.isdisjoint(each.co_names):
                self._looks_up = True

    def _module(self, name: str, module: nn.Module, depth: int) -> None:
        if not self._remember(module):
            return
        kind = type(module)
        if kind.__module__.startswith("anabranch."):  # a boundary, whose own state is no part of the graph
            return
        theirs = kind.__module__.startswith("torch.")
        self.holders.append(Holder(name, module, vars(module), theirs))
        if module not in self._modules:  # one that the step uses beside its model: its mode is part of the graph too
            self.holders.append(Holder(name, module, _Mode(module), True))
            for entries in (module._parameters, module._buffers):  # which nobody else watches
                self.holders.append(Holder(name, module, entries, True))
                for key, tensor in entries.items():
                    if tensor is not None:
                        self._tensor(f"{name}.{key}", tensor)
        if theirs or not self._remember(kind):
            return
        self.holders.append(Holder(kind.__name__, kind, vars(kind), False))
        for base in kind.__mro__:
            if base in (nn.Module, object):
                continue
            for key, value in vars(base).items():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if key in _NEVER_RUN or not isinstance(function, types.FunctionType):
                    continue
                self._names.update(*(code.co_names for code in _nested(function.__code__)))
                self._follow(key, function, depth + 1)

    def _tensor(self, name: str, tensor: Tensor) -> None:
        if _answers_for_itself(type(tensor)):
            return  # such as a table on servers: what is asked of it is its own to answer
        if self._remember(tensor) and not is_lazy(tensor):
            while name in self.tensors:
                name += "_"
            self.tensors[name or "tensor"] = tensor

    def _namespace(self, name: str, value: type | types.ModuleType) -> None:
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        if module in ("builtins", "anabranch") or module.startswith(("torch.", "anabranch.", "numpy", "optree")):
            return
        file = getattr(value, "__file__", None)
        if module == "torch" or (isinstance(value, types.ModuleType) and (file is None or _is_pythons(file))):
            return
        if not self._remember(value):
            return
        self.holders.append(Holder(name or module, value, vars(value), False))
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):  # which torch calls by itself
            for key, function in list(vars(value).items()):
                self._follow(key, function, 1)

    def _object(self, name: str, value: object) -> None:
        module = type(value).__module__
        if module == "builtins" or module.split(".")[0] in ("torch", "numpy", "anabranch"):
            return
        values = getattr(value, "__dict__", None)
        slots = [slot for base in type(value).__mro__ for slot in _slots(base)]
        if not isinstance(values, dict) and not slots:
            return
        if not self._remember(value):
            return
        if isinstance(values, dict):
            self.holders.append(Holder(name, value, values, False))
        if slots:
            self.holders.append(Holder(name, value, _Slots(value, slots), False))
        if not _is_pythons(_file_of(type(value))):
            self._namespace(type(value).__name__, type(value))

    # Attributes whose names are mentioned lead on, to more code and more names, until nothing new is found.

    def _spread(self) -> None:
        done: set[tuple[int, str]] = set()
        before = -1
        while before != len(done):
            before = len(done)
            for index, holder in enumerate(list(self.holders)):
                for name in self._leads(holder):
                    if (index, name) not in done:
                        done.add((index, name))
                        self._follow(name if not holder.is_object else f"{holder.name}.{name}", holder.values[name], 1)

    def _leads(self, holder: Holder) -> list[str]:
        names = self.mentioned(holder)
        if isinstance(holder.owner, type):  # operators call these without naming them
            names += [n for n in holder.values if n.startswith("__") and n not in _NEVER_RUN and n not in names]
            if any(isinstance(holder.values.get(n), types.FunctionType) for n in ("__getattr__", "__getattribute__")):
                self._looks_up = True
        return [n for n in names if n in holder.values]


class _Mode(Mapping[str, object]):
    """A module's training mode as an attribute that counts."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> object:
        if name != "mode":
            raise KeyError(name)
        return self._module.training

    def __iter__(self) -> Iterator[str]:
        return iter(["mode"])

    def __len__(self) -> int:
        return 1


class _Slots(Mapping[str, object]):
    """The attributes of an object that has slots."""

    def __init__(self, owner: object, names: Iterable[str]) -> None:
        self._owner, self._names = owner, [name for name in names if hasattr(owner, name)]

    def __getitem__(self, name: str) -> object:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _slots(kind: type) -> list[str]:
    found = vars(kind).get("__slots__", ())
    return [found] if isinstance(found, str) else [name for name in found if not name.startswith("__")]


def _file_of(kind: type) -> str:
    for value in vars(kind).values():
        code = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, types.CodeType):
            return code.co_filename
    return ""


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def global_names(code: types.CodeType) -> Iterator[str]:
    """The globals that the code reads or writes; not those of rewritten assertions, which no name could have."""
    for each in _nested(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL") and instruction.argval.isidentifier():
                yield instruction.argval


def codes_of(kind: type) -> Iterator[types.CodeType]:
    """The code of the user's methods of a class."""
    for base in kind.__mro__:
        for value in vars(base).values():
            code = getattr(getattr(value, "__func__", value), "__code__", None)
            if isinstance(code, types.CodeType) and not from_library(code) and code.co_name != "__init__":
                yield code
