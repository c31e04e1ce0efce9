"""Modules that can be served by name: the command line offers them where the user names no module."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor, nn

__all__ = ["Feedforward", "Nothing", "find_factory", "make_optimizer"]

Factory = Callable[[int], nn.Module]
"""Make an expert's module for inputs of so many features."""


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
        """Return the input, as a tensor of its own."""
        return x.clone()


_NAMED: dict[str, Factory] = {"ffn": Feedforward, "nop": Nothing}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}


def find_factory(name: str) -> Factory:
    """Return the factory of the modules that ``name`` stands for: ``ffn``, ``nop``, or ``package.module:function``.

    >>> find_factory("ffn")(8).__class__.__name__
    'Feedforward'

    Raises:
        ValueError: no such name, module or function.
    """
    if name in _NAMED:
        return _NAMED[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is no module to serve; name {', '.join(_NAMED)} or package.module:function")
    try:
        factory = getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be loaded: {error}") from error
    if not callable(factory):
        raise ValueError(f"{name!r} is a {type(factory).__name__}, not a function of the number of features")

    def make(features: int) -> nn.Module:
        try:
            module = factory(features)
        except TypeError as error:
            raise ValueError(f"{name!r} takes no number of features: {error}") from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"{name!r} returned a {type(module).__name__}, not an nn.Module")
        return module

    return make


def make_optimizer(name: str, module: nn.Module, lr: float) -> torch.optim.Optimizer | None:
    """Return the optimizer called ``name`` over ``module``'s parameters; ``None`` for a module without any, or for
    ``none``.

    Raises:
        ValueError: no such optimizer.
    """
    if name.lower() == "none" or not any(True for _ in module.parameters()):
        return None
    if name.lower() not in _OPTIMIZERS:
        raise ValueError(f"{name!r} is no optimizer here; there are: {', '.join(_OPTIMIZERS)}, none")
    return _OPTIMIZERS[name.lower()](module.parameters(), lr=lr)
