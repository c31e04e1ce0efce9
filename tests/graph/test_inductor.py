"""Steps handed to Inductor: the same training but for rounding, the optimizer untouched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import CaptureError
from anabranch.graph import StepProgram, capture
from anabranch.graph.operation_graph import OperationGraph
from anabranch.graph.passes import lower
from anabranch.graph.run import inductor
from anabranch.graph.run.codegen import generate


def _losses_under_numbers(numbers: list[float], compile: bool) -> list[float]:  # noqa: A002
    """Of a loss whose weight, a Python number, changes between two steps."""
    torch.manual_seed(0)
    model, weight = nn.Linear(4, 3), {"now": 0.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * weight["now"]

    program, losses = StepProgram(model, loss, [optimizer], compile=compile), []
    for i, number in enumerate(numbers):
        weight["now"] = number
        losses.append(float(program.run(torch.sin(torch.arange(12.0).reshape(3, 4) + i))["loss"]))  # type: ignore
    return losses


NUMBERS = [1.0, 1.5, 2.0, 3.5, 1.5, 0.25, 7.0, -0.0, 2.0]


def test_a_number_that_inductor_writes_into_its_kernels_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its third value on, steps ran with the second one."""
    made: list[object] = []

    def with_numbers_inside(graph: OperationGraph, leaves: Sequence[object]) -> Callable[..., tuple[object, ...]]:
        made.append(leaves)
        lowered = lower(graph)

        def kernels(*given: object) -> tuple[object, ...]:
            pairs = zip(given, leaves, strict=True)
            program = generate(lowered.fx, dict(lowered.shared()))
            return program.run(*(new if isinstance(new, Tensor) else old for new, old in pairs))

        return kernels

    monkeypatch.setattr(inductor, "_compile", with_numbers_inside)
    assert _losses_under_numbers(NUMBERS, compile=True) == _losses_under_numbers(NUMBERS, compile=False)
    assert len(made) == 3  # the first number's, and those of two others


def test_an_error_of_inductor_is_a_capture_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here\nlong trace")

    monkeypatch.setattr(torch._inductor, "standalone_compile", refuse)
    graph = capture(lambda x: x + 1, torch.ones(2))
    program = inductor.compiled(graph, graph.program)
    with pytest.raises(CaptureError, match=r"Inductor refuses the step \(RuntimeError: no compiler here\)"):
        program.run(torch.ones(2))
