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
_OPERATION = "all_reduce of rows and loss"


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
    share = [high, rows - high * _PART, 0.0, float(active), float(stopping), run % _RUNS]
    values = torch.tensor([*share, float(rows > 0), float(refrozen)], dtype=torch.float64, device=device)
    if loss is not None:
        values[_LOSS] = loss.detach().double() * rows
    return values


def sent_alone(share: Tensor, workers: Workers | None, run: int) -> Callable[[], Tensor]:
    """Send a header in its own message, and return what waits for the totals; without workers it is the totals."""
    pending = None if workers is None else workers.start_all_reduce(share, operation=_OPERATION, step=run)

    def arrived() -> Tensor:
        if pending is not None:
            pending.finish()
        return share

    return arrived


def total_of(arrived: Callable[[], Tensor], run: int, workers: Workers | None) -> Total:
    """Return the totals of a run, once they have arrived.

    Raises:
        BoundaryError: the workers are not all in the same run.
    """
    high, low, loss, active, stopping, runs, with_rows, refrozen = arrived().tolist()
    if runs != (1 if workers is None else workers.size) * (run % _RUNS):
        raise BoundaryError(
            "the workers are in different runs: every worker runs the same steps in the same order, and a loss "
            "that raises on one worker only must end the job, or be caught on all of them",
            peer="the other workers",
            operation=_OPERATION,
            step=run,
        )
    return Total(high * _PART + low, loss, *map(int, (active, stopping, with_rows, refrozen)))
