"""Models that are not nn.Sequential, small, each with something that is hard to cut."""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Coded(nn.Module):
    """Modules and buffers, and the code that uses them."""

    def __init__(self, code: Callable[..., object], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.code = code
        for name, part in parts.items():
            self.add_module(name, part) if isinstance(part, nn.Module) else self.register_buffer(name, part)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.code(self, *args, **kwargs)


def linears(code: Callable[..., object], width: int = 4, names: str = "a b", **parts: nn.Module | Tensor) -> Coded:
    return Coded(code, **{name: nn.Linear(width, width) for name in names.split()}, **parts)


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


# A model whose code reads numbers from everywhere, and the ways to change them.

NUMBER = 1.0
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


def helper() -> float:
    return 1.0


class Config:
    scale = 1.0
    mask: Tensor | None = None


class Child(nn.Module):
    """A layer whose class has a method that the model's code calls, and a forward that may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def factor(self) -> float:
        return 1.0


class Reads(nn.Module):
    factor = other = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Child(), Child(), Child()
        self.config, self.number, self.array = Config(), 1.0, np.ones(1)
        self.settings = SimpleNamespace(scale=1.0)
        self.function, self.shift = torch.tanh, torch.ones(3, dtype=torch.float64)
        self.deep = {"a": {"b": {"c": {"d": {"e": 1.0}}}}}
        self.gain = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("offset", torch.ones(3, dtype=torch.float64))  # read by several parts

    def method(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x) + self.offset
        scale = self.factor * type(self).other * self.config.scale * self.number * float(self.array[0])
        scale *= self.settings.scale * self.deep["a"]["b"]["c"]["d"]["e"] * self.method() * helper() * NUMBER
        scale *= float(os.environ.get("ANABRANCH_TEST_SCALE", "1")) * VARIABLE.get() * self.b.factor()
        x = self.b(x * scale)
        return self.c(self.function(x) * scale + self.shift) * self.gain + self.offset


Change = Callable[[Reads, pytest.MonkeyPatch], object]
CHANGES: dict[str, Change] = {
    "class attribute by self": lambda model, patch: patch.setattr(Reads, "factor", 2.0),
    "class attribute by type": lambda model, patch: patch.setattr(Reads, "other", 2.0),
    "attribute of a class of settings": lambda model, patch: patch.setattr(Config, "scale", 2.0),
    "attribute of an object of settings": lambda model, patch: patch.setattr(model.settings, "scale", 2.0),
    "attribute": lambda model, patch: patch.setattr(model, "number", 2.0),
    "NumPy array": lambda model, patch: model.array.fill(2.0),
    "dict five deep": lambda model, patch: model.deep["a"]["b"]["c"]["d"].update(e=2.0),
    "method replaced on its class": lambda model, patch: patch.setattr(Reads, "method", lambda self: 2.0),
    "method replaced on the class of a child": lambda model, patch: patch.setattr(Child, "factor", lambda self: 2.0),
    "forward replaced on the class of a child": lambda model, patch: patch.setattr(
        Child, "forward", lambda self, x: x @ self.weight * 2
    ),
    "helper replaced": lambda model, patch: patch.setitem(globals(), "helper", lambda: 2.0),
    "global": lambda model, patch: patch.setitem(globals(), "NUMBER", 2.0),
    "environment": lambda model, patch: patch.setenv("ANABRANCH_TEST_SCALE", "2"),
    "context variable": lambda model, patch: VARIABLE.set(2.0),
    "tensor changed in place": lambda model, patch: model.shift.mul_(2.0),
    "tensor replaced": lambda model, patch: setattr(model, "shift", model.shift * 2),
    "buffer replaced": lambda model, patch: setattr(model, "offset", model.offset * 2),
    "parameter replaced": lambda model, patch: setattr(
        model, "gain", nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))
    ),
    "lambda in place of a function": lambda model, patch: setattr(model, "function", lambda x: x + 1),
    "partial in place of a function": lambda model, patch: setattr(
        model, "function", functools.partial(torch.add, other=2.0)
    ),
    "hook on a layer": lambda model, patch: model.b.register_forward_hook(lambda module, args, output: output * 2),
}
