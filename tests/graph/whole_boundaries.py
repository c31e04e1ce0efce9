"""Crossings in code that becomes a graph: Dynamo leaves them whole, as it does the calls of the package's modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from anabranch.autodiff.boundary import crossing, whole_calls
from anabranch.autodiff.boundary.crossing import Form
from anabranch.autodiff.boundary.recorded import RecordedBoundary


def cross(boundary, *inputs: Tensor) -> Sequence[Tensor]:
    """Cross a boundary that has a ``handle``."""
    if torch.compiler.is_dynamo_compiling():
        return whole_calls.call(boundary.handle, inputs, {})
    return crossing.cross(boundary, *inputs)


class Recorded(RecordedBoundary):
    """One that has."""

    def __init__(self, kind: str, name: str, function: Callable[..., object], forms: Callable[..., list[Form]]) -> None:
        super().__init__(kind, name, function, forms)  # type: ignore[arg-type]
        object.__setattr__(self, "handle", whole_calls.handle_of(self))

    def call_whole(self, *inputs: Tensor) -> Sequence[Tensor]:
        return crossing.cross(self, *inputs)
