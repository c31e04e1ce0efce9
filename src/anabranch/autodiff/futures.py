"""Futures returned by callbacks: recognised, and waited for with a time limit."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor

from anabranch.deadline import Deadline

GradientFuture: TypeAlias = "concurrent.futures.Future[Tensor] | torch._C.Future[Any]"
"""A gradient on its way: of ``concurrent.futures``, of torch, or ``get_future()`` of a collective's work."""


def is_future(value: object) -> TypeGuard[GradientFuture]:
    """Return True if ``value`` is a future of either kind."""
    return isinstance(value, concurrent.futures.Future | torch._C.Future)


def result_of(future: GradientFuture, deadline: Deadline, *, peer: str, operation: str) -> Tensor:
    """Return the future's result, or ``DeadlineExceeded`` naming ``peer`` when the deadline comes first."""
    pause = 1e-5  # torch's futures have no timeout
    while not future.done():
        deadline.check(peer=peer, operation=operation)
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    if isinstance(future, concurrent.futures.Future):
        return future.result(timeout=0)
    # Done already: no thread waits, but the current streams for the future's.
    (value,) = torch.futures.wait_all([cast("torch.futures.Future[Tensor]", future)])
    return _only_tensor(value)


def _only_tensor(value: object) -> Tensor:
    """Return the tensor of a future's value; that of a collective is a list of its tensors, here of one."""
    several = value if isinstance(value, list | tuple) else [value]
    if len(several) == 1 and isinstance(several[0], Tensor):
        return several[0]
    raise TypeError(f"a callback's future returns a tensor, or a list of one tensor like collectives, got {value!r}")


_GRACE = 1.0
"""Seconds that a failed sweep waits for work its callbacks have begun: the remote side may be waiting for us too."""


def abandon(values: Iterable[object], error: BaseException) -> None:
    """Cancel the futures among ``values``, give those that run a moment to end, and note on ``error`` which did not.

    Their results are ignored: ``error`` came first.
    """
    futures = [value for value in values if is_future(value)]
    for future in futures:
        if isinstance(future, concurrent.futures.Future):
            future.cancel()
    deadline = Deadline.after(_GRACE)
    while (running := sum(not future.done() for future in futures)) and not deadline.expired():
        time.sleep(1e-3)
    if running:
        error.add_note(f"{running} future(s) that callbacks returned are still running")
