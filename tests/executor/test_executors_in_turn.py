"""Executors opened and closed in turn, as in a notebook or a search over settings, leave nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab


def train_once(mode: str | None, engine: str) -> list[weakref.ref[object]]:
    """Train and evaluate a new model; return what should be gone with it."""
    model = nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 1))
    steps = {
        "train": ab.TrainStep(
            model, lambda m, ids: m(ids).square().mean(), torch.optim.Adagrad(model.parameters()), accumulate=2
        ),
        "look": ab.EvalStep(model, lambda m, ids: {"y": m(ids)}),
    }
    with ab.Executor(steps, mode, engine=engine) as executor:  # type: ignore[arg-type]
        for _ in range(4):
            executor.run("train", batch=torch.randint(50, (6, 2)))
        executor.run("look", batch=torch.randint(50, (6, 2)))
    return [weakref.ref(thing) for thing in (executor, model)]


@pytest.mark.parametrize("mode", [None, "AllReduce", "PS", "Hybrid"])
def test_an_executor_is_freed_with_its_model(mode: str | None) -> None:
    left, sizes = [], []
    for _ in range(20):
        left += train_once(mode, "tape")
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
        sizes.append(sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided))
    assert [reference() for reference in left] == [None] * 40
    assert sizes[-1] == sizes[1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "Hybrid"])
def test_an_executor_with_graphs_is_freed_with_its_model(mode: str | None) -> None:
    left = train_once(mode, "graph")
    for _ in range(5):  # Dynamo's programs are freed by a finalizer, and what they hold after it
        gc.collect()
    assert [reference() for reference in left] == [None, None]
