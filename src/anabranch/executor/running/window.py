"""The runs that one optimizer step accumulates, and their weights.

Under ``reduction="mean"`` a run's gradient is a mean over its rows, so it enters the sum times its rows, and the sum is
divided by all rows of the window: over its runs, over the workers. Under ``"sum"`` gradients add up as they are.

The totals over the workers travel in a header: with the first bucket of gradients where there is one, else alone::

    [ rows / 4096, rows % 4096, loss * rows, 1 if this worker has a batch, 1 if it was asked to stop, run % 1024,
      1 if it has rows, 1 if other parameters than before are frozen here ]

Rows go in two parts so that a float32 bucket counts up to 2**36 of them exactly. The runs' numbers show whether all
workers are in the same one: a worker that caught its own error loss and continued is in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.collectives import Workers
from anabranch.errors import BoundaryError

HEADER_SIZE = 8
_PART = 4096
_LOSS = 2
_RUNS = 1024


@dataclass(frozen=True, slots=True)
class Total:
    """Totals of a run over all workers.

    Attributes:
        rows: the weight of the run.
        loss: the sum of the workers' losses, each times its rows.
        active: how many workers had a batch.
        stopping: how many were asked to stop.
        with_rows: how many had rows.
        refrozen: how many have frozen or unfrozen parameters since the last window.
    """

    rows: float
    loss: float
    active: int
    stopping: int
    with_rows: int
    refrozen: int


def header(
    loss: Tensor | None,
    rows: float,
    run: int,
    device: torch.device,
    *,
    active: bool,
    stopping: bool,
    refrozen: bool = False,
) -> Tensor:
    """Return this worker's share; a worker without rows has no loss."""
    high = math.floor(rows / _PART)
    on_host = device.type == "cpu"
    weighted = loss.item() * rows if loss is not None and on_host else 0.0
    share = [high, rows - high * _PART, weighted, float(active), float(stopping), run % _RUNS]
    share += [float(rows > 0), float(refrozen)]
    values = torch.tensor(share, dtype=torch.float64, device=device)
    if loss is not None and not on_host:  # without waiting for the device
        values[_LOSS] = loss.detach() * rows
    return values


class Totals:
    """A run's totals, on their way around the workers."""

    __slots__ = ("_arrived", "_run", "_size")

    def __init__(self, arrived: Callable[[], Tensor], run: int, size: int) -> None:
        self._arrived = arrived
        self._run = run
        self._size = size

    @classmethod
    def alone(cls, share: Tensor, workers: Workers | None, step: int) -> Totals:
        """Send a header in its own message; without workers it is the total already."""
        if workers is None:
            return cls(lambda: share, step, 1)
        pending = workers.start_all_reduce(share, operation="all_reduce of rows and loss", step=step)

        def arrived() -> Tensor:
            pending.finish()
            return share

        return cls(arrived, step, workers.size)

    def wait_for(self) -> Total:
        """Return the totals, once they have arrived.

        Raises:
            BoundaryError: the workers are not all in the same run.
        """
        high, low, loss, active, stopping, runs, with_rows, refrozen = self._arrived().tolist()
        if runs != self._size * (self._run % _RUNS):
            raise BoundaryError(
                "the workers are in different runs: every worker runs the same steps in the same order, and a loss "
                "that raises on one worker only must end the job, or be caught on all of them",
                peer="the other workers",
                operation="all_reduce of rows and loss",
                step=self._run,
            )
        counts = map(int, (active, stopping, with_rows, refrozen))
        return Total(high * _PART + low, loss, *counts)
