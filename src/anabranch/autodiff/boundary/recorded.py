"""``RecordedBoundary``: a boundary written as a differentiable function, on its own tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.autodiff.boundary.crossing import Crossed, Form, Tensors
from anabranch.autodiff.isolated import IsolatedCall


@dataclass(frozen=True, slots=True)
class RecordedBoundary:
    """A boundary that is written as a differentiable function, on its own tape.

    The tape is inside the one node, so the function's recordings (the number of rows, the experts that answered) may
    differ from run to run without affecting the graph around it.

    Attributes:
        kind: as ``Boundary``.
        name: as ``Boundary``.
        function: takes the entry token (``None`` without a backward) and the inputs, returns the outputs. What it
            crosses itself it gives the entry to.
        output_forms: as ``Boundary.forms``.
    """

    kind: str
    name: str
    function: Callable[..., Sequence[Tensor]]
    output_forms: Callable[[Tensors], Sequence[Form]]

    def forms(self, inputs: Tensors) -> Sequence[Form]:
        """Return the outputs' forms."""
        return self.output_forms(inputs)

    def forward(self, inputs: Tensors, wants: Sequence[bool] | None) -> Crossed:
        """Run the function, recording it if a gradient may come."""
        if wants is None:
            with torch.no_grad():
                return Crossed(self.function(None, *inputs))
        entry = torch.empty((), requires_grad=True, device="cpu")
        detached = [None if value is None else value.detach() for value in inputs]
        leaves = [
            value.requires_grad_() for value, want in zip(detached, wants, strict=True) if value is not None and want
        ]
        with torch.enable_grad():
            outputs = self.function(entry, *detached)
        places = [index for index, want in enumerate(wants) if want]
        call = IsolatedCall([entry, *leaves], outputs, [-1, *places], len(inputs))
        dead = [index for index, output in enumerate(call.outputs) if output is None]
        return Crossed([output.detach() for output in outputs], call, dead)

    def backward(self, state: object, inputs: Tensors, gradients: Tensors, *, updates: bool) -> list[Tensor | None]:
        """Sweeps the function's own tape."""
        assert isinstance(state, IsolatedCall)
        retain = torch._C._autograd._get_current_graph_task_keep_graph()
        answer: list[Tensor | None] = [None] * len(inputs)
        if not updates:  # not towards the entry
            state = IsolatedCall(state.leaves[1:], state.outputs, state.places[1:], state.arity)
        for place, gradient in zip(state.places, state.backward(gradients, retain=retain), strict=True):
            if place >= 0:
                answer[place] = gradient
        return answer
