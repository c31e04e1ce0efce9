"""A click model whose tables are on a server: plain PyTorch, of which only the rows of a batch travel.

::

    python examples/short/tables.py
    anabranch run --workers 2 --servers 1 examples/short/tables.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import anabranch as ab

torch.manual_seed(0)
pairs = torch.stack([torch.randint(1000, (8000,)), torch.randint(200, (8000,))], 1)
tastes, kinds = torch.randn(1000, 2), torch.randn(200, 2)
clicked = ((tastes[pairs[:, 0]] * kinds[pairs[:, 1]]).sum(1) > 0).float()


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.ads = nn.Embedding(1000, 8, sparse=True), nn.Embedding(200, 8, sparse=True)

    def forward(self, pairs: Tensor) -> Tensor:
        products: Tensor = self.users(pairs[:, 0]) * self.ads(pairs[:, 1])
        return products.sum(1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    pairs, clicked = batch
    return nn.functional.binary_cross_entropy_with_logits(model(pairs), clicked)


model = Clicks()
step = ab.TrainStep(model, loss, torch.optim.Adagrad(model.parameters(), lr=0.3))
loader = ab.loaders.GlobalBatches(TensorDataset(pairs, clicked), 200)  # of all workers together
with ab.Executor({"train": step}, "Hybrid", dataloaders={"train": loader}) as executor:
    while executor.epoch < 6:
        value = executor.run("train")["loss"]
        if executor.step % 10 == 0 and ab.job().rank == 0:
            print(f"loss {value:.3f}")
    if ab.job().rank == 0:
        print(executor.routes())
