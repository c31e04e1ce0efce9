"""Run by every worker of a job: W workers on unequal shards against one plain loop on the whole batch.

Some losses sum over the workers themselves; ``total`` does so, and nothing in the plain loop.

A case may name a device. PyTorch's default device may be another, where nothing of the library's own belongs.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce

import anabranch as ab

STEPS = 5
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adam_decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "row_wise_adagrad": lambda p: ab.RowWiseAdagrad(p, lr=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True, weight_decay=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "ftrl": lambda p: ab.FTRL(p, lr=0.1, l1=0.01),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
}


class Model(nn.Module):
    """An embedding (sparse or not), a layer used twice, a branch used on some rows only, a parameter never used."""

    def __init__(self, sparse: bool, has_rare: bool) -> None:
        super().__init__()
        self.has_rare = has_rare
        self.table = nn.Embedding(50, 6, sparse=sparse)
        self.shared = nn.Linear(6, 6)
        self.rare = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        hidden = self.shared(torch.tanh(self.shared(self.table(ids).mean(1) + x)))
        rare = ids[:, 0] < 5
        if self.has_rare and rare.any():  # on some steps and some workers only
            hidden = hidden.index_add(0, rare.nonzero()[:, 0], self.rare(hidden[rare]))
        return hidden


def batch_of(case: dict, step: int, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator("cpu").manual_seed(1000 + step)
    with torch.device("cpu"):
        batch = {
            "ids": torch.randint(0, 50, (rows, 3), generator=generator),
            "x": torch.randn(rows, 6, generator=generator, dtype=torch.float64),
            "y": torch.randint(0, 3, (rows,), generator=generator),
        }
    return {name: value.to(case.get("device", "cpu")) for name, value in batch.items()}


def loss_of(case: dict, total=lambda tensor: tensor):
    """Return a loss whose mean, or sum, over the rows of all workers is that of the whole batch."""

    def ordinary(model: nn.Module, batch: dict) -> Tensor:
        return F.cross_entropy(model.head(model(batch["ids"], batch["x"])), batch["y"], reduction=case["reduction"])

    def contrastive(model: nn.Module, batch: dict) -> Tensor:
        mine, start = F.normalize(model(batch["ids"], batch["x"]), dim=1), batch["start"]
        everyone = total(F.pad(mine, (0, 0, start, batch["rows"] - start - len(mine))))
        return F.cross_entropy(mine @ everyone.T / 0.3, start + torch.arange(len(mine))) + ordinary(model, batch)

    def normalised(model: nn.Module, batch: dict) -> Tensor:
        hidden = model(batch["ids"], batch["x"])
        mean = total(hidden.sum(0)) / batch["rows"]
        variance = total((hidden - mean).square().sum(0)) / batch["rows"]
        return F.cross_entropy(model.head((hidden - mean) / (variance + 1e-3).sqrt()), batch["y"])

    def balanced(model: nn.Module, batch: dict) -> Tensor:
        logits = model.head(model(batch["ids"], batch["x"]))
        shares = total(logits.softmax(1).sum(0)) / batch["rows"]
        return F.cross_entropy(logits, batch["y"]) + 3.0 * shares.square().sum()

    return {one.__name__: one for one in (ordinary, contrastive, normalised, balanced)}[case.get("loss", "ordinary")]


def by_torch(tensor: Tensor) -> Tensor:
    return functional_all_reduce(tensor, "sum", torch.distributed.group.WORLD)


def shard(batch: dict, sizes: list[int], rank: int) -> dict:
    start = sum(sizes[:rank])
    return {key: value[start : start + sizes[rank]] for key, value in batch.items()} | {
        "start": start,
        "rows": sum(sizes),
    }


def optimizers_of(name: str, model: Model, sparse: bool | str) -> list[torch.optim.Optimizer]:
    rest = [parameter for key, parameter in model.named_parameters() if key != "table.weight"]
    make = OPTIMIZERS[name]
    if not sparse:
        return [make([model.table.weight, *rest])]
    return [OPTIMIZERS[sparse if isinstance(sparse, str) else "adagrad"]([model.table.weight]), make(rest)]


def schedulers_of(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.lr_scheduler.LRScheduler]:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]


def new_model(case: dict, seed: int) -> Model:
    torch.manual_seed(seed)
    with torch.device("cpu"):
        return Model(bool(case["sparse"]), case.get("rare", True)).double().to(case.get("device", "cpu"))


def plain_loop(case: dict, rows: int) -> tuple[Model, list[float]]:
    sparse, accumulate = case["sparse"], case["accumulate"]
    model = new_model(case, seed=0)
    optimizers = optimizers_of(case["optimizer"], model, sparse)
    schedulers = schedulers_of(optimizers)
    losses = []
    for step in range(STEPS):
        model.zero_grad(set_to_none=True)
        parts = [
            shard(batch_of(case, step * accumulate + part, rows + part), [rows + part], 0) for part in range(accumulate)
        ]
        total = sum(len(part["y"]) for part in parts) if case["reduction"] == "mean" else 1
        for part in parts:
            loss = loss_of(case)(model, part)
            weight = len(part["y"]) / total if case["reduction"] == "mean" else 1.0
            (loss * weight).backward()
            losses.append(loss.item())
        if case["clip"]:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
            factor = min(1.0, case["clip"] / (norm.item() + 1e-6))
            for p in model.parameters():
                if p.grad is not None:
                    p.grad = p.grad.coalesce() * factor if p.grad.is_sparse else p.grad * factor
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return model, losses


def with_workers(case: dict, rows: int, rank: int, world: int) -> tuple[dict[str, Tensor], list[float]]:
    sparse, accumulate = case["sparse"], case["accumulate"]
    model = new_model(case, seed=rank)  # rank 0's is everyone's
    optimizers = optimizers_of(case["optimizer"], model, sparse)
    step = ab.TrainStep(
        model,
        loss_of(case, by_torch if case["engine"] == "graph" else ab.all_reduce),
        optimizers,
        reduction=case["reduction"],
        scheduler=schedulers_of(optimizers),
        clip_grad_norm=case["clip"],
        accumulate=accumulate,
        precision=case.get("precision"),
    )
    losses = []
    steps = {"default": step, "look": ab.EvalStep(model, lambda model, ids: {"rows": model.table(ids)})}
    cache = ab.Cache(**case["cache"]) if case.get("cache") else None
    with ab.Executor(
        steps,
        case["mode"],
        engine=case["engine"],
        cache=cache,
        use_sparse_pull=case.get("sparse_pull", True),
        routes=case.get("routes"),
        served="replace",
    ) as executor:
        for run in range(STEPS * accumulate):
            whole = batch_of(case, run, rows + run % accumulate)
            count = len(whole["y"])
            sizes = [count // world] * world
            sizes[run % world] += count - sum(sizes)
            if case["unequal"]:  # one worker has most rows, one has none at all
                sizes = [0] * world
                sizes[run % world] = count - 2
                sizes[(run + 1) % world] += 2
            losses.append(executor.run(batch=shard(whole, sizes, rank))["loss"].item())
        assert executor.statistics().steps == STEPS
        found = {"table.weight": executor.run("look", torch.arange(50, device=case.get("device", "cpu")))["rows"]}
    return {**found, **dict(model.named_parameters())}, losses


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item()


def main() -> None:
    torch.set_default_device(sys.argv[2] if len(sys.argv) > 2 else None)
    torch.distributed.init_process_group("gloo")  # which also sums CUDA tensors, even of ranks that share a GPU
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cases = json.loads(sys.argv[1])
    results = []
    for case in cases:
        expected, expected_losses = plain_loop(case, rows=11)
        found, losses = with_workers(case, 11, rank, world)
        worst = max(distance(found[name], value) for name, value in expected.named_parameters())
        worst_loss = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
        results.append([worst, worst_loss, found["never"].grad is None])
    torch.distributed.destroy_process_group()
    print(json.dumps({"found": results}))


if __name__ == "__main__":
    main()
