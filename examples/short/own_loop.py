"""A loop of one's own: each gradient is averaged over the workers as soon as it is final, while backward goes on.

::

    python examples/short/own_loop.py
    anabranch run --workers 2 examples/short/own_loop.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import anabranch as ab

job = ab.job()
if job.world_size > 1:
    dist.init_process_group("gloo")


def average(parameter: Tensor, gradient: Tensor) -> torch.futures.Future[list[Tensor]] | None:
    """Average a final gradient while backward goes on; what the future brings takes its place."""
    if job.world_size == 1:
        return None
    work = dist.all_reduce(gradient.div_(job.world_size), async_op=True)
    assert work is not None
    averaged: torch.futures.Future[list[Tensor]] = work.get_future()
    return averaged


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
manager = ab.GradManager().attach(model.parameters(), average)
for number in range(200):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(number))[job.rank :: job.world_size]
    optimizer.zero_grad()
    with manager:
        value = nn.functional.mse_loss(model(x), x[:, :2].sum(1, keepdim=True).sin())
        manager.backward(value)
    optimizer.step()
    if number % 50 == 49 and job.rank == 0:
        print(f"loss {value:.3f}")
