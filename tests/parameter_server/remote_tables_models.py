"""What tests of remote tables train, and a client whose pushes wait for the test."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.parameter_server import ParameterClient
from anabranch.tables import FTRL, RowWiseAdagrad

ROWS, WIDTH = 20, 16


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, fused=True),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, fused=True),
    "row-wise adagrad": functools.partial(RowWiseAdagrad, lr=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.01, fused=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, amsgrad=True, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
    "adamax": functools.partial(torch.optim.Adamax, lr=0.01, weight_decay=0.01),
    "ftrl": functools.partial(FTRL, lr=0.1, l1=0.01),
}


def table_and_its_twin(
    make: Callable[..., torch.optim.Optimizer],
) -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    plain = nn.Embedding(ROWS, WIDTH)
    model = nn.Sequential(copy.deepcopy(plain))
    return model, plain, [make(model.parameters()), make(plain.parameters())]


def one_step(model: nn.Module, plain: nn.Module, own: torch.optim.Optimizer, ids: Tensor) -> None:
    """Compares what both read, and has both go back; only the twin moves here."""
    torch.testing.assert_close(model(ids), plain(ids), rtol=1e-5, atol=1e-6)
    for one in (model, plain):
        one(ids).square().sum().backward()
    own.step()
    own.zero_grad()


class Gate:
    """A client whose pushes do not leave before they are let."""

    def __init__(self, client: ParameterClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.failure: Exception | None = None
        self._push = client.push_many
        monkeypatch.setattr(client, "push_many", self.push_many)

    def push_many(self, *args: Any, **options: Any) -> None:
        assert self.opened.wait(timeout=60)
        if self.failure is not None:
            raise self.failure
        self._push(*args, **options)
