"""A long capture is logged once, with its subject, while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.graph.dynamo import slow_capture


class Passed:
    """A timer whose time has passed when it is started."""

    asked: list[float]

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        Passed.asked.append(seconds)
        self.start = call
        self.cancel = self.join = lambda: None


def test_a_slow_capture_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Passed.asked = []
    monkeypatch.setattr(slow_capture, "_start_timer", Passed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        caplog.at_level(logging.INFO, "anabranch"),
        ab.Executor({"critic": step}, engine="graph") as executor,
    ):
        for _ in range(4):
            executor.run("critic", torch.ones(2, 4))
        assert executor.engine("critic") == "graph"
    said = [record for record in caplog.records if "capturing step" in record.getMessage()]
    assert [(record.name, record.levelno) for record in said] == [("anabranch", logging.WARNING)]
    assert "'critic'" in said[0].getMessage()
    assert "Sequential, 3 modules, 4 parameters" in said[0].getMessage()
    assert Passed.asked == [5.0]
