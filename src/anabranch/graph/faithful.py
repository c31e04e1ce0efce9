"""What a capture would lose, found before or after it and refused: hooks, and changes of Python state.

A replay runs operations on tensors and nothing else. A hook on a parameter, a counter that the forward increments, a
list that the loss appends to would run once, at capture, and never again; so the capture is refused and names the line.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer

from anabranch.autodiff import hooks as own_hooks
from anabranch.errors import CaptureError
from anabranch.graph.tracing import is_library

__all__ = ["PythonNumbers", "PythonState", "captured_tensors", "reachable_modules", "refuse_hooks"]

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks")
_NOT_STATE = {"_parameters", "_buffers", "_modules", "training", "_non_persistent_buffers_set"}
# How torch's recurrent modules remember their parameters, which are swapped during a capture.
_NOT_STATE |= {"_flat_weights", "_flat_weight_refs"}
_DEPTH = 4


def refuse_hooks(
    modules: Mapping[nn.Module, str], tensors: Mapping[str, Tensor], optimizers: Iterable[Optimizer] = ()
) -> None:
    """Raises ``CaptureError`` if a backward or optimizer hook is set that a graph would not call."""
    for hooks in (getattr(global_hooks, name) for name in _GLOBAL_HOOKS):
        _refuse(hooks, "every module has a backward hook")
    for module, name in modules.items():
        for hooks in (getattr(module, kind) for kind in _MODULE_HOOKS):
            _refuse(hooks, f"module {name or type(module).__name__!r} has a backward hook")
    for name, tensor in tensors.items():
        _refuse(tensor._backward_hooks, f"{name!r} has a gradient hook")
        _refuse(getattr(tensor, "_post_accumulate_grad_hooks", None), f"{name!r} has a gradient hook")
    for optimizer in optimizers:
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            _refuse(getattr(optimizer, kind), f"{type(optimizer).__name__} has a step hook")


def _refuse(hooks: Mapping[int, Callable[..., object]] | None, what: str) -> None:
    for hook in (hooks or {}).values():
        if getattr(hook, "__module__", "") == own_hooks.__name__:
            continue  # of a session; outside a sweep of its own it does nothing
        code = getattr(hook, "__code__", None)
        line = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
        raise CaptureError(
            f"{line}{what} ({getattr(hook, '__qualname__', hook)}), which a graph would never call; remove it, or use "
            "engine='tape'"
        )


def reachable_modules(function: Callable[..., object]) -> dict[str, nn.Module]:
    """The modules that ``function`` closes over, by the names it knows them by; itself, if it is one, under ``""``."""
    if isinstance(function, nn.Module):
        return {"": function}
    found: dict[str, nn.Module] = {}
    for name, value in _surroundings(function):
        if isinstance(value, nn.Module) and value not in found.values():
            found[name] = value
    return found


def captured_tensors(function: Callable[..., object]) -> dict[str, Tensor]:
    """The tensors that ``function`` closes over directly, by the names it knows them by."""
    if isinstance(function, nn.Module):
        return {}
    return {name: value for name, value in _surroundings(function) if isinstance(value, Tensor)}


def _surroundings(function: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """What a function can reach: its closure, the globals it names, defaults, bound arguments, and helpers' too."""
    if depth > _DEPTH:
        return
    if isinstance(function, functools.partial):
        inner = [
            ("", function.func),
            *((f"args.{i}", a) for i, a in enumerate(function.args)),
            *function.keywords.items(),
        ]
    elif isinstance(function, types.MethodType):
        inner = [("self", function.__self__), ("", function.__func__)]
    elif isinstance(function, types.FunctionType):
        inner = list(_variables(function))
    else:
        return
    for name, value in inner:
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            if not _from_library(value):
                yield from _surroundings(value, depth + 1)
        elif name:
            yield name, value


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, value in (function.__kwdefaults__ or {}).items():
        yield name, value
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _from_library(value: object) -> bool:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return isinstance(code, types.CodeType) and is_library(code.co_filename)


class PythonState:
    """The Python values that a captured function could change, remembered so that a change is noticed and undone."""

    def __init__(self, function: Callable[..., object], modules: Mapping[nn.Module, str]) -> None:
        functions = [function, *_hooks_of(modules)]
        self._holders: dict[int, tuple[str, dict[str, object], object]] = {}
        for module, name in modules.items():
            self._hold(name or type(module).__name__, vars(module), module)
        self._codes: list[types.CodeType] = []
        self._cells: list[tuple[str, types.CellType, object]] = []
        self._globals: list[tuple[str, dict[str, object], object]] = []
        for watched in functions:
            self._watch_function(watched)
        self._contents: list[tuple[object, object]] = []
        self._kept = [(values, dict(values)) for _, values, _ in self._holders.values()]
        self._before = self._frozen(remember=True)

    def _hold(self, name: str, values: dict[str, object], owner: object) -> None:
        self._holders.setdefault(id(owner), (name, values, owner))

    def _watch_function(self, function: object, depth: int = 0) -> None:
        if depth > _DEPTH or _from_library(function):
            return
        if isinstance(function, functools.partial):
            self._watch_function(function.func, depth + 1)
        elif isinstance(function, types.MethodType):
            self._watch_owner(type(function.__self__).__name__, function.__self__)
            self._watch_function(function.__func__, depth + 1)
        elif isinstance(function, types.FunctionType):
            if function.__code__ in self._codes:
                return
            self._codes.append(function.__code__)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                self._cells.append((name, cell, _contents(cell)))
            for name in dict.fromkeys(_global_names(function.__code__)):
                if name in function.__globals__:
                    self._globals.append((name, function.__globals__, function.__globals__[name]))
            for name, value in _variables(function):
                self._watch_owner(name, value)
                self._watch_function(value, depth + 1)

    def _watch_owner(self, name: str, value: object) -> None:
        if isinstance(value, (nn.Module, type, types.ModuleType)) or type(value).__module__.startswith("torch"):
            return
        values = getattr(value, "__dict__", None)
        if isinstance(values, dict) and not callable(value):
            self._hold(name, values, value)

    def _frozen(self, remember: bool = False) -> dict[tuple[str, str], object]:
        seen: dict[tuple[str, str], object] = {}

        def look(owner: str, name: str, value: object) -> None:
            seen[owner, name] = _freeze(value)
            if remember and isinstance(value, (list, dict, set)):
                self._contents.append((value, value.copy()))

        for owner, values, _ in self._holders.values():
            for name, value in list(values.items()):
                if name not in _NOT_STATE and not name.endswith("_hooks") and "hooks_" not in name:
                    look(owner, name, value)
        for name, cell, _ in self._cells:
            look("", name, _contents(cell))
        for name, space, _ in self._globals:
            look("", name, space.get(name))
        return seen

    def undo_changes(self) -> CaptureError | None:
        """Puts Python state back as it was; returns the error that names what had changed, if anything had."""
        after = self._frozen()
        keys = [*self._before, *(key for key in after if key not in self._before)]
        changed = next((key for key in keys if self._before.get(key, _GONE) != after.get(key, _GONE)), None)
        self._restore()
        if changed is None:
            return None
        owner, name = changed
        shown = f"{owner}.{name}" if owner else name
        return CaptureError(
            f"{self._line(owner, name)}: {shown!r} changes while the step is captured; a "
            "replay runs tensor operations only and would lose the change: make it a tensor that is changed in place, "
            "move it out of the step, or use engine='tape'"
        )

    def numbers(self) -> PythonNumbers:
        """The plain values among these, which a capture bakes into its graph."""
        spaces = [
            (owner, values, name)
            for owner, values, _ in self._holders.values()
            for name in values
            if name not in _NOT_STATE and not name.endswith("_hooks") and "hooks_" not in name
        ]
        spaces += [("", space, name) for name, space, _ in self._globals]
        return PythonNumbers(spaces, self._cells)

    def _restore(self) -> None:
        for values, before in self._kept:
            for name in [name for name in values if name not in before]:
                del values[name]
            values.update(before)
        for _, cell, value in self._cells:
            if value is not _GONE:
                cell.cell_contents = value
        for name, space, value in self._globals:
            space[name] = value
        for container, contents in self._contents:
            if isinstance(container, list):
                container[:] = contents  # type: ignore[call-overload]
            else:
                container.clear()  # type: ignore[attr-defined]
                container.update(contents)  # type: ignore[attr-defined]

    def _line(self, owner: str, name: str) -> str:
        codes = list(self._codes)
        if owner:
            holder = next(thing for known, _, thing in self._holders.values() if known == owner)
            codes = [*_codes_of(type(holder)), *codes]
        places = [place for code in codes for place in _mentions(code, name)]
        stores = [place for opname, place in places if opname.startswith("STORE")]
        return next(iter([*stores, *(place for _, place in places)]), codes[0].co_filename if codes else "the forward")


class PythonNumbers:
    """Plain values that the user's code reads and may change between steps: a temperature, a dropout probability."""

    def __init__(
        self, spaces: Iterable[tuple[str, dict[str, object], str]], cells: Iterable[tuple[str, types.CellType, object]]
    ) -> None:
        self._entries = [
            (owner, space, name, space[name]) for owner, space, name in spaces if isinstance(space.get(name), _PLAIN)
        ]
        self._cells = [(name, cell, value) for name, cell, value in cells if isinstance(value, _PLAIN)]

    def changed(self) -> str | None:
        """The name of one that is no longer what it was."""
        for owner, space, name, value in self._entries:
            now = space.get(name, _GONE)
            if now is not value and now != value:
                return f"{owner}.{name}" if owner else name
        for name, cell, value in self._cells:
            now = _contents(cell)
            if now is not value and now != value:
                return name
        return None


_PLAIN = (bool, int, float, complex, str, tuple, types.NoneType)
_GONE = object()


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


def _hooks_of(modules: Mapping[nn.Module, str]) -> Iterator[Callable[..., object]]:
    for module in modules:
        yield from module._forward_pre_hooks.values()
        yield from module._forward_hooks.values()


def _freeze(value: object, depth: int = 0) -> object:
    """Something that is equal to what it was as long as ``value`` is unchanged."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)
    if depth < _DEPTH and isinstance(value, (list, tuple, set, frozenset)) and len(value) <= 10_000:
        return type(value), tuple(_freeze(item, depth + 1) for item in value)
    if depth < _DEPTH and isinstance(value, dict) and len(value) <= 10_000:
        return dict, tuple((_freeze(k, depth + 1), _freeze(v, depth + 1)) for k, v in value.items())
    return type(value), id(value)


def _codes_of(kind: type) -> Iterator[types.CodeType]:
    for base in kind.__mro__:
        for value in vars(base).values():
            function = getattr(value, "__func__", value)
            if (
                isinstance(function, types.FunctionType)
                and not _from_library(function)
                and function.__name__ != "__init__"
            ):
                yield function.__code__


def _mentions(code: types.CodeType, name: str) -> Iterator[tuple[str, str]]:
    for instruction in dis.get_instructions(code):
        if instruction.argval == name and instruction.positions is not None:
            yield instruction.opname, f"{code.co_filename}:{instruction.positions.lineno}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentions(constant, name)
