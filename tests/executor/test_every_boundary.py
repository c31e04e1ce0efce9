"""Tables on servers and remote experts inside a pipe's stages: the plain loop's numbers, and no row read twice."""

from __future__ import annotations

import time
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.moved_parameter import parameters_here
from toys import in_job, plain_window, step_of

# One job across every boundary. The experts are synchronous: one gathers the gradients of all rows of a step, whichever
# microbatch and pipeline they come from, and then steps once. A pipeline's loss is a mean over its own rows, so the sum
# is divided by the pipelines.

STEPS = 20
ROWS = 12
WIDTH = 6
EXPERTS = 2
SPEC = ab.TensorSpec(WIDTH, dtype=torch.float64)


class Synchronous(ab.ExpertBackend):
    """Steps once a step of the job, on the mean of its pipelines' gradients."""

    pipelines = 1
    used = 0

    def apply_gradients(self) -> None:
        came = self.backward_pool.statistics().rows
        if came - self.used < ROWS:
            return
        self.used = came
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
        loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])  # noqa: E731
        losses += plain_window(model, loss, [batch_of(step)], lambda batch: ROWS, then=optimizers)
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
        for moved in remote.moved:
            values[moved.name] = remote.client.read_state(moved.name, moved.rule()).values.flatten().tolist()
        dist.barrier()
    return {"losses": losses, "output": output.tolist(), "values": values, "served": served}


def run(what: str, stages: int) -> dict[str, object]:
    pipelines = ab.job().workers // stages if what == "grid" else 1
    directory = ab.job().serve(lambda index, count: make_backends(index, count, pipelines))
    return plain(directory) if what == "plain" else grid(directory, stages)


def far(a: object, b: object) -> float:
    mine, other = (torch.tensor(value, dtype=torch.float64) for value in (a, b))
    return float((mine - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_job_across_every_boundary_trains_as_one_process(workers: int):
    """Rows of two stages, the table on a server, a block's feed-forward a mixture of experts in two processes."""
    (plain,) = in_job(run, 1, "plain", 1)
    ranks = in_job(run, workers, "grid", 2, servers=1, experts=2)
    assert len(plain["losses"]) == 20
    for rank, found in enumerate(ranks):
        assert found["served"] == (["read.table.weight"] if rank % 2 == 0 else [])
        assert far(found["losses"], plain["losses"]) < 1e-12
        assert far(found["output"], plain["output"]) < 1e-12
        for name, values in found["values"].items():
            if values:  # experts have a parameter of no numbers
                assert far(values, plain["values"][name]) < 1e-12, name


# Models that are not nn.Sequential.


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return x + self.second(torch.tanh(self.first(x)))


def test_a_table_of_a_traced_model_is_refused_with_the_cure():
    with ab.Pipe(ab.pipeline.split(Looks(), at=["second"]), [1, 1], chunks=3) as traced:
        step = step_of(traced, torch.optim.Adam, F.mse_loss)
        with pytest.raises(ValueError, match=r"table.weight is a table of a model that split"):
            ab.Executor(step, "Hybrid")
        with ab.Executor(step, "PS", use_sparse_pull=False) as executor:
            assert executor.run(batch=(torch.arange(4), torch.ones(4, 4).double()))["loss"].isfinite()


# What a lookup reads.


class Square(nn.Module):
    """Its gradient tells which rows were seen."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * x).sum(1)


class Meddle(nn.Module):
    """Lets somebody else change the table, before the stage in front runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.executor: ab.Executor | None = None
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.executor is not None and not ab.pipeline.is_recomputing():
            remote = self.executor._remote
            assert remote is not None
            remote.client.push_many({"0.weight": (torch.arange(8), torch.full((8, 2), 100.0))})
            self.executor = None
        return x * self.one


def test_a_stage_that_runs_again_sees_the_rows_that_it_saw():
    table = nn.Embedding(8, 2, sparse=True)
    meddle = Meddle()
    before = table.weight.detach().clone()
    pipe = ab.Pipe(nn.Sequential(table, Square(), meddle), [2, 1], checkpoint="always")
    step = step_of(pipe, loss=lambda y, t: y.sum(), lr=0.5, reduction="sum")
    with ab.Executor(step, "Hybrid", consistency="asp") as executor, pipe:
        meddle.executor = executor
        ids = torch.arange(8)[:, None]
        executor.run(batch=(ids.expand(8, 1), torch.zeros(8)))
    # Once 0.5 * 100 by the other, once 0.5 * 2 x by the gradient of x * x at what the forward had read.
    assert torch.allclose(table.weight, before - 50.0 - 0.5 * 2 * before)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_each_microbatch_reads_its_rows_once_and_a_step_pushes_once(checkpoint: str):
    pipe = ab.Pipe(nn.Sequential(nn.Embedding(8, 2, sparse=True), Square()), [1, 1], chunks=3, checkpoint=checkpoint)
    with ab.Executor(step_of(pipe, loss=F.mse_loss), "Hybrid") as executor, pipe:
        for _ in range(2):
            executor.run(batch=(torch.arange(6)[:, None].expand(6, 2) % 5, torch.zeros(6, 2)))
        table = executor.statistics().tables["0.weight"]
    assert (table.pulls, table.pushes) == (2 * 3, 2)


def test_lookups_of_two_stages_take_turns(monkeypatch: pytest.MonkeyPatch):
    """A cache and the messages on their way are one state, which two threads would tear."""
    layers = [nn.Embedding(8, 2, sparse=True), Again(), nn.Linear(2, 1)]
    pipe = ab.Pipe(nn.Sequential(*layers), [1, 2], chunks=4, checkpoint="never")
    with ab.Executor(step_of(pipe, loss=F.mse_loss), "Hybrid", cache=ab.Cache(capacity=2)) as executor, pipe:
        remote = executor._remote
        assert remote is not None
        pull, inside, together = remote.client.pull_many, 0, 0

        def slow(*arguments: object, **options: object) -> object:
            nonlocal inside, together
            inside += 1
            together = max(inside, together)
            time.sleep(0.02)  # enough for the other stage to come in as well
            found = pull(*arguments, **options)  # type: ignore[arg-type]
            inside -= 1
            return found

        monkeypatch.setattr(remote.client, "pull_many", slow)
        executor.run(batch=(torch.arange(8), torch.zeros(8, 1)))
    assert together == 1


class Again(nn.Module):
    """Looks up rows of a second table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0].detach() > 0).long() * 3 + 2)
