"""A step captured as one graph, optimizer included: the same bits in less time, and a page that draws it.

::

    python examples/short/graph.py
"""

import time

import torch
from torch import nn

import anabranch as ab

torch.set_num_threads(1)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x[:, :2].sum(1, keepdim=True).sin())


states = []
for engine in ("tape", "graph"):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 1))
    step = ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
    with ab.Executor({"train": step}, engine=engine) as executor:
        for hundred in range(3):
            began = time.monotonic()
            for number in range(100 * hundred, 100 * hundred + 100):
                executor.run("train", torch.randn(64, 16, generator=torch.Generator().manual_seed(number)))
            seconds = time.monotonic() - began
            value = executor.run("train", torch.randn(64, 16, generator=torch.Generator().manual_seed(1)))["loss"]
            print(f"{engine}: {10000 * seconds:.0f} us a step, loss {value:.3f}")
        if engine == "graph":
            print(executor.graph("train").memory_plan().peak_bytes, "bytes at most")
            executor.graph("train").to_html("graph.html")
    states.append(model.state_dict())
assert all(map(torch.equal, states[0].values(), states[1].values()))
