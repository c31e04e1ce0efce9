"""An executor that cannot be made leaves nothing open."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.executor import executor as module


def test_the_first_group_is_left_if_the_second_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def groups() -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(rank=0, size=1, close=lambda: closed.append("first"))
        raise ab.PeerLost("rank 1 did not come", peer="rank 1", operation="rendezvous")

    made = groups()
    monkeypatch.setattr(module, "join_pipelines", lambda *_: next(made))
    monkeypatch.setattr(module.dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(module, "Workers", lambda *_, **options: next(made))
    monkeypatch.setattr(module, "check_pipes", lambda *_: SimpleNamespace(process_group=None))
    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ab.PeerLost, match="rank 1 did not come"):
        ab.Executor(step, "AllReduce", process_group=object())  # type: ignore[arg-type]
    assert set(closed) == {"first"}
