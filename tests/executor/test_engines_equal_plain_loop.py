"""One worker's executor is the plain PyTorch loop on either engine, bit for bit, random numbers included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covering import pairwise
from plain_loop import TrainingCase, check


class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(100, 1, mode="sum")
        self.deep = nn.Embedding(100, 8)
        self.mlp = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.wide(ids) + self.mlp(self.deep(ids).flatten(1)))[:, 0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch_norm_and_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))


def transformer() -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 2)), nn.Linear(2, 8), block, nn.Flatten(), nn.Linear(24, 3))


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def click(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["ids"]), batch["click"])


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(10, 6, generator=generator),
        "y": torch.randint(0, 3, (10,), generator=generator),
        "ids": torch.randint(0, 100, (10, 3), generator=generator),
        "click": torch.randint(0, 2, (10,), generator=generator).float(),
    }


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "mlp": (mlp, classify),
    "batch_norm_and_dropout": (batch_norm_and_dropout, classify),
    "transformer": (transformer, classify),
    "wide_and_deep": (WideAndDeep, click),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("engine", "name", "optimizer", "clip"), pairwise(["tape", "graph"], MODELS, OPTIMIZERS, [0.1, None])
)
def test_an_engine_is_the_plain_loop_bit_for_bit(name: str, optimizer: str, clip: float | None, engine: Any) -> None:
    make, loss = MODELS[name]

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = make()
        chosen = OPTIMIZERS[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.5)
        return TrainingCase(model, loss, chosen, batch=batch_of, scheduler=scheduler, clip=clip)

    assert check(build, engine).engines[-1] == engine
