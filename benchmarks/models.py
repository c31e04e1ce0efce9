"""The models that training steps are measured on, small enough to show overhead and large enough not to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab


@dataclass(frozen=True)
class Case:
    """A model, its loss, a batch for it, and how many steps are timed at once."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    batch: Callable[[], tuple[Tensor, Tensor]]
    calls: int = 50

    def on(self, device: str) -> Case:
        """The same case with its model and its batch on ``device``."""
        model, batch = self.model, self.batch
        return replace(self, model=lambda: model().to(device), batch=lambda: tuple(part.to(device) for part in batch()))

    def step(self, **options: Any) -> ab.TrainStep:
        """A training step of a new model with fused Adam."""
        model = self.model()
        return ab.TrainStep(model, self.loss, torch.optim.Adam(model.parameters(), fused=True), **options)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed_forward(self.after(x))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class WideAndDeep(nn.Module):
    def __init__(self, rows: int = 20_000, fields: int = 8, width: int = 16) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(rows, 1, mode="sum")
        self.deep = nn.Embedding(rows, width)
        self.mlp = mlp(fields * width, 64, 32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.wide(ids) + self.mlp(self.deep(ids).flatten(1)))[:, 0]


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def click(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    ids, clicked = batch
    return F.binary_cross_entropy_with_logits(model(ids), clicked)


def gpt2() -> nn.Module:
    """GPT-2 small as Hugging Face has it, of random weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def next_token_of_gpt2(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, _ = batch
    return model(input_ids=x, labels=x).loss


def vectors(rows: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randint(0, classes, (rows,))


def tokens(rows: int, context: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (rows, context)), torch.randint(0, 256, (rows, context))


CASES = {
    "mlp_small": Case(lambda: mlp(64, 128, 128, 10), classify, lambda: vectors(32, 64, 10)),
    "mlp_deep": Case(lambda: mlp(*[64] * 13), classify, lambda: vectors(32, 64, 64)),
    "transformer_d64_l2": Case(lambda: Transformer(64, 2), next_token, lambda: tokens(8, 32)),
    "wide_and_deep_20k": Case(
        WideAndDeep,
        click,
        lambda: (torch.randint(0, 20_000, (256, 8)), torch.randint(0, 2, (256,)).float()),
    ),
    "mlp_med": Case(lambda: mlp(512, 1024, 1024, 512), classify, lambda: vectors(256, 512, 512), calls=5),
    "transformer_d256_l4": Case(lambda: Transformer(256, 4), next_token, lambda: tokens(8, 64), calls=5),
}
"""Those of the tests too."""

TRANSFORMERS = {"transformer_d512_l12": Case(lambda: Transformer(512, 12), next_token, lambda: tokens(4, 64), calls=3)}
"""Of a second a step, which no engine can make quicker; GPT-2 where Hugging Face's library is installed."""
if find_spec("transformers") is not None:
    TRANSFORMERS["gpt2_small"] = Case(gpt2, next_token_of_gpt2, lambda: tokens(2, 64), calls=3)
