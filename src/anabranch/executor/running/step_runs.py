"""``StepRuns``: one run of a training step, or of an evaluation, from the batch to the values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from anabranch.executor.engines.evaluator import Evaluator
from anabranch.executor.engines.fetching import Fetch
from anabranch.executor.loaders.batches import Batches
from anabranch.executor.observing.watching import Watching, rates_of
from anabranch.executor.running.pipe_runner import evaluated
from anabranch.executor.running.remote import RemotePart
from anabranch.executor.running.runner import StepRunner
from anabranch.executor.steps import EvalStep, TrainStep
from anabranch.tensors import Structure, as_tensors, count_rows

__all__ = ["StepRuns", "StepTaken", "rows_of"]


@dataclass(frozen=True, slots=True)
class StepTaken:
    """An optimizer step that a run took.

    Attributes:
        rows: of this worker's batch.
        rates: learning rates that it was taken with.
        numbers: tensors by name; sinks get those with one element.
    """

    rows: float
    rates: tuple[float, ...]
    numbers: Mapping[str, Tensor]


@dataclass(slots=True)
class StepRuns:
    """Runs the steps of an executor.

    Attributes:
        runners: of the training steps, by their names.
        evaluators: of the evaluations.
        batches: the bound loaders.
        devices: where each step's batches go.
        watching: receives each step.
        remote: the parameters on servers.
        before: called with the step's name and the batch in place of the first training run, for ``anabranch plan``.
        rows: of this worker's batches so far.
    """

    runners: Mapping[str, StepRunner]
    evaluators: Mapping[str, Evaluator]
    batches: Batches
    devices: Mapping[str, torch.device | None]
    watching: Watching
    remote: RemotePart | None
    before: Callable[[str, Structure | None], None] | None = None
    rows: float = 0.0

    @property
    def step(self) -> int:
        """The number of optimizer steps taken, those of a loaded checkpoint included."""
        return sum(runner.steps for runner in self.runners.values())

    def train(
        self, name: str, step: TrainStep, batch: Structure | None, fetch: Fetch
    ) -> tuple[dict[str, Tensor], StepTaken | None]:
        """Return the values of a run, and the optimizer step that it took if steps are observed."""
        if self.remote is not None and self.before is None:
            self.remote.open()  # before a batch is taken: it may be refused
        runner = self.runners[name]
        watched, steps_before = self.watching.of_steps, runner.steps
        rates = rates_of(step.optimizers) if watched or fetch.wants_rates else ()
        fetch.norm, rows = None, 0.0
        if not step.model.training:
            step.model.train()
        ran = None
        try:
            while ran is None:
                bound = batch is None
                found = self.batches.next(name, runner.end_epoch) if bound else batch
                length = self.batches.length(name) if bound else None
                if self.before is not None:
                    self.before(name, found)
                if found is None:
                    with runner.in_epoch(length):
                        ran = runner.run_idle()
                    if ran is None:
                        runner.end_epoch()
                        self.batches.start_epoch(name)
                    continue
                found = as_tensors(found, self.devices[name])
                rows = rows_of(step, found)
                with runner.in_epoch(length) if bound else nullcontext():
                    ran = runner.run(found, rows, fetch)
                self.rows += rows
        finally:
            self._end_reads()
        if self.remote is not None:
            self.remote.read_applied()
        if fetch.names is not None:
            fetch.rows = torch.tensor(rows if step.rows is not None else int(rows), device="cpu")
            fetch.rates = torch.tensor(rates, dtype=torch.float64, device="cpu")
        values = {"loss": ran.loss}
        values.update(fetch.collect(ran.returned))
        values["loss"] = ran.loss
        if runner.steps != steps_before:
            self.watching.counted(self.step)
        if not watched or runner.steps == steps_before:
            return values, None
        numbers = {"loss": ran.loss} if fetch.norm is None else {"loss": ran.loss, "grad_norm": fetch.norm}
        return values, StepTaken(rows, rates, {**numbers, **ran.returned, "loss": ran.loss})

    def _end_reads(self) -> None:
        if self.remote is not None:
            self.remote.tables.end(self.remote.clock)

    def evaluate(self, name: str, step: EvalStep, batch: Structure | None, fetch: Fetch) -> dict[str, Tensor]:
        """Return the values of an evaluation."""
        found = self.batches.next_to_evaluate(name) if batch is None else batch
        found = as_tensors(found, self.devices[name])
        if self.remote is not None:
            self.remote.begin(training=False)
        try:
            with evaluated(step.model, fetch), _eval_mode(step.model), torch.no_grad():
                returned = self.evaluators[name].run(found, fetch)
        finally:
            self._end_reads()
        if fetch.names is not None and "rows" in fetch.names:
            fetch.rows = torch.tensor(count_rows(found), device="cpu")
        return cast("dict[str, Tensor]", fetch.collect(returned))


def rows_of(step: TrainStep, batch: Structure) -> float:
    """Return the weight of a batch.

    Raises:
        ValueError: its tensors disagree in rows, or ``rows(batch)`` gave no number of at least 0.
    """
    rows = float(count_rows(batch) if step.rows is None else step.rows(batch))
    if not 0 <= rows < float("inf"):
        raise ValueError(f"rows(batch) gave {rows!r}; the weight of a batch is a finite number of at least 0")
    return rows


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode for the block; afterwards every submodule has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
