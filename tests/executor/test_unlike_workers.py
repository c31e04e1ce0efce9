"""Workers whose parameters are not alike at first: made alike, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

import anabranch as ab
from anabranch.collectives import Workers
from anabranch.executor.likeness import check_alike
from anabranch.executor.routes import CommMode, plan_routes
from anabranch.executor.steps import Step, distinct_models
from anabranch.testing import LocalJob

HEAD = """
import json, torch
import torch.distributed as dist
from torch import nn
import anabranch as ab
rank = ab.job().rank

def executor(model, **options):
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    return ab.Executor(step, comm_mode="AllReduce", timeout=50, **options)
"""

LAYOUTS = (
    HEAD
    + """
gaps = nn.Linear(3, 4)
gaps.weight = nn.Parameter((torch.arange(24.0) + rank).reshape(4, 6)[:, ::2])
order = nn.Linear(3, 4)
order.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t() + rank)
values = []
for model in (gaps, order):
    with executor(model) as running:
        values.append(model.weight.tolist())
print(json.dumps({"values": values}))
"""
)


def test_rank_0s_parameters_are_everyones_however_they_lie_in_memory() -> None:

    first, second = LocalJob(2).run_source(LAYOUTS).check().results
    assert first is not None
    assert first == second
    assert first["values"][1][0] == [0.0, 4.0, 8.0]  # type: ignore[index]


OTHERS = (
    HEAD
    + """
model = nn.Linear(3, 2 + rank)
try:
    executor(model)
except ValueError as error:
    print(json.dumps({"error": str(error)}))
"""
)


def test_another_model_on_another_worker_is_refused_on_all_of_them() -> None:
    for found in LocalJob(2).run_source(OTHERS).check().results:
        assert found is not None
        assert "weight (2, 3)" in str(found["error"])
        assert "weight (3, 3)" in str(found["error"])


class OneAfterAnother:
    """Stands in for the workers of one job that describe themselves one by one, in this process."""

    def __init__(self) -> None:
        self.everyone: list[bytes] = []

    def all_gather_bytes(self, data: bytes, *, operation: str) -> list[bytes]:
        self.everyone.append(data)
        return self.everyone


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.table(ids)))


Make = Callable[[Model], Optimizer | list[Optimizer]]


def compare(first: Make, second: Make, mode: CommMode = "AllReduce") -> None:
    workers = cast(Workers, OneAfterAnother())
    for make in (first, second):
        model = Model()
        steps: dict[str, Step] = {"train": ab.TrainStep(model, lambda m, b: m(b).mean(), make(model))}
        check_alike(workers, mode, steps, plan_routes(steps, distinct_models(steps), mode, None))


def sgd(model: Model, **settings: Any) -> Optimizer:
    return SGD(model.parameters(), **{"lr": 0.1, **settings})


def with_a_frozen_head(model: Model, **settings: Any) -> Optimizer:
    model.head.requires_grad_(False)
    return sgd(model, **settings)


def adam(model: Model, **settings: Any) -> Optimizer:
    return Adam(model.parameters(), **{"lr": 0.1, **settings})


def in_groups(model: Model, *, head: dict[str, Any] | None = None, turned: bool = False, cut: int = 2) -> Optimizer:
    held = [model.head.weight, model.head.bias, model.table.weight]
    groups: list[dict[str, Any]] = [{"params": held[:cut], **(head or {})}, {"params": held[cut:]}]
    return SGD([{**g, "params": g["params"][::-1]} for g in groups[::-1]] if turned else groups, lr=0.1)


def with_extra(value: object) -> Make:
    def make(model: Model) -> Optimizer:
        optimizer = sgd(model)
        optimizer.param_groups[0]["extra"] = value
        return optimizer

    return make


def scheduled(model: Model) -> Optimizer:
    optimizer = sgd(model)
    StepLR(optimizer, 1)
    return optimizer


def apart(model: Model) -> list[Optimizer]:
    return [SGD(model.head.parameters(), lr=0.1), Adam(model.table.parameters(), lr=0.1)]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (sgd, adam, "optimizer 0 is torch.optim.sgd.SGD"),
        (sgd, partial(sgd, lr=torch.tensor(0.5)), "lr=0.1' and .*lr=0.5"),
        (sgd, partial(sgd, momentum=0.9), "momentum=0.0' and .*momentum=0.9"),
        (adam, partial(adam, betas=(0.9, 0.9)), r"betas=\(0.9, 0.999\)' and .*betas=\(0.9, 0.9\)"),
        (sgd, in_groups, "parameters=3' and .*parameters=2"),
        (in_groups, partial(in_groups, head={"lr": 0.2}), "group of head.bias: lr=0.1' and .*lr=0.2"),
        (in_groups, partial(in_groups, cut=1), "group of head.bias: "),
        (apart, lambda m: apart(m)[::-1], "optimizer 0 is"),
        (with_extra(len), with_extra(1), "builtin_function"),
        (sgd, scheduled, "initial_lr"),
    ],
)  # fmt: skip
def test_optimizers_that_would_train_apart_are_refused(first: Make, second: Make, said: str) -> None:
    with pytest.raises(ValueError, match=f"the optimizers of rank 0 and rank 1 .*{said}.* make the same optimizers"):
        compare(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (apart, apart),
        (sgd, partial(sgd, foreach=True)),
        (adam, partial(adam, fused=True)),
        (partial(sgd, weight_decay=0), partial(sgd, weight_decay=np.float64(0.0))),
        (partial(sgd, lr=0.5), partial(sgd, lr=torch.tensor(0.5))),
        (in_groups, partial(in_groups, turned=True)),  # groups that were made from a set
        (with_extra([0.1, "a"]), with_extra((0.1, "a"))),
        (with_extra(torch.zeros(100)), with_extra(torch.ones(100))),  # memory of its own, no setting
    ],
)
def test_optimizers_that_move_parameters_alike_are_not_refused(first: Make, second: Make) -> None:
    compare(first, second)


def test_only_optimizers_of_all_reduced_parameters_are_compared() -> None:
    """Servers take each worker's numbers with its pushes: under asp workers may have rates of their own."""
    compare(sgd, partial(sgd, lr=0.5), "PS")
    compare(with_a_frozen_head, partial(with_a_frozen_head, lr=0.5), "PS")  # what is frozen is here, and is not moved
    rates = [lambda m, lr=lr: [SGD(m.head.parameters(), lr=0.1), SGD(m.table.parameters(), lr=lr)] for lr in (0.1, 0.5)]
    compare(*rates, mode="Hybrid")
    with pytest.raises(ValueError, match="group of table.weight: lr"):
        compare(*rates)


def test_workers_that_are_in_different_runs_say_so() -> None:
    source = """
        import json, torch
        from torch import nn
        import anabranch as ab

        rank = ab.job().rank
        model = nn.Linear(2, 1)

        def loss(model, batch):
            if rank == 1 and batch.shape[0] == 3:
                raise ArithmeticError("this batch is bad, here")
            return model(batch).square().mean()

        step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
        said = []
        with ab.Executor(step, comm_mode="AllReduce", timeout=50) as executor:
            for rows in (2, 3, 2):
                try:
                    executor.run(batch=torch.ones(rows, 2))
                except (ArithmeticError, ab.BoundaryError) as error:
                    said.append(str(error))
        print(json.dumps({"said": said}))
    """
    first, second = LocalJob(2).run_source(source).check().results
    assert "the workers are in different runs" in first["said"][0]
    assert second["said"][0] == "this batch is bad, here"
    assert "the workers are in different runs" in second["said"][1]


def test_an_interrupt_behind_the_first_message_of_a_run_is_no_crash_of_the_next(tmp_path: Path) -> None:
    """Ctrl-C came once the header was on its way: the next run's messages met the failed one's, and gloo aborted."""
    source = """
        import json, sys, torch
        from torch import nn
        import anabranch as ab
        from anabranch.collectives import Workers

        rank = ab.job().rank
        model = nn.Linear(2, 1).bfloat16()  # whose buckets would round the header, so it has a message of its own
        step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
        start, said = Workers.start_all_reduce, []

        def interrupted(workers, tensor, *, operation="", **keywords):
            start(workers, tensor, operation=operation, **keywords)
            if operation == "all_reduce of rows and loss":
                raise KeyboardInterrupt

        executor = ab.Executor(step, comm_mode="AllReduce", timeout=50)
        batch = torch.ones(2, 2, dtype=torch.bfloat16)
        executor.run(batch=batch)
        if rank == 0:
            Workers.start_all_reduce = interrupted
        calls = [lambda: executor.run(batch=batch)] * 2
        calls += [lambda: executor.save(sys.argv[1]), lambda: executor.load(sys.argv[1])]
        for call in calls if rank == 0 else calls[:1]:
            try:
                call()
            except (KeyboardInterrupt, ab.BoundaryError) as error:
                said.append(f"{type(error).__name__} {error}")
            Workers.start_all_reduce = start
        print(json.dumps({"said": said}), flush=True)
    """
    result = LocalJob(2).run_source(source, str(tmp_path / "saved"))
    first, second = result.results
    assert first is not None, result.logs
    assert second is not None, result.logs
    interrupt, *others = first["said"]
    assert interrupt.startswith("KeyboardInterrupt")
    assert [word in text for word, text in zip(("run", "save", "load"), others, strict=True)] == [True] * 3
    assert all("failed in the middle of its communication" in text for text in others)
    assert second["said"][0].startswith(("PeerLost", "DeadlineExceeded"))
    assert not (tmp_path / "saved").exists()


def test_workers_that_load_are_in_the_same_run_again(tmp_path: Path) -> None:
    """One had called a run that failed before its first message, and its number of runs stayed ahead for good."""
    source = """
        import json, sys, torch
        from torch import nn
        import anabranch as ab

        rank = ab.job().rank
        model = nn.Linear(2, 1)
        step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor(step, comm_mode="AllReduce", timeout=50) as executor:
            executor.run(batch=torch.ones(2, 2))  # before the first one the workers exchange their rows
            executor.save(sys.argv[1])
            if rank == 1:
                try:
                    executor.run(batch=torch.ones(2, 3))
                except RuntimeError:
                    pass
            executor.load(sys.argv[1])
            executor.run(batch=torch.ones(2, 2))
            print(json.dumps({"steps": executor.step}))
    """
    results = LocalJob(2).run_source(source, str(tmp_path / "saved")).check().results
    assert list(results) == [{"steps": 2}] * 2
