"""The graph engine with parameters on servers: the tape's numbers, to the bit, in every mode."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.graph.crossings import crossing_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.bag = nn.EmbeddingBag(20, 8, mode="sum")
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids).sum(1) + self.bag(ids)))  # type: ignore[no-any-return]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().mean()  # type: ignore[no-any-return]


def train(engine: Literal["tape", "graph"], mode: str, *, clip: float | None, runs: int, **options: Any):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    step = ab.TrainStep(
        model,
        loss,
        optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        clip_grad_norm=clip,
        accumulate=runs,
    )
    crossed = []
    with ab.Executor({"train": step}, mode, engine=engine, **options) as executor:
        # Another batch size is another graph.
        losses = [executor.run("train", torch.randint(0, 20, (rows, 5)))["loss"] for rows in (3, 4, 4, 3, 4, 4)]
        used = executor.engine("train")
        if engine != "tape":
            nodes = executor.graph("train").fx.nodes
            crossed = sorted(found.__name__ for node in nodes if (found := crossing_of(node)) is not None)
    return [*losses, *(parameter.detach() for parameter in model.parameters())], used, crossed


CASES: dict[str, dict[str, Any]] = {
    "plain": {"clip": None, "runs": 1},
    "cached": {"clip": None, "runs": 1, "cache": ab.Cache(capacity=8)},
    "clipped": {"clip": 0.1, "runs": 1},
    "accumulated": {"clip": None, "runs": 2},
}


QUICK = [("PS", "cached"), ("PS", "clipped"), ("Hybrid", "accumulated")]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        pytest.param(mode, case, marks=() if (mode, case) in QUICK else pytest.mark.slow)
        for mode in ("Hybrid", "PS")
        for case in CASES
    ],
)
def test_a_graph_with_parameters_on_servers_is_the_tape_to_the_bit(mode: str, case: str) -> None:
    theirs, _, _ = train("tape", mode, **CASES[case])
    mine, used, crossed = train("graph", mode, **CASES[case])
    assert used == "graph"
    assert crossed == ["table_backward"] * 2 + ["table_forward"] * 2
    assert len(mine) == 10  # the servers' tables are back in the model
    assert all(map(torch.equal, mine, theirs))
