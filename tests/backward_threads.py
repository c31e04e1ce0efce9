"""A function whose backward notes whether torch may use its own threads of devices for it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor


class NotesThreads(torch.autograd.Function):
    """The identity; each backward adds to ``seen``."""

    seen: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        NotesThreads.seen.append(torch._C._is_multithreading_enabled())
        return gradient
