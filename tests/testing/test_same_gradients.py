"""``assert_same_gradients`` lets equal modules pass, and names what differs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.testing import assert_same_gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(3, 4), nn.Linear(4, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.drop(self.first(x).tanh())
        return {"y": self.last(hidden), "hidden": hidden}


class Detached(Net):
    def forward(self, x: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(x, ids)
        return {"y": found["y"], "hidden": found["hidden"].detach()}


def pair(kind: type[Net] = Net) -> tuple[Net, Net]:
    torch.manual_seed(0)
    model = Net()
    other = kind()
    other.load_state_dict(model.state_dict())
    return model, other


@pytest.mark.parametrize("batch", [torch.randn(5, 3), (torch.randn(5, 3), torch.arange(5)), {"x": torch.randn(5, 3)}])
def test_a_copy_passes_and_nothing_is_left_behind(batch):
    model, other = pair()
    model.first.weight.grad = torch.ones(4, 3)
    assert_same_gradients(model, other, batch)
    assert model.first.weight.grad.eq(1).all()
    assert other.first.weight.grad is None


def test_a_pipe_is_the_module_that_it_splits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    with ab.Pipe(copy.deepcopy(model), [1, 2], chunks=3) as pipe:
        assert_same_gradients(model, pipe, torch.randn(7, 3, dtype=torch.float64), tolerance=1e-12)


def test_a_remote_expert_is_the_module_that_it_calls():
    model = nn.Linear(3, 2)
    backend = ab.ExpertBackend("ffn.0", copy.deepcopy(model), args_schema=[ab.TensorSpec(3)])
    with ab.ExpertServer([backend]) as server:
        assert_same_gradients(model, ab.RemoteExpert("ffn.0", server.endpoint), torch.randn(4, 3))


def test_differences_are_named():
    model, other = pair(Detached)
    x = torch.randn(5, 3)
    with pytest.raises(AssertionError, match="the gradient of input 0: they differ by"):
        assert_same_gradients(model, other, x)
    _, other = pair()
    with torch.no_grad():
        other.last.bias += 1
    with pytest.raises(AssertionError, match="output y: they differ by 1,"):
        assert_same_gradients(model, other, x)
    assert_same_gradients(model, other, x, tolerance=10.0)
    with pytest.raises(ValueError, match="no parameter name is in both"):
        assert_same_gradients(model, nn.Linear(3, 2), x)
