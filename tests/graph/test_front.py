"""Dynamo in front of the graph engine: its programs, what it cannot guard, and nothing that outlives its executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anabranch as ab
from anabranch.errors import CaptureError
from plain_loop import TrainingCase, check, linear, mean_square


def trained(make: Callable[[], nn.Module] = linear) -> str:
    """The engine at the end of a training that is the plain loop's."""

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = make()
        return TrainingCase(model, mean_square, torch.optim.Adam(model.parameters(), lr=0.05))

    return check(build, "graph").engines[-1]


def test_the_numbers_of_one_model_are_not_symbolic_in_another() -> None:
    """Dynamo keeps what it learns of changing numbers by the name of the code: each front has its own."""
    for p in (0.5, 0.3, 0.5):
        assert trained(make=lambda p=p: nn.Sequential(nn.Linear(4, 3), nn.Dropout(p))) == "graph"


def test_with_torch_compile_switched_off_nothing_is_captured(recwarn: pytest.WarningsRecorder) -> None:
    torch.compiler.set_stance("force_eager")
    try:
        with pytest.raises(CaptureError, match="torch.compile is switched off"):
            ab.capture(nn.ReLU(), torch.ones(2))
    finally:
        torch.compiler.set_stance("default")
    assert not recwarn.list
    assert trained() == "graph"  # nothing is remembered


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (torch._guards.TracingContext, "get_traced_code"),
        (torch._dynamo.symbolic_convert.InstructionTranslator, "current_tx"),
        (torch._dynamo, "config"),
        (torch._C, "_len_torch_function_stack"),
        (torch._C._autograd, "_top_saved_tensors_default_hooks"),
        (nn.modules.module, "_global_forward_hooks"),
    ],
)
def test_a_pytorch_without_a_private_name_is_a_capture_error_with_its_cause(
    place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = linear()
    step = ab.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.delattr(place, name)
    with ab.Executor(step, engine="graph") as executor, pytest.raises(CaptureError, match=name) as raised:
        executor.run(batch=torch.ones(2, 4))
    assert raised.value.__cause__ is not None


# Reasons why a step cannot be a graph: the user's line, PyTorch's words, the cure.


def writes_outside(model: nn.Module, x: Tensor) -> Any:
    sums = []

    def region(x: Tensor) -> Any:
        sums.append(x.sum())
        return model(x)

    return checkpoint(region, x, use_reentrant=False).sum()


def writes_early(model: nn.Module, x: Tensor) -> Any:
    written = model(x).exp()
    written.add_(1)
    return written.sum()


def branches(model: nn.Module, x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: model(y).sum(), lambda y: model(y).square().sum(), (x,))


LOSSES = [branches, writes_outside]


def refusal(loss: Any) -> str:
    model = nn.Linear(4, 4)
    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor, pytest.raises(CaptureError) as raised:
        executor.run(batch=torch.ones(3, 4))
    return str(raised.value)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_reasons_name_the_line_and_the_cure(loss: Any) -> None:
    first = loss.__code__.co_firstlineno
    found = refusal(loss)
    assert any(f"{__file__}:{line}: the step cannot be a graph" in found for line in range(first, first + 8)), found
    assert "use engine='tape'" in found


def test_an_error_of_backward_is_not_put_at_the_line_that_runs_the_step() -> None:
    found = refusal(writes_early)
    assert "modified by an inplace operation" in found
    assert __file__ not in found
