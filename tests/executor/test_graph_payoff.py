"""When a graph is tried: only where it can be faster, and never for more than a tenth of the run's time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.executor.engines import auto_engine
from anabranch.executor.engines.graph_payoff import GraphPayoff

SHORT, LONG = [1e-9], [1e3]
"""Seconds of a step in which all is overhead, and of one in which nearly all is kernels."""


def counted(operations: int = 10) -> GraphPayoff:
    payoff = GraphPayoff()
    with payoff.counting(nn.Linear(1, 1)):
        for _ in range(operations):
            torch.ones(1)
    return payoff


def test_operations_are_counted_in_the_eighth_run() -> None:
    payoff = GraphPayoff()
    wanted = []
    for _ in range(10):
        wanted.append(payoff.wants_to_count)
        payoff.spent(1e6)
        assert not payoff.known
        assert not payoff.pays(SHORT)
    assert wanted == [False] * 7 + [True] + [False] * 2
    with payoff.counting(nn.Linear(1, 1)):
        torch.ones(1)
    assert payoff.known
    assert payoff.pays(SHORT)


def test_a_step_of_long_kernels_is_left_alone() -> None:
    payoff = counted()
    payoff.spent(1e6)
    assert payoff.pays(SHORT)
    assert not payoff.pays(LONG)
    assert "a step of 1000000.0 ms" in payoff.reason(LONG)
    assert "too little for a graph" in payoff.reason(LONG)


def test_capturing_takes_at_most_a_tenth_of_the_run() -> None:
    payoff = counted(500)  # 2 s, and 2 ms for each
    payoff.spent(29.0)
    assert not payoff.pays(SHORT)
    assert "at most a tenth" in payoff.reason(SHORT)
    payoff.spent(2.0)
    assert payoff.pays(SHORT)

    payoff.tried(5.0)  # another one would take as long
    payoff.spent(68.0)
    assert not payoff.pays(SHORT)
    payoff.spent(2.0)
    assert payoff.pays(SHORT)


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        pytest.param(1e-7, "so long that the capture takes at most a tenth", id="a short run"),
        pytest.param(100.0, "too little for a graph to be faster", id="long kernels"),
    ],
)
def test_an_executor_goes_by_the_times_of_its_steps(
    seconds: float, why: str, captures: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(auto_engine, "time", SimpleNamespace(perf_counter=lambda: seconds * next(now)))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step) as executor:
        for _ in range(20):
            executor.run(batch=torch.ones(2, 4))
        assert executor.engine() == "tape"
        assert why in executor.explain()
    assert not captures
