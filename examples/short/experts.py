"""A mixture of four experts that train in processes of their own; training goes on if one of these is killed.

::

    python examples/short/experts.py
    anabranch run --experts 2 examples/short/experts.py
"""

import torch
from torch import nn

import anabranch as ab


def make_backends(index: int, count: int) -> list[ab.ExpertBackend]:
    """Return the experts of process ``index`` of ``count``."""
    made = []
    for number in range(index, 4, count):
        torch.manual_seed(number)
        module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        adam = torch.optim.Adam(module.parameters(), lr=0.01)
        made.append(ab.ExpertBackend(f"expert.{number}", module, adam, args_schema=[ab.TensorSpec(16)]))
    return made


directory = ab.job().serve(make_backends)  # in a process of experts it returns when the job has ended
torch.manual_seed(0)
mixture = ab.RemoteMixtureOfExperts(16, (4,), directory, "expert", k_best=2)
model = nn.Sequential(nn.Linear(8, 16), mixture, nn.Linear(16, 1))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x[:, :2].sum(1, keepdim=True).sin())


step = ab.TrainStep(model, loss, torch.optim.Adam(model.parameters(), lr=0.01))
with ab.Executor({"train": step}) as executor:
    while (number := executor.step) < 100:
        value = executor.run("train", torch.randn(64, 8))["loss"]
        if number % 25 == 24:
            print(f"loss {value:.3f}")
print(mixture.statistics().rows)
