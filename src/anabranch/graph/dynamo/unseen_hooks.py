"""Hooks that a graph would never call: on gradients of parameters, on modules' backward, on optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from anabranch.autodiff import hooks as own_hooks
from anabranch.errors import CaptureError

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
