"""The two nodes that a captured boundary becomes, as the functions that generated code calls.

::

    y0, y1, state = cross_forward([x, mask])
    ...
    dx, = cross_backward(state, [x, mask], [dy0, None])

They call the boundary's own methods, as the tape does. The value ``state`` carries one run's data for backward: it is
freed after its last reader, or with the frame of a failed run, and several runs may be in progress at once. The inputs
are arguments of the backward node too, so that no other node reuses their memory before it.

A crossing is an effect: no pass drops, merges, repeats or reorders it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from anabranch.autodiff.boundary.crossing import (
    Boundary,
    Form,
    cross,
    current_tracer,
    in_own_memory,
    run_backward,
    run_forward,
)
from anabranch.errors import CaptureError, SchemaError


class Crossing:
    """A graph node's call of one direction of a boundary, with the name under which graphs show it."""

    def __init__(self, boundary: Boundary, wants: Sequence[bool] | None, phase: str) -> None:
        self.boundary = boundary
        self.wants = None if wants is None else tuple(wants)
        self.__name__ = f"{boundary.kind}_{phase}"

    @property
    def label(self) -> str:
        """The kind and the name of the remote side."""
        return f"{self.boundary.kind} {self.boundary.name}"


class ForwardCrossing(Crossing):
    """Returns the outputs, and the state for the backward node."""

    def __init__(self, boundary: Boundary, wants: Sequence[bool] | None, forms: Sequence[Form]) -> None:
        super().__init__(boundary, wants, "forward")
        self._forms = tuple(forms)

    def __call__(self, inputs: Sequence[Tensor | None]) -> tuple[object, ...]:
        if current_tracer() is not None:
            return *cross(self.boundary, *inputs), None
        crossed = run_forward(self.boundary, inputs, self.wants)
        for index, (output, form) in enumerate(zip(crossed.outputs, self._forms, strict=True)):
            if tuple(output.shape) != form.shape or output.dtype != form.dtype:
                raise SchemaError(
                    f"{self.label} returned output {index} as {tuple(output.shape)} {output.dtype}, and the graph was "
                    f"captured when it returned {form.shape} {form.dtype}; make a new Executor, or use engine='tape'"
                )
        return *crossed.outputs, crossed.state


class BackwardCrossing(Crossing):
    """Takes that state, the inputs and the outputs' gradients; returns the gradients of the inputs that require one.

    A graph needs every gradient that its capture promised: if the remote side gives none, zeros are returned.
    """

    def __init__(self, boundary: Boundary, wants: Sequence[bool], *, updates: bool) -> None:
        super().__init__(boundary, wants, "backward")
        self._updates = updates

    def __call__(
        self, state: object, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        assert self.wants is not None
        if current_tracer() is not None:
            raise CaptureError(f"the gradient of {self.label} cannot be differentiated again; use engine='tape'")
        answer = run_backward(self.boundary, state, inputs, gradients, self.wants, updates=self._updates)
        owned = in_own_memory(answer, [*inputs, *gradients])  # the graph reuses it
        return tuple(
            value.new_zeros(value.shape) if gradient is None else gradient
            for gradient, value, want in zip(owned, inputs, self.wants, strict=True)
            if want and value is not None
        )


def crossing_of(node: fx.Node) -> Crossing | None:
    """Return the node's crossing; ``None`` for any other node."""
    return node.target if isinstance(node.target, Crossing) else None
