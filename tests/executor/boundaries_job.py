"""One job across every boundary: pipelines beside one another, a table on a server, a mixture of experts in a block.

The first argument is ``"plain"``, for PyTorch's own loop in one process, or ``"grid"`` for an executor's; the second
one the number of stages. Each rank prints one line of JSON: its losses, what the model says in the end, and its
parameters.

The experts are synchronous: one gathers the gradients of all rows of a step, whichever microbatch and pipeline they
come from, and then steps once. A pipeline's loss is a mean over its own rows, so the sum is divided by the pipelines.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.moved_parameter import parameters_here

STEPS = 20
ROWS = 12
WIDTH = 6
EXPERTS = 2
SPEC = ab.TensorSpec(WIDTH, dtype=torch.float64)


class Synchronous(ab.ExpertBackend):
    """Steps once a step of the job, on the mean of its pipelines' gradients."""

    pipelines = 1
    came = 0

    def backward(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        assert inputs[0] is not None
        self.came += len(inputs[0])
        return super().backward(*inputs)

    def apply_gradients(self) -> None:
        if self.came < ROWS:
            return
        self.came = 0
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.pipelines
        super().apply_gradients()


def make_backends(index: int, count: int, pipelines: int) -> list[ab.ExpertBackend]:
    """One expert a process; alone both."""
    made: list[ab.ExpertBackend] = []
    for number in range(index, EXPERTS, count):
        torch.manual_seed(100 + number)
        module = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)).double()
        adam = torch.optim.Adam(module.parameters(), lr=0.01)
        backend = Synchronous(f"ffn.{number}", module, adam, args_schema=[SPEC])
        backend.pipelines = pipelines
        made.append(backend)
    return made


@ab.skippable(stash=["memory"])
class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor):
        memory = self.table(ids * 7 % 50).mean(1)
        yield ab.stash("memory", memory)
        return self.mix(memory)


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


@ab.skippable(pop=["memory"])
class Write(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor):
        memory = yield ab.pop("memory")
        return self.head(torch.cat([x, memory], 1))


def new_model(directory: object) -> nn.Sequential:
    torch.manual_seed(0)
    mixture = ab.RemoteMixtureOfExperts(WIDTH, [EXPERTS], directory, "ffn", k_best=EXPERTS, k_min=EXPERTS)
    blocks = Block(nn.Linear(WIDTH, WIDTH)), Block(mixture)
    return nn.Sequential(OrderedDict(read=Read(), first=blocks[0], second=blocks[1], write=Write())).double()


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    tables = [value for name, value in model.named_parameters() if "table" in name]
    rest = [value for name, value in model.named_parameters() if "table" not in name]
    return [torch.optim.Adagrad([{"params": tables}], lr=0.1), torch.optim.AdamW(rest, lr=0.01)]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 50, (ROWS, 4), generator=generator)
    return ids, torch.randn(ROWS, 3, generator=generator, dtype=torch.float64)


def plain(directory: object) -> dict[str, object]:
    """The loop that everybody knows."""
    model = new_model(directory)
    optimizers, losses = optimizers_of(model), []
    for step in range(STEPS):
        ids, target = batch_of(step)
        model.zero_grad()
        loss = F.mse_loss(model(ids), target)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        output = model.eval()(batch_of(STEPS)[0])
    values = {name: value.flatten().tolist() for name, value in parameters_here(model).items()}
    return {"losses": losses, "output": output.tolist(), "values": values}


def grid(directory: object, stages: int) -> dict[str, object]:
    """The same as rows of pipelines; the servers have the table."""
    job = ab.job()
    rows = job.world_size // stages
    place = job.grid(data=rows, pipeline=stages)
    part = slice(place.data_rank * ROWS // rows, (place.data_rank + 1) * ROWS // rows)
    pipe = ab.Pipe(
        new_model(directory), {1: [4], 2: [2, 2]}[stages], chunks=3, checkpoint="never", schedule="1F1B",
        process_group=place.pipeline_group,
    )  # fmt: skip
    steps = {
        "train": ab.TrainStep(pipe, F.mse_loss, optimizers_of(pipe)),
        "look": ab.EvalStep(pipe, lambda model, batch: {"output": model(batch[0])}),
    }
    with ab.Executor(steps, "Hybrid", process_group=place.data_group, timeout=60.0) as executor, pipe:
        losses = []
        for step in range(STEPS):
            batch = tuple(value[part] for value in batch_of(step))
            losses.append(executor.run("train", batch)["loss"].item())
        output = executor.run("look", batch_of(STEPS))["output"]
        values = {name: value.flatten().tolist() for name, value in parameters_here(pipe).items()}
        served = [route.parameter for route in executor.routes() if route.place.served]
        remote = executor._remote
        assert remote is not None
        kept = remote.read()
        values |= {moved.name: kept[moved.parameter].values.flatten().tolist() for moved in remote.moved}
        dist.barrier()
    return {"losses": losses, "output": output.tolist(), "values": values, "served": served}


def main() -> None:
    torch.set_num_threads(1)
    what, stages = sys.argv[1], int(sys.argv[2])
    pipelines = ab.job().workers // stages if what == "grid" else 1
    directory = ab.job().serve(lambda index, count: make_backends(index, count, pipelines))
    print(json.dumps(plain(directory) if what == "plain" else grid(directory, stages)), flush=True)


if __name__ == "__main__":
    main()
