"""Workers whose parameters are not alike at first: made alike, or refused by name."""

from __future__ import annotations

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


STRANGER = (
    HEAD
    + """
dist.init_process_group("gloo")
group = dist.new_group([0, 1])
try:
    with executor(nn.Linear(3, 2), process_group=group) as running:
        running.run(batch=torch.ones(2, 3))
    print(json.dumps({"error": ""}))
except ValueError as error:
    print(json.dumps({"error": str(error)}))
dist.barrier()
dist.destroy_process_group()
"""
)


def test_only_members_of_a_process_group_use_it() -> None:
    results = LocalJob(3).run_source(STRANGER).check().results
    assert [found and found["error"] for found in results[:2]] == ["", ""]
    assert "rank 2 is no member" in str(results[2] and results[2]["error"])


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
