"""The modules around a pipe's layers. They do not run in a pipe, so a later change of them would go unseen."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

__all__ = ["has_hooks", "outline", "refuse_changes"]


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of the module runs hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def outline(module: nn.Module, inside: Collection[nn.Module], name: str = "") -> dict[str, object]:
    """Return by name the layers, which are ``inside``, and of the modules around them the code that does not run."""
    found: dict[str, object] = {name: (module.__dict__.get("forward"), has_hooks(module))}
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        if child in inside:
            found[path] = child
        elif child is not None:
            found |= outline(child, inside, path)
    return found


def refuse_changes(before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Raise ``ValueError`` with the name of the first module that differs."""
    if before != now:
        name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
        how = "added" if name not in before else "removed" if name not in now else "replaced, hooked or wrapped"
        raise ValueError(
            f"{repr(name) if name else 'the model'} was {how} after the Pipe was made, which runs those of before; "
            "make a new Pipe of the model"
        )
