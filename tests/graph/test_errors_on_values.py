"""Operators that raise on some values raise in a graph as in the plain loop, and no parameter moves.

PYTEST_DONT_REWRITE: an assert of a loss here is the plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plain_loop import ERROR, TrainingCase, check, sgd

TABLE = torch.arange(10.0).view(5, 2)
RIGHT, SINGULAR, IDS, OUTSIDE = torch.eye(3), torch.zeros(3, 3), torch.tensor([1, 2, 0]), torch.tensor([1, 7, 0])


def asserted(ids: Tensor) -> float:
    assert ids.max() < 5, "an id outside the table"
    return 0.0


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor | float], Tensor, Tensor]] = {
    "inv": (lambda scale, a: torch.linalg.inv(a * scale).sum(), RIGHT, SINGULAR),
    "assert": (lambda scale, ids: asserted(ids), IDS, OUTSIDE),
    "lookup": (lambda scale, ids: F.embedding(ids, TABLE).sum() * scale, IDS, OUTSIDE),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", CASES)
def test_it_raises_in_a_graph_too_and_nothing_has_moved(name: str) -> None:
    term, right, wrong = CASES[name]

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = nn.Linear(3, 2)

        def loss(model: Any, batch: Any) -> Any:
            return model(batch[0]).square().mean() + term(model.bias[0].exp(), batch[1])

        return TrainingCase(model, loss, sgd(model), batch=lambda i: (torch.ones(3, 3), wrong if i == 6 else right))

    got = check(build, "graph")
    assert [i for i, loss in enumerate(got.losses) if loss == ERROR] == [6]
    assert got.engines == ["graph"] * 8
