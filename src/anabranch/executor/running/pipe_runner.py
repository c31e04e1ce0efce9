"""Runs a ``TrainStep`` whose model is a ``Pipe``, in one process or across ranks, with or without other pipelines.

::

                stage 0      stage 1
    row 0       rank 0 ────> rank 1        a row is a pipeline: its ranks take the same batches
                  │            │
    row 1       rank 2 ────> rank 3        a column holds one stage: its ranks average their gradients

The pipe's schedule takes the tape's place: it leaves gradients in ``.grad``, which go into the column's buckets as any
others do. Values on which a row must agree (the loss, a request to stop) are sent with the end of the step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch import spans
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.collectives import Workers
from anabranch.executor.drift import Drift
from anabranch.executor.engines.clipping import clip_scale
from anabranch.executor.engines.engine import Begin, Engine, Ready, StepOutput
from anabranch.executor.engines.fetching import FACTS, Fetch
from anabranch.executor.engines.finite import nonfinite_names
from anabranch.executor.running.runner import StepRunner
from anabranch.executor.steps import Step, TrainStep
from anabranch.interrupts import hold_interrupts
from anabranch.pipeline import Pipe
from anabranch.pipeline.pipe import Loss, Shared
from anabranch.tensors import Structure, named_parts

__all__ = ["PipeRunner", "PipelineGrid", "check_pipes", "evaluated", "pipe_run", "runner_for", "seed_pipes"]

_log = logging.getLogger("anabranch.executor")


def runner_for(
    name: str, step: TrainStep, workers: Workers | None, make: Callable[[], Engine], asked: str, drift: Drift | None
) -> StepRunner:
    """Return the runner of the step called ``name``; the engine that was ``asked`` for is made if it can run this
    model.
    """
    if not isinstance(step.model, Pipe):
        return StepRunner(step, make(), workers, drift)
    if asked == "graph":
        _log.warning("step %r trains a Pipe, which runs its own schedule: its engine is the tape", name)
    return PipeRunner(step, workers, drift)


class PipeRunner(StepRunner):
    """Runs one ``TrainStep`` of a ``Pipe``.

    Args:
        step: the step to run; its loss is ``fn(output, target)``.
        workers: the ranks that hold the same stages in other pipelines; ``None`` without any.
        drift: compares their parameters, if they are to be compared.
    """

    def __init__(self, step: TrainStep, workers: Workers | None, drift: Drift | None = None) -> None:
        self._pipe = cast(Pipe, step.model)
        self._schedule = _ScheduleEngine(step, self._pipe)
        super().__init__(step, self._schedule, workers, drift)

    def run(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput:
        """One run on this pipeline's share of the batch."""
        _check_fetch(fetch)
        if self.remote is not None:
            self.remote.part.tables.keeps_reads = self._pipe.checkpoint != "never"
        self._schedule.rows = int(rows)
        self._schedule.asks_to_stop = self.asked_to_stop
        return super().run(batch, rows, fetch)

    def _wants_to_stop(self) -> bool:
        # Only values known to the whole row go up the columns, or some columns would stop a run earlier.
        return self.asked_to_stop if self._pipe.process_group is None else self._schedule.asked_to_stop

    def _named_parameters(self) -> Mapping[str, Tensor]:
        here = set(parameters_here(self._pipe).values())
        return {name: parameter for parameter, name in self._pipe.first_names().items() if parameter in here}

    def _clip(self, max_norm: float) -> Tensor:
        if self.remote is None:
            return self._pipe.clip_grad_norm(max_norm)
        norm = self._pipe.clip_grad_norm(max_norm, elsewhere=self.remote.squared_norm())
        self.remote.release(clip_scale(norm, max_norm).item())
        return norm

    def _norm(self) -> Tensor:
        return self._pipe.grad_norm()

    def _find_nonfinite(self) -> list[str]:
        found = _nonfinite(self._pipe)
        if self.remote is None or not self.step.skip_nonfinite:
            return found
        everyone = self.remote.part.gather([[*found, *self.remote.nonfinite()]])
        return sorted({name for names in everyone for name in names[0]})

    @property
    def _looks_first(self) -> bool:
        # Alike on all stages, whatever each has to sum.
        across = self._pipe.process_group is not None
        return self.step.skip_nonfinite is not None and (across or super()._looks_first)

    def _update(self) -> None:
        if self._workers is not None and self._workers.size > 2:
            # The sums of more than two depend in their last bits on where a gradient is in its bucket.
            self._pipe.align_ties()
        super()._update()


class _ScheduleEngine:
    """Differentiates by running the pipe's schedule."""

    name = "tape"

    def __init__(self, step: TrainStep, pipe: Pipe) -> None:
        self._step = step
        self._pipe = pipe
        self._handed_over: list[Tensor] = []
        self._ready: Ready = lambda parameter, gradient: None
        self.rows = 0
        self.asks_to_stop = False
        self.asked_to_stop = False

    def attach(self, parameters: Mapping[str, Tensor], ready: Ready) -> None:
        """Hands the gradients of these parameters to ``ready`` from now on."""
        self._handed_over = list(reversed(parameters.values()))  # type: ignore[call-overload]
        self._ready = ready

    def follow_model(self) -> None:
        """Nothing is kept of the model's parameters."""

    def differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Run the schedule; then ``begin(loss)``, then passes on the gradients."""
        shared = self._run(batch, seed)
        begin(shared.loss)
        for parameter in self._handed_over:
            if parameter.grad is not None:
                self._ready(parameter, parameter.grad)
        return StepOutput(shared.loss, {})

    def step(self, batch: Structure, fetch: Fetch) -> StepOutput:
        """Return the schedule, clipping and the optimizers' step."""
        shared = self._run(batch)
        if self._step.skip_nonfinite is not None and (names := _nonfinite(self._pipe)):
            return StepOutput(shared.loss, {}, names)
        if self._step.clip_grad_norm is not None:
            self._pipe.clip_grad_norm(self._step.clip_grad_norm)
        self.update()
        return StepOutput(shared.loss, {})

    def update(self) -> None:
        """Step the optimizers of this process's stages."""
        hold_interrupts()
        with spans.span("optimizer", "compute"):
            for optimizer in self._step.optimizers:
                optimizer.step()

    def _run(self, batch: Structure, seed: float = 1.0) -> Shared:
        shared = pipe_run(self._step, self._pipe, batch, self.rows, word=self.asks_to_stop, seed=seed)
        self.asked_to_stop = self.asked_to_stop or any(shared.words)
        return shared


def pipe_run(step: TrainStep, pipe: Pipe, batch: Structure, rows: int, *, word: object, seed: float = 1.0) -> Shared:
    """Forward and backward of one batch by the pipe's schedule, with the facts that all its ranks know afterwards."""
    args, inputs, target = _split_batch(batch)
    device = next((parameter.device.type for parameter in pipe.parameters()), "cpu")
    dtype = step.autocast_dtype
    with nullcontext() if dtype is None else torch.autocast(device, dtype=dtype):
        return pipe.step_together(
            args, inputs, target, loss=cast(Loss, step.loss), reduction=step.reduction, rows=rows, word=word, seed=seed
        )


def _nonfinite(pipe: Pipe) -> list[str]:
    """Return the parameters whose gradients are not finite; not empty if there is one on any of the pipe's ranks."""
    if pipe.process_group is not None and math.isfinite(pipe.grad_norm()):
        return []
    first, here = pipe.first_names(), parameters_here(pipe).values()
    found = nonfinite_names((first[parameter], parameter.grad) for parameter in here if parameter.grad is not None)
    elsewhere = [] if pipe.process_group is None else ["parameters on another rank (or their norm is too large)"]
    return found or elsewhere


def _split_batch(batch: Structure) -> tuple[tuple[Structure, ...], dict[str, Structure], Structure]:
    """Return a batch's positional inputs, keyword inputs and target."""
    if (inputs := named_parts(batch)) is not None:
        target = inputs.pop("target", None)
        return (), inputs, target
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise ValueError(
            f"a TrainStep of a Pipe takes batches (x, target), got {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
            + '; several inputs come before the target, keyword inputs in a dict, the target under "target"'
        )
    return tuple(batch[:-1]), {}, batch[-1]


def _check_fetch(fetch: Fetch) -> None:
    others = [name for name in fetch.names or () if name != "loss" and name not in FACTS]
    if others:
        raise ValueError(
            f"fetch names {others}, but a TrainStep of a Pipe returns 'loss' and {FACTS} only: outputs and "
            "gradients are split over microbatches and other stages' ranks; use an EvalStep, or pipe.step"
        )


# Evaluation.


def evaluated(model: nn.Module, fetch: Fetch) -> AbstractContextManager[None]:
    """Make a pipe's output available on all of its ranks while the block runs.

    Raises:
        ValueError: ``fetch`` names a submodule of a pipe, which sees microbatches one at a time.
    """
    if not isinstance(model, Pipe):
        return nullcontext()
    layers = [name for name in fetch.names or () if name in model.submodules]
    if layers:
        raise ValueError(
            f"fetch names {layers}, layers of a Pipe, which run one microbatch at a time; return the values "
            "from outputs(model, batch)"
        )
    return model.output_everywhere()


# The steps of a program, and the grid they run on.


def check_pipes(steps: Mapping[str, Step], group: dist.ProcessGroup | None, comm_mode: str | None) -> Pipe | None:
    """Return the pipe whose ranks these are, if one of the steps' is across ranks.

    Raises:
        ValueError: steps that cannot run on the same ranks, ``rows=`` for a pipe, or a data-parallel ``group`` with
            other stages in it.
    """
    for name, step in steps.items():
        if isinstance(step.model, Pipe) and isinstance(step, TrainStep) and step.rows is not None:
            raise ValueError(f"step {name!r} trains a Pipe, which splits batches along their rows; leave out rows=")
    across = [step.model for step in steps.values() if isinstance(step.model, Pipe) and step.model.process_group]
    if not across:
        return None
    pipe = across[0]
    for name, step in steps.items():
        if not isinstance(step.model, Pipe) or step.model.process_group is not pipe.process_group:
            raise ValueError(
                f"step {name!r} does not run on the ranks of the other steps' Pipe; build all Pipes of an Executor "
                "on one process_group, or make another Executor"
            )
    if comm_mode is not None:
        line = set(dist.get_process_group_ranks(cast(dist.ProcessGroup, pipe.process_group)))
        column = set(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        if len(line & column) > 1:
            raise ValueError(
                f"gradients would be averaged over ranks {sorted(column)}, of which {sorted(line & column)} are stages "
                "of one pipeline; give process_group= the ranks that hold the same stage (job.grid(...).data_group)"
            )
    return pipe


def seed_pipes(steps: Mapping[str, Step], seed: int) -> None:
    """From now on pipes draw from the streams of ``seed``."""
    for step in steps.values():
        if isinstance(step.model, Pipe):
            step.model.seed = seed


class PipelineGrid:
    """Parallel pipelines as one sequence of ranks: ``row * stages + stage``.

    Args:
        column: the ranks that hold this rank's stage; ``None`` if there is one pipeline.
        line: the ranks of this pipeline.
    """

    def __init__(self, column: Workers | None, line: Workers) -> None:
        self._column = column
        self._line = line
        self.stages = line.size
        self.size = line.size * (1 if column is None else column.size)
        self.rank = line.rank + (0 if column is None else column.rank * line.size)

    def all_gather_bytes(self, data: bytes, *, operation: str) -> list[bytes]:
        """Every rank's ``data``, in the order of ranks."""
        row = self._line.all_gather_bytes(data, operation=operation)
        if self._column is None:
            return row
        rows = self._column.all_gather_bytes(msgspec.msgpack.encode(row), operation=operation)
        return [one for text in rows for one in msgspec.msgpack.decode(text, type=list[bytes])]

    def gather_bytes(self, data: bytes, *, operation: str) -> list[bytes]:
        """Return the same on rank 0, nothing on the others."""
        row = self._line.gather_bytes(data, operation=operation)
        if self._column is None or self._line.rank:
            return row
        rows = self._column.gather_bytes(msgspec.msgpack.encode(row), operation=operation)
        return [one for text in rows for one in msgspec.msgpack.decode(text, type=list[bytes])]

    def check_present(self) -> None:
        """Raise ``PeerLost`` if a rank of this row or of this column is known to be lost."""
        self._line.check_present()
        if self._column is not None:
            self._column.check_present()

    def close(self) -> None:
        """End watching the ranks of this pipeline."""
        self._line.close()
