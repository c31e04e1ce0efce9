"""The steps of a program: a ``TrainStep`` changes parameters, an ``EvalStep`` does not.

They are descriptions: checked when they are made, run by the executor, without their own state.

A loss with its own parameters is trained with the model, as one module for code that iterates over parameters: the
model keeps its names in checkpoints, routes and ``fetch``, and the loss's follow with the prefix ``loss.``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from numbers import Real
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anabranch.autodiff.moved_parameter import Elsewhere
from anabranch.choices import choice
from anabranch.pipeline import Pipe
from anabranch.tensors import Structure

_T = TypeVar("_T")
PREFIX = "loss"
_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Loss: TypeAlias = "Callable[..., Any]"
Outputs: TypeAlias = "Callable[..., Mapping[str, Tensor]]"
"""``loss(model, batch)`` and ``outputs(model, batch)``; the batch is whatever nested structure the caller passes."""


class StepDescription:
    """An object with immutable attributes, because captured graphs depend on them."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            kind = type(self).__name__
            raise AttributeError(
                f"{name!r} of a {kind} cannot be changed because graphs are made from it; make a new {kind} and a new "
                "Executor"
            )
        super().__setattr__(name, value)


class TrainStep(StepDescription):
    """One training step: forward, loss, backward, and the optimizers' update.

    Its attributes have the names of the arguments and are read-only: to change one, create a new step.

    >>> import torch
    >>> model = nn.Linear(4, 1)
    >>> def loss(model, batch):
    ...     return nn.functional.mse_loss(model(batch["x"]), batch["y"])
    >>> step = TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> step.accumulate
    1

    Args:
        model: the module whose parameters are trained.
        loss: ``loss(model, batch)`` returns a scalar tensor, or that and a dict of tensors to return, or a mapping
            with ``"loss"`` (its other tensors are returned), or an object with ``.loss``. For a ``Pipe``
            it is ``loss(output, target)``, a scalar, and batches are ``(x, target)``, ``(x, y, target)``, or a mapping
            or dataclass of keyword inputs with the target under ``"target"``. A loss that is a module (or a method of
            one) with parameters or buffers of its own is trained, saved and loaded with the model, with the prefix
            ``loss.``.
        optimizer: one, or several over disjoint parameters of ``model``.
        reduction: ``"mean"`` when the loss is a mean over the batch's rows: workers and accumulated batches are
            weighted by their rows; ``"sum"`` when it is a sum: gradients are added.
        scheduler: one or several, each for one of the optimizers; they step once per optimizer step.
        clip_grad_norm: the largest norm of all gradients together, as ``torch.nn.utils.clip_grad_norm_`` clips;
            sparse gradients are included.
        accumulate: optimizers and schedulers step on every ``accumulate``-th run.
        rows: ``rows(batch)`` returns the weight of a batch whose loss is a mean over something else than its rows, such
            as the tokens that are not padding, or whose tensors share no dim 0, such as a sampled subgraph. With a
            ``Pipe`` it is called with each microbatch of the batch, too, on the last stage's rank.
        ids: ``ids(batch)`` returns the ids that the step will look up in tables on servers, by the names that
            ``Executor.routes()`` shows: ``{"users.weight": batch.users % 1000}``. It is called ahead, with the next
            batch too, so that rows are there in time; the executor learns ids that are in the batch as they are by
            itself. Other ids than the step's cost bytes, and change no number.
        precision: ``"bfloat16"`` or ``"float16"``, or torch's types of these names, computes the loss under
            ``torch.autocast`` with that type; ``"float16"`` also scales the loss so that small gradients are not lost,
            as ``torch.amp.GradScaler`` does, skips steps whose gradients overflow, and runs on the tape. Parameters
            keep their own type.
        skip_nonfinite: how to handle a step whose gradients hold NaN or an infinity. ``False``: it raises
            ``NonFinite`` and updates nothing; ``True``: it is skipped and counted, on all workers
            (``Executor.statistics().skipped_steps``); ``None``: there is no check, and it is applied as in a plain
            loop. A single worker whose parameters are on one GPU, with optimizers of ``fused=True``, does not wait for
            it there: such a step updates nothing either, and the next run, evaluation, save or the end of the block
            raises.
        clip_grad_value: the largest absolute value of a gradient's element, as ``torch.nn.utils.clip_grad_value_``;
            after ``clip_grad_norm``, if both are given.
        on_gradients: called as ``on_gradients(gradients)`` before clipping and the optimizers, with the local gradients
            by parameter name, averaged over workers and accumulated batches, to read or to change in place.
        flush: how to handle an accumulation window that is incomplete at the end of a loader's epoch: ``"step"`` takes
            an optimizer step after the epoch's last batch, ``"keep"`` continues it in the next epoch, ``"drop"``
            discards it.
        activation_budget: the most memory that forward and backward may have allocated at once, in bytes or as
            ``"2GiB"``: activations and gradients, not parameters, optimizer state and batches. The step then runs as a
            graph that recomputes as much as necessary to fit.

    Raises:
        TypeError: an argument that is not a module, loss, optimizer or scheduler.
        ValueError: an optimizer of another model's parameters, two that share one, a
            scheduler for none of the optimizers, a lazy layer without a shape, or a number out of range.
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
        rows: Callable[[Structure], float | Tensor] | None = None,
        ids: Callable[[Structure], Mapping[str, Tensor]] | None = None,
        precision: Literal["bfloat16", "float16"] | torch.dtype | None = None,
        skip_nonfinite: bool | None = False,
        clip_grad_value: float | None = None,
        on_gradients: Callable[[dict[str, Tensor]], object] | None = None,
        flush: Literal["step", "keep", "drop"] = "step",
        activation_budget: int | str | None = None,
    ) -> None:
        _check_model(model)
        if not callable(loss):
            raise TypeError(f"loss is called as loss(model, batch), got {type(loss).__name__}")
        criterion = loss if hasattr(loss, "__name__") else type(loss)
        if criterion.__module__ in ("torch.nn.modules.loss", "torch.nn.functional") and not isinstance(model, Pipe):
            raise TypeError(
                f"loss is called as loss(model, batch), but {criterion.__name__} takes an output and a target; write "
                "lambda model, batch: criterion(model(batch[0]), batch[1])"
            )
        names = getattr(getattr(loss, "__code__", None), "co_varnames", ())[:2]
        if names == ("batch", "model") and not isinstance(model, Pipe):
            raise TypeError("loss is called as loss(model, batch), but takes batch and then model; swap the two")
        if ids is not None and not callable(ids):
            raise TypeError(f"ids is called as ids(batch), got {type(ids).__name__}")
        reduction = choice("reduction", reduction, ("mean", "sum"))
        _check_bound("clip_grad_norm", clip_grad_norm)
        _check_bound("clip_grad_value", clip_grad_value)
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate is a number of runs, an int of at least 1, got {accumulate!r}")
        reduced = str(precision).removeprefix("torch.") if isinstance(precision, torch.dtype) else precision
        reduced = choice("precision", reduced, (None, *_PRECISIONS))
        if not isinstance(skip_nonfinite, bool | None):
            raise TypeError(f"skip_nonfinite is True, False, or None to check no gradients, got {skip_nonfinite!r}")
        if activation_budget is not None and (isinstance(model, Pipe) or reduced == "float16"):
            what = "a Pipe" if isinstance(model, Pipe) else "precision='float16'"
            raise ValueError(f"activation_budget needs a graph, but {what} runs without one; leave one of them out")
        if reduced == "float16":
            parts = model.named_modules()
            experts = [name or "the model" for name, part in parts if getattr(type(part), "steps_there", False)]
            if isinstance(model, Pipe) or experts:
                why = "a Pipe has one a microbatch"
                if experts:
                    why = f"remote experts ({experts[0]}) would step with scaled gradients"
                raise ValueError(
                    f"precision='float16' scales the loss of a whole batch, but {why}; use 'bfloat16', which needs no "
                    "scale"
                )
        flush = choice("flush", flush, ("keep", "step", "drop"))
        self.model, loss = beside(model, loss)
        self.loss = loss if reduced is None or isinstance(model, Pipe) else _cast(loss, model, _PRECISIONS[reduced])
        self.optimizers = _optimizers(optimizer, self.model)
        self.schedulers = _schedulers(scheduler, self.optimizers)
        self.reduction = reduction
        self.clip_grad_norm = clip_grad_norm
        self.accumulate = accumulate
        self.rows, self.ids = rows, ids
        self.precision = reduced
        self.skip_nonfinite = True if reduced == "float16" else skip_nonfinite
        self.clip_grad_value = clip_grad_value
        self.on_gradients = on_gradients
        self.flush = flush
        self.activation_budget = None if activation_budget is None else _bytes("activation_budget", activation_budget)

    def __repr__(self) -> str:
        """Return the classes of the model, of the loss if it is a module, and of the optimizers."""
        loss = [self.model.loss] if isinstance(self.model, ModelWithLoss) else []
        parts = [model_of(self.model), *loss, *self.optimizers]
        return f"TrainStep({', '.join(type(part).__name__ for part in parts)})"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that ``precision`` computes in; ``None`` leaves operations unchanged."""
        return None if self.precision is None else _PRECISIONS[self.precision]


class EvalStep(StepDescription):
    """One evaluation: the model in eval mode, without gradients, its modes restored afterwards.

    Its attributes are read-only, like those of a ``TrainStep``.

    >>> model = nn.Linear(4, 1)
    >>> step = EvalStep(model, lambda model, batch: {"prediction": model(batch)})

    Args:
        model: the module to evaluate, often the one that a ``TrainStep`` trains.
        outputs: ``outputs(model, batch)`` returns a dict of tensors.
        rows: ``rows(batch)`` is the weight of a batch in ``Executor.evaluate``, in place of its rows.

    Raises:
        TypeError: an argument that is not a module, or cannot be called.
        ValueError: a lazy layer that has not seen a batch.
    """

    def __init__(
        self, model: nn.Module, outputs: Outputs, *, rows: Callable[[Structure], float | Tensor] | None = None
    ) -> None:
        if not callable(outputs):
            raise TypeError(f"outputs is called as outputs(model, batch), got {type(outputs).__name__}")
        _check_model(model)
        self.model = model
        self.outputs = outputs
        self.rows = rows

    def __repr__(self) -> str:
        """Return the class of the model."""
        return f"EvalStep({type(self.model).__name__})"


Step: TypeAlias = TrainStep | EvalStep


def _cast(loss: Loss, model: nn.Module, dtype: torch.dtype) -> Loss:
    """Return ``loss`` under autocast for the model's kind of device."""
    kind = next(model.parameters()).device.type

    def under_autocast(model: nn.Module, batch: Structure) -> object:
        with torch.autocast(kind, dtype=dtype):
            return loss(model, batch)

    return under_autocast


def _bytes(name: str, value: object) -> int:
    """Return the bytes that a number, or a string such as ``"512MiB"``, stands for."""
    text = str(value) if isinstance(value, int | str) else ""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(iB|B)?\s*", text)
    unit = 1024 if parts is not None and parts[3] == "iB" else 1000
    size = 0 if parts is None else int(float(parts[1]) * unit ** " KMGT".index((parts[2] or " ").upper()))
    if size < 1:
        raise ValueError(f"{name} is a number of bytes above 0, or a string such as '2GiB' or '500MB', got {value!r}")
    return size


def _check_bound(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real | None):
        raise TypeError(f"{name} is a finite number above 0, or None, got {value!r}")
    if value is not None and not 0 < float(value) < math.inf:
        raise ValueError(f"{name} is a finite number above 0, or None, got {value!r}")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is an nn.Module, got {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor).__module__.startswith("torch.distributed.tensor"):
            raise ValueError(
                f"{name!r} of {type(model).__name__} is a DTensor, of which each rank holds a part (fully_shard, "
                "parallelize_module); give the Executor the model before it is sharded: a Pipe puts its layers on "
                "several ranks, comm_mode='PS' its parameters on servers"
            )
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} of {type(model).__name__} has no shape yet: its layer is lazy; run the model once on a batch"
            )


def _listed(name: str, given: object, kind: type[_T]) -> list[_T]:
    """One ``kind`` or several, as a list."""
    several = [given] if isinstance(given, kind) else given
    if not isinstance(several, list | tuple):
        raise TypeError(f"{name} is one {kind.__name__} or a list of them, got {several!r}")
    for index, one in enumerate(several):
        if not isinstance(one, kind):
            raise TypeError(f"{name} {index} is a {type(one).__name__}, not a {kind.__name__}")
    return list(several)


def _optimizers(given: Optimizer | Sequence[Optimizer], model: nn.Module) -> tuple[Optimizer, ...]:
    optimizers = _listed("optimizer", given, Optimizer)
    if not optimizers:
        raise ValueError("optimizer is an empty list; give at least one")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    owner: dict[Tensor, int] = {}
    piped = isinstance(model_of(model), Pipe)
    for index, optimizer in enumerate(optimizers):
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS evaluates the loss several times per step; use another optimizer")
        for parameter in parameters_of(optimizer):
            if piped and type(parameter) is Elsewhere:
                continue
            if parameter not in names:
                raise ValueError(
                    f"optimizer {index} ({type(optimizer).__name__}) holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is not the model's; make it a parameter of "
                    f"{type(model_of(model)).__name__}, or of a module that is the step's loss"
                )
            if (first := owner.setdefault(parameter, index)) != index:
                raise ValueError(f"optimizers {first} and {index} both hold {names[parameter]!r}; split them")
    if piped:
        _leave_to_other_ranks(optimizers)
    return tuple(optimizers)


def _leave_to_other_ranks(optimizers: Iterable[Optimizer]) -> None:
    """Take out the parameters of a pipe's other ranks, as ``Adam(model.parameters())`` has: no gradient comes here."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            here = [type(one) is not Elsewhere for one in group["params"]]
            for key in group.keys() & {"params", "param_names"}:
                group[key] = list(compress(group[key], here))
        for one in [one for one in optimizer.state if type(one) is Elsewhere]:
            del optimizer.state[one]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """All that an optimizer holds."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _schedulers(
    given: LRScheduler | Sequence[LRScheduler] | None, optimizers: Sequence[Optimizer]
) -> tuple[LRScheduler, ...]:
    schedulers = [] if given is None else _listed("scheduler", given, LRScheduler)
    for index, scheduler in enumerate(schedulers):
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric, which a training step does not have; step it yourself")
        if not any(scheduler.optimizer is optimizer for optimizer in optimizers):
            raise ValueError(f"scheduler {index} ({type(scheduler).__name__}) is for none of this step's optimizers")
    return tuple(schedulers)


def named_steps(steps: StepDescription | Mapping[str, StepDescription]) -> dict[str, Step]:
    """Return ``steps`` by name; a single step is called ``"default"``.

    Raises:
        TypeError, ValueError: no steps, a name that is not a string, or a value that is not a step.
    """
    if isinstance(steps, StepDescription):
        steps = {"default": steps}
    if not isinstance(steps, Mapping):
        raise TypeError(f"steps is a TrainStep, an EvalStep or a dict of them, got {type(steps).__name__}")
    if not steps:
        raise ValueError("steps is empty; give at least one TrainStep or EvalStep")
    named: dict[str, Step] = {}
    for name, step in steps.items():
        if not (name and isinstance(name, str) and isinstance(step, TrainStep | EvalStep)):
            raise TypeError(f"steps are TrainSteps and EvalSteps by name, got {name!r}: {step!r}")
        named[name] = step
    return named


def distinct_models(steps: Mapping[str, Step]) -> dict[str, nn.Module]:
    """Every model and every loss that is a module once, by the prefix of its tensors' names.

    A single model has no prefix, a single loss has ``loss.``.
    """
    models: dict[nn.Module, str] = {}
    losses: dict[nn.Module, str] = {}
    for name, step in steps.items():
        models.setdefault(model_of(step.model), f"{name}.")
        if isinstance(step.model, ModelWithLoss):
            losses.setdefault(step.model.loss, f"{name}.loss.")
    if len(models) == 1:
        models = dict.fromkeys(models, "")
        losses = dict.fromkeys(losses, "loss.") if len(losses) == 1 else losses
    return {prefix: module for module, prefix in (*models.items(), *losses.items())}


# A loss that is a module.


class ModelWithLoss(nn.Module):
    """A model and the module that computes its loss, under the model's own names and ``loss.``.

    Args:
        model: its names are unchanged.
        loss: its names begin with ``loss.``.
    """

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    @property
    def training(self) -> bool:
        """True if both are in training mode; each keeps its own."""
        return self.model.training and self.loss.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Nothing: ``train`` and ``eval`` reach the two parts as they reach all children."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model's modules by their own names, then the loss's."""
        memo = set() if memo is None else memo
        yield from self.model.named_modules(memo, prefix, remove_duplicate)
        behind = f"{prefix}.{PREFIX}" if prefix else PREFIX
        yield from self.loss.named_modules(memo, behind, remove_duplicate)


def beside(model: nn.Module, loss: Callable[..., Any]) -> tuple[nn.Module, Callable[..., Any]]:
    """Return the module that a step trains and its loss function, for a loss that may own parameters or buffers.

    Args:
        model: the model of the step.
        loss: a function, a module, or a method of a module.

    Raises:
        ValueError: the model is a ``Pipe``, or has its own ``loss`` already.
    """
    owner = getattr(loss, "__self__", loss)
    if not isinstance(owner, nn.Module):
        return model, loss
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    if all(id(tensor) in known for tensor in (*owner.parameters(), *owner.buffers())):
        return model, loss
    if isinstance(model, Pipe):
        raise ValueError(
            f"the loss {type(owner).__name__} has its own parameters or buffers, but a Pipe computes its loss on "
            "the last stage's rank only; make them a layer at the end of the Pipe"
        )
    taken = [name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())]
    if any(name.split(".")[0] == PREFIX for name in taken):
        raise ValueError(
            f"{type(model).__name__} has a {PREFIX!r}, under which the parameters of the loss {type(owner).__name__} "
            f"would be saved; rename the model's, or use {type(model).__name__}.{PREFIX} as the loss"
        )
    return ModelWithLoss(model, owner), lambda both, batch: loss(both.model, batch)


def model_of(module: nn.Module) -> nn.Module:
    """Return the model without the loss module."""
    return module.model if isinstance(module, ModelWithLoss) else module
