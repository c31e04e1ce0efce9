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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.optim import Optimizer

from anabranch.autodiff import hooks as own_hooks
from anabranch.errors import CaptureError
from anabranch.graph.python_values import GONE, contents, freeze, mutables
from anabranch.graph.surroundings import Holder, Surroundings, codes_of, from_library, global_names, is_state

__all__ = ["PythonState", "captured_tensors", "reachable_modules", "refuse_hooks"]

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks")
_DEPTH = 4
_MODE = "training"


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
        self._before = self._frozen()
        held = [value for holder, _ in self._kept for value in holder.values.values()]
        held += [value for _, _, value in self._attributes] + [value for _, value in self._cells]
        held += [value for _, _, value in self._globals]
        self._undo = [_undoing(value) for value in mutables(held)]
        self._undo += [_undoing(value) for value in held if _is_generator(value)]
        self._randomness = _Randomness(self._around)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors within reach that are no state of ``modules``, by what they are called."""
        return self._around.tensors

    def refuse_iterators(self) -> None:
        """Raises for what the step could advance and nobody put back: to be called before it is tried."""
        for (owner, name), value in self._values():
            if isinstance(value, Iterator) and not isinstance(value, Tensor):
                raise CaptureError(
                    f"{self._line(owner, name)}: the step reads {_shown(owner, name)!r}, an iterator "
                    f"({type(value).__name__}), which a replay would not advance; pass what it yields in the batch, or "
                    "use engine='tape'"
                )

    def _values(self) -> Iterator[tuple[tuple[Holder | None, str], object]]:
        for holder, _ in self._kept:
            for name in self._around.mentioned(holder):
                yield (holder, name), holder.values[name]
        for holder, name, _ in self._attributes:
            yield (holder, name), holder.values.get(name)
        for name, cell in self._around.cells:
            yield (None, name), contents(cell)
        for name, space in self._around.globals:
            yield (None, name), space.get(name)

    def _frozen(self) -> dict[tuple[Holder | None, str], object]:
        seen: dict[tuple[Holder | None, str], object] = {}
        for holder, _ in self._kept:
            for name, value in list(holder.values.items()):
                if is_state(name) or name == _MODE:
                    seen[holder, name] = freeze(value)
        for key, value in self._values():
            if key not in seen:
                seen[key] = freeze(value)
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
        return CaptureError(
            f"{self._line(owner, name)}: {_shown(owner, name)!r} changes while the step is captured; a "
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
        for undo in self._undo:
            undo()

    def _line(self, holder: Holder | None, name: str) -> str:
        codes = list(self._around.codes)
        if holder is not None:
            kind = holder.owner if isinstance(holder.owner, type) else type(holder.owner)
            codes = [*codes_of(kind), *codes]
        names = [name, *(["train", "eval"] if name == _MODE else [])]
        names += holder.name.rsplit(".", 1)[-1:] if holder is not None else []
        for each in names:
            places = [place for code in codes for place in _mentions(code, each)]
            stores = [place for opname, place in places if opname.startswith("STORE")]
            if places:
                return next(iter([*stores, *(place for _, place in places)]))
        return f"{codes[0].co_filename}:{codes[0].co_firstlineno}" if codes else "the forward"


def _shown(owner: Holder | None, name: str) -> str:
    return f"{owner.name}.{name}" if owner else name


def _is_generator(value: object) -> bool:
    """Whether it is a generator of random numbers, of Python's or of numpy's."""
    numpy = sys.modules.get("numpy.random")
    return isinstance(value, random.Random) or (
        numpy is not None and isinstance(value, (numpy.Generator, numpy.RandomState))
    )


def _undoing(value: Any) -> Callable[[], object]:
    """What puts ``value`` back as it is now."""
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    if _is_generator(value):
        bits = getattr(value, "bit_generator", None) or value._bit_generator
        kept = bits.state
        return lambda: setattr(bits, "state", kept)
    copy = value.copy() if hasattr(value, "copy") else value[:]
    if isinstance(value, (dict, set)):

        def refill() -> None:
            value.clear()
            value.update(copy)

        return refill
    if isinstance(value, deque):

        def rebuild() -> None:
            value.clear()
            value.extend(copy)

        return rebuild
    whole = ... if hasattr(value, "dtype") else slice(None)
    return lambda: value.__setitem__(whole, copy)


class _Randomness:
    """The process's own random number generators of Python and numpy, drawing from which is lost on a graph.

    Looked at only where the code mentions them, for other threads (a loader's) may draw during a capture.
    """

    def __init__(self, around: Surroundings) -> None:
        values = [space.get(name) for name, space in around.globals] + [contents(cell) for _, cell in around.cells]
        names = [name for name, _ in (*around.globals, *around.cells)]
        drawers = [n for n, v in zip(names, values, strict=True) if getattr(v, "__self__", None) is _pythons_own]
        draws = around.mentions("random") or bool(drawers)
        self._readers = [_python_state, _numpy_state] if draws else []
        places = [place for name in ("random", *drawers) for code in around.codes for place in _mentions(code, name)]
        self._line = places[0][1] if places else "the step"
        self._before = [read() for read in self._readers]

    def undo(self) -> CaptureError | None:
        """Puts back what changed; returns the error that names it."""
        changed = None
        for read, before in zip(self._readers, self._before, strict=True):
            if read()[:2] != before[:2]:
                name, _, restore = before
                restore()
                changed = changed or CaptureError(
                    f"{self._line}: the step draws from, or seeds, the generator of {name}, which a graph does once "
                    "and for all; draw numbers with torch, pass them in the batch, or use engine='tape'"
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


def _mentions(code: types.CodeType, name: str) -> Iterator[tuple[str, str]]:
    for instruction in dis.get_instructions(code):
        if instruction.argval == name and instruction.positions is not None:
            yield instruction.opname, f"{code.co_filename}:{instruction.positions.lineno}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentions(constant, name)
