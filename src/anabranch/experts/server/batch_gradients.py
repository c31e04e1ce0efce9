"""Gradients of an expert's parameters: a batch's own, and those that earlier batches left for a later step.

::

    left by earlier batches ──> set aside ───────────────────────┐
    this batch ──> .grad ──> finite? ──> mean over requests ──> sum ──> apply_gradients ──> cleared if it has stepped,
                               └── a batch that fails leaves the others' as they were           else left for the next
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from anabranch.autodiff.moved_parameter import parameters_here

__all__ = ["BatchGradients", "WaitingGradients"]


class WaitingGradients:
    """The gradients of a module's parameters that wait for a step.

    Attributes:
        applied: they have been used in an update; set by the update itself if it may leave the parameters unchanged.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.applied = False

    @contextmanager
    def of_batch(self) -> Iterator[BatchGradients]:
        """Set aside those of earlier batches while a batch's are computed; restore them if it fails or has none."""
        batch = BatchGradients(self, self._module)
        try:
            yield batch
        finally:
            if not batch.summed:
                batch.put_back()

    def state_dict(self) -> dict[str, object]:
        """Return the gradients by parameter; empty if none waits."""
        return {
            name: _packed(parameter.grad)
            for name, parameter in self._module.named_parameters()
            if parameter.grad is not None
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the gradients from ``state_dict``."""
        for name, parameter in self._module.named_parameters():
            parameter.grad = _unpacked(state[name], parameter) if name in state else None


class BatchGradients:
    """One batch's gradients, in ``.grad``, and those of earlier batches beside them."""

    def __init__(self, owner: WaitingGradients, module: nn.Module) -> None:
        self._owner = owner
        self._parameters = list(parameters_here(module).values())
        self._earlier = [parameter.grad for parameter in self._parameters]
        self.summed = False
        self.stepped = False
        """The update has changed parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    def put_back(self) -> None:
        """Discard the batch's gradients."""
        for parameter, gradient in zip(self._parameters, self._earlier, strict=True):
            parameter.grad = gradient

    @contextmanager
    def applied(self, *, overridden: bool) -> Iterator[None]:
        """Add the earlier gradients to the batch's for an update in the block; clear them if it was made.

        An update that fails before it has changed anything discards only this batch. ``overridden``: it may leave them
        for later, or change parameters in ways visible only in their values.
        """
        for parameter, gradient in zip(self._parameters, self._earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else _sum(gradient, parameter.grad)
        before = self._marks() if overridden else None
        self._owner.applied = not overridden
        failed = True
        try:
            yield
            failed = False
        finally:
            if self._owner.applied or before != self._marks():
                self.summed = self.stepped = True
                for parameter in self._parameters:
                    parameter.grad = None
            else:
                self.summed = not failed

    def _marks(self) -> tuple[list[int], list[float]]:
        """Return what changes when a parameter does: its version, or through ``.data`` only its values."""
        with torch.no_grad():
            sums = [parameter.sum().double() for parameter in self._parameters if parameter.numel()]
            return [parameter._version for parameter in self._parameters], torch.stack(sums).tolist() if sums else []


def _sum(earlier: Tensor, gradient: Tensor) -> Tensor:
    # A sparse one is added to a dense one, not the reverse.
    return gradient + earlier if earlier.is_sparse else earlier + gradient


def _packed(gradient: Tensor) -> object:
    if not gradient.is_sparse:
        return gradient
    gradient = gradient.coalesce()
    return {"indices": gradient.indices(), "values": gradient.values()}


def _unpacked(state: object, parameter: Tensor) -> Tensor:
    if isinstance(state, Tensor):
        return state.to(parameter.device, parameter.dtype)
    parts = cast("Mapping[str, Tensor]", state)
    found = torch.sparse_coo_tensor(
        parts["indices"], parts["values"], parameter.shape, check_invariants=True, device=parts["values"].device
    )
    return found.coalesce().to(parameter.device, parameter.dtype)
