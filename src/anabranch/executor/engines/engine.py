"""``Engine``: computes the gradients of a training step, on the tape; ``GradientSink``: takes them somewhere as they
become final; ``Fetch``: what the caller of a run wants returned.

::

    engine:   batch ──> loss ──────────> backward: gradient final ─ ─ ─ ─ ─ ─> optimizers
    sinks:               └ start_run         └ ready ─> bucket, push      └ end_run, finish

The tape, a graph and a pipe are engines; the buckets of the workers' sums and the pushes to servers are sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

from anabranch.autodiff import GradManager, record_outputs
from anabranch.autodiff import grad_sessions as sessions
from anabranch.autodiff.grad_sessions import loss_and_returned
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.executor.engines.gradients import LateCheck, all_finite, clip_norm, elements, nonfinite_names, norm_of
from anabranch.executor.steps import TrainStep
from anabranch.graph import Graph
from anabranch.interrupts import hold_interrupts
from anabranch.record import spans
from anabranch.tensors import Structure, map_structure

LATE = {"cuda"}
"""Types of devices on which a step does not wait to learn whether its gradients are finite."""

NOTHING = nullcontext()

NORM = "grad_norm"
"""The name of a run's norm, unless the step returns something of that name or the model has such a submodule."""

Begin: TypeAlias = "Callable[[Tensor], None]"
"""``begin(loss)`` is called before the first gradient is final."""


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
        modules: the submodules whose outputs are requested, by name.
        gradients: the parameters whose gradients are requested, by ``<parameter>.grad``.
        wants_norm: the norm of the gradients is requested, unless the step itself returns something of that name.
        norm: the norm of all gradients before clipping, where it was requested and the step took one.
    """

    norm: Tensor | None = None

    def __init__(self, names: Sequence[str] | None, model: nn.Module) -> None:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise TypeError(f"fetch is a list of names, such as ['loss'], got {names!r}")
        self.names = None if names is None else list(names)
        self.wants_norm = self.names is not None and NORM in self.names
        self._model = model
        self._recorded: Mapping[str, Structure] = {}
        self.modules: dict[str, nn.Module] = {}
        self.gradients: dict[str, nn.Parameter] = {}
        if self.names:
            modules = dict(model.named_modules())
            gradients = {f"{name}.grad": parameter for name, parameter in model.named_parameters()}
            self.modules = {name: modules[name] for name in self.names if name and name in modules}
            self.gradients = {name: gradients[name] for name in self.names if name in gradients}

    def record(self, values: Mapping[str, Structure]) -> None:
        """Take submodules' outputs from an engine that has them, and gradients from one that leaves no ``.grad``."""
        self._recorded = values

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the outputs of the submodules requested while the block runs forward."""
        with record_outputs(self.modules) as outputs:
            yield
        self._recorded = outputs

    def check(self, returned: Mapping[str, object]) -> None:
        """Raise ``ValueError`` for an unknown name, before the step changes anything."""
        for name in self.names or ():
            if name in ("loss", NORM) or name in returned or name in self.modules or name in self.gradients:
                continue
            raise ValueError(
                f"fetch names {name!r}, which is neither 'loss', nor a key that the step returns ({sorted(returned)}), "
                f"nor a submodule of {type(self._model).__name__}, nor '<parameter>.grad', nor {NORM!r}"
            )

    def collect(self, returned: Mapping[str, Tensor]) -> dict[str, Structure]:
        """Return the fetched values, once the step has run, without the tape that they depend on: it was swept by
        then.
        """
        values: Mapping[str, Structure] = returned
        if self.names is not None:
            values = {name: self._value(name, returned) for name in self.names if name != "loss" or name in returned}
        return {name: _detached(value) for name, value in values.items()}

    def _value(self, name: str, returned: Mapping[str, Tensor]) -> Structure:
        for values in (returned, self._recorded):
            if name in values:
                return values[name]
        if name in self.gradients:
            gradient = self.gradients[name].grad
            # .grad may be a view of a bucket that the next step overwrites.
            return None if gradient is None else gradient.detach().clone()
        return self.norm if name == NORM else None


def _detached(value: Structure) -> Structure:
    if isinstance(value, Tensor):
        return value.detach()
    return map_structure(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


class GradientSink(Protocol):
    """Takes the gradients of some parameters as they become final.

    Attributes:
        at_end: it takes them out of ``.grad`` itself when backward has ended.
    """

    at_end: bool

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters whose gradients it takes, by name."""
        ...

    def ready(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        """Take a final gradient; return the tensor that replaces it, if one does."""
        ...


class Engine:
    """Computes the gradients of one training step by autograd, and steps its optimizers on those in ``.grad``.

    Any model, control flow included. Gradients are passed on as soon as they are final, so that communication overlaps
    the rest of backward; without sinks, a step is the plain PyTorch loop, call for call. A graph and a pipe are engines
    that replace parts of it.

    Args:
        step: the step to run.
        sinks: take gradients elsewhere; ``lay_out`` reads which parameters each takes.

    Attributes:
        stopping: all processes that run one model together know that one of them was asked to stop.
        late_failed: gradients of an earlier step were not finite, by which nothing was updated; its reader resets it.
    """

    first_looks = False  # all ranks look for gradients that are not finite, whether or not each has to sum any
    reads_again = False  # the forward runs a second time, in backward

    def __init__(self, step: TrainStep, sinks: Sequence[GradientSink] = ()) -> None:
        self._step, self._sinks = step, sinks
        self.stopping = self.late_failed = False
        self._manager = GradManager()
        self._takers: dict[Tensor, GradientSink] = {}
        self._session = sessions.Session()  # of a step without sinks

    @property
    def name(self) -> str:
        """The name that ``Executor.engine`` returns."""
        return "tape"

    @property
    def graph(self) -> Graph | None:
        """The graph of the last run, if it was one."""
        return None

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The model's parameters that are here, by name: looked up at the first run, when tables have moved."""
        return parameters_here(self._step.model)

    @cached_property
    def late_check(self) -> LateCheck | None:
        """The check that a lone worker's step on a GPU does not wait for, or None where it has to."""
        optimizers = self._step.optimizers
        devices = {parameter.device for parameter in self.parameters.values() if parameter.requires_grad}
        fused = all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)
        waits = self.first_looks or self._step.skip_nonfinite is not False
        if waits or not fused or len(devices) != 1 or (device := devices.pop()).type not in LATE:
            return None
        return LateCheck(optimizers, device, self._step.schedulers)

    def settle(self) -> bool:
        """Set ``late_failed`` if the last step's gradients turn out not to have been finite, and return it."""
        late: LateCheck | None = vars(self).get("late_check")
        if late is not None and late.failed():
            self.late_failed = True
        return self.late_failed

    def ask_to_stop(self) -> None:
        """Let them know, with the next run at the latest; may be called from a signal handler."""
        self.stopping = True

    def check(self, fetch: Fetch) -> None:
        """Raise ``ValueError`` for names to fetch that this engine never has."""

    def lay_out(self) -> None:
        """From now on ``differentiate`` passes on the gradients of the parameters that the sinks have now."""
        self._takers = {parameter: sink for sink in self._sinks for parameter in sink.parameters.values()}
        watched = set(self._manager.attached_tensors())
        if new := [one for one, taker in self._takers.items() if one not in watched and not taker.at_end]:
            self._manager.attach(new, callbacks=self._pass_on)

    def _pass_on(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        taker = self._takers.get(parameter)  # none if thawed since: the runner refuses it
        return None if taker is None else taker.ready(parameter, gradient)

    def differentiate(self, batch: Structure, rows: float, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward, and backward from the gradient ``seed`` of the loss; ``begin(loss)`` is called in between."""
        self._manager.release()  # if an interrupt kept the run before from doing so
        with self._manager:
            loss, returned = self._forward(batch, fetch)
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    raise ValueError(
                        "the loss called backward() itself, whose gradients servers, several workers and "
                        "accumulate=... would not get; return the sum of the losses"
                    )
            begin(loss)
            began = spans.begin()
            self._manager.backward(loss, None if seed == 1.0 else torch.full_like(loss, seed))
            if began:
                spans.complete(began, "backward", "compute")
        return StepOutput(loss.detach(), returned)

    def step(self, batch: Structure, rows: float, fetch: Fetch) -> StepOutput | None:
        """Forward, backward, clipping and the optimizers' step, for a worker without others.

        Nothing is updated where a gradient is not finite, unless ``step.skip_nonfinite`` is None. ``None`` is returned
        before anything has run, where the step is to be taken in parts.
        """
        return self._finish(self._sweep(batch, fetch), self.update)

    def _sweep(self, batch: Structure, fetch: Fetch) -> StepOutput:
        """Forward and backward; gradients are left in ``.grad``."""
        sessions.end(self._session)  # if an interrupt kept the run before from doing so
        sessions.begin(self._session)
        try:
            loss, returned = self._forward(batch, fetch)
            began = spans.begin()
            roots = [loss, *self._session.exits]
            retain, create = sessions.sweep_flags(self._session)
            if create:
                sessions.run_sweep(roots, [None] * len(roots), retain, create)
            else:
                torch.autograd.backward(roots, retain_graph=retain)
            if began:
                spans.complete(began, "backward", "compute")
        finally:
            sessions.end(self._session)
        return StepOutput(loss.detach(), returned)

    def _finish(self, ran: StepOutput, update: Callable[[], None]) -> StepOutput:
        """Check and clip the gradients, and step the optimizers on them."""
        looked = False
        if (late := self.late_check) is not None:
            self.settle()
            reached = [parameter for parameter in self.parameters.values() if parameter.grad is not None]
            looked = late.look(reached, [cast("Tensor", parameter.grad) for parameter in reached])
        if not looked and self._step.skip_nonfinite is not None and (names := self.nonfinite()):
            return StepOutput(ran.loss, ran.returned, names)
        if self._step.clip_grad_norm is not None:
            self.clip(self._step.clip_grad_norm)
        update()
        return ran

    def _forward(self, batch: Structure, fetch: Fetch) -> tuple[Tensor, Mapping[str, Tensor]]:
        began = spans.begin()
        with fetch.recording() if fetch.modules else NOTHING:
            answer = self._step.loss(self._step.model, batch)
        if began:
            spans.complete(began, "forward", "compute")
        loss, returned = loss_and_returned(answer)
        fetch.check(returned)
        return loss, returned

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
        if all_finite([gradient for p in self.parameters.values() if (gradient := p.grad) is not None]):
            return []
        return nonfinite_names((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)

    def norm(self) -> Tensor:
        """Return the norm of all gradients together."""
        return norm_of(elements(self.parameters.values()))

    def clip(self, max_norm: float, elsewhere: float | None = None) -> Tensor:
        """Clip the gradients by their norm together with the sum of squares ``elsewhere``; return the norm before."""
        return clip_norm(elements(self.parameters.values()), max_norm, elsewhere)
