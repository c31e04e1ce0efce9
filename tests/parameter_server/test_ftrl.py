"""``FTRL``: the source's algorithm, the same from dense and sparse gradients, and the same alone and on servers."""

from __future__ import annotations

import math

import pytest
import torch

import anabranch as ab

STEPS, WEIGHTS = 40, 12


def as_in_the_source(grads: torch.Tensor, lr: float, beta: float, l1: float, l2: float) -> list[float]:
    """Algorithm 1 of McMahan et al. (2013), a weight at a time, in doubles."""
    weights = [0.0] * grads.shape[1]
    z, n = list(weights), list(weights)
    for grad in grads.tolist():
        for i, g in enumerate(grad):
            if not g:
                continue
            sigma = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / lr
            z[i] += g - sigma * weights[i]
            n[i] += g * g
            rate = (beta + math.sqrt(n[i])) / lr + l2
            weights[i] = 0.0 if abs(z[i]) <= l1 else -(z[i] - math.copysign(l1, z[i])) / rate
    return weights


def gradients() -> torch.Tensor:
    return torch.randn(STEPS, WEIGHTS, dtype=torch.float64) * (torch.rand(STEPS, WEIGHTS) < 0.5)


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.0), (1.5, 0.0), (0.5, 2.0)])
def test_it_is_the_algorithm_of_its_source(l1: float, l2: float) -> None:
    grads = gradients()
    weight = torch.nn.Parameter(torch.zeros(WEIGHTS, dtype=torch.float64))
    optimizer = ab.FTRL([weight], lr=0.3, beta=0.7, l1=l1, l2=l2)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    wanted = torch.tensor(as_in_the_source(grads, 0.3, 0.7, l1, l2), dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), wanted, rtol=1e-10, atol=1e-12)
    assert bool((weight == 0).any()) == (l1 > 0)


def test_sparse_and_dense_gradients_give_the_same_bits() -> None:
    dense, sparse = (torch.nn.Embedding(20, 4, sparse=sparse) for sparse in (False, True))
    sparse.load_state_dict(dense.state_dict())
    for table in (dense, sparse):
        torch.manual_seed(3)
        optimizer = ab.FTRL(table.parameters(), lr=0.1, l1=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 5))  # begins with 0
        for _ in range(12):
            optimizer.zero_grad()
            (table(torch.randint(0, 20, (6,))) * torch.randn(6, 4)).sum().backward()
            optimizer.step()
            schedule.step()
    assert torch.equal(dense.weight, sparse.weight)


def test_first_values_are_not_forgotten_and_quiet_weights_stay() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = ab.FTRL([weight], lr=0.5)
    weight.grad = torch.tensor([1.0, 0.0, -1.0])
    optimizer.step()
    torch.testing.assert_close(weight.data, torch.tensor([0.75, -2.0, 3.25]))  # by g / Q, and Q is (1 + 1) / 0.5


def test_a_nan_gradient_is_not_hidden() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = ab.FTRL([weight], l1=1.0)
    weight.grad = torch.tensor([float("nan"), 1.0])
    optimizer.step()
    assert weight.isnan().tolist() == [True, False]


@pytest.mark.parametrize("numbers", [{"lr": -1.0}, {"beta": 0.0}, {"l1": -0.1}, {"l2": float("nan")}])
def test_numbers_out_of_range_are_refused(numbers: dict[str, float]) -> None:
    (name,) = numbers
    with pytest.raises(ValueError, match=f"FTRL takes {name} >"):
        ab.FTRL([torch.nn.Parameter(torch.zeros(1))], **numbers)
