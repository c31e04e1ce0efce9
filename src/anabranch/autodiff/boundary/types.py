"""``Boundary``: the interface of a boundary, and the results of crossing one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Boundary", "Crossed", "Form"]


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, dtype and device of an output, known before anything has been sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    differentiable: bool = True


@dataclass(slots=True)
class Crossed:
    """The result of a crossing.

    Attributes:
        outputs: in their own memory, not shared with an input.
        state: the values that backward needs in addition to the inputs; freed when backward has run or is impossible.
        no_gradient: which outputs have none.
        fresh: the outputs are known to be in newly allocated contiguous memory, so no check is needed.
        reads_inputs: backward reads the inputs, which are saved for it.
        differentiable_again: backward is itself made of crossings and torch's operations, to be recorded.
    """

    outputs: Sequence[Tensor]
    state: object = None
    no_gradient: Sequence[int] = ()
    fresh: bool = False
    reads_inputs: bool = True
    differentiable_again: bool = False


class Boundary(Protocol):
    """One kind of boundary at one place of a model.

    It holds nothing of a run, for several may be in progress: what belongs to one is in the state that forward returns.

    Attributes:
        kind: what is on the remote side: ``"expert"``, ``"table"``.
        name: which one, for graphs and errors.
    """

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    def forward(self, inputs: Sequence[Tensor | None], wants: Sequence[bool] | None) -> Crossed:
        """Goes there. ``wants``: which inputs require a gradient; ``None``: there will be no backward."""

    def backward(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, updates: bool
    ) -> Sequence[Tensor | None]:
        """Return a gradient for each input. ``None`` is not a gradient, on both sides. Without ``updates`` nothing
        there is to change: ``torch.autograd.grad`` accumulates into no parameter.
        """

    def forms(self, inputs: Sequence[Tensor | None]) -> Sequence[Form]:
        """Return the outputs' forms for inputs like these, of which only shape, dtype and device may be read."""
