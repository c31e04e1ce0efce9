"""Models that are not nn.Sequential, small, each with something that is hard to cut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None, *, scale: float = 1.0) -> tuple[Tensor, None]:
        x = x + self.attention(self.norm(x)) * scale
        if mask is not None:
            x = x.masked_fill(~mask, 0.5)
        return x + torch.tanh(self.mlp(x)), None


class Language(nn.Module):
    """A mask and positions made between modules, a skip over all layers, tied embeddings, labels, a dict of outputs."""

    def __init__(self, layers: int = 4, width: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.positions = nn.Parameter(torch.randn(8, width))
        self.register_buffer("shift", torch.linspace(0, 1, width))
        self.h = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = dropout

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        extra: list[Tensor] | None = None,
        labels: Tensor | None = None,
        scale: float = 1.0,
    ) -> dict[str, Tensor | None]:
        rows, length = ids.shape
        x = embedded = self.embed(ids) + self.positions[torch.arange(length, device=ids.device)]
        keep = None if mask is None else mask.bool().view(rows, length, 1)
        for i, layer in enumerate(self.h):
            x, _ = layer(x, keep, scale=scale)
            x = F.dropout(x, self.dropout, self.training) + self.shift
            if extra is not None:
                x = x * extra[i % len(extra)]
        logits = self.head(self.norm(x + embedded))
        per_row = None
        if labels is not None:
            per_row = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(rows, -1).mean(1)
        return {"logits": logits, "loss": per_row}


class Images(nn.Module):
    """BatchNorm between modules and inside them, operations in place on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.tail = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.stem(x)))
        x = self.body(x) + x
        x = self.tail(x)
        x += 1.0
        x = self.relu(x)
        return self.fc(x.mean((2, 3)))
