"""The tape engine: a step run eagerly by PyTorch's autograd, with any model, control flow included.

Gradients are passed on as soon as they are final, so that communication overlaps the rest of backward. Without a
receiver, a step is the plain PyTorch loop, call for call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from anabranch import spans
from anabranch.autodiff import Callback, GradManager
from anabranch.autodiff import grad_sessions as sessions
from anabranch.autodiff.moved_parameter import parameters_here
from anabranch.autodiff.roots import run_sweep
from anabranch.executor.engines.clipping import clip_gradients
from anabranch.executor.engines.engine import Begin, Ready, StepOutput, loss_and_returned
from anabranch.executor.engines.fetching import Fetch
from anabranch.executor.engines.finite import all_finite, nonfinite_names
from anabranch.executor.engines.loss_scale import LossScale
from anabranch.executor.steps import TrainStep
from anabranch.interrupts import hold_interrupts
from anabranch.tensors import Structure

__all__ = ["TapeEngine"]


class TapeEngine:
    """Differentiates one ``TrainStep`` by PyTorch's autograd.

    Attributes:
        scale: the factor on the loss that ``differentiate`` starts backward from, if there is one.
    """

    name = "tape"

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._manager = GradManager()
        self._attached: tuple[Mapping[str, Tensor], Ready] | None = None
        self.siblings = None  # with its tokens a session, for a step without a receiver of gradients
        self.tokens = sessions.Tokens()
        self.scale: LossScale | None = None
        self.follow_model()

    def attach(self, parameters: Mapping[str, Tensor], ready: Ready) -> None:
        """Hands the gradients of these parameters to ``ready`` from now on."""
        self._attached = parameters, ready
        self._manager = GradManager().attach(parameters.values(), callbacks=cast(Callback, ready))

    def follow_model(self) -> None:
        """Look up the model's parameters again: some were replaced."""
        named = parameters_here(self._step.model)
        self._names, self._parameters = list(named), list(named.values())

    def differentiate(self, batch: Structure, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward, and backward from the gradient ``seed`` of the loss; ``begin(loss)`` is called in between."""
        factor = seed if self.scale is None else seed * self.scale.value
        self._manager.release()  # if an interrupt kept the run before from doing so
        with self._manager:
            loss, returned = self._forward(batch, fetch)
            if any(parameter.grad is not None for parameter in self._parameters):
                raise ValueError(
                    "the loss called backward() itself, whose gradients servers, several workers and accumulate=... "
                    "would not get; return the sum of the losses"
                )
            begin(loss)
            began = spans.begin()
            self._manager.backward(loss, None if factor == 1.0 else torch.full_like(loss, factor))
            if began:
                spans.complete(began, "backward", "compute")
        return StepOutput(loss.detach(), returned)

    def differentiate_noting(
        self, batch: Structure, fetch: Fetch, begin: Begin, seed: float
    ) -> tuple[StepOutput, dict[Tensor, Tensor]]:
        """``differentiate``, and a copy of each gradient as it was passed on."""
        assert self._attached is not None
        parameters, ready = self._attached
        noted: dict[Tensor, Tensor] = {}

        def note(parameter: Tensor, gradient: Tensor) -> Tensor | None:
            noted[parameter] = gradient.detach().clone()
            return ready(parameter, gradient)

        self.attach(parameters, note)
        try:
            return self.differentiate(batch, fetch, begin, seed), noted
        finally:
            self.attach(parameters, ready)

    def step(
        self,
        batch: Structure,
        fetch: Fetch,
        between: Callable[[Tensor, Mapping[str, Tensor]], None] | None = None,
    ) -> StepOutput:
        """Forward, backward, clipping and the optimizers' step; ``between`` is called once the gradients are final."""
        self._end_session()  # if an interrupt kept the run before from doing so
        sessions.begin(self)
        try:
            loss, returned = self._forward(batch, fetch)
            began = spans.begin()
            roots = [loss, *self.tokens.exits]
            retain, create = sessions.sweep_flags(self)
            if create:
                run_sweep(roots, [None] * len(roots), retain, create)
            else:
                torch.autograd.backward(roots, retain_graph=retain)
            if began:
                spans.complete(began, "backward", "compute")
        finally:
            self._end_session()
        if between is not None:
            between(loss.detach(), returned)
        if self._step.skip_nonfinite is not None and (names := self._nonfinite()):
            return StepOutput(loss.detach(), returned, names)
        if self._step.clip_grad_norm is not None:
            clip_gradients(self._parameters, self._step.clip_grad_norm)
        self.update()
        return StepOutput(loss.detach(), returned)

    def _end_session(self) -> None:
        self.tokens.entries.clear()
        self.tokens.exits.clear()
        sessions.end(self)

    def _nonfinite(self) -> list[str]:
        if all_finite([p.grad for p in self._parameters if p.grad is not None]):
            return []
        pairs = zip(self._names, self._parameters, strict=True)
        return nonfinite_names((name, p.grad) for name, p in pairs if p.grad is not None)

    def update(self) -> None:
        """Step the optimizers."""
        hold_interrupts()
        began = spans.begin()
        for optimizer in self._step.optimizers:
            optimizer.step()
        if began:
            spans.complete(began, "optimizer", "compute")

    def _forward(self, batch: Structure, fetch: Fetch) -> tuple[Tensor, Mapping[str, Tensor]]:
        began = spans.begin()
        with fetch.recording():
            answer = self._step.loss(self._step.model, batch)
        if began:
            spans.complete(began, "forward", "compute")
        loss, returned = loss_and_returned(answer)
        fetch.check(returned)
        return loss, returned
