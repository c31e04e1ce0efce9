"""A loss that is a mean over tokens: microbatches weigh by theirs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import assert_same_gradients, close, reference
from torch import Tensor, nn

from anabranch.pipeline import Pipe

PADDING = -100
SCHEDULES = {"GPipe": [2, 2], "1F1B": [1, 3], "Interleaved1F1B": [1, 1, 1, 1], "ZB1P": [2, 2], "ZBV": [1, 1, 1, 1]}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def tokens(x: Tensor, target: Tensor) -> Tensor:
    assert x.shape == target.shape
    return (target != PADDING).sum()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_weighs_its_microbatches_by_their_tokens(schedule: str, checkpoint: str):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 9)).double()
    plain = reference(model)
    x = torch.randint(0, 9, (7, 5))
    target = x.masked_fill(torch.arange(5) >= torch.tensor([5, 0, 1, 2, 0, 0, 3])[:, None], PADDING)
    with Pipe(model, SCHEDULES[schedule], ["cpu"] * 2, 4, checkpoint, schedule) as pipe:
        for rows in (7, 1):
            result = pipe.step(x[:rows], target[:rows], loss=loss, rows=tokens)
            expected = loss(plain(x[:rows]), target[:rows])
            expected.backward()
            assert close(result.loss, expected)
            assert_same_gradients(pipe, plain)
        assert pipe.step(x[4:6], target[4:6], loss=loss, rows=tokens).loss.isnan(), "as the plain loss"
        by_name = pipe.step(input=x, target=target, loss=loss, rows=lambda target: (target != PADDING).sum())
        assert close(by_name.loss, loss(plain(x), target))


@pytest.mark.parametrize("weight", [-1, math.inf, math.nan])
def test_a_weight_that_is_no_count_is_refused(weight: float):
    with Pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1]) as pipe, pytest.raises(ValueError, match="rows= gave"):
        pipe.step(torch.ones(4, 2), torch.ones(4, 2), loss=F.mse_loss, rows=lambda x, target: weight)
