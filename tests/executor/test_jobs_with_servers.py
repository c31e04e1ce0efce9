"""Jobs with parameters on servers: a worker that stops, one that dies, and how the others continue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from toys import Tabled, in_job

ROWS = 24


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"])[:, 0], batch["y"])


def batch_of(step: int, rank: int, world: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (7, 3), generator=generator)
    y = torch.randn(7, generator=generator, dtype=torch.float64)
    part = slice(7 * rank // world, 7 * (rank + 1) // world)
    return {"ids": ids[part], "y": y[part]}


def new_model() -> Tabled:
    return Tabled(ROWS, 4).double()


def executor_of(model: Tabled, mode: str | None, **options: object) -> ab.Executor:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)
    look = ab.EvalStep(model, lambda model, ids: {"rows": model.table(ids)})
    return ab.Executor({"train": ab.TrainStep(model, loss, optimizer), "look": look}, mode, **options)


def numbers(executor: ab.Executor, model: Tabled) -> list[float]:
    rows = executor.run("look", torch.arange(ROWS))["rows"]
    return [*rows.flatten().tolist(), *model.head.weight.flatten().tolist(), *model.head.bias.tolist()]


def stop_one(path: str, bound: int) -> dict[str, object]:
    """Rank 1 makes three steps and stops, until rank 0 was halted; then both go on to the tenth."""
    model, folder, rank = new_model(), Path(path), ab.job().rank
    halted = folder / "halted"
    alone = {"done": 0, "error": ""}
    model.head.requires_grad_(False)  # all that a step reads is here from the first on
    cache = ab.Cache(capacity=ROWS, pull_bound=100, push_bound=100)
    with executor_of(model, "PS", consistency=f"ssp:{bound}", cache=cache) as executor:
        for step in range(10):
            # A new machine compiles its kernels in the first steps.
            executor._remote.client.calls.timeout = 400.0 if halted.exists() or step < 3 or rank == 1 else 30.0
            if step == 3:
                (folder / f"stopped-{rank}").touch()
                wait_for(halted if rank == 1 else folder / "stopped-1")
            while executor.statistics().steps == step:
                try:
                    executor.run("train", batch_of(0, rank, 2))
                except ab.DeadlineExceeded as error:
                    if not halted.exists():
                        alone = {"done": step, "error": str(error)}
                        halted.touch()
    return alone


def wait_for(path: Path) -> None:
    until = time.monotonic() + 400.0  # a new machine compiles its kernels
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


def close_early(path: str) -> int:
    """Rank 1 makes three steps and closes; its process stays until rank 0 has made ten."""
    rank, over = ab.job().rank, Path(path) / "over"
    with executor_of(new_model(), "PS", consistency="ssp:2", timeout=50.0) as executor:
        for step in range(3 if rank else 10):
            executor.run("train", batch_of(step, rank, 2))
    over.touch() if rank == 0 else wait_for(over)
    return executor.step


def test_a_worker_that_has_closed_is_not_waited_for(tmp_path: Path) -> None:
    assert in_job(close_early, 2, str(tmp_path), servers=2) == [10, 3]


def go_on(folder: str, mode: str, last: int, at_end: str) -> dict[str, object]:
    """Trains from the newest checkpoint to step ``last``, then saves, or stops because rank 1 asks for it."""
    model, rank, world = new_model(), ab.job().rank, ab.job().world_size
    with executor_of(model, mode, cache=ab.Cache(capacity=10)) as executor:
        executor.resume(folder)
        while (step := executor.statistics().steps) < last and not executor.stopping:
            if at_end == "stop" and step == 3 and rank == 1:
                executor.request_stop()
            executor.run("train", batch_of(step, rank, world))
        executor.save(folder)
        return {"steps": executor.statistics().steps, "numbers": numbers(executor, model)}


def plainly(steps: int) -> object:
    """The numbers of one process after so many steps, up to rounding."""
    plain = new_model()
    with executor_of(plain, None) as executor:
        for step in range(steps):
            executor.run("train", batch_of(step, 0, 1))
        return pytest.approx(numbers(executor, plain), rel=0, abs=1e-12)


@pytest.mark.slow
def test_when_one_worker_stops_the_others_halt_after_exactly_k_steps(tmp_path: Path) -> None:
    """Although all that a step reads is cached, so that it asks the servers for nothing."""
    halted, _ = in_job(stop_one, 2, str(tmp_path), 2, servers=2, timeout=800.0)
    assert halted["done"] == 4 + 2  # rank 1 is in its fourth step
    assert "nothing arrived from worker 1" in str(halted["error"])


@pytest.mark.slow
def test_a_stopped_job_resumes_with_other_workers_and_servers(tmp_path: Path) -> None:
    stopped = in_job(go_on, 2, str(tmp_path), "PS", 8, "stop", servers=1)
    assert [result["steps"] for result in stopped] == [4, 4]
    in_job(go_on, 3, str(tmp_path), "Hybrid", 6, "save", servers=2)
    assert in_job(go_on, 1, str(tmp_path), "PS", 8, "save", servers=1)[0]["numbers"] == plainly(8)
