"""A graph must give the bits of the tape: the sign of a zero counts, which NaN it is does not; random numbers do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anabranch.executor.engines.graph_engine import Differs, Snapshot, bits_differ

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_the_sign_of_a_zero_counts(dtype: torch.dtype) -> None:
    zero = torch.zeros(3, dtype=dtype)
    assert not bits_differ(zero, zero.clone())
    assert bits_differ(zero, -zero)


def test_nan_is_nan_and_nothing_else_and_an_imaginary_zero_has_a_sign_too() -> None:
    one = torch.tensor([1.0, NAN])
    assert not bits_differ(one, torch.tensor([1.0, -NAN]))
    assert bits_differ(one, torch.tensor([NAN, 1.0]))
    assert bits_differ(torch.ones(2), torch.ones(2, dtype=torch.float64))
    one, other = (torch.complex(torch.ones(2), zero) for zero in (torch.zeros(2), -torch.zeros(2)))
    assert bits_differ(one, other)
    assert not bits_differ(one, other.conj()), "conjugated when it is looked at"


def test_random_numbers_drawn_on_a_device_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state.clone()])
    before = Snapshot(nn.Linear(2, 2), [])
    before.compare()
    state += 1
    with pytest.raises(Differs, match="other random numbers"):
        before.compare()
