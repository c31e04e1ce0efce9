"""Workers without rows: named on all workers where the others' forward waits for them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import anabranch as ab
from anabranch.collectives.rowless import Rowless
from anabranch.liveness.group import Group
from anabranch.liveness.peers import Peers
from toys import run_in_job


def in_three_runs(how: str, mode: str, empty: int) -> dict[str, Any]:
    """A worker's error and losses; the worker ``empty`` has no rows in the second run."""
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), nn.Linear(3, 2)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch)
        total: Tensor | float = 0.0
        if how == "by anabranch":
            total = ab.all_reduce(output.sum(0))
        elif how == "by torch":
            dist.all_reduce(total := output.detach().sum(0))
        return (output - total).square().mean()

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    said, losses = "", []
    assert dist.group.WORLD is not None
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    before = options._timeout
    try:
        with ab.Executor(step, mode, engine="tape", timeout=60.0, heartbeat=0.2) as executor:
            for run in range(3):
                if run == 1:  # a wait that ends soon, once all have met
                    executor._workers.timeout, executor._workers.rowless._limit = 3.0, timedelta(seconds=1.5)
                rows = 0 if run == 1 and rank == empty else 4
                losses.append(executor.run(batch=torch.ones(rows, 3))["loss"].item())
    except ab.BoundaryError as error:
        said = f"{type(error).__name__} {error}"
    assert options._timeout == before
    return {"said": said, "runs": len(losses)}


def in_a_job(how: str, mode: str = "AllReduce", *, workers: int = 2, empty: int = 1) -> list[dict[str, Any]]:
    job = run_in_job(in_three_runs, workers, how, mode, empty, servers=0 if mode == "AllReduce" else 1)
    return [result["returned"] for result in job.results if result is not None]


@pytest.mark.parametrize(
    ("how", "mode", "workers", "empty"),
    [
        ("by torch", "AllReduce", 2, 1),
        ("by anabranch", "AllReduce", 2, 0),
        pytest.param("by torch", "AllReduce", 3, 0, marks=pytest.mark.slow),
        pytest.param("by anabranch", "Hybrid", 2, 1, marks=pytest.mark.slow),
        pytest.param("by torch", "PS", 3, 2, marks=pytest.mark.slow),
    ],
)
def test_where_the_loss_waits_for_a_worker_without_rows_all_are_told_which(
    how: str, mode: str, workers: int, empty: int
) -> None:
    for found in in_a_job(how, mode, workers=workers, empty=empty):
        assert found["said"].startswith(f"BoundaryError rank {empty} had no rows"), found
        assert found["runs"] == 1


def test_a_worker_without_rows_takes_part_where_the_loss_waits_for_nobody() -> None:
    assert in_a_job("not at all") == [{"said": "", "runs": 3}] * 2


def rowless(store: dist.Store, rank: int) -> Rowless:
    return Rowless(store, Group(Peers(rank, lambda: store), [0, 1], heartbeat=0.01), timeout=30.0)


def test_only_a_failed_wait_for_a_rank_is_blamed_on_a_worker_without_rows() -> None:
    store = dist.HashStore()
    first, second = (rowless(store, rank) for rank in (0, 1))
    waits = [
        ab.DeadlineExceeded("not all ranks arrived", peer="rank 1"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 27000ms for recv operation"),
    ]
    others = [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        ab.BoundaryError("fewer than 2 experts", peer="expert.3"),
        ab.DeadlineExceeded("no answer", peer="unix:/run/parameters-0"),
        ab.PeerLost("rank 1 is lost: its process has ended", peer="rank 1"),
        ab.PipelineError("rank 1 raised ZeroDivisionError", stage=1),
    ]
    with second.here():
        assert [first.explain(error, 7) for error in others] == [None] * 5
        for error in waits:
            assert str(first.explain(error, 7)).startswith("rank 1 had no rows")
        for error in others[-2:]:
            assert first.explain(error, 7) is not None, "the rank has ended because of it"
    assert [first.explain(error, 8) for error in waits] == [None] * 2
