"""Run by every worker of a job: a ``TrainStep`` of a ``Pipe`` on a grid of workers against one plain loop.

The first argument names what to do, the second is JSON; each rank prints one line of JSON with what it found.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab

STEPS = 4
torch.sparse.check_sparse_tensor_invariants.disable()  # or Adagrad's sparse update warns


@ab.skippable(stash=["ids"])
class Look(nn.Module):
    """Looks up rows of a table, and lets the numbers themselves jump over the layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 5, sparse=sparse)

    def forward(self, ids: Tensor):
        yield ab.stash("ids", ids)
        return self.table(ids).mean(1)


@ab.skippable(pop=["ids"])
class Scale(nn.Module):
    def forward(self, x: Tensor):
        ids = yield ab.pop("ids")
        return x * (1 + ids.sum(1, keepdim=True) / 100)


def new_model(sparse: bool = True, seed: int = 0) -> nn.Sequential:
    """Seven layers; the last weight is the second layer's."""
    torch.manual_seed(seed)
    layers = [Look(sparse), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), Scale(), nn.Tanh(), nn.Linear(5, 5)]
    model = nn.Sequential(*layers).double()
    model[6].weight = model[1].weight
    return model


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """A stage without a table, or without anything else, has empty groups."""
    tables = [value for name, value in model.named_parameters() if "table" in name]
    rest = [value for name, value in model.named_parameters() if "table" not in name]
    decayed = [value for value in rest if value.ndim > 1]
    others = [value for value in rest if value.ndim == 1]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01)
    return [torch.optim.Adagrad([{"params": tables}], lr=0.1), adamw]


def schedulers_of(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.lr_scheduler.LRScheduler]:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]


def batch_of(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, 30, (rows, 3), generator=generator)
    return ids, torch.randn(rows, 5, generator=generator, dtype=torch.float64)


@dataclass
class Plain:
    """The loop that everybody knows."""

    case: dict

    def __post_init__(self) -> None:
        self.model = new_model()
        self.optimizers = optimizers_of(self.model)
        self.schedulers = schedulers_of(self.optimizers)

    def train(self, runs: range, rows: int) -> list[float]:
        losses: list[float] = []
        accumulate, mean = self.case["accumulate"], self.case["reduction"] == "mean"
        for first in runs[::accumulate]:
            self.model.zero_grad()
            parts = [batch_of(first + k, rows + k) for k in range(accumulate)]
            total = sum(len(x) for x, _ in parts)
            for x, target in parts:
                loss = F.mse_loss(self.model(x), target, reduction=self.case["reduction"])
                (loss * (len(x) / total if mean else 1)).backward()
                losses.append(loss.item())
            self.clip()
            for one in (*self.optimizers, *self.schedulers):
                one.step()
        return losses

    def clip(self) -> None:
        for p in self.model.parameters():
            p.grad = p.grad.coalesce() if p.grad.is_sparse else p.grad
        if self.case["clip"]:
            values = [p.grad.values() if p.grad.is_sparse else p.grad for p in self.model.parameters()]
            factor = min(1.0, self.case["clip"] / (torch.nn.utils.get_total_norm(values).item() + 1e-6))
            for p in self.model.parameters():
                p.grad = p.grad * factor


class Piped:
    """The same under an executor, on a grid of ``data`` x ``pipeline`` workers, in rows of the grid."""

    def __init__(self, case: dict, seed: int = 0) -> None:
        self.case = case
        self.columns, stages = case["data"], case["pipeline"]
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.row, self.stage = divmod(rank, stages)
        lines = [dist.new_group(list(range(d * stages, (d + 1) * stages))) for d in range(self.columns) if stages > 1]
        groups = [
            dist.new_group(list(range(s, self.columns * stages, stages)))
            for s in range(stages)
            if dist.is_initialized()
        ]
        model = new_model(seed=seed + self.row)  # the first row's is everyone's
        self.pipe = ab.Pipe(
            model,
            case["balance"],
            chunks=case.get("chunks", 3),
            schedule=case.get("schedule", "1F1B"),
            checkpoint=case.get("checkpoint", "except_last"),
            process_group=lines[self.row] if lines else None,
        )
        optimizers = optimizers_of(self.pipe)
        reduction = case["reduction"]
        self.step = ab.TrainStep(
            self.pipe,
            lambda output, target: F.mse_loss(output, target, reduction=reduction),
            optimizers,
            reduction=reduction,
            scheduler=schedulers_of(optimizers),
            clip_grad_norm=case["clip"],
            accumulate=case["accumulate"],
            skip_nonfinite=case.get("skip_nonfinite", False),
        )
        self.executor = ab.Executor(
            {"train": self.step, "validate": ab.EvalStep(self.pipe, self.outputs)},
            comm_mode=case.get("mode", "AllReduce" if groups else None),
            process_group=groups[self.stage] if groups else None,
            timeout=60.0,
            served="replace",
        )

    def outputs(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        output = model(batch[0])
        return {"loss": F.mse_loss(output, batch[1]), "output": output}

    def shard(self, batch: tuple[Tensor, Tensor], run: int) -> tuple[Tensor | None, Tensor | None]:
        """Unequal shards: one row of the grid gets most, with three one none. Ranks pass only what they must."""
        rows = len(batch[0])
        sizes = [0] * self.columns
        sizes[run % self.columns] = rows - 2
        sizes[(run + 1) % self.columns] += 2
        start = sum(sizes[: self.row])
        x, target = (part[start : start + sizes[self.row]] for part in batch)
        if self.case.get("schedule") in ("ZBV", "Interleaved1F1B") or self.case["pipeline"] == 1:
            return x, target
        return (x, None) if self.stage == 0 else (None, target)

    def train(self, runs: range, rows: int) -> list[float]:
        found = []
        for run in runs:
            batch = batch_of(run, rows + run % self.case["accumulate"])
            values = self.executor.run("train", self.shard(batch, run), fetch=["loss"] if run % 2 else None)
            assert list(values) == ["loss"]
            found.append(values["loss"].item())
        return found


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item()


def compare(piped: Piped, plain: Plain) -> float:
    """The largest distance of what this rank has, on servers or here, from the plain loop's."""
    expected = dict(plain.model.named_parameters(remove_duplicate=False))
    here = dict(piped.pipe.named_parameters())
    remote = piped.executor._remote
    if remote is not None and not piped.executor._closed:
        if dist.is_initialized():
            dist.barrier()  # by now everyone has pushed
        kept = remote.read()
        here |= {moved.name: kept[moved.parameter].values for moved in remote.moved}
    return max([distance(value, expected[name]) for name, value in here.items()] or [0.0])


def train() -> dict:
    found = []
    for case in json.loads(sys.argv[2]):
        plain, piped = Plain(case), Piped(case)
        runs = range(STEPS * case["accumulate"])
        expected = plain.train(runs, 8)
        with piped.executor as executor:
            losses = piped.train(runs, 8)
            worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
            x, target = batch_of(99, 6)
            values = executor.run("validate", (x, target))
            with torch.no_grad():
                output = plain.model(x)
            assert distance(values["output"], output) < 1e-12
            assert distance(values["loss"], F.mse_loss(output, target)) < 1e-12
            assert executor.engine("train") == "tape"
            statistics = executor.statistics()
            assert statistics.steps == STEPS
            assert statistics.runs == {"train": len(runs), "validate": 1}
            found.append([compare(piped, plain), worst])
        piped.pipe.close()
    return {"found": found}


def save() -> dict:
    """Trains, saves, and goes on."""
    case, path, runs = json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    piped = Piped(case)
    with piped.executor as executor:
        piped.train(range(runs), 8)
        executor.save(path)
        losses = piped.train(range(runs, runs + 4), 8)
        calls = piped.pipe.calls
    piped.pipe.close()
    return {"losses": losses, "calls": calls}


def load() -> dict:
    """Goes on from there with another model of its own, differently split."""
    case, path, runs = json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    piped = Piped(case, seed=77)
    with piped.executor as executor:
        assert executor.resume(path)
        losses = piped.train(range(runs, runs + 4), 8)
        calls = piped.pipe.calls
    piped.pipe.close()
    return {"losses": losses, "calls": calls}


def skip() -> dict:
    """A step with NaN in it changes nothing, on the servers and on any stage; the next one counts."""
    case = json.loads(sys.argv[2])
    plain, piped = Plain(case), Piped(case)
    with piped.executor as executor:
        for run, spoilt in enumerate([False, True, False]):
            x, target = piped.shard(batch_of(run, 8), run)
            if target is not None and spoilt:
                target[0, 0] = torch.nan
            executor.run("train", (x, target))
        plain.train(range(1), 8)
        plain.train(range(2, 3), 8)
        assert executor.statistics().skipped_steps == 1
        found = compare(piped, plain)
    piped.pipe.close()
    return {"found": found}


def places() -> dict:
    """Where the parameters of this rank's stages live, and what cannot be."""
    case = json.loads(sys.argv[2])
    piped = Piped(case)
    column = piped.executor._workers._group

    def again(**options: object) -> None:
        ab.Executor(piped.step, process_group=column, **options).close()

    with piped.executor as executor:
        found = {route.parameter: str(route.place) for route in executor.routes()}
    for words, options in {
        "use consistency='bsp', or a Pipe in one process": {"comm_mode": "PS", "consistency": "ssp:1"},
        "routes= names '9.weight'": {"comm_mode": "PS", "routes": {"9.weight": "AllReduce"}},
        "shared by stages on several ranks": {"comm_mode": "AllReduce", "routes": {"1.weight": "PS", "6.weight": "PS"}},
    }.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            again(**options)
    again(comm_mode="Hybrid", routes={"3.bias": "PS", "6.bias": "PS"})  # said on every rank, whosever they are
    piped.pipe.close()
    return {"places": found}


def mistakes() -> dict:
    """What a grid refuses, on every rank, and goes on."""
    case = json.loads(sys.argv[2])
    piped = Piped(case)
    x, target = batch_of(0, 4)

    def refused(kind: type[Exception], words: str, call) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert words in str(caught.value)

    executor = piped.executor
    refused(
        ValueError,
        "'loss' and 'grad_norm' only",
        lambda: executor.run("train", (x, target), fetch=["0"]),
    )
    refused(ValueError, "one microbatch at a time", lambda: executor.run("validate", (x, target), fetch=["0"]))
    refused(ValueError, "takes batches (x, target)", lambda: executor.run("train", [x]))
    kind = ValueError if piped.stage else ab.PipelineError
    refused(
        kind, "the ranks of a pipeline take the same batch", lambda: executor.run("train", (x[piped.stage :], None))
    )
    stages = [piped.row * case["pipeline"] + stage for stage in range(case["pipeline"])]
    refused(
        ValueError,
        f"of which {stages} are stages of one pipeline",
        lambda: ab.Executor({"train": piped.step}, comm_mode="AllReduce"),
    )
    lone = nn.Linear(2, 2)
    other = ab.EvalStep(lone, lambda model, batch: {})
    refused(ValueError, "'other' does not run on the ranks", lambda: ab.Executor({"train": piped.step, "other": other}))
    before = piped.pipe.calls
    executor.run("train", (x, target))
    assert piped.pipe.calls - before in (0, 1)
    executor.close()
    piped.pipe.close()
    return {}


def stop() -> dict:
    """One rank is asked to stop; all see it after the same run."""
    piped = Piped(json.loads(sys.argv[2]))
    seen = []
    with piped.executor as executor:
        for run in range(4):
            if run == 1 and dist.get_rank() == dist.get_world_size() - 1:
                executor.request_stop()
            piped.train(range(run, run + 1), 8)
            seen.append(executor.stopping)
    piped.pipe.close()
    return {"seen": seen}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    print(json.dumps(globals()[sys.argv[1]]()), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
