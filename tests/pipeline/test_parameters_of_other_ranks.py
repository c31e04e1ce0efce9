"""What a pipe across ranks leaves to others: the model refuses to run or be read here, and their memory is freed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch import Pipe
from anabranch.autodiff.moved_parameter import Elsewhere
from anabranch.pipeline import split
from anabranch.pipeline.stage.partition import flatten_layers, split_layers
from anabranch.pipeline.stage.stage_placement import leave_to_others

GROUP = cast("dist.ProcessGroup", None)


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_global_rank", lambda _, rank: rank)


def layers() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4)]


def left() -> nn.Sequential:
    """Return a model as the first of two ranks has it; tied weights are trained on both."""
    model = nn.Sequential(*layers())
    model[2].bias = model[0].bias
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if name[0] in "23"}
    leave_to_others(split_layers(model, flatten_layers(model), [2, 2]), [0, 1], names, GROUP)
    return model


USES: dict[str, Callable[[nn.Sequential], object]] = {
    "call": lambda m: m(torch.ones(2, 4)),
    "evaluate": lambda m: m.eval()(torch.ones(2, 4)),
    "save": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "read": lambda m: sum(value.sum() for value in m.state_dict().values()),
    "penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
    "norm": lambda m: nn.utils.get_total_norm(m.parameters()),
    "load": lambda m: m.load_state_dict(nn.Sequential(*layers()).state_dict()),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_what_only_another_rank_trains_is_refused_with_rank_stage_and_cure(use: str) -> None:
    model = left()
    with pytest.raises((ValueError, RuntimeError), match=r"weight is on rank 1, in stage 1 .*pipe.state_dict\(\)"):
        USES[use](model)


def test_everything_else_goes_on_and_memory_is_freed() -> None:
    model = left()
    assert [type(p) is Elsewhere for p in model.parameters()] == [False, False, True, True, True]
    assert {p.untyped_storage().nbytes() for p in model.parameters() if type(p) is not Elsewhere} == {64, 16}
    with torch._C.DisableTorchFunctionSubclass():
        assert {p.untyped_storage().nbytes() for p in model.parameters() if type(p) is Elsewhere} == {4}
    assert sum(p.numel() for p in model.parameters()) == 44
    for optimizer in (torch.optim.Adagrad(model.parameters()), torch.optim.AdamW(model.parameters(), lr=0.1)):
        model[:2](torch.ones(2, 4)).sum().backward(inputs=list(model.parameters()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert set(optimizer.state) <= set(model.parameters())
    model.eval().requires_grad_(False).to("cpu", torch.float32)
    assert not any(p.requires_grad for p in copy.deepcopy(model).parameters())
    with Pipe(model[:2], [1, 1]) as pipe:
        assert pipe(torch.ones(2, 4)).shape == (2, 4)


def test_a_model_is_split_by_its_code_where_others_have_its_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.b(torch.tanh(self.a(x))) + self.a.weight.sum()
            return result

    model = Tied()
    parts = split(model, ["b"], example=(torch.ones(2, 4),))
    leave_to_others(
        split_layers(parts, flatten_layers(parts), [1, 1]),
        [0, 1],
        {p: f"b.{name}" for name, p in model.b.named_parameters()},
        GROUP,
    )
    with Pipe(parts, [1, 1]) as pipe, pytest.raises(ValueError, match=r"b.weight is on rank 1"):
        pipe(torch.ones(2, 4))
