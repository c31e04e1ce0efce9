"""Parts that the user has compiled with ``torch.compile``: Dynamo would trace through them, and a graph would run them
uncompiled.

Inductor's kernels differ from those in the last bits, so such a step is not a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from anabranch.errors import CaptureError

__all__ = ["compiled_refusal", "has_compiled_methods", "refuse_compiled_code", "refuse_compiled_parts"]


def compiled_refusal(part: str) -> CaptureError:
    """Return the error for a compiled ``part``."""
    return CaptureError(
        f"{part} is compiled by torch.compile, whose results differ from a graph's in the last bits; pass the "
        "one, or use engine='tape'"
    )


def has_compiled_methods(kind: type) -> bool:
    """Return True if the class or one that it derives from decorates a method with ``torch.compile``."""
    return any(_is_wrapper(value) for each in kind.__mro__ for value in vars(each).values())


def refuse_compiled_parts(values: Iterable[object]) -> None:
    """Check the modules and functions of a step.

    Raises:
        CaptureError: one is compiled, or a part of it.
    """
    for value in values:
        if isinstance(value, nn.Module):
            for name, module in value.named_modules():
                if _is_compiled(module):
                    part = f"{name.removeprefix('_orig_mod.')!r} of the model" if name else "the model"
                    raise compiled_refusal(part)
        elif _is_wrapper(value):
            raise compiled_refusal(getattr(value, "__qualname__", str(value)))


def refuse_compiled_code(traced: Iterable[CodeType]) -> None:
    """Check the code that Dynamo traced: it calls compiled functions through one of its own.

    Raises:
        CaptureError: a compiled function was called.
    """
    if any(code.co_name == "getattr_and_trace_no_nested_graph_breaks" for code in traced):
        raise compiled_refusal("a function that the step calls")


def _is_compiled(module: nn.Module) -> bool:
    from torch._dynamo.eval_frame import OptimizedModule

    held: Any = module
    compiled = isinstance(module, OptimizedModule) or held._compiled_call_impl is not None
    return compiled or any(map(_is_wrapper, _functions_of(module)))


def _functions_of(module: nn.Module) -> Iterator[object]:
    """Return the functions of the module's own classes, and those set on it."""
    yield from (value for value in vars(module).values() if isinstance(value, FunctionType))
    for kind in type(module).__mro__:
        if kind is nn.Module:
            return
        yield from (value for value in vars(kind).values() if isinstance(value, FunctionType))


def _is_wrapper(value: object) -> bool:
    function = getattr(value, "__func__", value)
    return isinstance(function, FunctionType) and bool(inspect.getattr_static(function, "_is_torch_compile", False))
