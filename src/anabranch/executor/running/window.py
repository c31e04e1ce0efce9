"""The runs that one optimizer step accumulates: their weights, and their gradients for the servers.

Under ``reduction="mean"`` a run's gradient is a mean over its rows, so it enters the sum times its rows, and the sum is
divided by all rows of the window: over its runs, over the workers. Under ``"sum"`` gradients add up as they are.

The totals over the workers travel in a header: with the first bucket of gradients where there is one, else alone::

    [ rows / 4096, rows % 4096, loss * rows, 1 if this worker has a batch, 1 if it was asked to stop, run % 1024,
      1 if it has rows, 1 if other parameters than before are frozen here, 1 if newcomers wait to join ]

Rows go in two parts so that a float32 bucket counts up to 2**36 of them exactly. The runs' numbers show whether all
workers are in the same one: a worker that caught its own error loss and continued is in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anabranch.collectives import Workers
from anabranch.collectives.buckets import HEADER
from anabranch.errors import BoundaryError
from anabranch.executor.engines.gradients import nonfinite_names
from anabranch.executor.running.remote import RemotePart
from anabranch.executor.steps import TrainStep
from anabranch.parameter_server import Merging, RemoteEmbedding, merge_rows
from anabranch.parameter_server.client.parameter_client import REFUSALS

HEADER_SIZE = 9
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
        newcomers: how many have seen that newcomers wait to join.
    """

    rows: float
    loss: float
    active: int
    stopping: int
    with_rows: int
    refrozen: int
    newcomers: int


def header(
    loss: Tensor | None,
    rows: float,
    run: int,
    device: torch.device,
    *,
    active: bool,
    stopping: bool,
    refrozen: bool = False,
    newcomers: bool = False,
) -> Tensor:
    """Return this worker's share; a worker without rows has no loss."""
    high = math.floor(rows / _PART)
    share = [high, rows - high * _PART, 0.0, float(active), float(stopping), run % _RUNS]
    if loss is not None and loss.is_cpu:
        share[_LOSS] = loss.item() * rows
    share += [float(rows > 0), float(refrozen), float(newcomers)]
    values = torch.from_numpy(np.array(share)).to(device)  # a quarter of torch.tensor's time
    if loss is not None and not loss.is_cpu:
        values[_LOSS] = loss.detach().double() * rows
    return values


def total_of(arrived: Callable[[], Tensor], run: int, workers: Workers | None) -> Total:
    """Return the totals of a run, once they have arrived.

    Raises:
        BoundaryError: the workers are not all in the same run.
    """
    high, low, loss, active, stopping, runs, with_rows, refrozen, newcomers = arrived().tolist()
    if runs != (1 if workers is None else workers.size) * (run % _RUNS):
        raise BoundaryError(
            "the workers are in different runs: every worker runs the same steps in the same order, and a loss "
            "that raises on one worker only must end the job, or be caught on all of them",
            peer="the other workers",
            operation=HEADER,
            step=run,
        )
    return Total(high * _PART + low, loss, *map(int, (active, stopping, with_rows, refrozen, newcomers)))


# The gradients for the servers.

_UNSENT = (*REFUSALS, TypeError, ValueError)
"""Errors of a push that left the servers as they were, but for one that some shards refused, which the client knows."""


class RemoteWindow:
    """The gradients of one training step's window that go to the servers.

    Attributes:
        at_end: False: a push needs the gradients of its own tables only.
        parameters: those that the window takes the gradients of, by the names that the engine has for them.
    """

    at_end = False

    def __init__(self, part: RemotePart, step: TrainStep) -> None:
        self.part = part
        self._step = step
        mine = set(step.model.parameters())
        self._names = {tensor: name for tensor, name in part.whole_parameters.items() if tensor in mine}
        self.parameters: Mapping[str, Tensor] = {}
        self.embeddings = [module for module in step.model.modules() if isinstance(module, RemoteEmbedding)]
        self._weight = self._factor = 1.0
        # Other steps' optimizers move these, so that this step's gradients of them go nowhere, as in the plain loop.
        self._foreign = {moved.name for moved in part.moved if moved.optimizer not in step.optimizers}
        if self._foreign and step.clip_grad_norm is not None:
            name = min(self._foreign)
            raise ValueError(
                f"a step clips by the norm of all gradients, but that of {name}, which another step's optimizer "
                f"moves, is on the servers; keep it on the workers: routes={{{name!r}: 'AllReduce'}}"
            )
        self.start_window()

    def lay_out(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take the gradients of those ``parameters`` that belong on the servers; return the others."""
        self.parameters = {name: tensor for name, tensor in parameters.items() if tensor in self._names}
        return {name: tensor for name, tensor in parameters.items() if tensor not in self._names}

    def start_window(self) -> None:
        """Begins a new sum."""
        self._total = 0.0
        self._dense: dict[str, Tensor] = {}
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def start_run(self, weight: float, factor: float) -> None:
        """Start a run of this ``weight`` whose gradients, times ``factor``, are summed to a mean over that weight."""
        self._weight = weight
        # A window of one run sums nothing: its gradients are sent as the mean that they are.
        self._factor = factor if self._step.accumulate > 1 else factor / (weight or 1.0)

    def ready(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a final gradient of a copy."""
        name = self._names[parameter]
        if name in self._foreign:
            return
        gradient = gradient if self._factor == 1.0 else gradient * self._factor
        self._dense[name] = self._dense[name] + gradient if name in self._dense else gradient

    def end_run(self) -> None:
        """Take the looked-up tables' gradients after backward."""
        self._total += self._weight
        frozen = {moved.name for moved in self.part.moved if not moved.parameter.requires_grad}  # since the lookup, too
        frozen |= {module.name for module in self.embeddings if not module.on_servers.requires_grad}
        frozen -= {module.name for module in self.embeddings if module.on_servers.requires_grad}  # of another copy
        for name, (ids, grads) in self.part.tables.take().items():
            if name in frozen or name in self._foreign:
                continue
            self._rows.setdefault(name, []).append((ids, grads if self._factor == 1.0 else grads * self._factor))
        for parameter in self._names:
            parameter.grad = None

    def push(self) -> None:
        """Send the window's gradients; where workers vote, they wait for ``release``."""
        part = self.part
        if part.votes:
            part.begin_push()
            try:
                self._push()
            except Exception as error:  # noqa: BLE001 - raised with the vote, on all workers
                part.refuse(error)
            return
        part.unconfirmed = part.clock
        try:
            self._push()
        except _UNSENT:
            part.unconfirmed = None
            raise
        part.clock, part.unconfirmed = part.clock + 1, None

    def _push(self) -> None:
        mean = self._step.reduction == "mean"
        divisor = self._total if mean and self._step.accumulate > 1 and self._total else 1.0
        if mean:  # every stage of a pipeline pushes with the weight of its rows, so they count once for each
            divisor /= self.part.stages
        merged = {name: parts[0] if len(parts) == 1 else merge_rows(parts) for name, parts in self._rows.items()}
        dense = self._dense
        if divisor != 1.0:
            merged = {name: (ids, grads / divisor) for name, (ids, grads) in merged.items()}
            dense = {name: gradient / divisor for name, gradient in dense.items()}
        merging = Merging(self._total if mean else 1.0, mean, self.part.votes)
        self.part.tables.push(merging, gradients=merged, beside=self.part.whole.beside(dense))
        self.start_window()

    def nonfinite(self) -> list[str]:
        """Return the names of gradients with NaN or an infinity in the open window."""
        rows = [(name, grads) for name, parts in self._rows.items() for _, grads in parts]
        return nonfinite_names([*self._dense.items(), *rows], own=False)

    @property
    def names(self) -> set[str]:
        """The parameters whose gradients this window may hold."""
        return {*self._names.values(), *self.part.rows}

    def squared_norm(self) -> float:
        """Return the sum of squares of the gradients just pushed, of all workers together."""
        try:
            return self.part.client.squared_norm(self.part.clock)
        except Exception as error:  # noqa: BLE001 - as above
            self.part.refuse(error, "norm")
            return 0.0
