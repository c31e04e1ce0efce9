"""``TrainStep(activation_budget=...)``: the plain loop's bits in less memory, or a clear refusal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from plain_loop import mean_square


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))))


def step_of(model: nn.Module, **options: Any) -> ab.TrainStep:
    return ab.TrainStep(model, mean_square, torch.optim.Adam(model.parameters(), lr=0.01), **options)


def test_the_plain_loops_bits_in_less_memory() -> None:
    batch = torch.randn(256, 16)
    peaks, states = [], []
    for budget in (None, "300KiB"):
        model = model_of()
        torch.manual_seed(1)
        # Accumulated, so that the graph is that of forward and backward alone.
        with ab.Executor(step_of(model, activation_budget=budget, accumulate=2), engine="graph") as run:
            for _ in range(4):
                run.run(batch=batch)
            assert run.engine() == "graph"
            peaks.append(run.graph().memory_plan().peak_bytes)
        states.append(copy.deepcopy(model.state_dict()))
    assert peaks[0] > 400_000
    assert peaks[1] <= 300 * 1024
    for one, two in zip(states[0].values(), states[1].values(), strict=True):
        assert torch.equal(one, two)


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_does() -> None:
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    with (
        ab.Executor(step_of(model, activation_budget=1000), engine="graph") as executor,
        pytest.raises(ab.CaptureError, match=r"does not fit its activation_budget: .* with recomputation \d+"),
    ):
        executor.run(batch=torch.randn(64, 16))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("given", "expected"),
    [(5000, 5000), ("2GiB", 2**31), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("7B", 7), ("9", 9)],
)
def test_sizes(given: Any, expected: int) -> None:
    assert step_of(model_of(), activation_budget=given).activation_budget == expected


@pytest.mark.parametrize("given", [0, -1, True, "much", "0GiB", "2 GiBs", 1.5])
def test_a_value_that_is_not_a_size_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="activation_budget is a number of bytes above 0"):
        step_of(model_of(), activation_budget=given)


def test_the_tape_has_no_budget() -> None:
    with pytest.raises(ValueError, match="activation_budget, which needs a graph"):
        ab.Executor(step_of(model_of(), activation_budget=5000))
    with pytest.raises(ValueError, match="precision='float16' runs without one"):
        step_of(model_of(), activation_budget=5000, precision="float16")
