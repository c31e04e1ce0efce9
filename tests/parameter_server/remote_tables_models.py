"""What tests of remote tables train, and a client whose pushes wait for the test."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.parameter_server import ParameterClient, RemoteTables
from anabranch.tables import FTRL, Cache, RowWiseAdagrad

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


class Cached:
    """A table on the servers of ``client``, behind a cache, and its twin, which the plain loop trains."""

    def __init__(self, client: ParameterClient, name: str, **cache: Any) -> None:
        self.client, self.tables = client, RemoteTables(client, cache=Cache(**{**LARGE, **cache}))
        self.plain = nn.Embedding(ROWS, WIDTH)
        self.model = nn.Sequential(copy.deepcopy(self.plain))
        self.optimizer, self.own = (OPTIMIZERS[name](one.parameters()) for one in (self.model, self.plain))
        self.tables.adopt(self.model, ["0.weight"], self.optimizer)

    def step(self, number: int, ids: Tensor) -> None:
        """Compare what both read, and have both go back; only the twin moves here."""
        self.tables.begin(number)
        self.go_back(self.model(ids), ids)

    def go_back(self, rows: Tensor, ids: Tensor) -> None:
        torch.testing.assert_close(rows, self.plain(ids), rtol=1e-5, atol=1e-6)
        for one in (rows, self.plain(ids)):
            one.square().sum().backward()
        self.own.step()
        self.own.zero_grad()

    def pushed(self) -> int:
        return self.client.statistics()[0].tables["0.weight"].rows_pushed

    def assert_alike(self) -> None:
        torch.testing.assert_close(self.client.pull("0.weight"), self.plain.weight, rtol=1e-5, atol=1e-6)


LARGE: dict[str, Any] = {"capacity": ROWS, "pull_bound": 50, "push_bound": 50}
"""A cache that sends nothing by itself in a few steps."""
