"""The tape engine: a training step run eagerly, its gradients summed over runs and workers while backward runs.

::

    forward ─> loss ─> header launched ─> backward ┌ gradient final ─> bucket ─> all_reduce ┐ ─> wait, divide, clip,
                                                   └ ... every parameter, as it comes ...   ┘    optimizers, schedulers

With one worker and no accumulation there is nothing to sum: the step is the plain PyTorch loop, call for call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from anabranch.autodiff import Callback, GradManager
from anabranch.collectives import GradientBuckets, Workers
from anabranch.errors import BoundaryError
from anabranch.executor.clipping import clip_gradients
from anabranch.executor.fetching import Fetch
from anabranch.executor.steps import TrainStep, parameters_of
from anabranch.executor.window import HEADER_SIZE, Total, Totals, header
from anabranch.tensors import Structure

__all__ = ["Ran", "TapeEngine"]

_NOTHING: Mapping[str, Tensor] = {}


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run of a training step gave: the whole batch's loss, and what the step returned on this worker."""

    loss: Tensor
    returned: Mapping[str, Tensor]


class TapeEngine:
    """Runs one ``TrainStep`` by PyTorch's autograd.

    Args:
        step: what to run.
        workers: whom to average with; ``None`` trains alone.
    """

    name = "tape"

    def __init__(self, step: TrainStep, workers: Workers | None) -> None:
        self.step = step
        self._workers = workers if workers is not None and workers.size > 1 else None
        self.runs = 0
        self.steps = 0
        self._in_window = 0
        self._window_rows = 0.0
        self._broken = False
        self._parameters = list(step.model.parameters())
        self._held = _count_held(step)
        self._loss_dtype = self._parameters[0].dtype  # until a loss was seen: a worker may have no rows at first
        self._layout: tuple[bool, ...] | None = None
        self._buckets: GradientBuckets | None = None
        self._manager = GradManager()
        self._device = self._parameters[0].device
        self.asked_to_stop = False
        self.stopping = False

    def _lay_out(self) -> None:
        """Buckets for the parameters that require a gradient now; laid out anew when some were frozen or thawed."""
        layout = tuple(parameter.requires_grad for parameter in self._parameters)
        if layout == self._layout:
            return
        self._layout = layout
        named = {name: value for name, value in self.step.model.named_parameters() if value.requires_grad}
        self._buckets = GradientBuckets(
            named, self._workers, sparse=_sparse_tables(self.step.model), header=HEADER_SIZE
        )
        self._manager = GradManager(timeout=self._workers.timeout if self._workers is not None else 1800.0)
        self._manager.attach(named.values(), callbacks=cast(Callback, self._buckets.ready))

    def run(self, batch: Structure, rows: float, fetch: Fetch) -> Ran:
        """One run on this worker's share of the batch, which has ``rows`` rows."""
        if self._workers is None and self.step.accumulate == 1:
            return self._run_plainly(batch, fetch)
        self._begin_run()
        if not rows > 0:
            ran = self._add_nothing(active=True)
            assert ran is not None
            return ran
        assert self._buckets is not None
        weight = rows if self.step.reduction == "mean" else 1.0
        with self._manager:
            loss, returned = self._forward(batch, fetch)
            with self._window_kept_whole():
                totals = self._start_run(loss, weight)
                self._manager.backward(loss)
                self._buckets.launch_rest()
                total = totals.wait_for()
                self._finish_run(total)
        return Ran(loss.detach() if self._workers is None else self._loss_of(total), returned)

    def _start_run(self, loss: Tensor | None, weight: float, *, active: bool = True) -> Totals:
        """Begins a run of the buckets, which carry its header if they communicate now; alone it goes ahead of them."""
        assert self._buckets is not None
        last = self._closes_window()
        share = header(loss, weight, active=active, stopping=self.asked_to_stop, device=self._device)
        if last and self._workers is not None and self._buckets.carries_header:
            self._buckets.start_run(weight, last=last, header=share, step=self.runs)
            return Totals(self._buckets.header)
        self._buckets.start_run(weight, last=last, step=self.runs)
        return Totals.alone(share, self._workers, self.runs)

    def _finish_run(self, total: Total) -> None:
        self.stopping = self.stopping or total.stopping > 0
        self._end_run(total.rows)

    def run_idle(self) -> Ran | None:
        """A run of a worker whose loader has ended: adds nothing; ``None`` when that is so on every worker."""
        self._begin_run()
        return self._add_nothing(active=False)

    def _add_nothing(self, *, active: bool) -> Ran | None:
        assert self._buckets is not None
        with self._window_kept_whole():
            total = self._start_run(None, 0.0, active=active).wait_for()
            if not total.active:
                return None
            self._buckets.launch_rest()
            self._finish_run(total)
        return Ran(self._loss_of(total), {})

    @contextmanager
    def _window_kept_whole(self) -> Iterator[None]:
        """What fails halfway leaves no half sums behind: the window is dropped."""
        try:
            yield
        except BaseException as error:
            self._broken = self._workers is not None
            if self._in_window:
                error.add_note(f"the {self._in_window} runs accumulated before this one are dropped with it")
            self._in_window = 0
            raise

    def _run_plainly(self, batch: Structure, fetch: Fetch) -> Ran:
        self._check_held()
        self._clear_gradients()
        loss, returned = self._forward(batch, fetch)
        with self._manager:
            self._manager.backward(loss)
        self.runs += 1
        self._update()
        self.stopping = self.asked_to_stop
        return Ran(loss.detach(), returned)

    def _begin_run(self) -> None:
        if self._broken:
            raise BoundaryError(
                "an earlier run failed in the middle of its communication, so this worker no longer knows where the "
                "others stand; restart the job from its last checkpoint",
                operation="run",
                step=self.runs,
            )
        self._check_held()
        if self._in_window == 0:
            self._lay_out()
            assert self._buckets is not None
            self._buckets.start_window()
            self._window_rows = 0.0
        # The window's sums are in the buckets; a .grad left from the last run would be added to them again.
        self._clear_gradients()

    def _check_held(self) -> None:
        """Raises ``ValueError`` if an optimizer was given a parameter that the model did not have at first."""
        held = _count_held(self.step)
        if held == self._held:
            return
        known = set(self._parameters)
        for optimizer in self.step.optimizers:
            for parameter in parameters_of(optimizer):
                if parameter not in known:
                    raise ValueError(
                        f"{type(optimizer).__name__} was given a parameter of shape {tuple(parameter.shape)} that the "
                        "model did not have when the Executor was made; make a new TrainStep and Executor"
                    )
        self._held = held

    def _check_thawed(self) -> None:
        """Raises ``ValueError`` for a gradient that is this run's and this worker's alone."""
        assert self._layout is not None
        for parameter, laid_out in zip(self._parameters, self._layout, strict=True):
            if not laid_out and parameter.grad is not None:
                names = {value: name for name, value in self.step.model.named_parameters()}
                raise ValueError(
                    f"{names[parameter]!r} was thawed (requires_grad) inside the loss or in an open accumulation "
                    "window; do it between two optimizer steps"
                )

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _closes_window(self) -> bool:
        return self._in_window + 1 == self.step.accumulate

    def _forward(self, batch: Structure, fetch: Fetch) -> tuple[Tensor, Mapping[str, Tensor]]:
        with fetch.recording():
            answer = self.step.loss(self.step.model, batch)
        loss, returned = _loss_and_returned(answer)
        fetch.check(returned)
        self._loss_dtype = loss.dtype
        return loss, returned

    def _end_run(self, rows: float) -> None:
        self._window_rows += rows
        self.runs += 1
        if not self._closes_window():
            self._in_window += 1
            return
        assert self._buckets is not None
        divisor = self._window_rows if self.step.reduction == "mean" else 1.0
        # Without any rows the sums are all zero, or there are none.
        self._buckets.finish(divisor or 1.0)
        self._check_thawed()
        self._in_window = 0
        self._update()

    def _update(self) -> None:
        step = self.step
        if step.clip_grad_norm is not None:
            clip_gradients(self._parameters, step.clip_grad_norm)
        for optimizer in step.optimizers:
            optimizer.step()
        for scheduler in step.schedulers:
            scheduler.step()
        self.steps += 1

    def _loss_of(self, total: Total) -> Tensor:
        value = total.loss / total.rows if self.step.reduction == "mean" and total.rows else total.loss
        return torch.tensor(value, dtype=self._loss_dtype, device=self._device)

    # The window under way, for a checkpoint in the middle of it.

    def window(self) -> tuple[int, float, dict[str, Tensor]]:
        """How many runs the open window holds, their rows over all workers, and this worker's sums by parameter."""
        sums = self._buckets.sums() if self._buckets is not None and self._in_window else {}
        return self._in_window, self._window_rows, sums

    def restore(self, runs: int, steps: int, in_window: int, rows: float, sums: Mapping[str, Tensor]) -> None:
        """Continues where another engine stood; ``sums`` are this worker's part of the open window."""
        self.runs = runs
        self.steps = steps
        self._broken = False
        self._in_window = 0
        if in_window:
            self._begin_run()
            assert self._buckets is not None
            self._buckets.restore_sums(sums)
        self._in_window = in_window
        self._window_rows = rows


def _loss_and_returned(answer: object) -> tuple[Tensor, Mapping[str, Tensor]]:
    returned: object = _NOTHING
    loss = answer
    if isinstance(answer, tuple) and len(answer) == 2:
        loss, returned = answer
        if not isinstance(returned, Mapping):
            raise TypeError(f"beside the loss a step returns a dict of tensors, got {type(returned).__name__}")
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss(model, batch) returns a scalar tensor, or (scalar, dict), got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}, and backward starts from one number; return loss.mean() with "
            "reduction='mean', or loss.sum() with reduction='sum'"
        )
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on any parameter that requires a gradient; nothing would be trained")
    return loss if loss.ndim == 0 else loss.reshape(()), cast("Mapping[str, Tensor]", returned)


def _count_held(step: TrainStep) -> int:
    """How many parameters the optimizers hold; ``add_param_group`` changes it."""
    return sum(len(group["params"]) for optimizer in step.optimizers for group in optimizer.param_groups)


def _sparse_tables(model: nn.Module) -> list[str]:
    """The parameters whose gradients are known to be sparse before the first one arrives."""
    found = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return [name for name, parameter in model.named_parameters() if parameter in found]
