"""A model in two stages, which work on different parts of a batch at the same time.

::

    python examples/short/stages.py                         two threads
    anabranch run --workers 2 examples/short/stages.py      a stage a worker: the same numbers
"""

from typing import Any

import torch
from torch import nn

import anabranch as ab

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
job = ab.job()
ranks: dict[str, Any] = {} if job.world_size == 1 else {"process_group": job.grid(pipeline=2).pipeline_group}

with ab.Pipe(model, balance=[2, 3], chunks=4, schedule="1F1B", **ranks) as pipe:
    step = ab.TrainStep(pipe, nn.functional.mse_loss, torch.optim.Adam(pipe.parameters(), lr=0.01))
    with ab.Executor({"train": step}) as executor:
        while (number := executor.step) < 100:
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))
            value = executor.run("train", (x, x[:, :2].sum(1, keepdim=True).sin()))["loss"]
            if number % 25 == 24 and job.rank == 0:
                print(f"loss {value:.3f}")
    if job.rank == 0:
        print(pipe.describe())
