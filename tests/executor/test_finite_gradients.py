"""Gradients that are not finite are found in large and in small ones, and numbers too large to be summed are finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anabranch.executor.engines.gradients import all_finite, nonfinite_names

LARGE = 1 << 16


def gradients() -> dict[str, Tensor]:
    return {"large": torch.ones(LARGE), "small": torch.ones(3), "column": torch.ones(LARGE, 2)[:, 0]}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["large", "small", "column"])
def test_one_value_in_any_gradient_is_found(name: str, value: float, own: bool) -> None:
    found = gradients()
    assert all_finite(list(found.values()), own=own)
    found[name][1] = value
    assert not all_finite(list(found.values()), own=own)
    assert nonfinite_names(found.items(), own=own) == [name]


def test_opposite_infinities_do_not_cancel() -> None:
    large = torch.ones(LARGE)
    large[0], large[-1] = float("inf"), -float("inf")
    assert nonfinite_names([("large", large)]) == ["large"]


@pytest.mark.parametrize("name", ["large", "small"])
def test_finite_gradients_whose_sum_overflows_are_finite(name: str) -> None:
    found = gradients()
    found[name].fill_(torch.finfo(torch.float32).max)
    assert nonfinite_names(found.items()) == []


def test_what_is_looked_at_is_unchanged() -> None:
    found, before = gradients(), gradients()
    all_finite(list(found.values()))
    assert all(torch.equal(found[name], before[name]) for name in before)
