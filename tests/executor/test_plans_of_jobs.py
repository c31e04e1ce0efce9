"""Plans in a job of two workers and a server: their bytes are those that are counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from launched import run
from plain_loop import mean_square
from toys import in_job

ROWS = 500
KINDS: dict[str, dict[str, object]] = {
    "AllReduce": {"comm_mode": "AllReduce"},
    "Hybrid": {"comm_mode": "Hybrid"},
    "PS": {"comm_mode": "PS"},
    "whole tables": {"comm_mode": "Hybrid", "use_sparse_pull": False},
    "rounded": {"comm_mode": "Hybrid", "row_compression": "int8"},
    "sparse": {"comm_mode": "AllReduce", "sparse": True},
    "accumulated": {"comm_mode": "AllReduce", "accumulate": 2},
    "passing over": {"comm_mode": "Hybrid", "skip_nonfinite": True},
    "apart": {"comm_mode": "PS", "consistency": "asp"},
}


class Model(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, padding_idx=0, sparse=sparse)
        self.bags = nn.EmbeddingBag(ROWS, 3, mode="mean", sparse=sparse, padding_idx=7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.3), nn.Linear(5, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(torch.cat([self.table(ids[:, 0]), self.bags(ids)], 1)))  # type: ignore[no-any-return]


def batches(rank: int, count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        yield torch.randint(0, ROWS // 4, (16 + rank, 3), generator=generator)


def executor_of(
    comm_mode: str, *, sparse: bool = False, accumulate: int = 1, skip_nonfinite: bool = False, **options: object
) -> tuple[Model, ab.Executor]:
    torch.manual_seed(0)
    model = Model(sparse=sparse)
    tables = [model.table.weight, model.bags.weight]
    dense = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.Adam(dense, lr=0.01)]
    step = ab.TrainStep(model, mean_square, optimizers, accumulate=accumulate, skip_nonfinite=skip_nonfinite)
    return model, ab.Executor(step, comm_mode, seed=3, served="replace", **options)  # type: ignore[arg-type]


def crossed(executor: ab.Executor) -> dict[str, int]:
    tables = sum(loads.bytes for loads in executor.statistics().tables.values())
    return {"workers": executor.statistics().bytes - tables, "servers": tables}


def compare(kinds: list[str]) -> None:
    plans = {kind: compare_one(kind, ab.job().rank) for kind in kinds}
    modes = [kind for kind in kinds if kind in ("AllReduce", "Hybrid", "PS")]
    for mode in modes:
        others = {one.comm_mode: one.bytes for one in plans[mode].modes}
        assert others == {other: plans[other].bytes for other in modes}, mode


def compare_one(kind: str, rank: int) -> ab.Plan:
    """The bytes of a step, as planned before it and as counted; the second step is one like all others."""
    options = dict(KINDS[kind])
    _, executor = executor_of(str(options.pop("comm_mode")), **options)  # type: ignore[arg-type]
    runs = 2 if kind == "accumulated" else 1
    first, second = batches(rank, 2)
    with executor:
        for _ in range(runs):
            executor.run(batch=first)
        plan, before = executor.plan(batch=second), crossed(executor)
        for _ in range(runs):
            executor.run(batch=second)
        after = crossed(executor)
    for place, count in after.items():
        assert plan.bytes.get(place, 0) == count - before[place], (kind, place)
    return plan


def pipe() -> None:
    """The bytes that a rank of a pipe sends in a step, as planned and as counted; what is planned leaves no trace."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4), nn.Linear(4, 1)]
    group = ab.job().grid(pipeline=2).pipeline_group
    with ab.Pipe(nn.Sequential(*layers), [3, 2], chunks=4, process_group=group) as model:
        step = ab.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor(step, "auto") as executor:
            batch = torch.randn(8, 3), torch.randn(8, 1)
            plan = executor.plan(batch=batch)
            assert (executor.comm_mode, model.calls, model.bytes_sent) == (None, 0, 0)
            executor.run(batch=batch)
            assert plan.bytes["pipeline"] == model.bytes_sent > 0


@pytest.mark.slow
def test_the_bytes_planned_are_the_bytes_counted() -> None:
    in_job(compare, 2, list(KINDS), servers=2, timeout=300.0)
    in_job(pipe, 2)


SHOWN = """
import torch, anabranch as ab
model = torch.nn.Sequential(torch.nn.Embedding(100, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
step = ab.TrainStep(model, lambda model, ids: model(ids).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
print("before")
with ab.Executor(step, "Hybrid") as executor:
    executor.run(batch=torch.tensor([[1, 2], [2, 3]]))
print("trained")
"""


def test_the_command_prints_the_plan_and_ends_before_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SHOWN)
    ended = run("--workers", "2", "--servers", "1", script, command="plan")
    assert ended.returncode == 0, ended.stderr
    assert "trained" not in ended.stdout
    lines = ended.stdout.splitlines()
    assert lines[:2] == ["before", "step 'default', comm_mode='Hybrid': 2 workers, 1 server"]
    (table,) = [line for line in lines if line.startswith("0.weight")]
    assert "servers, by row" in table
    assert "120" in table  # three rows of 16 bytes and their ids, there and back
    assert all(len(line) <= 80 for line in lines)


def test_the_command_reports_a_script_without_a_step_to_plan(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('done')")
    ended = run(script, command="plan")
    assert ended.returncode == 1
    assert "nothing.py ended before it ran a training step" in ended.stderr
