"""Reads of a trace that Dynamo's guards do not cover: checked before each run, or refused.

Dynamo guards values that it meets as values. It does not recheck names that Python found among the built-ins, the
environment read through a function, modules found by an ``import`` statement, the classes registered with an abstract
base class, the order of an ``OrderedDict``, a class's metaclass, or the switches of attention kernels. Nor does it
check for absent things: a key of an object's ``__dict__``, an attribute of a module or of a function, a global that
would hide a built-in. These are kept here, each as a reading function and its value. Reads that cannot be repeated are
refused: the identity of two objects, special methods of the user's classes that Dynamo called instead of reading,
custom operators.
"""

from __future__ import annotations

import abc
import builtins
import dis
import enum
import functools
import os
import sys
import weakref
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Collection, KeysView
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from anabranch.errors import CaptureError
from anabranch.graph.dynamo.guards.unentered import look_at
from anabranch.graph.dynamo.origins import INSTALLED, LIBRARIES, OURS, closed_over
from anabranch.graph.dynamo.python_operators import name_of_python_operator

__all__ = ["REGISTERED", "Unseen"]

REGISTERED = "abstract base classes"
"""Changes with every class that any library registers somewhere, as imports do; a change of this kind says little."""

_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "expandvars"}
_CURE = "use engine='tape'"
_COMPARISONS = (
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__hash__",
    "__str__",
    "__repr__",
    "__format__",
)
_PLAIN_METACLASSES = (type, abc.ABCMeta, enum.EnumMeta)
_CALLS = ("_call_impl", "_wrapped_call_impl", "_compiled_call_impl")
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


class Unseen:
    """Checks on reads that guards leave out, one for each object that a trace has read."""

    def __init__(self) -> None:
        self._looks: dict[object, tuple[Callable[[], object], object]] = {}
        self._absent: dict[int, tuple[KeysView[str], set[str]]] = {}  # from dicts
        self._lacking: dict[int, tuple[weakref.ref[Any], frozenset[str]]] = {}  # objects
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._names: set[str] = set()  # that the user's code may look up in objects
        self._reads_dicts = False
        self._unentered: dict[int, FunctionType] = {}  # functions of torch that are called unread
        self._states: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []
        self.kinds: set[type] = set()
        """Metaclasses, whose attributes their classes have too."""
        self.refused: str | None = None
        """A value whose changes neither guards nor looks would notice."""

    def changed(self) -> object | None:
        """Return the first read that gives another value; ``None`` if all are unchanged."""
        for held, absent in self._absent.values():
            if not held.isdisjoint(absent):
                return "a name that came to hide another"
        for kept, lacked in self._lacking.values():
            own = getattr(kept(), "__dict__", None)
            if own and not lacked.isdisjoint(own):
                return "an attribute that did not exist"
        for key, (look, seen) in self._looks.items():
            if look() != seen:
                return key
        return None

    def _watch(self, key: object, look: Callable[[], object]) -> None:
        self._looks.setdefault(key, (look, look()))

    def _own_calls(self) -> list[object]:
        """Return the functions that modules have in place of their class's for a call; one check for all of them."""
        found: list[object] = []
        for kept in self._modules.values():
            held = getattr(kept(), "__dict__", ())
            if "_call_impl" in held or "_wrapped_call_impl" in held or "_compiled_call_impl" in held:
                found += [held.get(each) for each in _CALLS]  # type: ignore[union-attr]
        return found

    def examine_code(self, codes: Collection[CodeType]) -> None:
        """Record the traced code.

        Raises:
            CaptureError: it compares objects by identity.
        """
        names: set[str] = set()
        modules: set[str] = set()
        for code in codes:
            if code.co_filename.startswith(OURS):
                continue
            if _ENVIRONMENT & {*code.co_names} or code.co_filename == os.__file__:
                variables = vars(os.environ)["_data"]  # its own copy() decodes every one of them
                self._watch("environment", variables.copy)
            for operation in dis.get_instructions(code):
                if operation.opname == "LOAD_GLOBAL" and hasattr(builtins, operation.argval):
                    names.add(operation.argval)
                elif operation.opname == "IMPORT_NAME":
                    modules.add(operation.argval)
            if not code.co_filename.startswith(INSTALLED):
                _refuse_identity(code)
                if "_version" in code.co_names:
                    raise CaptureError(
                        f"{code.co_filename}:{code.co_firstlineno}: {code.co_qualname} reads the _version of a "
                        f"tensor, which a graph counts differently; {_CURE}"
                    )
                self._names |= {*code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
                self._reads_dicts |= not {"__dict__", "vars"}.isdisjoint(code.co_names)
        for space in _globals_of(codes):
            self._watch_absence(space, names)
        found = tuple(sorted(names))
        self._watch(("builtins", found), lambda: tuple(map(vars(builtins).get, found)))
        imported = tuple(sorted(modules))
        if imported:
            self._watch(("modules", imported), lambda: tuple(map(sys.modules.get, imported)))
        if any("getrecursionlimit" in code.co_names for code in codes):
            self._watch("recursion", sys.getrecursionlimit)
        if {"isinstance", "issubclass"} & names:
            self._watch(REGISTERED, abc.get_cache_token)

    def examine_calls(self, module: fx.GraphModule) -> None:
        """Record the torch calls found, those of checkpointed regions too.

        Raises:
            CaptureError: one is a function or a gradient that Dynamo does not read.
        """
        parts = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
        for node in (node for part in parts for node in part.graph.nodes):
            if node.op != "call_function":
                continue
            if isinstance(node.target, FunctionType) and node.target.__code__.co_filename.startswith(OURS[0]):
                self._unentered[id(node.target)] = node.target
            name = getattr(node.target, "__name__", "")
            if node.target is torch.amp.autocast_mode._enter_autocast:
                self._watch(("autocast", node.args[0]), functools.partial(_autocast_of, node.args[0]))
            if "attention" in name:
                self._watch("attention", _attention_switches)
            _refuse_unread(node.target)
        if self._unentered:
            self._looks["functions of torch"] = look_at(self._unentered.values())

    def note_state(self, read: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that the traced code reads process state of PyTorch, such as the rank."""
        self._states.append((read, args, kwargs))

    def examine_states(self) -> None:
        """Record the noted states, as they are outside the traced code."""
        for read, args, kwargs in self._states:
            self._watch((read, str(args), str(kwargs)), functools.partial(read, *args, **kwargs))
        self._states.clear()
        self._watch("kernels", _kernel_switches)

    def _watch_absence(self, held: dict[str, Any], names: Collection[str]) -> None:
        absent = set(names).difference(held)
        if absent:
            self._absent.setdefault(id(held), (held.keys(), set()))[1].update(absent)

    def _examine_absences(self, name: str, value: object) -> None:
        """Record missing attributes of an object that the code would find if they existed."""
        kind = type(value)
        try:
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        try:
            kept = weakref.ref(value)
        except TypeError:  # a SimpleNamespace
            if self._reads_dicts:
                self.refused = f"{name}, which does not allow weak references, and the __dict__ of some object"
            return
        if isinstance(value, nn.Module):
            self._modules[id(value)] = kept
            self.kinds.add(kind)  # that of a module which the loss finds in a global is not among the model's
            self._looks["calls"] = (self._own_calls, self._own_calls())
        if isinstance(value, ModuleType):
            self._watch_absence(held, self._names)
        elif isinstance(value, (FunctionType, functools.partial)) or _is_read(getattr(kind, "__getattr__", None)):
            self._lacking[id(value)] = kept, frozenset(self._names).difference(held)
        if self._reads_dicts and not isinstance(value, (type, ModuleType)):
            self._watch(("keys", id(value)), lambda: tuple(getattr(kept(), "__dict__", ())))

    def names(self, attribute: str) -> bool:
        """Return True if the traced code of the user's names ``attribute``."""
        return attribute in self._names

    def examine_value(self, name: str, value: object) -> None:
        """Record a value that a guard reads; one that cannot be watched is noted in ``refused``."""
        kind = type(value)
        self._examine_absences(name, value)
        if isinstance(value, type):
            self._examine_class(value)
        elif isinstance(value, FunctionType):
            self._examine_function(value)
        elif isinstance(value, OrderedDict) and kind is OrderedDict and _has_order(name, value):
            kept = weakref.ref(value)
            self._watch(("order", id(value)), lambda: None if (now := kept()) is None else list(now))
        elif isinstance(value, (np.ndarray, np.generic)):
            self.refused = f"{name}, a NumPy value (use a tensor or a Python number)"
        elif isinstance(value, ChainMap):
            self.refused = f"{name}, a ChainMap, in which one value may later hide another"
        elif isinstance(value, dict) and _is_users(getattr(kind, "__missing__", None)):
            self.refused = f"{name}, whose __missing__ makes values"
        elif not isinstance(value, nn.Module) and kind.__module__.partition(".")[0] not in ("torch", "builtins"):
            self.kinds.add(kind)  # an attribute may later hide that of a base class
            inherits = _is_installed(kind)  # with a mapping's __eq__, which has no file
            special = next((each for each in _COMPARISONS if _is_users(getattr(kind, each, None), inherits)), None)
            if special is not None:
                self.refused = f"{name}, whose class has its own {special}"

    def _examine_function(self, function: FunctionType) -> None:
        """Record the classes and functions that a function names: guards do not cover those that it only calls."""
        cells = closed_over(function)
        space = function.__globals__
        self._watch_absence(space, vars(builtins).keys() & set(function.__code__.co_names))
        module = sys.modules.get(str(space.get("__name__")))
        elsewhere = module is not None and vars(module) is not space
        if elsewhere and any(
            name in space for name in function.__code__.co_names
        ):  # Dynamo asks the module of that name
            self.refused = f"the names of {function.__qualname__}, code that exec runs under the name of another module"
        for value in (*cells, *(space[name] for name in function.__code__.co_names if name in space)):
            if isinstance(value, type):
                self._examine_class(value)
            elif getattr(value, "_dynamo_marked_constant", False) and not _is_installed(value):
                self.refused = f"{getattr(value, '__qualname__', value)} (torch.compiler.assume_constant_result)"

    def _examine_class(self, value: type) -> None:
        meta = type(value)
        if meta not in _PLAIN_METACLASSES and meta.__module__.partition(".")[0] != "torch":
            self.kinds.add(meta)
            if _is_users(getattr(meta, "__instancecheck__", None)):
                self.refused = f"isinstance(..., {value.__name__}), which its own code decides"


def _attention_switches() -> list[bool]:
    return [getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTION]


def _autocast_of(device: str) -> tuple[object, ...]:
    """Return autocast's defaults from the process."""
    return torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()


def _kernel_switches() -> tuple[bool, ...]:
    """Return the switches of libraries that a captured operation has already read, as an LSTM does."""
    return torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()


def _globals_of(codes: Collection[CodeType]) -> list[dict[str, Any]]:
    """Return the globals of the modules that the user's traced code comes from."""
    files = {code.co_filename for code in codes if not code.co_filename.startswith(LIBRARIES)}
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [vars(module) for module in modules if str(vars(module).get("__file__")) in files]


def _is_installed(value: Any) -> bool:
    """Return True for a class or a function of a library."""
    return str(getattr(sys.modules.get(value.__module__), "__file__", "")).startswith(INSTALLED)


def _is_users(method: object, inherits: bool = False) -> bool:
    """Return True for a function of the user's own code, and none that a dataclass generates.

    Args:
        method: of a class.
        inherits: a library's class, which may have methods of Python's frozen modules.
    """
    if not isinstance(method, FunctionType):
        return False
    code = method.__code__
    if inherits and code.co_filename.startswith("<frozen "):
        return False
    return not code.co_filename.startswith((*LIBRARIES, "<attrs")) and "__create_fn__" not in code.co_qualname


def _is_read(method: object) -> bool:
    """Return True for a function that is neither torch's nor ours."""
    return isinstance(method, FunctionType) and not method.__code__.co_filename.startswith(OURS)


def _has_order(name: str, value: OrderedDict[Any, Any]) -> bool:
    """Return False for the tables of a module, which the code reads by name; its hooks are called in their order."""
    if "_hooks" in name:
        return len(value) > 1
    return not any(f"_{kind}" in name for kind in ("modules", "parameters", "buffers", "hooks", "pre_hooks", "kwargs"))


def _refuse_identity(code: CodeType) -> None:
    before: dis.Instruction | None = None
    line = code.co_firstlineno
    for operation in dis.get_instructions(code):
        line = operation.starts_line or line
        if operation.opname == "IS_OP" and before is not None and before.opname != "LOAD_CONST":
            raise CaptureError(
                f"{code.co_filename}:{line}: the step tests whether two objects are identical ('is'), which a graph "
                f"would not test again; {_CURE}"
            )
        before = operation


def _refuse_unread(target: Any) -> None:
    operator = name_of_python_operator(target)
    if operator is not None:
        raise CaptureError(f"the custom operator {operator} is Python code that a graph would not read again; {_CURE}")
    if isinstance(target, FunctionType) and not target.__code__.co_filename.startswith(LIBRARIES):
        raise CaptureError(
            f"{target.__code__.co_filename}:{target.__code__.co_firstlineno}: {target.__qualname__} is allowed in "
            f"graphs unread (torch.compiler.allow_in_graph), and a graph would not notice what it reads; {_CURE}"
        )
