"""``survey_pipe``: a few runs of a pipe's own schedule, to measure the time of its stages and the traffic between them.

Nothing is trained: gradients, buffers, generators, modes and the pipe's counts are as before afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from torch import Tensor, nn

from anabranch.executor.plan.step_survey import StageSurvey, StepSurvey, as_before
from anabranch.executor.routes import CommMode
from anabranch.executor.running.pipe_runner import pipe_run
from anabranch.executor.running.step_runs import rows_of
from anabranch.executor.steps import TrainStep, parameters_of
from anabranch.experts import RemoteExpert, RemoteMixtureOfExperts
from anabranch.parameter_server import RemoteEmbedding
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure

__all__ = ["check_planned", "survey_pipe"]

_RUNS = 4  # the same number on every rank


def survey_pipe(step: TrainStep, pipe: Pipe, batch: Structure) -> StepSurvey:
    """Return the facts of a run of ``step``, whose model is ``pipe``; every rank of the pipe calls it.

    Raises:
        Exception: any error of a stage or the loss.
    """
    rows, walls = int(rows_of(step, batch)), []
    loss = step.loss.parameters() if isinstance(step.loss, nn.Module) else ()
    trained = {*pipe.parameters(), *loss, *(p for optimizer in step.optimizers for p in parameters_of(optimizer))}
    # What the ranks tell one another before an update: is there a NaN, and by how much is it clipped.
    norms = int(step.skip_nonfinite is not None and pipe.process_group is not None) + int(
        step.clip_grad_norm is not None
    )
    with as_before(pipe), pipe.uncounted(), _gradients_kept([*trained]):
        for _ in range(_RUNS):
            sent = pipe.bytes_sent
            began = time.perf_counter()
            pipe_run(step, pipe, batch, rows, word=None)
            for _ in range(norms):
                pipe.grad_norm()
            walls.append(time.perf_counter() - began)
            sent = pipe.bytes_sent - sent
            for parameter in trained:
                parameter.grad = None
    wall, simulated = median(walls[1:]), pipe.simulated(rows)
    busy = [sum(interval.end - interval.start for interval in rank) for rank in simulated.intervals]
    stages = tuple(
        StageSurvey(
            f"stage {costs.stage}",
            f"rank {costs.rank}, layers {costs.layers}",
            costs.parameters,
            sum(costs.seconds.values()),
            pipe.microbatches(rows) * sum(costs.sends.values()),
        )
        for costs in pipe.costs()
    )
    busiest = min(max(busy), wall)
    return StepSurvey(busiest, stages=stages, waiting=wall - busiest, sent=sent, idle=simulated.bubble)


def check_planned(name: str, step: TrainStep, comm_mode: CommMode | None) -> None:
    """Raise ``ValueError`` if a step cannot be planned; alike on all ranks of a pipe."""
    if not isinstance(step.model, Pipe):
        return
    away = (RemoteEmbedding, RemoteExpert, RemoteMixtureOfExperts)
    asked = [type(m).__name__ for layer in step.model.every_layer() for m in layer.modules() if isinstance(m, away)]
    if asked or comm_mode in ("PS", "Hybrid"):
        raise ValueError(
            f"step {name!r} trains a Pipe {f'with {asked[0]}' if asked else f'under {comm_mode!r}'}, and a look at it "
            "would train what is elsewhere. For its stages plan it with experts and tables here, under comm_mode=None "
            "or 'AllReduce'; for experts and servers plan its module without the Pipe"
        )


@contextmanager
def _gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
