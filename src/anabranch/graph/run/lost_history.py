"""``without_history``: a tensor that a graph computed and the model keeps, as ``self.last = h`` does.

On the tape such a tensor keeps the history of its step. A graph has none. So its gradient is an error, like a second
gradient through a history on the tape, and never silently missing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.errors import CaptureError

__all__ = ["without_history"]


class _Lost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, anchor: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[None, None]:
        raise CaptureError(
            "a gradient reaches a tensor that the model kept from an earlier step, which ran as a graph and recorded "
            "no history; detach() it where it is kept, or use engine='tape'"
        )


def without_history(value: Tensor) -> Tensor:
    """Return ``value`` as a tensor that requires a gradient, and raises ``CaptureError`` if one arrives."""
    with torch.enable_grad():
        return _Lost.apply(value, torch.empty(0, requires_grad=True, device="cpu"))  # type: ignore[no-any-return,no-untyped-call]
