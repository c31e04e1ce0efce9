"""What a shard runs on is compiled before it listens, so that no request waits for a compiler."""

from __future__ import annotations

import pytest
import torch

from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.transport import Server


def test_no_request_compiles_anything():
    event = pytest.importorskip("numba.core.event")
    with ParameterServer() as server, ParameterClient([server.endpoint]) as client:
        with event.install_recorder("numba:compile") as recorder:
            for k, make in enumerate([torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam]):
                client.init(
                    f"t{k}", (20, 4), kind="rows", init=0.5, optimizer=lambda rows, make=make: make(rows, lr=0.1)
                )
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
                client.init(str(dtype)[6:], (3,), dtype=dtype, optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
                client.push(str(dtype)[6:], torch.ones(3, dtype=dtype))
            ids = torch.tensor([3, 7, 3])
            names = [f"t{k}" for k in range(3)]
            for _ in range(2):
                client.push_many({name: (ids, torch.ones(3, 4)) for name in names})
                client.pull_many(dict.fromkeys(names, ids))
        assert not recorder.buffer


def test_the_kernels_are_there_before_the_shard_listens(monkeypatch):
    order = []
    monkeypatch.setattr(
        "anabranch.parameter_server.server.shard_server.compile_kernels", lambda: order.append("compiled")
    )
    real = Server.__init__

    def noted(self, *arguments, **options):
        order.append("listens")
        real(self, *arguments, **options)

    monkeypatch.setattr(Server, "__init__", noted)
    with ParameterServer():
        pass
    assert order == ["compiled", "listens"]
