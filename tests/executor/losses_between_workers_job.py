"""Run by every worker of a job: losses that sum over the workers, on unequal shards, against one plain loop."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

import anabranch as ab

STEPS = 4
ROWS = 11
START, TOTAL = 0, ROWS  # of this worker's shard in the whole batch


def plainly(tensor: Tensor) -> Tensor:
    return tensor


def by_anabranch(tensor: Tensor) -> Tensor:
    return ab.all_reduce(tensor)


def by_torch(tensor: Tensor) -> Tensor:
    return functional_all_reduce(tensor, "sum", dist.group.WORLD)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.inner(self.table(ids)))


def loss_of(kind: str, total_over_workers):
    """Return a loss whose mean over the rows of all workers is that of the whole batch."""

    def contrastive(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mine = F.normalize(model(batch["ids"]), dim=1)
        everyone = total_over_workers(F.pad(mine, (0, 0, START, TOTAL - START - len(mine))))
        return F.cross_entropy(mine @ everyone.T / 0.3, START + torch.arange(len(mine)), reduction="mean")

    def normalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = model(batch["ids"])
        mean = total_over_workers(hidden.sum(0)) / TOTAL
        variance = total_over_workers((hidden - mean).square().sum(0)) / TOTAL
        hidden = (hidden - mean) / (variance + 1e-3).sqrt()
        return F.cross_entropy(model.head(hidden), batch["y"])

    def balanced(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model.head(model(batch["ids"]))
        shares = total_over_workers(logits.softmax(1).sum(0)) / TOTAL
        return F.cross_entropy(logits, batch["y"]) + 3.0 * shares.square().sum()

    return {"contrastive": contrastive, "normalised": normalised, "balanced": balanced}[kind]


def batch_of(run: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(run)
    return {
        "ids": torch.randint(0, 20, (ROWS,), generator=generator),
        "y": torch.randint(0, 3, (ROWS,), generator=generator),
    }


def new_model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def optimizer_of(case: dict, model: Model) -> torch.optim.Optimizer:
    return {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[case["optimizer"]](model.parameters(), lr=0.05)


def plain_loop(case: dict) -> tuple[Model, list[float]]:
    global START
    START = 0
    model, accumulate, losses = new_model(0), case["accumulate"], []
    loss, optimizer = loss_of(case["loss"], plainly), optimizer_of(case, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            value = loss(model, batch_of(step * accumulate + part))
            (value / accumulate).backward()
            losses.append(value.item())
        if case["clip"]:
            nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
        optimizer.step()
    return model, losses


def with_workers(case: dict) -> tuple[dict[str, Tensor], list[float]]:
    global START
    rank, world = dist.get_rank(), dist.get_world_size()
    model, losses, graph = new_model(rank), [], case["engine"] == "graph"
    step = ab.TrainStep(
        model,
        loss_of(case["loss"], by_torch if graph else by_anabranch),
        optimizer_of(case, model),
        accumulate=case["accumulate"],
        clip_grad_norm=case["clip"],
        precision=case["precision"],
    )
    with ab.Executor(
        {"train": step, "look": ab.EvalStep(model, lambda model, ids: {"rows": model.table(ids)})},
        case["mode"],
        engine=case["engine"],
        timeout=150,
        served="replace",
    ) as executor:
        for run in range(STEPS * case["accumulate"]):
            first = 2 + (0 if graph else run % 3)  # a graph is of one size
            sizes = [first] * (world - 1)
            sizes.insert(0 if graph else run % world, ROWS - sum(sizes))
            START = sum(sizes[:rank])
            shard = {key: value[START : START + sizes[rank]] for key, value in batch_of(run).items()}
            losses.append(executor.run("train", shard)["loss"].item())
        assert executor.engine("train") == case["engine"]
        rows = executor.run("look", torch.arange(20))["rows"]
    return {**{name: value.detach() for name, value in model.named_parameters()}, "table.weight": rows}, losses


def main() -> None:
    dist.init_process_group("gloo")
    worst = []
    for case in json.loads(sys.argv[1]):
        expected, expected_losses = plain_loop(case)
        actual, losses = with_workers(case)
        distances = [
            ((actual[name] - value).abs().max() / value.abs().max()).item()
            for name, value in expected.named_parameters()
        ]
        worst.append(max(*distances, *(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))))
    dist.destroy_process_group()
    print(json.dumps({"worst": worst}))


if __name__ == "__main__":
    main()
