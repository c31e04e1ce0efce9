"""Random numbers in stages: own streams, replayed by recomputation, out of the process's generator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import Computes, close
from torch import nn
from torch.utils import checkpoint as recomputation

from anabranch import Pipe
from anabranch.pipeline.stage.random_streams import _GiveGenerator, drawing_from

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout_": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x[None, :, :, None], 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[None], 0.5, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "rrelu": lambda x: F.rrelu(x - 2.0, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "rand": lambda x: torch.rand(3, 4),
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(2, dtype=torch.float64),
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(100, (8,)),
    "randint_low": lambda x: torch.randint(5, 100, (8,)),
    "randint_like": lambda x: torch.randint_like(x, 100),
    "randint_like_low": lambda x: torch.randint_like(x, 5, 100),
    "randperm": lambda x: torch.randperm(20),
    "normal_": lambda x: torch.empty(3).normal_(),
    "uniform_": lambda x: torch.empty(3).uniform_(),
    "exponential_": lambda x: torch.empty(3).exponential_(),
    "random_": lambda x: torch.empty(3).random_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full((20,), 0.5)),
    "multinomial": lambda x: torch.multinomial(torch.ones(20), 5),
    "poisson": lambda x: torch.poisson(torch.full((5,), 4.0)),
    "normal": lambda x: torch.normal(torch.zeros(3), 1.0),
    "gamma": lambda x: torch.distributions.Gamma(torch.ones(3), torch.ones(3)).sample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(torch.ones(3)).sample(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "fractional": lambda x: F.fractional_max_pool2d(torch.rand(1, 1, 8, 8), 2, output_ratio=(0.5, 0.5)),
    "init": lambda x: nn.init.xavier_uniform_(torch.empty(3, 3)),
    "no generator": lambda x: torch.cat([torch.rand(9, generator=None), torch.randint(99, (3,), generator=None)]),
    "a module's attention": lambda x: ATTENTION(x[:, None], x[:, None], x[:, None])[0],
    "an LSTM": lambda x: LSTM(x[:, None])[0],
}
ATTENTION, LSTM = nn.MultiheadAttention(4, 2, dropout=0.5), nn.LSTM(4, 4, 2, dropout=0.5)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_random_operations_draw_from_the_stream_and_not_from_the_global_generator(name: str, grad: bool):
    x = torch.ones(6, 4)
    before = torch.get_rng_state()

    def draw(microbatch: int) -> torch.Tensor:
        with torch.set_grad_enabled(grad), drawing_from(0, 0, 0, microbatch):
            return DRAWS[name](x)

    first, again, other = draw(0), draw(0), draw(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_without_dropout_is_not_refused_and_a_given_generator_is_used():
    x = torch.randn(1, 2, 3, 4)
    with drawing_from(0, 0, 0, 0):
        attended = F.scaled_dot_product_attention(x, x, x)
        drawn = torch.rand(3, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(attended, F.scaled_dot_product_attention(x, x, x))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_an_operation_without_generator_is_refused_by_name():
    def draw() -> None:
        with _GiveGenerator(drawing_from(0, 0, 0, 0)):
            torch.ops.aten._cudnn_init_dropout_state(0.5, True, 0)

    with pytest.raises(RuntimeError, match="_cudnn_init_dropout_state"):
        draw()


def noisy(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.3, training=True) + torch.randn_like(x)


def noisy_model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6), nn.Dropout(0.5), Computes(noisy), nn.Linear(6, 6), nn.RReLU(), Computes(noisy)]
    return nn.Sequential(*layers).double()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"])
def test_recomputation_replays_the_masks(schedule: str):
    """Bit for bit, a tied weight's gradient and running statistics included."""
    x, target = torch.randn(2, 8, 6, dtype=torch.float64)
    grads = []
    for checkpoint in ("never", "always", "except_last"):
        model = nn.Sequential(*noisy_model(), nn.BatchNorm1d(6, dtype=torch.float64))
        model[3].weight = model[0].weight
        with Pipe(model, [2, 1, 2, 2], chunks=4, checkpoint=checkpoint, schedule=schedule, seed=7) as pipe:
            pipe.step(x, target, loss=F.mse_loss)
            pipe(x).sum().backward()
        grads.append([*(parameter.grad for parameter in model.parameters()), *model.buffers()])
    for ours, others in zip(grads[0], zip(*grads[1:], strict=True), strict=True):
        assert all(torch.equal(ours, other) for other in others)


def test_steps_and_seeds_draw_different_numbers_and_runs_the_same():
    x = torch.ones(8, 6, dtype=torch.float64)
    with Pipe(noisy_model(), [3, 3], seed=1) as pipe, Pipe(noisy_model(), [3, 3], seed=1) as same:
        first, second = pipe(x), pipe(x)
        assert not torch.equal(first, second)
        assert torch.equal(same(x), first)
        same.calls = 1
        assert torch.equal(same(x), second)
    with Pipe(noisy_model(), [3, 3], seed=2) as other:
        assert not torch.equal(other(x), first)


def test_the_mask_is_that_of_the_stage_and_microbatch():
    x = torch.ones(4, 6, dtype=torch.float64)
    with Pipe(nn.Sequential(nn.Identity(), nn.Dropout(0.5)), [1, 1], chunks=2, seed=3) as pipe:
        y = pipe(x)
    for i, part in enumerate(y.chunk(2)):
        with drawing_from(3, 0, 1, i):
            assert close(part, F.dropout(x[:2], 0.5))


class Checkpointed(nn.Module):
    """A layer with dropout that keeps no activations: PyTorch's own recomputation."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant
        self.keeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x, 0.5)
        run = functools.partial(recomputation.checkpoint, self._run, use_reentrant=self.reentrant)
        return F.dropout((self._run if self.keeps else run)(x), 0.5)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        RUNS.append(self)
        return self.second(torch.tanh(F.dropout(self.first(x), 0.5)))


RUNS: list[nn.Module] = []


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB1P"])
@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_a_layer_replays_the_masks_of_its_stage(reentrant: bool, mode: str, schedule: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(reentrant), Checkpointed(reentrant)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    before = torch.get_rng_state()
    functions = [torch.get_rng_state, torch.set_rng_state]
    functions += [recomputation.get_device_states, recomputation.set_device_states]
    gradients = []
    for keeps in (True, False):
        for layer in model[1:]:
            layer.keeps = keeps
        model.zero_grad()
        RUNS.clear()
        with Pipe(model, [1, 2], chunks=3, checkpoint=mode, schedule=schedule, seed=1) as pipe:
            if reentrant and not keeps and schedule == "ZB1P":
                with pytest.raises(RuntimeError, match="reentrant"):
                    pipe.step(x, loss=lambda y, _: y.square().mean())
                return
            pipe.step(x, loss=lambda y, _: y.square().mean())
            pipe(x).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(close, *gradients))
    forwards = 2 if mode == "always" else 1
    assert len(RUNS) == (forwards + 1) * 2 * 3 * 2, "once more in a backward, also if it is in two parts"
    assert torch.equal(torch.get_rng_state(), before)
    assert functions[:2] == [torch.get_rng_state, torch.set_rng_state]
    assert functions[2:] == [recomputation.get_device_states, recomputation.set_device_states]


@pytest.mark.parametrize("place", ["softsign", "dropout"])
@pytest.mark.parametrize("kind", [lambda wrapper: wrapper, functools.partial, lambda wrapper: mock.Mock(wraps=wrapper)])
def test_a_users_wrapper_of_a_function_is_applied_once(
    place: str, kind: Callable[[Callable[..., object]], object], monkeypatch: pytest.MonkeyPatch
):
    original = getattr(F, place)
    calls = []

    def wrapper(x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(place)
        return original(x, *args, **kwargs) * 2

    monkeypatch.setattr(F, place, kind(wrapper))
    model = nn.Sequential(nn.Linear(3, 3), nn.Softsign() if place == "softsign" else nn.Dropout(0.5)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    before = torch.get_rng_state()
    with Pipe(model, [1, 1], chunks=1, seed=3) as pipe:
        y = pipe(x)
    assert len(calls) == 1
    assert torch.equal(torch.get_rng_state(), before), "drawn from the stage's stream"
    if place == "softsign":
        assert close(y, model(x))
    else:
        assert set((y / model[0](x)).round().flatten().tolist()) <= {0.0, 4.0}


class Gated(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y[:, :3] * torch.ops.aten.sigmoid(y[:, 3:])


def test_a_layer_is_compiled_in_one_graph_inside_a_stage():
    model, x = nn.Sequential(Gated(3, 6), nn.Linear(3, 3)), torch.randn(4, 3)
    expected = model(x)
    model[0] = torch.compile(model[0], backend="eager", fullgraph=True)
    with Pipe(model, [1, 1], chunks=2) as pipe:
        assert torch.allclose(pipe(x), expected)
