"""Gradients asked for inside the loss, as critics are penalized, run as graphs with the plain loop's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain_loop import TrainingCase, check


def of_mixtures(critic: Any, real: Tensor) -> Tensor:
    """As WGAN-GP: the norm of the gradient at points between real and made ones."""
    made, share = torch.randn_like(real), torch.rand(len(real), 1)
    between = (share * real + (1 - share) * made).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return critic(made).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()  # type: ignore[no-any-return]


def of_real_points(critic: Any, real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """As R1: the squared gradient at real points."""
    real = real.detach().clone().requires_grad_()
    judged = critic(real)
    slope = torch.autograd.grad(judged, real, torch.ones_like(judged), create_graph=True, retain_graph=True)[0]
    penalty = slope.square().sum(1).mean()
    return F.softplus(-judged).mean() + 5 * penalty, {"penalty": penalty}


def case_of(loss: Any) -> TrainingCase:
    critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TrainingCase(critic, loss, torch.optim.Adam(critic.parameters(), lr=0.01))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loss", [of_mixtures, of_real_points])
def test_a_gradient_penalty_runs_as_a_graph(loss: Any) -> None:
    got = check(lambda patch: case_of(loss), "graph")
    assert got.refused_at is None
    assert got.engines[-1] == "graph"
