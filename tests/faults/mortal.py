"""A shard with one table that can die and come back at its endpoint."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.testing import MemoryTransport

HERE = "memory:shard"
SGD = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
SPEC = TableSpec("t", 8, 2, initial=Constant(0.0))


class Shard:
    """A server of a directory; its ``with`` block gives a client that has just come, and ends in the server's death."""

    def __init__(self, directory: Path, durability: str = "log", **options: object) -> None:
        self.network, self.directory = MemoryTransport(), directory
        self._make = functools.partial(
            ParameterServer, listen=HERE, transport=self.network, durability=durability, checkpoint_dir=directory,
        )  # fmt: skip
        self.start(**options)

    def start(self, **options: object) -> None:
        self.server = self._make(**options).__enter__()

    def die(self) -> None:
        """As a killed one: nothing that was not written by now is."""
        self.server._persistence.checkpoint = lambda: None  # type: ignore[method-assign]
        self.server.__exit__(None, None, None)

    def client(self, **options: object) -> ParameterClient:
        return ParameterClient([HERE], transport=self.network, timeout=60, **options)

    def __enter__(self) -> ParameterClient:
        self._client = self.client()
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self.die()


def push(client: ParameterClient, times: int = 1, row: int = 1) -> None:
    for _ in range(times):
        client.sparse_push("t", torch.tensor([row]), -torch.ones(1, 2))


def value(client: ParameterClient) -> float:
    return float(client.sparse_pull("t", torch.tensor([1]))[0, 0])
