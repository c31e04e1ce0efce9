"""The interface between running a step and differentiating it, implemented by the tape and the graph engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from anabranch.executor.engines.fetching import Fetch
from anabranch.tensors import Structure

__all__ = ["Begin", "Engine", "Ready", "StepOutput", "loss_and_returned"]

Ready: TypeAlias = "Callable[[Tensor, Tensor], Tensor | None]"
"""``ready(parameter, gradient)`` takes a final gradient and returns the tensor that replaces it."""

Begin: TypeAlias = "Callable[[Tensor], None]"
"""``begin(loss)`` is called before the first gradient is final."""

_NOTHING: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one run of a training step.

    Attributes:
        loss: a tensor of no dimensions.
        returned: the step's other results.
        nonfinite: the parameters with gradients that are not finite; nothing was updated.
    """

    loss: Tensor
    returned: Mapping[str, Tensor]
    nonfinite: Sequence[str] = ()


class Engine(Protocol):
    """Computes the gradients of one training step."""

    @property
    def name(self) -> str:
        """The name that ``Executor.engine`` returns."""
        ...

    def attach(self, parameters: Mapping[str, Tensor], ready: Ready) -> None:
        """From now on ``differentiate`` passes the gradients of these parameters to ``ready`` as they become final."""
        ...

    def follow_model(self) -> None:
        """Look up the model's parameters again: some were replaced."""
        ...

    def differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward, and backward from the gradient ``seed`` of the loss."""
        ...

    def update(self) -> None:
        """Step the optimizers on the gradients in ``.grad``."""
        ...

    def step(self, batch: Structure, fetch: Fetch) -> StepOutput:
        """Forward, backward, clipping and the optimizers' step, for a worker without others.

        Nothing is updated where a gradient is not finite, unless ``step.skip_nonfinite`` is None.
        """
        ...


def loss_and_returned(answer: object) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Check the result of the user's loss function, and split it into loss and further tensors.

    Raises:
        TypeError, ValueError: it is not a scalar tensor that depends on a parameter, with or without a dict.
    """
    returned: object = _NOTHING
    loss = answer
    if isinstance(answer, tuple) and len(answer) == 2:
        loss, returned = answer
        if not isinstance(returned, Mapping):
            raise TypeError(f"besides the loss a step returns a dict of tensors, got {type(returned).__name__}")
    elif isinstance(answer, Mapping) and "loss" in answer:
        loss = answer["loss"]
        returned = {name: value for name, value in answer.items() if name != "loss" and isinstance(value, Tensor)}
    elif not isinstance(answer, Tensor):
        loss = getattr(answer, "loss", answer)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss(model, batch) returns a scalar tensor, (scalar, dict), a mapping with 'loss' or an object with "
            f".loss, got {type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, but backward starts from a single number; return loss.mean() "
            "with reduction='mean', or loss.sum() with reduction='sum'"
        )
    if not torch.is_grad_enabled():
        raise ValueError(
            "gradients are switched off around this run (torch.no_grad, inference_mode); a step needs them"
        )
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any parameter that requires a gradient; nothing would be trained")
    return loss if loss.ndim == 0 else loss.reshape(()), cast("Mapping[str, Tensor]", returned)
