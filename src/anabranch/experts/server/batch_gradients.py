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

__all__ = ["ParameterGradients"]


class ParameterGradients:
    """The gradients of a module's parameters: a batch's own, in ``.grad``, and those of earlier batches beside them.

    Attributes:
        applied: they have been used in an update; set by the update itself if it may leave the parameters unchanged.
        stepped: the batch's update has changed parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.applied = self.stepped = self._summed = False
        self._parameters: list[nn.Parameter] = []
        self._earlier: list[Tensor | None] = []

    @contextmanager
    def of_batch(self) -> Iterator[None]:
        """Set aside those of earlier batches while a batch's are computed; restore them if it fails or has none."""
        self._parameters = list(parameters_here(self._module).values())
        self._earlier = [parameter.grad for parameter in self._parameters]
        self.stepped = self._summed = False
        for parameter in self._parameters:
            parameter.grad = None
        try:
            yield
        finally:
            if not self._summed:
                for parameter, gradient in zip(self._parameters, self._earlier, strict=True):
                    parameter.grad = gradient
            self._parameters, self._earlier = [], []

    @contextmanager
    def added(self, *, overridden: bool) -> Iterator[None]:
        """Add the earlier gradients to the batch's for an update in the block; clear them if it was made.

        An update that fails before it has changed anything discards only this batch. ``overridden``: it may leave them
        for later, or change parameters in ways visible only in their values.
        """
        for parameter, gradient in zip(self._parameters, self._earlier, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else _sum(gradient, parameter.grad)
        before = self._marks() if overridden else None
        self.applied = not overridden
        try:
            yield
            self._summed = True
        finally:
            if self.applied or before != self._marks():
                self._summed = self.stepped = True
                for parameter in self._parameters:
                    parameter.grad = None

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
