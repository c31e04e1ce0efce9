"""Workers that are unlike: at first made alike or refused, later told in `check_workers` steps and by a save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import anabranch as ab
from anabranch.collectives import Workers
from anabranch.collectives.shared_memory import SharedSum
from anabranch.executor.likeness import check_alike, checksum
from anabranch.executor.loaders.loading import BoundLoader
from anabranch.executor.steps import Step
from plain_loop import collected_warnings, mean_square
from toys import Tabled, in_job, look_of, run_in_job, step_of


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))


After = Callable[[ab.Executor, Any, torch.optim.Optimizer, int], object]


def train(
    make: Callable[[], nn.Module] = layers,
    *,
    at_first: Callable[[Any], object] = lambda model: None,
    after: After = lambda *_: None,
    every: int = 5,
    runs: int = 12,
    mode: str = "AllReduce",
    **step: Any,
) -> Any:
    """How a training of some runs ends on this worker, whose batches are its own."""
    torch.manual_seed(0)
    model, rank = make(), ab.job().rank
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    try:
        one = ab.TrainStep(model, mean_square, optimizer, **step)
        with ab.Executor(one, mode, engine="tape", timeout=60, check_workers=every) as executor:
            at_first(model)
            for run in range(runs):
                torch.manual_seed(100 * run + rank)
                executor.run(batch=torch.randn(4, 3))
                after(executor, model, optimizer, run)
    except ab.WorkersDiffer as error:
        return [list(error.parameters), list(error.ranks), list(error.steps), str(error)]
    except ValueError as error:
        return str(error)
    return "trained"


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.codes = nn.Parameter(torch.ones(2, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.1 * hidden.mean(0))
        return hidden - self.codes[0]


class Table(nn.Module):
    def __init__(self, max_norm: float | None = 0.1) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, max_norm=max_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x[:, 0].abs().long() % 5)


def with_optimizer_in_a_hook(model: Any) -> None:
    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)

    model[0].weight.register_post_accumulate_grad_hook(step)


def on_rank_1(change: Callable[[Any, Any], object]) -> After:
    return lambda executor, model, optimizer, run: change(model, optimizer) if ab.job().rank == run - 5 == 1 else None


def lower_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.05


def noise(gradients: dict[str, Tensor]) -> None:
    for gradient in gradients.values():
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two workers say of all that makes them unlike, in one job."""
    return in_job(everything, 2, str(tmp_path_factory.mktemp("two")), servers=1)


def everything(folder: str) -> dict[str, Any]:
    return {
        "layouts": layouts(),
        "outcomes": outcomes(),
        "for a while": differing_for_a_while(folder),
        "runs": runs_of_their_own(f"{folder}/saved"),
    }


def outcomes() -> dict[str, Any]:
    return {
        "nothing": train(),
        "batch norm": train(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))),
        "codebook": train(Codebook),
        "max_norm": train(Table),
        "hook": train(at_first=with_optimizer_in_a_hook),
        "load_state_dict": train(after=on_rank_1(load)),
        "rate": train(after=on_rank_1(lower_rate)),
        "rate on servers": train(lambda: Table(None), after=on_rank_1(lower_rate), mode="PS"),
        "noise": train(on_gradients=noise),
        "accumulated": train(Codebook, accumulate=2, runs=22),
        "never": train(Codebook, every=0),
        "too short": train(Codebook, runs=4),
    }


WRITTEN = {"codebook": ["codes"], "hook": ["0.weight"], "accumulated": ["codes"]}
ONCE = {"load_state_dict": 4, "rate": 4}
RIGHT = ("nothing", "batch norm", "never", "too short")


def test_whatever_makes_parameters_differ_is_told_with_names_ranks_and_steps(said: list[dict[str, Any]]) -> None:
    for ended in (one["outcomes"] for one in said):
        for name in RIGHT:
            assert ended[name] == "trained", name
        for name, parameters in WRITTEN.items():
            assert ended[name][:3] == [parameters, [1], [0, 5]], name
        assert (len(ended["noise"][0]), ended["noise"][1:3]) == (4, [[1], [0, 5]])
        assert ended["rate on servers"][:3] == [["the learning rate of step 'default'"], [1], [5, 10]]
        for name, count in ONCE.items():
            assert (len(ended[name][0]), ended[name][1:3]) == (count, [[1], [5, 10]]), name
        assert "max_norm=0.1 shrinks rows in place" in ended["max_norm"]


def differing_for_a_while(folder: str) -> list[Any]:
    rank, said = ab.job().rank, list[Any]()

    def save(executor: ab.Executor, model: Any, optimizer: Any, run: int) -> None:
        """Saves at run 2, differs at run 3 and is not saved then, goes back to what was saved, and trains on."""
        if run == 3 and rank == 1:
            model[1].bias.data.fill_(3.0)
        if run in (2, 3):
            try:
                executor.save(f"{folder}/run")
            except ab.WorkersDiffer as error:
                said.append([list(error.parameters), list(error.steps)])
                for reads in (executor.state_dict, lambda: executor.export(f"{folder}/whole")):
                    with pytest.raises(ab.WorkersDiffer):
                        reads()
                executor.load(f"{folder}/run")
                said.append(executor.step)

    def by_rounding(executor: ab.Executor, model: Any, optimizer: Any, run: int) -> None:
        if run in (2, 7) and rank == 1:
            model[0].weight.data.mul_(1 + 2e-7)
            optimizer.state[model[0].weight]["momentum_buffer"].mul_(1 + 2e-7)
        if run == 9:
            everyone = [None, None]
            torch.distributed.all_gather_object(everyone, model[0].weight.tolist())
            said.append(everyone[0] == everyone[1])

    def in_a_run(executor: ab.Executor, model: Any, optimizer: Any, run: int) -> None:
        """Differs, goes back, and then has a parameter of another shape."""
        if run == 0:
            executor.save(f"{folder}/run-2")
        if rank == 1 and run in (0, 3):
            model[1].bias.data = torch.full((5 if run else 4,), 3.0)
        if run == 1:
            with pytest.raises(ab.WorkersDiffer):  # noqa: PT012
                for _ in range(4):
                    executor.run(batch=torch.ones(2, 3))
            executor.load(f"{folder}/run-2")
            said.append("loaded")
        if run == 3:
            executor.save(f"{folder}/run-2")

    with collected_warnings() as warned:
        torch.distributed.init_process_group("gloo")
        ended = [train(after=save, every=100), train(after=by_rounding), train(after=in_a_run, every=3)]
        torch.distributed.destroy_process_group()
    return [said, ended[:2], ended[2][0], [text for text in warned if "differed by rounding" in text]]


def test_workers_that_differ_are_not_saved_and_rounding_is_said_once_and_mended(said: list[dict[str, Any]]) -> None:
    for rank, (seen, ended, wrong, warned) in enumerate(one["for a while"] for one in said):
        assert seen == [[["1.bias"], [3, 4]], 3, True, "loaded"]
        assert (ended, wrong) == (["trained", "trained"], ["1.bias"])
        assert len(warned) == (rank == 0), warned


def pipes() -> Any:
    grid, rank = ab.job().grid(data=2, pipeline=2), ab.job().rank
    torch.manual_seed(0)
    pipe = ab.Pipe(layers(), [1, 1], chunks=1, process_group=grid.pipeline_group)
    step = step_of(pipe, loss=nn.functional.mse_loss)
    with ab.Executor(step, "AllReduce", process_group=grid.data_group, timeout=60, check_workers=3) as executor:
        if rank == 2:
            next(pipe.parameters()).data.add_(1.0)
        with pytest.raises(ab.WorkersDiffer) as caught:  # noqa: PT012
            for run in range(6):
                torch.manual_seed(10 * run + rank // 2)
                executor.run(batch=(torch.randn(4, 3), torch.zeros(4, 4)))
    return [list(part) for part in (caught.value.parameters, caught.value.ranks, caught.value.steps)]


@pytest.mark.slow
def test_a_stage_whose_workers_differ_ends_the_run_on_the_other_stages_ranks_too() -> None:
    assert in_job(pipes, 4) == [[["0.weight"], [2], [0, 3]]] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_a_checksum_sees_each_bit_and_its_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).remainder(5).to(dtype)
    sums = [checksum(other) for other in (tensor, tensor.flip(0), torch.ones_like(tensor), torch.zeros_like(tensor))]
    assert len(set(sums)) == len(sums)
    assert checksum(tensor.t().contiguous().t()) == sums[0], "of the numbers, wherever they lie in memory"


# Not alike at first.


def executor(model: nn.Module, **options: Any) -> ab.Executor:
    return ab.Executor(step_of(model), comm_mode="AllReduce", timeout=50, **options)


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
    with pytest.raises(ValueError, match="rank 0 and rank 1 .*loader of 'default': no GlobalBatches.*nothing"):
        executor(gaps, dataloaders={} if rank else {"default": [torch.ones(2, 3)]})
    return values


def test_rank_0s_parameters_are_everyones_however_they_lie_in_memory(said: list[dict[str, Any]]) -> None:
    """Another model or loader is refused."""
    first, second = (one["layouts"] for one in said)
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
    steps: dict[str, Step] = {"train": step_of(Tabled(5, 2))}
    data = range(6)
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


def test_workers_that_are_in_different_runs_say_so_unless_they_load(said: list[dict[str, Any]]) -> None:
    """A run that failed before its first message left one worker's number of runs ahead for good."""
    assert ["the workers are in different runs" in one["runs"][rank] for rank, one in enumerate(said)] == [True] * 2


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
        step_of(model)
    with pytest.raises(ValueError, match=r"'0.weight' of .* is a DTensor"):
        look_of(model)
