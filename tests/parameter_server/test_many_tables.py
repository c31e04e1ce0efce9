"""Hundreds of tables on one shard: their description does not fit the header of a frame."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.testing import MemoryTransport

ADAM = RowOptimizer.from_factory(functools.partial(torch.optim.Adam, lr=1.0))
MANY = 1000
NAMES = [f"table_{number}" for number in range(MANY)]


@pytest.mark.slow
def test_hundreds_of_tables_are_described_counted_saved_loaded_and_dropped(tmp_path: Path) -> None:
    """From 160 on it was ``RemoteError: the header is 76117 bytes, over the 65536``."""
    network = MemoryTransport()
    with (
        ParameterServer(listen="memory:s", transport=network) as server,
        ParameterClient([server.endpoint], transport=network) as client,
    ):
        for name in NAMES:
            client.init_table(TableSpec(name, 4, 2, initial=Constant(0.0)), ADAM)
        client.sparse_push(NAMES[-1], torch.tensor([1]), torch.ones(1, 2))
        rows = client.sparse_pull(NAMES[-1], torch.arange(4))
        assert client.statistics()[0].tables[NAMES[-1]].pushes == 1
        assert sum(len(described["tables"]) for described in client.calls.describe()) == MANY
        client.save(tmp_path / "kept")
        client.drop_some(NAMES)
        assert client.statistics()[0].tables == {}
        client.load(tmp_path / "kept")
        assert torch.equal(client.sparse_pull(NAMES[-1], torch.arange(4)), rows)
