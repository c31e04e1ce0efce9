"""A pipe in one process gives the unsplit module's outputs and gradients, whatever the split."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import (
    Computes,
    assert_same_gradients,
    assert_trains_alike,
    reference,
    skipping_model,
)
from torch import Tensor, nn

from anabranch import ExpertBackend, ExpertServer, Pipe, RemoteExpert, TensorSpec

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_microbatch_is_the_unsplit_module_to_the_last_bit(schedule: str):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = reference(model)
    x = torch.randn(6, 3)
    with Pipe(model, [1, 1, 1, 2], schedule=schedule) as pipe:
        y = pipe(x)
        y.sum().backward()
    expected = plain(x)
    expected.sum().backward()
    assert torch.equal(y, expected)
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_backward_twice_with_retain_graph(schedule: str, checkpoint: str):
    model = skipping_model()
    plain = reference(model)
    x = torch.randn(5, 5, dtype=torch.float64)
    with Pipe(model, [3, 3, 3, 2], chunks=2, schedule=schedule, checkpoint=checkpoint) as pipe:
        y = pipe(x)
        y.sum().backward(retain_graph=True)
        (y**2).sum().backward()
        with pytest.raises(RuntimeError, match="second backward"):
            y.sum().backward()
    expected = plain(x)
    expected.sum().backward(retain_graph=True)
    (expected**2).sum().backward()
    assert_same_gradients(pipe, plain)


def test_frozen_parameters_and_inputs_give_an_output_without_graph():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    with Pipe(model, [1, 1], chunks=2) as pipe:
        x = torch.randn(4, 3)
        assert not pipe(x).requires_grad
        torch.testing.assert_close(pipe.step(x, x, loss=F.mse_loss).loss, F.mse_loss(model(x), x))


class Twice(nn.Module):
    """Uses a weight twice, and one that goes straight to an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(torch.tanh(self.inner(x))) * self.bias, self.bias.expand(x.shape[0], 4)


class Tall(nn.Module):
    """Weights whose gradients ZB1P may not add inside a multiplication: turned, of a convolution, without bias, and for
    three dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Linear(4, 4, bias=False)
        self.deep = nn.Linear(2, 2)
        self.turned = nn.Parameter(torch.randn(4, 4))
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bare(x) @ self.turned + torch.addmm(x, x, self.turned, alpha=0.5)
        return self.convolution(self.deep(x.unflatten(1, (2, 2))).flatten(1).unsqueeze(1)).squeeze(1)


def linear(frozen: bool = False) -> nn.Linear:
    return nn.Linear(4, 4).requires_grad_(not frozen)


SPARSE = torch.eye(4, dtype=torch.float64).to_sparse()
MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "a frozen first stage": lambda: [linear(frozen=True), nn.Tanh(), linear()],
    "weights used twice": lambda: [linear(), Twice(), Computes(lambda pair: pair[0] + pair[1] ** 2)],
    "weights in lists": lambda: [
        Computes(lambda x: x[:, None].expand(-1, 3, -1)),
        nn.LSTM(4, 4, 2, batch_first=True),
        Computes(lambda result: result[0]),
    ],
    "parametrizations": lambda: [
        nn.utils.parametrizations.weight_norm(linear()),
        nn.MultiheadAttention(4, 2).requires_grad_(False).out_proj,
        nn.Sequential(
            Computes(lambda x: x[:, None].expand(-1, 3, -1)),
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        ),
    ],
    "weights of every use": lambda: [linear(), nn.Tanh(), Tall()],
    "a sparse tensor between stages": lambda: [
        Computes(lambda x: (x * 2, SPARSE)),
        Computes(lambda pair: torch.sparse.mm(pair[1], pair[0].t()).t()),
        linear(),
    ],
    "a value passed on and changed in place": lambda: [
        linear(),
        Computes(lambda x: (x[:, 1:], torch.tanh(x)[:, 1:])),
        Computes(lambda pair: pair[0].mul_(2) + pair[1]),
    ],
    "rows of a sparse gradient": lambda: [
        Computes(lambda x: x.argsort(1)), nn.Embedding(4, 3, sparse=True), Computes(lambda x: x.mean(1)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("schedule", "checkpoint"), [("1F1B", "always"), ("ZB1P", "never"), ("ZB1P", "always")])
def test_layers_of_every_kind_are_the_unsplit_modules(name: str, schedule: str, checkpoint: str):
    model = nn.Sequential(*MODELS[name]()).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    target = torch.zeros_like(model(x))
    assert_trains_alike(model, [1, 1, 1], x, target, chunks=3, schedule=schedule, checkpoint=checkpoint)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB1P"])
def test_side_effects_of_backward_run_once(schedule: str):
    """A hook inside a layer, and a function of one's own that takes a weight."""
    calls = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            calls.append("function")
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum(0)

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.register_hook(lambda grad: calls.append("hook") or 2 * grad)
            return Own.apply(y, self.weight)

    model = nn.Sequential(nn.Linear(3, 3), Hooked(), nn.Linear(3, 3)).double()
    plain = reference(model)
    x, target = torch.randn(2, 4, 3, dtype=torch.float64)
    with Pipe(model, [1, 1, 1], chunks=2, schedule=schedule, checkpoint="always") as pipe:
        pipe.step(x, target, loss=F.mse_loss)
    assert calls == 2 * ["function", "hook"]
    F.mse_loss(plain(x), target).backward()
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB1P"])
def test_an_expert_in_another_place_may_be_a_layer(schedule: str):
    """Of two boundaries, one inside the other, each is a differentiable operation; it runs once a microbatch."""
    updates = []

    class Counting(ExpertBackend):
        def apply_gradients(self, *arguments: object) -> None:
            updates.append(None)
            super().apply_gradients(*arguments)

    layer = nn.Linear(4, 4)
    backend = Counting("layer.0", copy.deepcopy(layer), args_schema=(TensorSpec(4),))
    with ExpertServer([backend]) as server:
        model = nn.Sequential(nn.Linear(4, 4), RemoteExpert("layer.0", server.endpoint), nn.Linear(4, 4))
        plain = nn.Sequential(copy.deepcopy(model[0]), layer, copy.deepcopy(model[2]))
        x, target = torch.randn(2, 6, 4)
        with Pipe(model, [1, 1, 1], chunks=3, checkpoint="always", schedule=schedule) as pipe:
            result = pipe.step(x, target, loss=F.mse_loss)
    loss = F.mse_loss(plain(x), target)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    assert len(updates) == 3
    for index in (0, 2):
        torch.testing.assert_close(model[index].weight.grad, plain[index].weight.grad)


def test_a_pipe_takes_over_mode_and_state_of_the_sequential_itself():
    class Scaled(nn.Sequential):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__(*layers)
            self.register_buffer("version", torch.tensor(3))

    model = Scaled(nn.Linear(2, 2), nn.Dropout(0.5)).eval()
    pipe = Pipe(model, [1, 1])
    assert not pipe.training
    assert list(pipe.state_dict()) == list(model.state_dict())
    pipe.train()
    assert model[1].training
