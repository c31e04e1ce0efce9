"""``Engine``: computes the gradients of a training step; ``GradientSink``: takes them somewhere as they become final;
``Fetch``: what the caller of a run wants returned.

::

    engine:   batch ──> loss ──────────> backward: gradient final ─ ─ ─ ─ ─ ─> optimizers
    sinks:               └ start_run         └ ready ─> bucket, push      └ end_run, finish

The tape, a graph and a pipe are engines; the buckets of the workers' sums and the pushes to servers are sinks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from anabranch.autodiff import record_outputs
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.executor.engines.gradients import all_finite, clip_norm, elements, nonfinite_names, norm_of
from anabranch.executor.loaders.upcoming import UpcomingIds
from anabranch.executor.steps import TrainStep
from anabranch.graph import Graph
from anabranch.interrupts import hold_interrupts
from anabranch.record import spans
from anabranch.tensors import Structure, map_structure

_GRADIENT = ".grad"
_NORM = "grad_norm"
_ROWS = "rows"
_RATES = "learning_rates"
FACTS = (_NORM, _ROWS, _RATES)
"""Names of facts about a run, unless the step returns something of that name or the model has such a submodule."""

Begin: TypeAlias = "Callable[[Tensor], None]"
"""``begin(loss)`` is called before the first gradient is final."""

_NOTHING: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one run of a training step.

    Attributes:
        loss: a tensor of no dimensions.
        returned: the step's other results.
        nonfinite: the parameters with gradients that are not finite; nothing was updated.
    """

    loss: Tensor
    returned: Mapping[str, Tensor]
    nonfinite: Sequence[str] = ()


class Fetch:
    """One request's names, classified before anything runs; keys of the step are known only after its forward.

    Args:
        names: the names to fetch; ``None`` takes everything the step returns.
        model: has the submodules and parameters.

    Attributes:
        modules: the submodules whose outputs are requested.
        gradients: the gradients requested, as ``<parameter>.grad``.
        wants_norm: the norm of the gradients is requested, unless the step itself returns something of that name.
        wants_rates: the same of the learning rates.
        norm: the norm of all gradients before clipping, where it was requested and the step took one.
        rows: the rows of this worker's batch, of no dimensions.
        rates: the learning rate of each parameter group, float64.
    """

    norm: Tensor | None = None
    rows: Tensor | None = None
    rates: Tensor | None = None

    def __init__(self, names: Sequence[str] | None, model: nn.Module) -> None:
        if isinstance(names, str):
            raise TypeError(f"fetch is a list of names, got the string {names!r}; write fetch=[{names!r}]")
        if names is not None and not (isinstance(names, Iterable) and all(isinstance(name, str) for name in names)):
            raise TypeError(f"fetch is a list of names, which are strings, got {names!r}")
        self.names = None if names is None else list(names)
        self.wants_norm = self.names is not None and _NORM in self.names
        self.wants_rates = self.names is not None and _RATES in self.names
        self._outputs: Mapping[str, Structure] = {}
        self._recorded: Mapping[str, Structure] = {}
        self._model = model
        self._modules: dict[str, nn.Module] = {}
        self._gradients: dict[str, nn.Parameter] = {}
        self.modules: list[str] = []
        self.gradients: list[str] = []
        if not self.names:
            return
        modules = dict(model.named_modules())
        self._modules = {name: modules[name] for name in self.names if name and name in modules}
        parameters = dict(model.named_parameters())
        self._gradients = {
            name: parameters[name.removesuffix(_GRADIENT)]
            for name in self.names
            if name.endswith(_GRADIENT) and name.removesuffix(_GRADIENT) in parameters
        }
        self.modules, self.gradients = list(self._modules), list(self._gradients)

    def record_gradients(self, gradients: Mapping[str, Structure]) -> None:
        """Take gradients from an engine that leaves none in ``.grad``."""
        self._recorded = gradients

    def record(self, outputs: Mapping[str, Structure]) -> None:
        """Take the outputs of the submodules from an engine that has them."""
        self._outputs = outputs

    def recording(self) -> AbstractContextManager[None]:
        """Record the outputs of the submodules requested while the block runs forward."""
        return self._recording() if self._modules else nullcontext()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        with record_outputs(self._modules) as outputs:
            yield
        self._outputs = outputs

    def check(self, returned: Mapping[str, object]) -> None:
        """Raise ``ValueError`` for an unknown name, before the step changes anything."""
        for name in self.names or ():
            if name == "loss" or name in FACTS or name in returned or name in self._modules or name in self._gradients:
                continue
            raise ValueError(
                f"fetch names {name!r}, which is neither 'loss', nor a key that the step returns ({sorted(returned)}), "
                f"nor a submodule of {type(self._model).__name__}, nor '<parameter>.grad', nor one of {FACTS}"
            )

    def collect(self, returned: Mapping[str, Tensor]) -> dict[str, Structure]:
        """Return the fetched values, once the step has run, without the tape that they depend on: it was swept by
        then.
        """
        found = returned if self.names is None else self._collect(self.names, returned)
        return {name: _detached(value) for name, value in found.items()}

    def _collect(self, names: Iterable[str], returned: Mapping[str, Tensor]) -> Mapping[str, Structure]:
        found: dict[str, Structure] = {}
        for name in names:
            if name in returned:
                found[name] = returned[name]
            elif name in self._recorded:
                found[name] = self._recorded[name]
            elif name in self._gradients:
                gradient = self._gradients[name].grad
                # .grad may be a view of a bucket that the next step overwrites.
                found[name] = None if gradient is None else gradient.detach().clone()
            elif name in self._modules:
                found[name] = self._outputs.get(name)
            elif name in FACTS:
                found[name] = {_NORM: self.norm, _ROWS: self.rows, _RATES: self.rates}[name]
        return found


def _detached(value: Structure) -> Structure:
    if isinstance(value, Tensor):
        return value.detach()
    return map_structure(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


class GradientSink(Protocol):
    """Takes the gradients of some parameters as they become final."""

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters whose gradients it takes, by name."""
        ...

    def ready(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Take a final gradient; return the tensor that replaces it, if one does."""
        ...


class Engine(ABC):
    """Computes the gradients of one training step, and steps its optimizers on those in ``.grad``.

    Attributes:
        name: the name that ``Executor.engine`` returns.
        stopping: all processes that run one model together know that one of them was asked to stop.
        parameters: those of the model that are here, by name.
    """

    name = "tape"
    first_looks = False  # all ranks look for gradients that are not finite, whether or not each has to sum any
    reads_again = False  # the forward runs a second time, in backward

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self.stopping = False
        self.parameters = self._named_parameters()

    def follow_model(self) -> None:
        """Look up the model's parameters again: some were replaced."""
        self.parameters = self._named_parameters()

    def _named_parameters(self) -> Mapping[str, Tensor]:
        return parameters_here(self._step.model)

    def ask_to_stop(self) -> None:
        """Let them know, with the next run at the latest; may be called from a signal handler."""
        self.stopping = True

    @property
    def graph(self) -> Graph | None:
        """The graph of the last run, if it was one."""
        return None

    def check(self, fetch: Fetch) -> None:
        """Raise ``ValueError`` for names to fetch that this engine never has."""
        assert fetch.names is not None

    @abstractmethod
    def attach(self, sinks: Sequence[GradientSink]) -> None:
        """From now on ``differentiate`` passes the gradients of the sinks' parameters on as they become final."""

    @abstractmethod
    def differentiate(self, batch: Structure, rows: float, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward, and backward from the gradient ``seed`` of the loss."""

    @abstractmethod
    def step(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput | None:
        """Forward, backward, clipping and the optimizers' step, for a worker without others.

        Nothing is updated where a gradient is not finite, unless ``step.skip_nonfinite`` is None. ``None`` is returned
        before anything has run, where the step is to be taken in parts.
        """

    @contextmanager
    def watched(self, upcoming: UpcomingIds, batch: Structure) -> Iterator[None]:
        """Let ``upcoming`` learn from the run in the block which ids it looks up."""
        with upcoming.watching(batch):
            yield

    def add(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput | None:
        """``step`` where gradients are left from earlier steps, to which it adds."""
        return self.step(batch, rows, fetch)

    def update(self) -> None:
        """Step the optimizers on the gradients in ``.grad``."""
        hold_interrupts()
        began = spans.begin()
        for optimizer in self._step.optimizers:
            optimizer.step()
        if began:
            spans.complete(began, "optimizer", "compute")

    def nonfinite(self) -> list[str]:
        """Return the parameters whose gradients are not finite."""
        named = self.parameters.items()
        if all_finite([p.grad for _, p in named if p.grad is not None]):
            return []
        return nonfinite_names((name, p.grad) for name, p in named if p.grad is not None)

    def norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        return norm_of(elements(self.parameters.values()))

    def clip(self, max_norm: float, elsewhere: float | None = None) -> Tensor:
        """Clip the gradients by their norm together with the sum of squares ``elsewhere``; return the norm before."""
        return clip_norm(elements(self.parameters.values()), max_norm, elsewhere)


def loss_and_returned(answer: object) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Check the result of the user's loss function, and split it into loss and further tensors.

    Raises:
        TypeError, ValueError: it is not a scalar tensor that depends on a parameter, with or without a dict.
    """
    returned: object = _NOTHING
    loss = answer
    if isinstance(answer, tuple) and len(answer) == 2:
        loss, returned = answer
        if not isinstance(returned, Mapping):
            raise TypeError(f"besides the loss a step returns a dict of tensors, got {type(returned).__name__}")
    elif isinstance(answer, Mapping) and "loss" in answer:
        loss = answer["loss"]
        returned = {name: value for name, value in answer.items() if name != "loss" and isinstance(value, Tensor)}
    elif not isinstance(answer, Tensor):
        loss = getattr(answer, "loss", answer)
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss(model, batch) returns a scalar tensor, (scalar, dict), a mapping with 'loss' or an object with "
            f".loss, got {type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, but backward starts from a single number; return loss.mean() "
            "with reduction='mean', or loss.sum() with reduction='sum'"
        )
    if not torch.is_grad_enabled():
        raise ValueError(
            "gradients are switched off around this run (torch.no_grad, inference_mode); a step needs them"
        )
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any parameter that requires a gradient; nothing would be trained")
    return loss if loss.ndim == 0 else loss.reshape(()), cast("Mapping[str, Tensor]", returned)
