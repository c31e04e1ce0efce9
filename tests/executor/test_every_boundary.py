"""Tables on servers and remote experts inside a pipe's stages: the plain loop's numbers, and no row read twice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch.testing import LocalJob

SCRIPT = Path(__file__).with_name("boundaries_job.py")


def far(a: object, b: object) -> float:
    mine, other = (torch.tensor(value, dtype=torch.float64) for value in (a, b))
    return float((mine - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_job_across_every_boundary_trains_as_one_process(workers: int):
    """Rows of two stages, the table on a server, a block's feed-forward a mixture of experts in two processes."""
    plain = LocalJob(1).run(SCRIPT, "plain", "1").check().results[0]
    ranks = LocalJob(workers, servers=1, experts=2).run(SCRIPT, "grid", "2").check().results
    assert plain is not None
    assert len(plain["losses"]) == 20
    for rank, found in enumerate(ranks):
        assert found is not None
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


def losses_of(model: nn.Module, mode: str | None, **options: bool) -> list[float]:
    step = ab.TrainStep(
        model,
        F.mse_loss if isinstance(model, ab.Pipe) else lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        torch.optim.Adam(model.parameters(), lr=0.01),
    )
    with ab.Executor(step, mode, engine="tape", **options) as executor:
        return [executor.run(batch=batch_for(number))["loss"].item() for number in range(5)]


def batch_for(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 10, (7,), generator=generator)
    return ids, torch.randn(7, 4, generator=generator, dtype=torch.float64)


def test_a_traced_model_has_its_table_whole_on_servers():
    expected = pytest.approx(losses_of(Looks(), None), rel=1e-12)
    traced = ab.Pipe(ab.pipeline.split(Looks(), at=["second"]), [1, 1], chunks=3)
    with traced, pytest.raises(ValueError, match=r"table.weight is a table of a model that split"):
        losses_of(traced, "Hybrid")
    with traced:
        assert losses_of(traced, "PS", use_sparse_pull=False) == expected


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
    step = ab.TrainStep(pipe, lambda y, t: y.sum(), torch.optim.SGD(pipe.parameters(), lr=0.5), reduction="sum")
    with ab.Executor(step, "Hybrid", consistency="asp") as executor, pipe:
        meddle.executor = executor
        ids = torch.arange(8)[:, None]
        executor.run(batch=(ids.expand(8, 1), torch.zeros(8)))
    # Once 0.5 * 100 by the other, once 0.5 * 2 x by the gradient of x * x at what the forward had read.
    assert torch.allclose(table.weight, before - 50.0 - 0.5 * 2 * before)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_each_microbatch_reads_its_rows_once_and_a_step_pushes_once(checkpoint: str):
    pipe = ab.Pipe(nn.Sequential(nn.Embedding(8, 2, sparse=True), Square()), [1, 1], chunks=3, checkpoint=checkpoint)
    step = ab.TrainStep(pipe, F.mse_loss, torch.optim.SGD(pipe.parameters(), lr=0.1))
    with ab.Executor(step, "Hybrid") as executor, pipe:
        for _ in range(2):
            executor.run(batch=(torch.arange(6)[:, None].expand(6, 2) % 5, torch.zeros(6, 2)))
        table = executor.statistics().tables["0.weight"]
    assert (table.pulls, table.pushes) == (2 * 3, 2)


def test_lookups_of_two_stages_take_turns(monkeypatch: pytest.MonkeyPatch):
    """A cache and the messages on their way are one state, which two threads would tear."""
    layers = [nn.Embedding(8, 2, sparse=True), Again(), nn.Linear(2, 1)]
    pipe = ab.Pipe(nn.Sequential(*layers), [1, 2], chunks=4, checkpoint="never")
    step = ab.TrainStep(pipe, F.mse_loss, torch.optim.SGD(pipe.parameters(), lr=0.1))
    with ab.Executor(step, "Hybrid", cache=ab.Cache(capacity=2)) as executor, pipe:
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
