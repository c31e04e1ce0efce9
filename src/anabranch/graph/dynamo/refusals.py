"""The errors of code that cannot be a graph: the user's line, and PyTorch's own words or the hook in the way."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from traceback import StackSummary

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.optim import Optimizer

from anabranch.autodiff import hooks as own_hooks
from anabranch.errors import CaptureError

# With the separator: torch_geometric is not torch.
_OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")
"""Prefixes of the files of torch and of this package: their lines are not the user's."""


def refusal_of(error: BaseException, what: str) -> CaptureError:
    """Return the error to raise in place of any error of Dynamo's, which becomes its cause.

    PyTorch's words are given whole: its messages change from one version to the next.
    """
    cure = "" if what == "the function" else "; use engine='tape'"
    line, words = user_line(getattr(error, "real_stack", None)), f"{type(error).__name__}: {error}"
    refusal = CaptureError(f"{line}{what} cannot be a graph{cure}. PyTorch says:\n{words.strip()}")
    refusal.__cause__ = error
    return refusal


def reason_of_call(error: Exception, line: str) -> str:
    """Return the error of one of Dynamo's calls, in one line, for the user's line."""
    words = (str(error).splitlines() or [""])[0]
    if isinstance(error, DynamicOutputShapeException):  # its message is the operator's name alone
        words = f"the shape of a result depends on values ({words}), which a graph cannot hold; use engine='tape'"
    return f"{line}{type(error).__name__}: {words}"


def user_line(stack: StackSummary | None) -> str:
    """Return the innermost line of the user's own code, or else of a library's, followed by a colon."""
    return _innermost([(frame.filename, frame.lineno) for frame in stack or ()])


def user_line_of(node: fx.Node) -> str:
    """Return the same of a call of Dynamo's graph."""
    return _innermost(re.findall(r'File "([^"]+)", line (\d+), in ', str(node.meta.get("stack_trace") or "")))


def _innermost(places: Sequence[tuple[str, object]]) -> str:
    own = [place for place in places if not place[0].startswith(_OURS)]
    chosen = own or [place for place in places if not place[0].startswith(_OURS[1])]
    return f"{chosen[-1][0]}:{chosen[-1][1]}: " if chosen else ""


# Hooks that a graph would never call: on gradients of parameters, on modules' backward, on optimizers.


_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def refuse_hooks(
    modules: Mapping[nn.Module, str], tensors: Mapping[str, Tensor], optimizers: Iterable[Optimizer] = ()
) -> None:
    """Raise ``CaptureError`` if a backward or optimizer hook is set that a graph would not call."""
    for module, name in modules.items():
        for hooks in (getattr(module, kind) for kind in _MODULE_HOOKS):
            _refuse(hooks, f"module {name or type(module).__name__!r} has a backward hook")
    for name, tensor in tensors.items():
        _refuse(tensor._backward_hooks, f"{name!r} has a gradient hook")
        _refuse(getattr(tensor, "_post_accumulate_grad_hooks", None), f"{name!r} has a gradient hook")
        for hooks in own_hooks.hooks_of_node(tensor):
            _refuse(hooks, f"the AccumulateGrad node of {name!r} has a hook")
    for optimizer in optimizers:
        for hook in own_hooks.hooks_of_step(optimizer):
            _refuse({0: hook}, f"{type(optimizer).__name__} has a step hook or a custom step")


def _refuse(hooks: Mapping[int, Callable[..., object]] | None, what: str) -> None:
    for hook in (hooks or {}).values():
        if getattr(hook, "__module__", "") == own_hooks.__name__:
            continue  # of a session; outside its own sweep it does nothing
        code = getattr(hook, "__code__", None)
        line = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
        raise CaptureError(
            f"{line}{what} ({getattr(hook, '__qualname__', hook)}), which a graph would never call; remove it, or use "
            "engine='tape'"
        )
