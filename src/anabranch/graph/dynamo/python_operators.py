"""Operators with kernels, derivatives or shapes written in Python: Dynamo calls them without reading them.

A graph would keep the values that their code read during capture, and a batch that is run both ways would repeat their
side effects, such as drawing from their own generator.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef

from anabranch.graph.dynamo.origins import LIBRARIES

__all__ = ["name_of_python_operator"]

_ANYBODYS = torch.library.__file__
"""The file that registers what is given to the functions of ``torch.library``."""

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of PyTorch's collectives: PyTorch registers their derivatives as anybody would."""

_REGISTERED_AT = ": registered at "


def name_of_python_operator(target: Any) -> str | None:
    """Return the name of the operator that a node calls, if it is the user's Python: a kernel or a backward."""
    found = next(filter(_is_python, _operators(target)), None)
    return None if found is None else str(found.name())  # type: ignore[no-untyped-call]


def _operators(target: Any) -> Iterator[torch._ops.OpOverload[..., Any]]:
    if isinstance(target, torch._ops.OpOverload):
        yield target
    elif isinstance(target, torch._ops.OpOverloadPacket):
        for overload in target.overloads():  # type: ignore[no-untyped-call]
            yield getattr(target, overload)


def _is_python(operator: torch._ops.OpOverload[..., Any]) -> bool:
    if operator.namespace in _COLLECTIVES:
        return False
    defined = OPDEFS.get(operator._schema.name)
    if defined is not None:
        return any(map(_is_the_users, _functions(defined)))
    name = operator.name()  # type: ignore[no-untyped-call]
    return any(_comes_from_python(line) for line in torch._C._dispatch_dump(name).splitlines())


def _functions(defined: CustomOpDef) -> Iterator[object]:
    """Yield the operator's kernels, that of each device as it was registered, and its backward."""
    yield defined._init_fn
    for registered in defined._backend_fns.values():
        yield inspect.getclosurevars(inspect.unwrap(registered)).nonlocals.get("fn")
    for function in (defined._setup_context_fn, defined._backward_fn):
        if function is not None:
            yield function


def _is_the_users(function: object) -> bool:
    return not isinstance(function, FunctionType) or not function.__code__.co_filename.startswith(LIBRARIES)


def _comes_from_python(registration: str) -> bool:
    """Return True for a line such as ``CPU: registered at train.py:12 :: (none)``."""
    key, _, place = registration.partition(_REGISTERED_AT)
    file = place.rpartition(" :: ")[0].rpartition(":")[0]
    return key != "Meta" and file.endswith(".py") and (file == _ANYBODYS or not file.startswith(LIBRARIES))
