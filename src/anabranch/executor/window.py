"""The runs that one optimizer step sums up, and what they weigh.

Under ``reduction="mean"`` a run's gradient is a mean over its rows, so it enters the sum times its rows, and the sum is
divided by all rows of the window: over its runs, over the workers. Under ``"sum"`` gradients add up as they are.

The total is not known when backward starts, so a header goes ahead of the gradients while backward runs::

    float64 [ rows, loss * rows, 1 if this worker has a batch ]      summed over the workers
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.collectives import Pending, Workers

__all__ = ["Header", "Total"]


class Total:
    """What a run amounts to over all workers: its rows, its loss, and how many workers had a batch."""

    __slots__ = ("active", "loss", "rows")

    def __init__(self, rows: float, loss: float, active: int) -> None:
        self.rows = rows
        self.loss = loss
        self.active = active


class Header:
    """One run's rows and loss on their way around the workers."""

    def __init__(self, workers: Workers, device: torch.device) -> None:
        self._workers = workers
        self._device = device
        self._values: Tensor | None = None
        self._pending: Pending | None = None

    def start(self, loss: Tensor | None, rows: float, step: int, *, active: bool = True) -> None:
        """Sends this worker's share; one whose loader has ended is not ``active`` and has no loss."""
        if loss is None:
            values = torch.tensor([rows, 0.0, float(active)], dtype=torch.float64, device=self._device)
        elif self._device.type == "cpu":
            values = torch.tensor([rows, loss.item() * rows, 1.0], dtype=torch.float64)
        else:  # without waiting for the device
            values = torch.tensor([rows, 0.0, 1.0], dtype=torch.float64, device=self._device)
            values[1] = loss.detach() * rows
        self._values = values
        self._pending = self._workers.start_all_reduce(values, operation="all_reduce of rows and loss", step=step)

    def total(self) -> Total:
        """The sums over all workers."""
        assert self._pending is not None
        assert self._values is not None
        self._pending.finish()
        rows, loss, active = self._values.tolist()
        self._pending = self._values = None
        return Total(rows, loss, int(active))
