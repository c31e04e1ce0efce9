"""A loss with its own parameters, trained with the model, as one module for code that iterates over parameters.

The model keeps its names in checkpoints, routes and ``fetch``; the loss's own parameters follow with the prefix
``loss.``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from anabranch.pipeline import Pipe

PREFIX = "loss"


class ModelWithLoss(nn.Module):
    """A model and the module that computes its loss, under the model's own names and ``loss.``.

    Args:
        model: its names are unchanged.
        loss: its names begin with ``loss.``.
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    @property
    def training(self) -> bool:
        """True if both are in training mode; each keeps its own."""
        return self.model.training and self.loss.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Nothing: ``train`` and ``eval`` reach the two parts as they reach all children."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model's modules by their own names, then the loss's."""
        memo = set() if memo is None else memo
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        behind = f"{prefix}.{PREFIX}" if prefix else PREFIX
        yield from self.loss.named_modules(memo, behind, remove_duplicate)


def beside(model: nn.Module, loss: Callable[..., Any]) -> tuple[nn.Module, Callable[..., Any]]:
    """Return the module that a step trains and its loss function, for a loss that may own parameters or buffers.

    Args:
        model: the model of the step.
        loss: a function, a module, or a method of a module.

    Raises:
        ValueError: the model is a ``Pipe``, or has its own ``loss`` already.
    """
    owner = getattr(loss, "__self__", loss)
    if not isinstance(owner, nn.Module):
        return model, loss
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    if all(id(tensor) in held for tensor in (*owner.parameters(), *owner.buffers())):
        return model, loss
    if isinstance(model, Pipe):
        raise ValueError(
            f"the loss {type(owner).__name__} has its own parameters or buffers, but a Pipe computes its loss on "
            "the last stage's rank only; make them a layer at the end of the Pipe"
        )
    taken = [name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())]
    if any(name.split(".")[0] == PREFIX for name in taken):
        raise ValueError(
            f"{type(model).__name__} has a {PREFIX!r}, under which the parameters of the loss {type(owner).__name__} "
            f"would be saved; rename the model's, or use {type(model).__name__}.{PREFIX} as the loss"
        )
    return ModelWithLoss(model, owner), lambda both, batch: loss(both.model, batch)


def model_of(module: nn.Module) -> nn.Module:
    """Return the model without the loss module."""
    return module.model if isinstance(module, ModelWithLoss) else module
