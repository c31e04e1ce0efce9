"""Checks, clipping and the loss's scale: functions on a step's gradients, between backward and the optimizers.

Functions on a list of gradients: the tape calls them on what is in ``.grad``, a graph traces ``clip_norm`` and asks
``all_finite`` before its update. All of them cost little where there is nothing to do.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anabranch.choices import listed
from anabranch.errors import NonFinite
from anabranch.tensors.structures import identical

_LARGE = 1 << 15  # elements of a tensor on the CPU that a sum, which only reads, checks faster
_FIRST_SCALE = 2.0**16
_REQUIRES_GRAD = operator.attrgetter("requires_grad")  # of a gradient that was itself recorded
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000


# Clipping, by the norm of all gradients together, or by each element's value, sparse ones included.


def elements(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the elements of every ``.grad``, in its own memory; a sparse one has its duplicates merged."""
    values: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            parameter.grad = gradient = gradient.coalesce()
        values.append(gradient._values() if gradient.is_sparse else gradient)
    return values


def norm_of(gradients: list[Tensor], elsewhere: float | None = None) -> Tensor:
    """Return the norm of all gradients together with the sum of squares ``elsewhere``."""
    total = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device="cpu")
    return total if elsewhere is None else (total.double().square() + elsewhere).sqrt()


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients of this ``norm``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def clip_norm(gradients: list[Tensor], max_norm: float, elsewhere: float | None = None) -> Tensor:
    """Scale gradients in place so that their norm together is at most ``max_norm``; return the norm before.

    Bitwise equal to ``torch.nn.utils.clip_grad_norm_``.

    Args:
        gradients: of a sparse one the elements, duplicates merged.
        max_norm: the largest norm that all gradients may have together.
        elsewhere: the sum of squares of gradients that are not here, and count too.
    """
    total = norm_of(gradients, elsewhere)
    scale = clip_scale(total, max_norm)
    for device in {gradient.device for gradient in gradients}:
        torch._foreach_mul_([gradient for gradient in gradients if gradient.device == device], scale.to(device))
    return total


def clip_values(gradients: list[Tensor], bound: float) -> None:
    """Clamp every element to at most ``bound`` in size, as ``torch.nn.utils.clip_grad_value_``."""
    for gradient in gradients:
        gradient.clamp_(-bound, bound)


# Gradients that are not finite.


def all_finite(gradients: list[Tensor], *, own: bool = True) -> bool:
    """Return True if all are finite; False may also mean that finite numbers overflowed in their sum.

    Args:
        gradients: of sparse ones, the rows count.
        own: their memory is not shared, like that of ``.grad``; small ones are then checked by an operation that writes
            back the values it reads, in a third of the time.
    """
    if not own:
        return _sums_finite(gradients)
    if not any(map(_REQUIRES_GRAD, gradients)) and (finite := _alike_finite(gradients)) is not None:
        return finite
    kinds = defaultdict[object, list[Tensor]](list)
    for gradient in map(_values, gradients):
        kinds[gradient.device, gradient.dtype].append(gradient)
    by_kind = ((alike, _alike_finite(alike)) for alike in kinds.values())
    return all(_sums_finite(alike) if finite is None else finite for alike, finite in by_kind)


def _alike_finite(gradients: list[Tensor]) -> bool | None:
    """Return what ``all_finite`` does; ``None`` if they are of several kinds, or their memory overlaps itself."""
    if not gradients:
        return True
    if gradients[0].is_cpu and max(map(Tensor.numel, gradients)) > _LARGE:
        if not _sums_finite(gradient for gradient in gradients if gradient.numel() > _LARGE):
            return False
        return _alike_finite([gradient for gradient in gradients if gradient.numel() <= _LARGE])
    flag, one = _scratch(gradients[0].device, threading.get_ident())
    try:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, one)
    except RuntimeError:
        flag.zero_()  # others may have been looked at before
        return None
    if flag.item():
        flag.zero_()
        return False
    return True


def _sums_finite(gradients: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(_values(gradient).sum())) for gradient in gradients)


def nonfinite_names(gradients: Iterable[tuple[str, Tensor]], *, own: bool = True) -> list[str]:
    """Return the names of the gradients that hold NaN or an infinity; of sparse ones, the rows count.

    >>> nonfinite_names([("weight", torch.ones(2)), ("bias", torch.tensor([1.0, float("nan")]))])
    ['bias']

    Args:
        gradients: with their names; a name may come several times.
        own: as for ``all_finite``.
    """
    named = list(gradients)
    if all_finite([gradient for _, gradient in named], own=own):
        return []
    return list(dict.fromkeys(name for name, gradient in named if not bool(torch.isfinite(_values(gradient)).all())))


def nonfinite_error(names: Iterable[str], step: int, *, late: bool = False) -> NonFinite:
    """Return the error of a step whose gradients are not finite.

    Args:
        names: of the parameters; unknown where the error is ``late``.
        step: the number of optimizer steps before it.
        late: a later call found it out.
    """
    whose = "gradients held" if late else f"the gradients of {listed(list(names))} hold"
    again = (
        "; the steps after it were taken. An optimizer without fused=True waits for the GPU in the step itself, and "
        "names the parameters"
    )
    return NonFinite(
        f"{whose} NaN or an infinity after {step} optimizer steps; nothing was updated by them. Look at the batch and "
        "the loss (torch.autograd.set_detect_anomaly(True) names the operation), lower the learning rate, or give the "
        f"TrainStep skip_nonfinite=True to skip such steps{again if late else ''}"
    )


class LateCheck:
    """A look for gradients that are not finite on a GPU, for which nobody waits.

    The optimizers' own kernels read its result on the device and then update nothing; this process reads it when the
    next step is about to update, or something is saved. Waiting at once would leave the GPU without work.

    Args:
        optimizers: whose kernels do so, all with ``fused=True``.
        device: of their parameters and gradients.
        schedulers: of the optimizers; they step with every step, and go back behind one that has updated nothing.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], device: torch.device, schedulers: Sequence[LRScheduler] = ()
    ) -> None:
        on_gpu = device.type == "cuda"
        self._optimizers, self._schedulers = optimizers, schedulers
        self._bad = torch.zeros((), device=device, dtype=torch.float32)
        self._answer = torch.zeros((), device="cpu", dtype=torch.float32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._open = self._looked = False
        self._stepped: list[Tensor] = []  # all that have state, and those of the last look
        self._looked_at: list[Tensor] = []
        self._schedules: list[dict[str, Any]] = []  # before the step
        self._numbers: list[dict[str, Any]] = []
        self._behind: list[dict[str, Any]] = []  # those behind it: what has changed since is somebody else's

    @contextmanager
    def heeded(self) -> Iterator[None]:
        """Let the optimizers heed it in the block; a look at a step that ends in an error is forgotten."""
        self._looked = False
        for optimizer in self._optimizers:
            if all(group.get("fused") for group in optimizer.param_groups):  # a checkpoint may have brought others
                optimizer.found_inf = self._bad  # type: ignore[attr-defined]
        whole = False
        try:
            yield
            whole = True
        finally:
            if self._looked:
                self._behind = self._numbers_now()
                if not whole:
                    self.failed()  # the step was not counted
            for optimizer in self._optimizers:
                vars(optimizer).pop("found_inf", None)

    def look(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
        """Look at the gradients of some parameters; return False if this cannot be done without waiting."""
        # Fused SGD would take what was in memory for a momentum, if it passed over a parameter's first step; a gradient
        # that no optimizer clears would stay. Lists are compared first: a tensor's hash is Python's.
        stepped: list[Tensor] = [*chain.from_iterable(optimizer.state for optimizer in self._optimizers)]
        if not (identical(stepped, self._stepped) and identical(parameters, self._looked_at)):
            if not set(stepped).issuperset(parameters):
                return False
            self._stepped, self._looked_at = stepped, [*parameters]
        if not all("found_inf" in vars(one) for one in self._optimizers):
            return False
        try:
            _, one = _scratch(self._bad.device, threading.get_ident())
            torch._amp_foreach_non_finite_check_and_unscale_([*gradients], self._bad, one)
        except RuntimeError:  # memory that overlaps itself, several dtypes or devices
            self._bad.zero_()  # others may have been looked at before
            return False
        self._answer.copy_(self._bad, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._bad.device))  # the current device may be another
        self._open = self._looked = True
        parameters = [parameter for group in self._groups() for parameter in group["params"]]
        # A scheduler may refer to any of these: its copy refers to the same ones.
        own = {id(one): one for one in (*self._optimizers, *self._groups(), *parameters)}
        self._schedules = [copy.deepcopy(one.state_dict(), own) for one in self._schedulers]
        self._numbers = self._numbers_now()
        return True

    def _numbers_now(self) -> list[dict[str, Any]]:
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
            for group in self._groups()
        ]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the optimizers' groups, if there are schedulers to change them."""
        return [group for one in self._optimizers for group in one.param_groups] if self._schedulers else []

    def failed(self) -> bool:
        """Return True, once, if the gradients last looked at were not finite; the schedulers are then back before."""
        if not self._open:
            return False
        if self._copied is not None:
            self._copied.synchronize()
        self._open = False
        if not self._answer.item():
            return False
        self._bad.zero_()
        for scheduler, schedule in zip(self._schedulers, self._schedules, strict=True):
            scheduler.load_state_dict(schedule)
        for group, before, behind in zip(self._groups(), self._numbers, self._behind, strict=False):
            for key in before.keys() - {"params"}:
                if not _same(group.get(key), behind.get(key)):
                    continue
                if isinstance(group[key], Tensor):  # a rate that is a tensor is filled in place
                    group[key].copy_(before[key])
                else:
                    group[key] = before[key]
        return True


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _values(gradient: Tensor) -> Tensor:
    # Not coalesced: a sum of finite rows that overflows is the optimizer's own.
    values = gradient._values() if gradient.is_sparse else gradient
    return values.detach() if values.requires_grad else values


@cache
def _scratch(device: torch.device, thread: int) -> tuple[Tensor, Tensor]:
    """Return a flag that a check sets to 1 and its reader resets, and the factor 1; each thread has its own."""
    one = torch.ones((), device=device, dtype=torch.float32)  # whatever the default dtype
    return torch.zeros_like(one), one


# The scale of a loss.


class LossScale:
    """The factor on a float16 loss: large enough to keep small gradients, small enough to avoid overflow.

    A power of two that falls by half at an overflow and doubles after 2,000 steps without one, as in
    ``torch.amp.GradScaler``.

    >>> scale = LossScale()
    >>> scale.update(overflow=True)
    >>> scale.value
    32768.0
    """

    def __init__(self) -> None:
        self.value = _FIRST_SCALE
        self._steps = 0

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients of a scaled loss by the factor, in place."""
        values = [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
        if values:
            torch._foreach_mul_(values, 1.0 / self.value)

    def update(self, *, overflow: bool) -> None:
        """Update the factor after a step."""
        if overflow:
            self.value, self._steps = self.value * _BACKOFF, 0
            return
        self._steps += 1
        if self._steps == _INTERVAL:
            self.value, self._steps = self.value * _GROWTH, 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "steps": self._steps}

    def restore(self, state: dict[str, float]) -> None:
        """Restore a saved state."""
        self.value, self._steps = float(state["value"]), int(state["steps"])
