"""Workers whose parameters are not alike at first: made alike, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler

import anabranch as ab
from anabranch.collectives import Workers
from anabranch.collectives.shared_memory import SharedSum
from anabranch.executor.likeness import check_alike
from anabranch.executor.loaders.loading import BoundLoader
from anabranch.executor.steps import Step
from toys import Tabled, in_job, run_in_job


def executor(model: nn.Module) -> ab.Executor:
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), SGD(model.parameters(), lr=0.1))
    return ab.Executor(step, comm_mode="AllReduce", timeout=50)


def layouts() -> list[Any]:
    rank, gaps, order = ab.job().rank, nn.Linear(3, 4), nn.Linear(3, 4)
    gaps.weight = nn.Parameter((torch.arange(24.0) + rank).reshape(4, 6)[:, ::2])
    order.weight = nn.Parameter(torch.arange(12.0).reshape(3, 4).t() + rank)
    values = []
    for model in (gaps, order):
        with executor(model):
            values.append(model.weight.tolist())
    with pytest.raises(ValueError, match=r"weight \(2, 3\).*weight \(3, 3\)"):
        executor(nn.Linear(3, 2 + rank))
    step = ab.TrainStep(gaps, lambda m, b: m(b).square().mean(), SGD(gaps.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="rank 0 and rank 1 .*loader of 'default': no GlobalBatches.*nothing"):
        ab.Executor(
            step, comm_mode="AllReduce", dataloaders={} if rank else {"default": [torch.ones(2, 3)]}, timeout=50
        )
    return values


def test_rank_0s_parameters_are_everyones_however_they_lie_in_memory_and_another_model_or_loader_is_refused() -> None:
    first, second = in_job(layouts, 2)
    assert first == second
    assert first[1][0] == [0.0, 4.0, 8.0]


class OneAfterAnother:
    """Stands in for the workers of one job that describe themselves one by one, in this process."""

    rank = 0

    def __init__(self) -> None:
        self.everyone: list[bytes] = []

    def all_gather_bytes(self, data: bytes, *, operation: str) -> list[bytes]:
        self.everyone.append(data)
        return self.everyone


def test_workers_that_each_read_all_samples_are_warned_of_it(recwarn: pytest.WarningsRecorder) -> None:
    model, data = Tabled(5, 2), range(6)
    optimizer = SGD(model.parameters(), lr=0.1)
    steps: dict[str, Step] = {"train": ab.TrainStep(model, lambda m, b: m(b).mean(), optimizer)}
    parts = DataLoader(data, sampler=DistributedSampler(data, 2, 0))  # type: ignore[arg-type,var-annotated]
    for loader, warned in ((parts, 0), (DataLoader(data, 2), 1)):  # type: ignore[arg-type,var-annotated]
        workers = cast(Workers, OneAfterAnother())
        for _ in range(2):
            recwarn.clear()
            check_alike(workers, "AllReduce", steps, {"train": BoundLoader(loader)})
        assert len(recwarn) == warned
    assert "the 6 samples of the DataLoader of step 'train' in whole" in str(recwarn[0].message)


def runs_of_their_own(folder: str) -> list[str]:
    """Rank 1 fails in a run of its own, which a load makes good, and then in one that rank 0 goes on with."""
    rank, said = ab.job().rank, []
    with executor(nn.Linear(2, 1)) as running:
        running.run(batch=torch.ones(2, 2))  # before the first one the workers exchange their rows
        running.save(folder)
        if rank == 1:
            with pytest.raises(RuntimeError):
                running.run(batch=torch.ones(2, 3))
        running.load(folder)
        running.run(batch=torch.ones(2, 2))
        assert running.step == 2
        for _ in range(2):
            with pytest.raises((RuntimeError, ab.BoundaryError)) as caught:
                running.run(batch=torch.ones(2, 3 if rank and not said else 2))
            said.append(str(caught.value))
    return said


def test_workers_that_are_in_different_runs_say_so_unless_they_load(tmp_path: Path) -> None:
    """A run that failed before its first message left one worker's number of runs ahead for good."""
    first, second = in_job(runs_of_their_own, 2, str(tmp_path / "saved"))
    assert "the workers are in different runs" in first[0]
    assert "the workers are in different runs" in second[1]


def interrupted_behind_its_header(folder: str) -> list[str]:
    """Rank 0 is interrupted once its run's first message is on its way."""
    rank, start, said = ab.job().rank, SharedSum.start, []
    running = executor(nn.Linear(2, 1).bfloat16())  # whose buckets would round the header, so it has its own message

    def interrupted(shared: SharedSum, *, operation: str, step: int | None) -> None:
        start(shared, operation=operation, step=step)
        if operation == "all_reduce of rows and loss":
            raise KeyboardInterrupt

    def run() -> object:
        return running.run(batch=torch.ones(2, 2, dtype=torch.bfloat16))

    run()
    if rank == 0:
        SharedSum.start = interrupted  # type: ignore[method-assign, assignment]
    for call in [run, run, lambda: running.save(folder), lambda: running.load(folder)][: 1 if rank else 4]:
        with pytest.raises((KeyboardInterrupt, ab.BoundaryError)) as caught:
            call()
        said.append(f"{caught.typename} {caught.value}")
        SharedSum.start = start  # type: ignore[method-assign]
    return said


def test_an_interrupt_behind_the_first_message_of_a_run_is_no_crash_of_the_next(tmp_path: Path) -> None:
    """The next run's messages met the failed one's, and gloo aborted."""
    result = run_in_job(interrupted_behind_its_header, 2, str(tmp_path / "saved"))
    first, second = (one and one["returned"] for one in result.results)
    assert first, result.logs
    assert second, result.logs
    assert first[0].startswith("KeyboardInterrupt")
    assert [word in text for word, text in zip(("run", "save", "load"), first[1:], strict=True)] == [True] * 3
    assert all("failed in the middle of its communication" in text for text in first[1:])
    assert second[0].startswith(("PeerLost", "DeadlineExceeded"))
    assert not (tmp_path / "saved").exists()


# Modules whose parameters lie in parts on several ranks are refused when a step is made.


@pytest.fixture
def _fake_group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # A gloo group of its own process leaves sockets that this process's end closes.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_fake_group")
@pytest.mark.parametrize("sharded", [True, False])
def test_modules_that_are_fully_sharded_or_tensor_parallel_are_refused(sharded: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, mesh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), init_device_mesh("cpu", (1,))
    if sharded:
        fully_shard(model, mesh=mesh)
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"'0.weight' of .* is a DTensor.* give the Executor the model before it is"):
        ab.TrainStep(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"'0.weight' of .* is a DTensor"):
        ab.EvalStep(model, lambda m, x: {"y": m(x)})
