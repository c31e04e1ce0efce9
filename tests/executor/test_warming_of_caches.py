"""What cached tables run on is compiled when they are made, so that no step waits for a compiler."""

from __future__ import annotations

import pytest

from programs import Programs

SCRIPT = """
import types
import torch
from torch import nn
import anabranch as ab
from anabranch.tables.kernels import caches, routing, rows

def made():
    modules = (caches, routing, rows)
    kernels = {f"{m.__name__}.{name}": k for m in modules for name, k in vars(m).items() if hasattr(k, "signatures")}
    return {name: len(kernel.signatures) for name, kernel in kernels.items()}

model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
step = ab.TrainStep(model, lambda m, ids: m(ids).square().mean(), optimizer)
batches = [torch.randint(50, (9, 2)) for _ in range(8)]
with ab.Executor(step, "Hybrid", cache=ab.Cache("LFU", 10, BOUNDS), dataloaders={"default": batches}) as executor:
    before = made()
    assert before["anabranch.tables.kernels.caches.ask"] == 1, before
    assert before["anabranch.tables.kernels.routing.arrange"] == 1, before
    for _ in batches:
        executor.run()
    after = made()
assert after == before, {name: (before[name], after[name]) for name in after if after[name] != before[name]}
"""


@pytest.mark.parametrize("bounds", ["3, 2", pytest.param("0, 0", marks=pytest.mark.slow)])
def test_no_cached_step_compiles_anything(bounds: str, programs: Programs) -> None:
    """In a process of its own, for in this one the tests before have compiled everything."""
    done = programs.run(SCRIPT.replace("BOUNDS", bounds), timeout=200.0)
    assert done.returncode == 0, done.stderr[-3000:]
