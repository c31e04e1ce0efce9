"""``survey_step``: forward and backward of one batch, to measure their time and their requests to other processes.

Nothing is trained, and nothing that lives elsewhere is changed; generators, buffers and modes are as before afterwards.
User code that counts its own calls counts these. The time does not include a table's own gradient: its cost depends on
where the table is kept and is computed in ``costs.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from anabranch.autodiff.boundary.crossing import traced_by
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.executor.engines.engine import loss_and_returned
from anabranch.executor.plan.dry_run import DryRun, Lookups
from anabranch.executor.randomness import random_state, restore_random_state
from anabranch.executor.steps import TrainStep
from anabranch.experts import RemoteExpert, RemoteMixtureOfExperts
from anabranch.tensors import Structure

__all__ = ["ExpertTraffic", "StageSurvey", "StepSurvey", "TableLookups", "as_before", "survey_step"]

_RUNS = 4  # the same number on every worker, because a loss may communicate
_BACKWARD = 2  # times as long as forward, where it cannot be run


@dataclass(frozen=True, slots=True)
class TableLookups:
    """The lookups of one table in a run.

    Attributes:
        ids: the number of ids, as they come.
        read: distinct ids.
        moved: distinct ids that get a gradient: a padding id does not.
    """

    ids: int
    read: int
    moved: int


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """The calls of experts in a run, as if they kept no activations.

    Attributes:
        sent, received: bytes, forward and backward together.
    """

    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class StageSurvey:
    """One stage of a pipe in a run.

    Attributes:
        name, place: ``"stage 0"``, and its rank and layers.
        parameters: their numbers.
        seconds: of computing, all microbatches together.
        sent: bytes to other stages: activations to later ones, gradients to earlier ones.
    """

    name: str
    place: str
    parameters: int
    seconds: float
    sent: int


@dataclass(frozen=True, slots=True)
class StepSurvey:
    """The facts of one worker's run.

    Attributes:
        seconds: forward and backward, without the gradients of tables and without experts.
        tables: by the table's name.
        experts: by the expert's name, or the mixture's.
        away: seconds of experts' forward.
        stages: of a pipe, on any rank; its ``seconds`` are those of the busiest rank.
        waiting: seconds that the busiest rank of a pipe does not compute.
        sent: bytes that this rank of a pipe sends.
        idle: the part of all ranks' time, from 0 to 1, in which the schedule alone lets them wait.
    """

    seconds: float = 0.0
    tables: Mapping[str, TableLookups] = field(default_factory=dict)
    experts: Mapping[str, ExpertTraffic] = field(default_factory=dict)
    away: float = 0.0
    stages: tuple[StageSurvey, ...] = ()
    waiting: float = 0.0
    sent: int = 0
    idle: float = 0.0


def survey_step(step: TrainStep, batch: Structure, tables: Mapping[Tensor, str]) -> StepSurvey:
    """Return the facts of a run of ``step`` on ``batch``.

    Args:
        step: computes the loss.
        batch: this worker's.
        tables: the parameters that are only looked up and are here, and their names.

    Raises:
        Exception: raised by the loss.
    """
    dry_run = DryRun()
    with as_before(step.model):
        times = [_run(step, batch, Lookups(tables, dry_run), dry_run) for _ in range(_RUNS)]
    here, away = zip(*times[1:], strict=True)  # the first warms up
    found = {name: _looked_up(parts) for name, parts in dry_run.ids.items()}
    experts = {name: ExpertTraffic(*sizes) for name, sizes in dry_run.asked.items()}
    return StepSurvey(median(here), found, experts, median(away))


def _run(step: TrainStep, batch: Structure, lookups: Lookups, dry_run: DryRun) -> tuple[float, float]:
    """Return the seconds of forward and backward here, and those of experts' forward."""
    dry_run.start()
    began = time.perf_counter()
    with torch.enable_grad(), traced_by(dry_run), lookups:
        loss, _ = loss_and_returned(step.loss(step.model, batch))
    forward = time.perf_counter() - began - dry_run.away
    parameters = [p for p in parameters_here(step.model).values() if p.requires_grad and p not in lookups.tables]
    try:
        torch.autograd.grad(loss, [*parameters, *dry_run.leaves], allow_unused=True)
    except RuntimeError:  # reentrant checkpoints refuse it, and backward would reach .grad and the user's hooks
        return (1 + _BACKWARD) * forward, dry_run.away
    if loss.device.type == "cuda":
        torch.cuda.current_stream(loss.device).synchronize()
    return time.perf_counter() - began - dry_run.away, dry_run.away


def _looked_up(parts: Sequence[tuple[Tensor, int | None]]) -> TableLookups:
    ids = torch.cat([some for some, _ in parts])
    moved = torch.cat([some if padding is None else some[some != padding] for some, padding in parts])
    return TableLookups(len(ids), len(torch.unique(ids)), len(torch.unique(moved)))


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Put random generators, buffers and modes back after the block, in which experts evaluate: no call moves them."""
    random, buffers = random_state(), [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        for module in model.modules():
            if isinstance(module, RemoteExpert | RemoteMixtureOfExperts):
                module.eval()
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, training in modes:
            module.training = training
        restore_random_state(random)
