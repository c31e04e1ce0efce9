"""A loss that reads parameters past the pipe: gradients and hooks as in the loop, and after an error as before it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import assert_same_gradients, close
from torch import Tensor, nn

from anabranch import Pipe
from anabranch.record.spans import on_fault_point


def model_of_four() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2)).double()


def penalised(parameters: Callable[[], list[Tensor]], scale: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * scale + 0.1 * sum(p.square().sum() for p in parameters())

    return loss


def parameters_of(model: nn.Module, how: str) -> Callable[[], list[Tensor]]:
    """Read from the model's tree in each loss, or kept."""
    kept = list(model.parameters())
    return (lambda: kept) if how == "kept" else lambda: list(model.parameters())


def with_hooks(model: nn.Module, scale: Tensor, sums: list[Tensor]) -> None:
    """Clamp gradients, which shows how many parts of them a hook sees, and note those that were accumulated."""
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    model[3].weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    scale.register_hook(lambda grad: grad.clamp(-0.3, 0.3))
    model[3].bias.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.clone()))


@pytest.mark.parametrize("how", ["kept", "tree"])
@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("GPipe", "always"), ("1F1B", "except_last"), ("ZB1P", "never"), ("ZBV", "always")]
)
def test_gradients_and_hooks_are_those_of_the_loop(how: str, schedule: str, checkpoint: str):
    x, target = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    models = [model_of_four()]
    models.append(copy.deepcopy(models[0]))
    scales = [torch.ones((), dtype=torch.float64, requires_grad=True) for _ in models]
    sums: list[list[Tensor]] = [[], []]
    for model, scale, those in zip(models, scales, sums, strict=True):
        with_hooks(model, scale, those)
    ours, theirs = (penalised(parameters_of(m, how), s) for m, s in zip(models, scales, strict=True))
    with Pipe(models[0], [1, 1, 1, 1] if schedule == "ZBV" else [2, 2], chunks=3, schedule=schedule) as pipe:
        pipe.checkpoint = checkpoint
        for _ in range(2):
            pipe.step(x, target, loss=ours)
            theirs(models[1](x), target).backward()
        assert_same_gradients(*models)
        assert close(scales[0].grad, scales[1].grad)
        assert len(sums[0]) == 2
        assert all(map(close, *sums))
        pipe(x).sum().backward()
        assert len(sums[0]) == 3, "the hooks are there again"


@pytest.mark.parametrize("how", ["kept", "tree"])
@pytest.mark.parametrize("before", [False, True])
def test_after_an_error_at_any_place_gradients_are_what_they_were(how: str, before: bool):
    x, target = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    model, scale = model_of_four(), torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = penalised(parameters_of(model, how), scale)
    calls = 0

    def fails_at_last(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("the loss")
        return loss(output, target)

    leaves = [*model.parameters(), scale]
    with Pipe(model, [2, 2], chunks=3, schedule="1F1B", checkpoint="always") as pipe:
        if before:
            pipe.step(x, target, loss=loss)
        grads = [leaf.grad for leaf in leaves]
        copies = [None if grad is None else grad.clone() for grad in grads]

        def unchanged() -> bool:
            same = all(leaf.grad is grad for leaf, grad in zip(leaves, grads, strict=True))
            return same and all(map(close, grads, copies))

        with pytest.raises(KeyError, match="the loss"):
            pipe.step(x, target, loss=fails_at_last)
        assert unchanged()
        for stage, microbatch, phase in product(range(2), range(3), ("forward", "recompute", "backward")):

            def fail(name: str, point: str = f"pipeline.{phase}.{stage}.{microbatch}") -> None:
                if name == point:
                    raise KeyError("a stage")

            with on_fault_point(fail), pytest.raises(KeyError, match="a stage"):
                pipe.step(x, target, loss=loss)
            assert unchanged(), (stage, microbatch, phase)


def test_a_target_and_an_input_that_the_loss_reads_get_their_gradients_once():
    model = model_of_four()
    plain = copy.deepcopy(model)
    pairs = []
    for one in (model, plain):
        torch.manual_seed(3)
        x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
        target = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
        loss = lambda y, t, x=x: F.mse_loss(y, t) + x.square().sum()  # noqa: E731
        if one is model:
            with Pipe(model, [2, 2], chunks=3) as pipe:
                pipe.step(x, target, loss=loss)
        else:
            loss(plain(x), target).backward()
        pairs.append((x.grad, target.grad))
    assert all(map(close, *pairs))
    assert_same_gradients(model, plain)
