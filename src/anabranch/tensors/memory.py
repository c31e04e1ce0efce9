"""The memory of a tensor, apart from how often the tensor shows it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["shown_once"]


def shown_once(tensor: Tensor) -> Tensor:
    """Return a view that shows what an expanded tensor repeats once, so that it can be copied and written.

    >>> shown_once(torch.ones(3, 1).expand(3, 4)).shape
    torch.Size([3, 1])
    """
    with torch._C.DisableTorchFunctionSubclass():
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
