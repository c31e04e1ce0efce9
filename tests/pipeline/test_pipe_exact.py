"""A pipe in one process gives the unsplit module's outputs and gradients, whatever the split."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import assert_same_gradients, close, reference, skipping_model
from torch import nn

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


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_five_optimizer_steps_stay_exact(schedule: str):
    model = skipping_model()
    plain = reference(model)
    optimizer, other = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain))
    with Pipe(model, [3, 3, 3, 2], chunks=4, schedule=schedule) as pipe:
        for step in range(5):
            x, target = torch.randn(2, 7 - step, 5, dtype=torch.float64)
            optimizer.zero_grad()
            pipe.step(x, target, loss=F.mse_loss)
            optimizer.step()
            other.zero_grad()
            F.mse_loss(plain(x), target).backward()
            other.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert close(ours, theirs)


def test_two_steps_accumulate_twice_the_gradient():
    model = skipping_model()
    x, target = torch.randn(2, 6, 5, dtype=torch.float64)
    with Pipe(model, [6, 5], chunks=3, schedule="1F1B") as pipe:
        pipe.step(x, target, loss=F.mse_loss)
        once = [parameter.grad.clone() for parameter in pipe.parameters()]
        pipe.step(x, target, loss=F.mse_loss)
    for parameter, grad in zip(pipe.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * grad)


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


def test_a_hook_on_a_parameter_fires_once_with_the_whole_gradient():
    model = skipping_model()
    seen = []
    model[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    x, target = torch.randn(2, 4, 5, dtype=torch.float64)
    with Pipe(model, [6, 5], chunks=4) as pipe:
        pipe.step(x, target, loss=F.mse_loss)
        assert len(seen) == 1
        assert torch.equal(model[0].weight.grad, 2 * seen[0])
        pipe(x).sum().backward()
        assert len(seen) == 2


def test_the_graph_before_the_input_is_reached():
    before = nn.Linear(5, 5).double()
    model = skipping_model()
    x, target = torch.randn(2, 4, 5, dtype=torch.float64)
    with Pipe(model, [6, 5], chunks=2) as pipe:
        pipe.step(before(x), target, loss=F.mse_loss)
    got = before.weight.grad.clone()
    before.zero_grad()
    F.mse_loss(reference(model)(before(x)), target).backward()
    assert close(got, before.weight.grad)


def test_frozen_parameters_and_inputs_give_an_output_without_graph():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    with Pipe(model, [1, 1], chunks=2) as pipe:
        assert not pipe(torch.randn(4, 3)).requires_grad


def test_a_frozen_first_stage_is_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    plain = reference(model)
    x = torch.randn(4, 3)
    for schedule in ("1F1B", "ZB1P"):
        pipe = Pipe(model, [1, 1], chunks=1, schedule=schedule)
        with pipe:
            pipe.zero_grad()
            pipe(x).sum().backward()
    plain(x).sum().backward()
    assert model[0].weight.grad is None
    assert torch.equal(model[1].weight.grad, plain[1].weight.grad)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB1P"])
def test_weights_used_twice_or_going_straight_to_an_output_have_their_whole_gradient(schedule: str):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(torch.tanh(self.inner(x))) * self.bias, self.bias.expand(x.shape[0], 3)

    class Join(nn.Module):
        def forward(self, parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return parts[0] + parts[1] ** 2

    model = nn.Sequential(nn.Linear(3, 3), Twice(), Join()).double()
    plain = reference(model)
    x, target = torch.randn(2, 4, 3, dtype=torch.float64)
    with Pipe(model, [1, 1, 1], chunks=2, schedule=schedule) as pipe:
        pipe.step(x, target, loss=F.mse_loss)
    F.mse_loss(plain(x), target).backward()
    assert_same_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB1P"])
def test_layers_that_keep_their_weights_in_lists_norms_and_parametrizations(schedule: str):
    class Last(nn.Module):
        def forward(self, found: tuple) -> torch.Tensor:
            return found[0]

    model = nn.Sequential(
        nn.LSTM(4, 4, 2, batch_first=True),
        Last(),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.MultiheadAttention(4, 2, batch_first=True).requires_grad_(False).out_proj,
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    ).double()
    plain = reference(model)
    x, target = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    with Pipe(model, [1, 2, 2], chunks=2, schedule=schedule, checkpoint="always") as pipe:
        pipe.step(x, target, loss=F.mse_loss)
    F.mse_loss(plain(x), target).backward()
    assert_same_gradients(pipe, plain)
    assert close(model(x), plain(x))


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

        def forward(self, x: torch.Tensor) -> torch.Tensor:
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


def test_ids_and_sparse_gradients():
    model = nn.Sequential(nn.Embedding(10, 3, sparse=True), nn.Flatten(), nn.Linear(6, 1))
    plain = reference(model)
    ids = torch.tensor([[1, 2], [1, 1], [9, 2]])
    with Pipe(model, [1, 2], chunks=3, schedule="1F1B") as pipe:
        pipe(ids).sum().backward()
    plain(ids).sum().backward()
    assert model[0].weight.grad.is_sparse
    torch.testing.assert_close(model[0].weight.grad.to_dense(), plain[0].weight.grad.to_dense())


class WithSparse(nn.Module):
    def forward(self, x):
        return x * 2, torch.eye(4, dtype=torch.float64).to_sparse()


class OfSparse(nn.Module):
    def forward(self, given):
        x, sparse = given
        return torch.sparse.mm(sparse, x.t()).t()


@pytest.mark.parametrize("balance", [[2, 2], "size"])
def test_a_sparse_tensor_between_stages(balance: list[int] | str):
    model = nn.Sequential(nn.Linear(4, 4), WithSparse(), OfSparse(), nn.Linear(4, 2)).double()
    plain = reference(model)
    x = torch.randn(6, 4, dtype=torch.float64)
    places = {"sample": x[:3], "devices": ["cpu", "cpu"]} if balance == "size" else {}
    with Pipe(model, balance, chunks=2, **places) as pipe:
        y = pipe(x)
        y.sum().backward()
    expected = plain(x)
    expected.sum().backward()
    torch.testing.assert_close(y, expected)
    assert_same_gradients(pipe, plain)


def test_a_loss_with_parameters_is_trained():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(y * self.scale, target)

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x, target, loss = torch.randn(4, 3), torch.randn(4, 3), Scaled()
    with Pipe(model, [1, 1], chunks=2) as pipe:
        pipe.step(x, target, loss=loss)
    got = loss.scale.grad.clone()
    loss.zero_grad()
    loss(model(x), target).backward()
    torch.testing.assert_close(got, loss.scale.grad)


def test_names_in_the_state_dict_are_the_unsplit_modules():
    model = skipping_model()
    names = list(model.state_dict())
    for balance in ([1, 10], [3, 4, 4]):
        pipe = Pipe(model, balance)
        assert list(pipe.state_dict()) == names
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
        pipe.load_state_dict(model.state_dict())
        assert pipe.module is model


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
