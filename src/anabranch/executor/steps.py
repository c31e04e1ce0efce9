"""The steps of a program: a ``TrainStep`` changes parameters, an ``EvalStep`` only looks.

They are descriptions: checked when they are made, run by the executor, holding no state of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anabranch.pipeline import Pipe
from anabranch.tensors import Structure

__all__ = ["EvalStep", "Loss", "Outputs", "Step", "TrainStep", "distinct_models", "named_steps", "parameters_of"]

_T = TypeVar("_T")
Loss: TypeAlias = "Callable[..., Tensor | tuple[Tensor, Mapping[str, Tensor]]]"
Outputs: TypeAlias = "Callable[..., Mapping[str, Tensor]]"
"""``loss(model, batch)`` and ``outputs(model, batch)``; the batch is whatever nested structure the caller passes."""


class TrainStep:
    """One training step: forward, loss, backward, and the optimizers' update.

    >>> import torch
    >>> model = nn.Linear(4, 1)
    >>> def loss(model, batch):
    ...     return nn.functional.mse_loss(model(batch["x"]), batch["y"])
    >>> step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> step.accumulate
    1

    Args:
        model: the module whose parameters are trained.
        loss: ``loss(model, batch)`` returns a scalar tensor, or that and a dict of tensors to hand back. For a ``Pipe``
            it is ``loss(output, target)``, a scalar, and batches are ``(x, target)``, ``(x, y, target)``, or a mapping
            of keyword inputs with the target under ``"target"``.
        optimizer: one, or several over disjoint parameters of ``model``.
        reduction: ``"mean"`` when the loss is a mean over the batch's rows: workers and accumulated batches weigh by
            their rows; ``"sum"`` when it is a sum: their gradients add up.
        scheduler: one or several, each of one of the optimizers; they step once an optimizer step.
        clip_grad_norm: the largest norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` clips;
            sparse gradients count and are clipped too.
        accumulate: optimizers and schedulers step on every ``accumulate``-th run.
        rows: ``rows(batch)`` returns the weight of a batch whose tensors share no dim 0, such as a sampled subgraph.

    Raises:
        TypeError: an argument that is not a module, loss, optimizer or scheduler.
        ValueError: a model without parameters, an optimizer of another model's parameters, two that share one, a
            scheduler of none of the optimizers, a lazy layer that has not seen a batch, or a number out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        reduction: Literal["mean", "sum"] = "mean",
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
        rows: Callable[[Structure], float] | None = None,
    ) -> None:
        _check_model(model)
        if not callable(loss):
            raise TypeError(f"loss is called as loss(model, batch), got {type(loss).__name__}")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is 'mean' or 'sum', got {reduction!r}")
        if isinstance(clip_grad_norm, bool) or not isinstance(clip_grad_norm, Real | None):
            raise TypeError(f"clip_grad_norm is a finite number above 0, or None, got {clip_grad_norm!r}")
        if clip_grad_norm is not None and not (0 < clip_grad_norm < math.inf):
            raise ValueError(f"clip_grad_norm is a finite number above 0, or None, got {clip_grad_norm!r}")
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate is a number of runs, an int of at least 1, got {accumulate!r}")
        if rows is not None and not callable(rows):
            raise TypeError(f"rows is called as rows(batch), got {type(rows).__name__}")
        self.model = model
        self.loss = loss
        self.optimizers = _optimizers(optimizer, model)
        self.schedulers = _schedulers(scheduler, self.optimizers)
        self.reduction: Literal["mean", "sum"] = reduction
        self.clip_grad_norm = clip_grad_norm
        self.accumulate = accumulate
        self.rows = rows


class EvalStep:
    """One evaluation: the model in eval mode, without gradients, its modes restored afterwards.

    >>> model = nn.Linear(4, 1)
    >>> step = EvalStep(model, lambda model, batch: {"prediction": model(batch)})

    Args:
        model: the module to evaluate, often the one that a ``TrainStep`` trains.
        outputs: ``outputs(model, batch)`` returns a dict of tensors.

    Raises:
        TypeError: an argument that is not a module, or cannot be called.
        ValueError: a lazy layer that has not seen a batch.
    """

    def __init__(self, model: nn.Module, outputs: Outputs) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is an nn.Module, got {type(model).__name__}")
        if not callable(outputs):
            raise TypeError(f"outputs is called as outputs(model, batch), got {type(outputs).__name__}")
        _check_initialized(model)
        self.model = model
        self.outputs = outputs


Step: TypeAlias = TrainStep | EvalStep


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is an nn.Module, got {type(model).__name__}")
    _check_initialized(model)
    passes_on = isinstance(model, Pipe) and bool(model.elsewhere)  # a stage may have no parameters, others do
    if next(model.parameters(), None) is None and not passes_on:
        raise ValueError(f"{type(model).__name__} has no parameters to train; use EvalStep to only run it")


def _check_initialized(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} of {type(model).__name__} has no shape yet, since its layer is lazy; run the model once on "
                "a batch before making the step"
            )


def _listed(name: str, given: object, kind: type[_T]) -> list[_T]:
    """One ``kind`` or several, as a list; of what else is given, the type is named."""
    several = [given] if isinstance(given, kind) else given
    if isinstance(several, type) or not isinstance(several, Iterable):
        what = f"the class {several.__name__}; make one" if isinstance(several, type) else type(several).__name__
        raise TypeError(f"{name} is one {kind.__name__} or a list of them, got {what}")
    return list(several)


def _optimizers(given: Optimizer | Sequence[Optimizer], model: nn.Module) -> list[Optimizer]:
    optimizers = _listed("optimizer", given, Optimizer)
    if not optimizers:
        raise ValueError("optimizer is an empty list; give at least one")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[Tensor, int] = {}
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer {index} is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS evaluates the loss several times a step, which no TrainStep does; use another")
        for parameter in parameters_of(optimizer):
            if parameter not in names:
                raise ValueError(
                    f"optimizer {index} ({type(optimizer).__name__}) holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not the model's; make it a parameter of {type(model).__name__}"
                )
            if parameter in owner:
                raise ValueError(
                    f"optimizers {owner[parameter]} and {index} both hold {names[parameter]!r}; split them"
                )
            owner[parameter] = index
    return optimizers


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All that an optimizer holds."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _schedulers(given: LRScheduler | Sequence[LRScheduler] | None, optimizers: list[Optimizer]) -> list[LRScheduler]:
    schedulers = [] if given is None else _listed("scheduler", given, LRScheduler)
    for index, scheduler in enumerate(schedulers):
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric that no training step has; step it yourself")
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(f"scheduler {index} is a {type(scheduler).__name__}, not a torch LRScheduler")
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise ValueError(f"scheduler {index} ({type(scheduler).__name__}) is of none of this step's optimizers")
    return schedulers


def named_steps(steps: Step | Mapping[str, Step]) -> dict[str, Step]:
    """Return ``steps`` by name; a lone step is called ``"default"``.

    Raises:
        TypeError, ValueError: no steps, a name that is no text, or a value that is no step.
    """
    if isinstance(steps, TrainStep | EvalStep):
        return {"default": steps}
    if not isinstance(steps, Mapping):
        raise TypeError(f"steps is a TrainStep, an EvalStep or a dict of them, got {type(steps).__name__}")
    if not steps:
        raise ValueError("steps is empty; give at least one TrainStep or EvalStep")
    for name, step in steps.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"a step's name is a text that is not empty, got {name!r}")
        if not isinstance(step, TrainStep | EvalStep):
            raise TypeError(f"step {name!r} is a {type(step).__name__}, not a TrainStep or EvalStep")
    return dict(steps)


def distinct_models(steps: Mapping[str, Step]) -> dict[str, nn.Module]:
    """Every model once, by the prefix of its tensors' names: none when there is only one model."""
    models: dict[str, nn.Module] = {}
    for name, step in steps.items():
        if not any(step.model is model for model in models.values()):
            models[f"{name}."] = step.model
    return {"": next(iter(models.values()))} if len(models) == 1 else models
