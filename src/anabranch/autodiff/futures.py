"""A callback's value that is not there yet: told from tensors, and waited for with a bound."""

from __future__ import annotations

import concurrent.futures
import time
from typing import TypeAlias

import torch
from torch import Tensor

from anabranch.deadline import Deadline

__all__ = ["GradientFuture", "is_future", "result_of"]

GradientFuture: TypeAlias = "concurrent.futures.Future[Tensor] | torch.futures.Future[Tensor]"
"""A gradient on its way: of ``concurrent.futures`` or of torch."""


def is_future(value: object) -> bool:
    """Whether ``value`` is a future of either kind."""
    return isinstance(value, concurrent.futures.Future | torch.futures.Future)


def result_of(future: GradientFuture, deadline: Deadline, *, peer: str, operation: str) -> Tensor:
    """The future's result, or ``DeadlineExceeded`` naming ``peer`` when the deadline comes first."""
    if isinstance(future, concurrent.futures.Future):
        try:
            return future.result(timeout=deadline.remaining())
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # the work's own TimeoutError, not ours
            raise deadline.error(peer=peer, operation=operation) from None
    # torch's futures know no timeout: look until the deadline, then ask for what is there already.
    pause = 1e-5
    while not future.done():
        if deadline.expired():
            raise deadline.error(peer=peer, operation=operation)
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return future.value()
