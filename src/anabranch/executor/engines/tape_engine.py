"""The tape engine: a step run eagerly by PyTorch's autograd, with any model, control flow included.

Gradients are passed on as soon as they are final, so that communication overlaps the rest of backward. Without sinks, a
step is the plain PyTorch loop, call for call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from anabranch.autodiff import Callback, GradManager
from anabranch.autodiff import grad_sessions as sessions
from anabranch.executor.engines.engine import Begin, Engine, Fetch, GradientSink, StepOutput, loss_and_returned
from anabranch.executor.steps import TrainStep
from anabranch.record import spans
from anabranch.tensors import Structure


class TapeEngine(Engine):
    """Differentiates one ``TrainStep`` by PyTorch's autograd."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__(step)
        self._manager = GradManager()
        self._sinks: Sequence[GradientSink] = ()
        self._session = sessions.Session()  # of a step without sinks

    def attach(self, sinks: Sequence[GradientSink]) -> None:
        """From now on ``differentiate`` passes the gradients of the sinks' parameters on as they become final."""
        self._sinks, self._manager = sinks, GradManager()
        for sink in sinks:
            self._manager.attach(sink.parameters.values(), callbacks=cast(Callback, sink.ready))

    def differentiate(self, batch: Structure, rows: float, fetch: Fetch, begin: Begin, seed: float = 1.0) -> StepOutput:
        """Forward, and backward from the gradient ``seed`` of the loss; ``begin(loss)`` is called in between."""
        self._manager.release()  # if an interrupt kept the run before from doing so
        with self._manager:
            loss, returned = self._forward(batch, fetch)
            if any(parameter.grad is not None for parameter in self.parameters.values()):
                raise ValueError(
                    "the loss called backward() itself, whose gradients servers, several workers and accumulate=... "
                    "would not get; return the sum of the losses"
                )
            begin(loss)
            began = spans.begin()
            self._manager.backward(loss, None if seed == 1.0 else torch.full_like(loss, seed))
            if began:
                spans.complete(began, "backward", "compute")
        return StepOutput(loss.detach(), returned)

    def differentiate_noting(
        self, batch: Structure, rows: float, fetch: Fetch, begin: Begin, seed: float
    ) -> tuple[StepOutput, dict[Tensor, Tensor]]:
        """``differentiate``, and a copy of each gradient as it was passed on."""
        sinks, noted = self._sinks, dict[Tensor, Tensor]()
        self.attach([_Noting(sink, noted) for sink in sinks])
        try:
            return self.differentiate(batch, rows, fetch, begin, seed), noted
        finally:
            self.attach(sinks)

    def step(
        self,
        batch: Structure,
        rows: float,
        fetch: Fetch,
        between: Callable[[Tensor, Mapping[str, Tensor]], None] | None = None,
    ) -> StepOutput:
        """Forward, backward, clipping and the optimizers' step; ``between`` is called once the gradients are final."""
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
        if between is not None:
            between(loss.detach(), returned)
        if self._step.skip_nonfinite is not None and (names := self.nonfinite()):
            return StepOutput(loss.detach(), returned, names)
        if self._step.clip_grad_norm is not None:
            self.clip(self._step.clip_grad_norm)
        self.update()
        return StepOutput(loss.detach(), returned)

    def _forward(self, batch: Structure, fetch: Fetch) -> tuple[Tensor, Mapping[str, Tensor]]:
        began = spans.begin()
        with fetch.recording():
            answer = self._step.loss(self._step.model, batch)
        if began:
            spans.complete(began, "forward", "compute")
        loss, returned = loss_and_returned(answer)
        fetch.check(returned)
        return loss, returned


class _Noting:
    """A sink that copies each gradient before another takes it."""

    def __init__(self, sink: GradientSink, noted: dict[Tensor, Tensor]) -> None:
        self.parameters, self._sink, self._noted = sink.parameters, sink, noted

    def ready(self, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        self._noted[parameter] = gradient.detach().clone()
        return self._sink.ready(parameter, gradient)
