"""Values of the program's own classes in the state of a scheduler or of an optimizer's group.

A checkpoint names no class that would be imported. An enum is restored into the class of its name that the new object's
state has somewhere. A function is code, not state: the new object keeps the one that it has at that place. A scheduler
is loaded into the one that is there.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType

from torch.optim.lr_scheduler import LRScheduler

from anabranch.checkpoint.state import Custom
from anabranch.errors import CheckpointError
from anabranch.tensors.tree_codec import Path, map_leaves

_CODE = (FunctionType, BuiltinFunctionType, MethodType, partial, type)


def to_save(state: object) -> object:
    """Return ``state`` with ``Custom`` in place of the program's own values."""

    def leaf(value: object, path: Path) -> object:
        if isinstance(value, Enum):
            return Custom(f"enum {type(value).__qualname__}", to_save(value.value))
        if isinstance(value, LRScheduler):
            return Custom("scheduler", to_save(value.state_dict()))
        return Custom("function", None) if isinstance(value, _CODE) else value

    return map_leaves(leaf, state)


def restored(saved: object, here: object, what: str, within: list[tuple[LRScheduler, object]]) -> object:
    """Return the state that ``to_save`` was given, with the classes and functions of ``here``.

    Args:
        saved: the state of the object that was saved.
        here: the state of the new one.
        what: the object, for an error.
        within: gets the schedulers in ``here``, each with the state to load into it.

    Raises:
        CheckpointError: ``here`` has no such enum, function or scheduler.
    """
    enums: dict[str, type[Enum]] = {}

    def note(value: object, path: Path) -> object:
        if isinstance(value, Enum):
            enums[f"enum {type(value).__qualname__}"] = type(value)
        return value

    map_leaves(note, here)

    def leaf(value: object, path: Path) -> object:
        if not isinstance(value, Custom):
            return value
        there = _at(here, path)
        if value.kind == "function" and isinstance(there, _CODE):
            return there
        if value.kind == "scheduler" and isinstance(there, LRScheduler):
            within.append((there, restored(value.value, there.state_dict(), what, within)))
            return there
        try:
            return enums[value.kind](restored(value.value, None, what, within))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{what} was saved with a value at {'.'.join(map(str, path))} that only the program can make "
                f"({value.kind}), but the new one's state has {there!r} there; make it as it was made when it was saved"
            ) from None

    return map_leaves(leaf, saved)


def _at(here: object, path: Path) -> object:
    for key in path:
        try:
            here = here[key]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return here
