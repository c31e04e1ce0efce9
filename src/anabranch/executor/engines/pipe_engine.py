"""The engine of a ``TrainStep`` whose model is a ``Pipe``, in one process or across ranks, beside others or alone.

The pipe's schedule takes the tape's place: it leaves gradients in ``.grad``, which are passed on afterwards. Values on
which the ranks of one pipeline must agree (the loss, a request to stop) are sent with the end of the step.

::

                stage 0      stage 1
    row 0       rank 0 ────> rank 1        a row is a pipeline: its ranks take the same batches
                  │            │
    row 1       rank 2 ────> rank 3        a column holds one stage: its ranks average their gradients
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.collectives import Workers
from anabranch.executor.engines.engine import NORM, Begin, Engine, Fetch, GradientSink, StepOutput
from anabranch.executor.exchange import exchange
from anabranch.executor.steps import Step, TrainStep
from anabranch.pipeline import Pipe
from anabranch.pipeline.microbatch import scatter
from anabranch.pipeline.pipe import PipeRanks
from anabranch.pipeline.pipe_call import Loss, make_head
from anabranch.tensors import Structure, count_rows, named_parts


class PipeEngine(Engine):
    """Differentiates by running the pipe's schedule.

    Args:
        step: the step to run; its loss is ``fn(output, target)``.
        sinks: take gradients elsewhere.
        columns: how many pipelines there are beside one another.
    """

    def __init__(self, step: TrainStep, sinks: Sequence[GradientSink] = (), columns: int = 1) -> None:
        super().__init__(step, sinks)
        self._pipe, self._columns = cast(Pipe, step.model), columns
        self._asked_to_stop = False
        self.first_looks = self._pipe.process_group is not None  # alike on all stages, whatever each has to sum
        self.reads_again = self._pipe.checkpoint != "never"

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters of this process's stages that are here, by name."""
        here = set(parameters_here(self._pipe).values())
        return {name: p for p, name in PipeRanks(self._pipe).first_names().items() if p in here}

    def ask_to_stop(self) -> None:
        """Let the ranks of the pipeline know with the next run: else some columns would stop a run earlier."""
        self._asked_to_stop = True
        if self._pipe.process_group is None:
            self.stopping = True

    def check(self, fetch: Fetch) -> None:
        """Raise ``ValueError`` for outputs and gradients."""
        others = [name for name in fetch.names or () if name not in ("loss", NORM)]
        if others:
            raise ValueError(
                f"fetch names {others}, but a TrainStep of a Pipe returns 'loss' and {NORM!r} only: outputs and "
                "gradients are split over microbatches and other stages' ranks; use an EvalStep, or pipe.step"
            )

    def lay_out(self) -> None:
        """Nothing: no hook passes gradients on while the schedule runs."""

    def differentiate(self, batch: Structure, rows: float, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Run the schedule; then ``begin(loss)``, then passes on the gradients."""
        loss = self._run(batch, rows, seed)
        begin(loss)
        for sink in self._sinks:
            for parameter in reversed(sink.parameters.values()):  # type: ignore[call-overload]
                if parameter.grad is not None:
                    sink.ready(parameter, parameter.grad)
        return StepOutput(loss, {})

    def step(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput:
        """Return the schedule, clipping and the optimizers' step."""
        return self._finish(StepOutput(self._run(batch, rows), {}), self.update)

    def update(self) -> None:
        """Step the optimizers of this process's stages."""
        if self._columns > 2:
            # The sums of more than two depend in their last bits on where a gradient is in its bucket.
            PipeRanks(self._pipe).align_ties()
        super().update()

    def clip(self, max_norm: float, elsewhere: float | None = None) -> Tensor:
        """Clip the gradients of all stages by their norm; return the norm before."""
        return self._pipe.clip_grad_norm(max_norm, elsewhere=elsewhere)

    def norm(self) -> Tensor:
        """Return the norm of the gradients of all stages."""
        return PipeRanks(self._pipe).grad_norm()

    def nonfinite(self) -> list[str]:
        """Return the parameters whose gradients are not finite; not empty if there is one on any of the ranks."""
        across = self._pipe.process_group is not None
        if across and math.isfinite(PipeRanks(self._pipe).grad_norm()):
            return []
        elsewhere = ["parameters on another rank (or their norm is too large)"] if across else []
        return super().nonfinite() or elsewhere

    def _run(self, batch: Structure, rows: float, seed: float = 1.0) -> Tensor:
        """Forward and backward of one batch by the pipe's schedule, which brings word of requests to stop along."""
        if not torch.is_grad_enabled():
            raise ValueError("gradients are switched off around this run (torch.no_grad, inference_mode)")
        step, (args, inputs, target) = self._step, _split_batch(batch)
        device = next((parameter.device.type for parameter in self._pipe.parameters()), "cpu")
        dtype, rows_of = step.autocast_dtype, step.rows
        weigh = None if rows_of is None else lambda sizes: [rows_of(part) for part in scatter(batch, sizes)]
        fn = cast(Loss, step.loss)
        options: dict[str, Any] = {"keeps_outputs": False, "seed": seed, "trains": True}
        head = partial(make_head, loss=fn, reduction=step.reduction, weigh=weigh, **options)
        with nullcontext() if dtype is None else torch.autocast(device, dtype=dtype):
            ranks, rows_here = PipeRanks(self._pipe), count_rows(batch)
            loss, words = ranks.step(args, inputs, target, head=head, rows=rows_here, word=self._asked_to_stop)
        self.stopping = self.stopping or any(words)
        return loss


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


# The ranks of parallel pipelines.


def check_pipes(steps: Mapping[str, Step], group: dist.ProcessGroup | None, comm_mode: str | None) -> Pipe | None:
    """Return the pipe whose ranks these are, if one of the steps' is across ranks.

    Raises:
        ValueError: steps that cannot run on the same ranks, or a data-parallel ``group`` with other stages in it.
    """
    trained = [step.model for step in steps.values() if isinstance(step, TrainStep)]
    for module in (module for model in trained for module in model.modules()):
        if isinstance(module, Pipe):
            PipeRanks(module).join_executor()
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


def join_pipelines(pipe: Pipe, column: Workers | None, timeout: float, heartbeat: float) -> Workers:
    """Return all ranks of parallel pipelines, one pipeline after the other; ``column`` holds this rank's stage."""
    line = Workers(pipe.process_group, timeout=timeout, heartbeat=heartbeat)
    if column is None or column.size == 1:
        return line
    with line:
        if line.size == 1:
            return column
        rows = exchange(column, (line.name, line.ranks), tuple[str, list[int]], "meet")
        ranks = [rank for _, row in rows for rank in row]
        name = f"{rows[0][0]} and those beside it"
        return Workers(ranks=ranks, name=name, timeout=timeout, heartbeat=heartbeat)
