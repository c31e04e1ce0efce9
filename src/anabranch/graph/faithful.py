"""What a capture would lose, found before or after it and refused: hooks, and changes of Python state.

A replay runs operations on tensors and nothing else. A hook on a parameter, a counter that the forward increments, a
list that the loss appends to would run once, at capture, and never again; so the capture is refused and names the line.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer

from anabranch.autodiff import hooks as own_hooks
from anabranch.errors import CaptureError
from anabranch.graph.python_values import GONE, contents, freeze
from anabranch.graph.surroundings import Holder, Surroundings, codes_of, from_library, global_names, is_state

__all__ = ["PythonState", "captured_tensors", "reachable_modules", "refuse_hooks"]

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks")
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
            if not from_library(value):
                yield from _surroundings(value, depth + 1)
        elif name:
            yield name, value


def _variables(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
    for name in global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, value in (function.__kwdefaults__ or {}).items():
        yield name, value
    code = function.__code__
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)


class PythonState:
    """The Python values that a captured function could change, remembered so that a change is noticed and undone."""

    def __init__(self, function: Callable[..., object], modules: Mapping[nn.Module, str]) -> None:
        self._around = Surroundings(function, modules)
        self._cells = [(cell, contents(cell)) for _, cell in self._around.cells]
        self._globals = [(space, name, space[name]) for name, space in self._around.globals]
        self._kept = [(h, dict(h.values)) for h in self._around.holders if h.is_object and isinstance(h.values, dict)]
        self._attributes = [
            (holder, name, holder.values[name])
            for holder in self._around.holders
            if not (holder.is_object and isinstance(holder.values, dict))
            for name in self._around.mentioned(holder)
        ]
        self._contents: list[tuple[object, object]] = []
        self._randomness = _Randomness(self._around)
        self._before = self._frozen(remember=True)

    def _frozen(self, remember: bool = False) -> dict[tuple[Holder | None, str], object]:
        seen: dict[tuple[Holder | None, str], object] = {}

        def look(owner: Holder | None, name: str, value: object) -> None:
            seen[owner, name] = freeze(value)
            if remember and isinstance(value, (list, dict, set)):
                self._contents.append((value, value.copy()))

        for holder, _ in self._kept:
            for name, value in list(holder.values.items()):
                if is_state(name):
                    look(holder, name, value)
        for holder, name, _ in self._attributes:
            look(holder, name, holder.values.get(name))
        for name, cell in self._around.cells:
            look(None, name, contents(cell))
        for name, space in self._around.globals:
            look(None, name, space.get(name))
        return seen

    def undo_changes(self) -> CaptureError | None:
        """Puts Python state back as it was; returns the error that names what had changed, if anything had."""
        after = self._frozen()
        keys = [*self._before, *(key for key in after if key not in self._before)]
        changed = next((key for key in keys if self._before.get(key, GONE) != after.get(key, GONE)), None)
        self._restore()
        drawn = self._randomness.undo()
        if drawn is not None:
            return drawn
        if changed is None:
            return None
        owner, name = changed
        shown = f"{owner.name}.{name}" if owner else name
        return CaptureError(
            f"{self._line(owner, name)}: {shown!r} changes while the step is captured; a "
            "replay runs tensor operations only and would lose the change: make it a tensor that is changed in place, "
            "move it out of the step, or use engine='tape'"
        )

    def _restore(self) -> None:
        for holder, before in self._kept:
            values = holder.values
            assert isinstance(values, dict)
            for name in [name for name in values if name not in before]:
                del values[name]
            values.update(before)
        for holder, name, value in self._attributes:
            if holder.values.get(name, GONE) is not value:
                setattr(holder.owner, name if name != "mode" else "training", value)
        for cell, value in self._cells:
            if value is not GONE:
                cell.cell_contents = value
        for space, name, value in self._globals:
            space[name] = value
        for container, items in self._contents:
            if isinstance(container, list):
                container[:] = items  # type: ignore[call-overload]
            else:
                container.clear()  # type: ignore[attr-defined]
                container.update(items)  # type: ignore[attr-defined]

    def _line(self, holder: Holder | None, name: str) -> str:
        codes = list(self._around.codes)
        if holder is not None:
            kind = holder.owner if isinstance(holder.owner, type) else type(holder.owner)
            codes = [*codes_of(kind), *codes]
        places = [place for code in codes for place in _mentions(code, name)]
        stores = [place for opname, place in places if opname.startswith("STORE")]
        return next(iter([*stores, *(place for _, place in places)]), codes[0].co_filename if codes else "the forward")


class _Randomness:
    """The process's random number generators: seeding torch's, or drawing from Python's, is lost on a graph.

    Looked at only where the code mentions them, for other threads (a loader's) may draw during a capture.
    """

    def __init__(self, around: Surroundings) -> None:
        values = [space.get(name) for name, space in around.globals] + [contents(cell) for _, cell in around.cells]
        draws = around.mentions("random") or any(getattr(v, "__self__", None) is _pythons_own for v in values)
        self._readers = [_python_state, _numpy_state] if draws else []
        if around.mentions("manual_seed", "seed", "set_rng_state", "fork_rng"):
            self._readers.append(_torch_state)
        self._before = [read() for read in self._readers]

    def undo(self) -> CaptureError | None:
        """Puts back what changed; returns the error that names it."""
        changed = None
        for read, before in zip(self._readers, self._before, strict=True):
            if read()[:2] != before[:2]:
                name, _, restore = before
                restore()
                changed = changed or CaptureError(
                    f"the step draws from, or seeds, the generator of {name}, which a graph would do once and for all; "
                    "draw numbers with torch, pass them in the batch, or use engine='tape'"
                )
        return changed


_pythons_own = getattr(random.random, "__self__", None)
_State: TypeAlias = "tuple[str, object, Callable[[], object]]"


def _python_state() -> _State:
    state = random.getstate()
    return "Python's random", state, lambda: random.setstate(state)


def _numpy_state() -> _State:
    numpy = sys.modules.get("numpy.random")
    state = None if numpy is None else numpy.get_state()
    return "numpy.random", repr(state), lambda: numpy and numpy.set_state(state)


def _torch_state() -> _State:
    state = torch.get_rng_state()
    return "torch", state.numpy().tobytes(), lambda: torch.set_rng_state(state)


def _mentions(code: types.CodeType, name: str) -> Iterator[tuple[str, str]]:
    for instruction in dis.get_instructions(code):
        if instruction.argval == name and instruction.positions is not None:
            yield instruction.opname, f"{code.co_filename}:{instruction.positions.lineno}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentions(constant, name)
