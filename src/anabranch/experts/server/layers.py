"""Modules that can be served by name: the command line's alternatives to a user's module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["Feedforward", "Nothing", "check_steps", "find_factory", "make_optimizer", "make_scheduler"]

Factory = Callable[..., nn.Module | Mapping[str, object]]
"""Make an expert's module, or the arguments of its backend."""


class Feedforward(nn.Module):
    """A transformer's feed-forward layer with a residual connection: four times as wide inside.

    >>> Feedforward(8)(torch.zeros(2, 8)).shape
    torch.Size([2, 8])

    Args:
        features: the last size of its input and output.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.inner = nn.Linear(features, 4 * features)
        self.outer = nn.Linear(4 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus the layer's output."""
        hidden: Tensor = nn.functional.gelu(self.inner(self.norm(x)))
        changed: Tensor = self.outer(hidden)
        return x + changed


class Nothing(nn.Module):
    """Returns its input, so that a call costs only the transport.

    >>> Nothing(8)(torch.zeros(2, 8)).shape
    torch.Size([2, 8])

    Args:
        features: not used; all named modules take it.
    """

    def __init__(self, features: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, as its own tensor."""
        return x.clone()


_NAMED: dict[str, type[nn.Module]] = {"ffn": Feedforward, "nop": Nothing}
_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}


def find_factory(name: str) -> Factory:
    """Return the factory of the modules called ``name``: ``ffn``, ``nop``, or ``package.module:function``.

    >>> find_factory("ffn")(8).__class__.__name__
    'Feedforward'

    It returns a module, or a mapping of arguments of ``ExpertBackend`` with the module among them.

    Raises:
        ValueError: no such name, module or function; or when it is called, other arguments or another result.
    """
    if name in _NAMED:
        factory: Callable[..., object] = _NAMED[name]
    elif ":" in name:
        factory = _import(name)
    else:
        raise ValueError(
            f"{name!r} is not the name of a module to serve; use {', '.join(_NAMED)} or package.module:function"
        )

    def make(*args: object, **kwargs: object) -> nn.Module | Mapping[str, object]:
        try:
            made = factory(*args, **kwargs)
        except TypeError as error:
            given = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
            raise ValueError(f"{name!r} cannot be called with ({given}): {error}") from error
        if isinstance(made, nn.Module) or (isinstance(made, Mapping) and isinstance(made.get("module"), nn.Module)):
            return made
        raise ValueError(
            f"{name!r} returned a {type(made).__name__}, not an nn.Module, nor a mapping of ExpertBackend's arguments "
            "with its 'module'"
        )

    return make


def make_optimizer(
    name: str, module: nn.Module, lr: float | None = None, args: Mapping[str, object] | None = None
) -> Optimizer | None:
    """Return the optimizer called ``name`` over ``module``'s parameters; ``None`` for a module without any, or for
    ``none``.

    Args:
        name: ``sgd``, ``adam``, ``adamw``, ``adagrad``, ``none``, or ``package.module:class``.
        module: has the parameters.
        lr: the learning rate; ``None`` for 0.001, or the default of a class of another package.
        args: further arguments.

    Raises:
        ValueError: no such optimizer, or other arguments.
    """
    if name.lower() == "none" or not any(True for _ in module.parameters()):
        return None
    factory: Callable[..., object]
    given = dict(args or {})
    if ":" in name:
        factory = _import(name)
        given |= {} if lr is None else {"lr": lr}
    elif name.lower() in _OPTIMIZERS:
        factory = _OPTIMIZERS[name.lower()]
        given |= {"lr": 1e-3 if lr is None else lr}
    else:
        raise ValueError(f"{name!r} is not an optimizer; use {', '.join(_OPTIMIZERS)}, none, or package.module:class")
    made = _call(name, factory, module.parameters(), given)
    if not isinstance(made, Optimizer):
        raise ValueError(f"{name!r} returned a {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def make_scheduler(name: str, optimizer: Optimizer, args: Mapping[str, object] | None = None) -> LRScheduler:
    """Return the scheduler called ``name``, which is stepped once per update.

    >>> optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    >>> make_scheduler("StepLR", optimizer, {"step_size": 100}).step_size
    100

    Args:
        name: a class of ``torch.optim.lr_scheduler``, or ``package.module:function`` of the optimizer.
        optimizer: whose learning rate it changes.
        args: further arguments.

    Raises:
        ValueError: no such scheduler, other arguments, or one that steps with a metric.
    """
    factory = _import(name) if ":" in name else getattr(torch.optim.lr_scheduler, name, None)
    if not callable(factory) or factory is LRScheduler:
        raise ValueError(
            f"{name!r} is not a scheduler; use a class of torch.optim.lr_scheduler, such as StepLR, or "
            "package.module:function"
        )
    made = _call(name, factory, optimizer, dict(args or {}))
    if not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau):
        raise ValueError(
            f"{name!r} returned a {type(made).__name__}; an expert needs an LRScheduler that steps without a loss"
        )
    return made


def check_steps(uid: str, optimizer: Optimizer | None, scheduler: LRScheduler | None) -> None:
    """Refuse an optimizer that recomputes the loss, and a scheduler that steps with a metric."""
    for name, what in (("optimizer", optimizer), ("scheduler", scheduler)):
        if what is None:
            continue
        # The class's: schedulers replace the step of their optimizer instance.
        _, *parameters = inspect.signature(type(what).step).parameters.values()
        needed = [
            parameter.name
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if needed:
            raise ValueError(
                f"{uid}: a step of the {name}, a {type(what).__name__}, needs {', '.join(needed)}, which an update "
                f"from a caller's gradients does not have; use another {name}, or override apply_gradients"
            )


def _import(name: str) -> Callable[..., object]:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"{name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise ValueError(f"{name!r} is a {type(found).__name__}, not a function or class")
    return cast("Callable[..., object]", found)


def _call(name: str, factory: Callable[..., object], first: object, args: Mapping[str, object]) -> object:
    try:
        return factory(first, **args)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r} does not take {args}: {error}") from error
