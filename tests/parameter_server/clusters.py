"""Servers in this process, and clients of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anabranch.parameter_server import ParameterClient, ParameterServer, Worker
from anabranch.testing import MemoryTransport


class Cluster:
    """Shards, and clients of all of them, which are closed first."""

    def __init__(self, stack: ExitStack, shards: int, **options: Any) -> None:
        self.enter, self.network = stack.enter_context, MemoryTransport()
        serve = (ParameterServer(shard, shards, transport=self.network, **options) for shard in range(shards))
        self.servers = [self.enter(server) for server in serve]
        self.endpoints = [server.endpoint for server in self.servers]

    def client(self, **options: Any) -> ParameterClient:
        return self.enter(ParameterClient(self.endpoints, transport=self.network, **options))

    def workers(self, world: int, consistency: str = "bsp", **options: Any) -> list[ParameterClient]:
        return [self.client(worker=Worker(rank, world, consistency), **options) for rank in range(world)]


@contextmanager
def cluster(shards: int = 1, **options: Any) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, shards, **options)


@contextmanager
def client_of(shards: int = 1, **options: Any) -> Iterator[ParameterClient]:
    with cluster(shards) as servers:
        yield servers.client(**options)


@contextmanager
def durable_shard(
    folder: Path, durability: str = "log", **options: Any
) -> Iterator[tuple[ParameterServer, ParameterClient]]:
    """A shard whose state is kept in a folder, and a client of it."""
    with cluster(durability=durability, checkpoint_dir=folder) as servers:
        yield servers.servers[0], servers.client(**options)
