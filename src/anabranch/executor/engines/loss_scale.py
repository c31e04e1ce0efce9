"""The factor on a float16 loss: large enough to keep small gradients, small enough to avoid overflow."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["LossScale"]

_FIRST = 2.0**16
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """A power of two that falls by half at an overflow and doubles after 2,000 steps without one.

    The rule and its numbers are those of ``torch.amp.GradScaler``.

    >>> scale = LossScale()
    >>> scale.update(overflow=True)
    >>> scale.value
    32768.0
    """

    def __init__(self) -> None:
        self.value = _FIRST
        self._steps = 0

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients of a scaled loss by the factor, in place."""
        values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        if values:
            torch._foreach_mul_(values, 1.0 / self.value)

    def update(self, *, overflow: bool) -> None:
        """Update the factor after a step."""
        if overflow:
            self.value, self._steps = self.value * _BACKOFF, 0
            return
        self._steps += 1
        if self._steps == _INTERVAL:
            self.value, self._steps = self.value * _GROWTH, 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "steps": self._steps}

    def restore(self, state: dict[str, float]) -> None:
        """Restore a saved state."""
        self.value, self._steps = float(state["value"]), int(state["steps"])
