"""Run by both workers of a job: the results of the engines compared, and the order in which the graph sends."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.collectives import GradientBuckets
from anabranch.record.spans import heard


def collectives() -> dict[str, object]:
    """Losses that talk to the other worker by themselves: captured or refused, nobody is left waiting."""

    def plainly(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        return loss * total

    def differentiably(model: nn.Module, x: Tensor) -> Tensor:
        return ab.all_reduce(model(x).square().mean())

    def run(loss: object, engine: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor(step, engine=engine) as executor:
            # Rank 1 meets a new kind of batch in each run, rank 0 only one.
            rows = [2 + index * ab.job().rank for index in range(4)]
            losses = [executor.run(batch=torch.ones(count, 3))["loss"] for count in rows]
            return [*losses, *model.state_dict().values()]

    found: dict[str, object] = {}
    for loss in (plainly, differentiably):
        tape = run(loss, "tape")
        try:
            found[loss.__name__] = all(map(torch.equal, run(loss, "graph"), tape))
        except ab.CaptureError:
            found[loss.__name__] = "refused"
    return found


def order() -> dict[str, list[str]]:
    """Final gradients and launches of buckets, in the order in which one step on the graph has them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))  # of 4 MB each, two a bucket
    step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    log: list[str] = []
    x = torch.randn(2, 1024)
    ready = GradientBuckets.ready

    def seen(buckets: GradientBuckets, parameter: Tensor, gradient: Tensor) -> Tensor | None:
        log.append("gradient")
        return ready(buckets, parameter, gradient)

    GradientBuckets.ready = seen  # type: ignore[method-assign]
    with ab.Executor(step, comm_mode="AllReduce", engine="graph") as executor:
        for _ in range(2):  # lays the buckets out, and captures
            executor.run(batch=x)
        log.clear()
        with heard(lambda span: log.append(span[0])):
            executor.run(batch=x)
        assert executor.engine() == "graph"
    GradientBuckets.ready = ready  # type: ignore[method-assign]
    return {"log": log}


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    parts = {"order": order, "collectives": collectives}
    result = {what: parts[what]() for what in sys.argv[1:]}
    torch.distributed.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
