"""An expert on a device: outputs, gradients and updates are those of the module here."""

from __future__ import annotations

import copy

import pytest
import torch
from expert_modules import calling
from torch import nn

from anabranch.experts import ExpertBackend
from anabranch.tensors import TensorSpec

on_cuda = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("keep_activations", [0, 64])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_an_expert_on_a_device_is_the_module_here(device: str, keep_activations: int) -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    there = copy.deepcopy(here)
    mine, theirs = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (here, there))
    spec = TensorSpec(4, dtype=torch.float64)
    backend = ExpertBackend("ffn.0", there, theirs, args_schema=[spec], keep_activations=keep_activations)
    with calling(backend, device=device) as expert:
        for rows in (1, 5, 2048):
            x = torch.randn(rows, 4, dtype=torch.float64)
            near, far = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected, answer = here(near), expert(far)
            torch.testing.assert_close(answer, expected)
            expected.square().mean().backward()
            answer.square().mean().backward()
            torch.testing.assert_close(far.grad, near.grad)
            mine.step()
            mine.zero_grad()
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a)
