"""Plans of one process and of a job of two workers and a server: their bytes are those that are counted."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import anabranch as ab
from anabranch.executor import LinkCost, Plan
from anabranch.executor import plan as planner
from anabranch.executor.routes import CommMode, plan_routes
from anabranch.executor.running.window import HEADER_SIZE
from anabranch.executor.spec import Spec
from anabranch.executor.steps import distinct_models
from anabranch.executor.survey import StepSurvey, TableRows, survey_step
from anabranch.parameter_server import Consistency
from launched import run
from plain_loop import mean_square
from toys import in_job, job_servers, step_of
from waiting import wait_until


def test_times_are_of_the_links_and_of_the_slowest_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"workers": LinkCost(1024.0, 1.0), "servers": LinkCost(16.0, 2.0)}  # powers of two, so that sums are exact
    surveys = [StepSurvey({"compute": seconds}, {"table.weight": TableRows(10, 9)}) for seconds in (8.0, 9.0)]
    monkeypatch.setattr(planner, "_measured", lambda *_: (links, surveys, 0))

    def planned(model: nn.Module, mode: CommMode, **options: Any) -> Plan:
        step = {"train": step_of(model, **options)}
        routes = plan_routes(step, distinct_models(step), mode, None)
        spec = Spec(step, {"": model}, mode, routes, consistency=Consistency.parse("bsp"))  # type: ignore[arg-type]
        return planner.plan_step(spec, None, "train", None, None)

    dense, bucket = planned(nn.Linear(3, 1, bias=False), "AllReduce"), (3 + 1 + HEADER_SIZE) * 4
    assert (dense.bytes, dense.parts) == ({"workers": bucket}, {"compute": 9.0, "workers": 1024.0 + bucket})
    assert dense.step_seconds == 9.0 + 1024.0 + bucket
    rows = planned(nn.ModuleDict({"table": nn.Embedding(100, 4)}), "Hybrid", accumulate=2, clip_grad_norm=1.0)
    assert rows.bytes == {"workers": 2 * 8 * HEADER_SIZE + 8, "servers": (2 * 10 + 9) * (4 + 16)}  # 8 bytes of a vote
    messages = 2 + 1 + 2  # reads, a push, the norm and its release
    assert rows.parts == {**rows.parts, "compute": 18.0, "servers": messages * 16.0 + 2 * rows.bytes["servers"]}


def test_a_plan_with_a_cache_says_that_fewer_rows_may_cross() -> None:
    with ab.Executor(step_of(Model()), "Hybrid", cache=ab.Cache(capacity=9)) as executor:
        assert "upper bounds" in str(executor.plan(batch=IDS))
    with ab.Executor(step_of(Model()), "Hybrid") as executor:
        assert "upper bounds" not in str(executor.plan(batch=IDS))


# Looking at a batch.


class Model(nn.Module):
    def __init__(self, max_norm: float | None = None, rows: int = 50, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 4, padding_idx=-1, max_norm=max_norm, **options)
        self.bags = nn.EmbeddingBag(rows, 4, padding_idx=3, max_norm=max_norm, **options)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.cat([self.table(ids[:, 0]), self.bags(ids)], 1)
        return self.head(self.drop(self.norm(found)))  # type: ignore[no-any-return]


IDS = torch.tensor([[1, 2], [49, 2], [1, 3], [49, 1]])


def test_a_survey_leaves_everything_unchanged() -> None:
    model = Model(max_norm=0.1).eval()
    model.head.bias.grad = torch.ones(1)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    seen: list[bool] = []
    model.register_forward_hook(lambda module, *_: seen.append(module.training))
    model.head.bias.register_post_accumulate_grad_hook(lambda _: pytest.fail("a gradient was handed to a hook"))
    survey_step(step_of(model), IDS, {model.table.weight: ("table", False), model.bags.weight: ("bags", True)})
    assert seen == [True] * 4  # as a step would run it
    assert not model.training
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(model.head.bias.grad, torch.ones(1))
    assert model.table.weight.grad is None


def test_a_plan_is_of_the_loaders_next_batch_which_stays_the_next() -> None:
    loader = DataLoader(torch.arange(12).view(6, 2), batch_size=2)
    seen: list[list[int]] = []

    def noted(model: nn.Module, ids: Tensor) -> Tensor:
        seen.append(ids.flatten().tolist())
        return mean_square(model, ids)

    with ab.Executor(step_of(Model(), loss=noted), dataloaders={"default": loader}) as executor:
        plan = executor.plan()
        assert {tuple(ids) for ids in seen} == {(0, 1, 2, 3)}
        assert plan.notes == ()
        seen.clear()
        executor.run()
        assert seen == [[0, 1, 2, 3]]
        executor.plan()
        executor.run()
        assert seen[-1] == [4, 5, 6, 7]


def test_a_plan_names_experts_and_leaves_them_as_they_are() -> None:
    module = nn.Linear(4, 4)
    before = copy.deepcopy(module.state_dict())
    backend = ab.ExpertBackend(
        "linear.0", module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[ab.TensorSpec(4)]
    )
    with ab.ExpertServer([backend]) as server:
        model = nn.Sequential(nn.Linear(4, 4), ab.RemoteExpert("linear.0", server.endpoint))
        with ab.Executor(step_of(model)) as executor:
            plan = executor.plan(batch=torch.ones(8, 4))
        assert model[1].training
    (row,) = [row for row in plan.rows if row.boundary == "experts"]
    size = 8 * 4 * 4
    assert (row.name, row.bytes) == ("linear.0", 5 * size)  # inputs twice, outputs, and the gradients of both
    assert plan.bytes == {"experts": row.bytes}
    assert plan.parts["experts"] > 0
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)


# What is refused.


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that this job of one worker names."""
    with job_servers(1, monkeypatch):
        yield


def requests() -> dict[str, tuple[int, int, int]]:
    """The pushes and rows of every table on the servers."""
    with ab.ParameterClient() as client:
        tables = client.statistics()[0].tables
    return {name: (table.pushes, table.rows, table.step) for name, table in tables.items()}


@pytest.mark.parametrize("mode", ["auto", "PS", None])
def test_planning_only_reads_live_servers(server: None, mode: Any) -> None:
    with ab.Executor(step_of(Model()), mode) as executor:
        executor.run(batch=IDS)
        wait_until(lambda: all(pushes for pushes, _, _ in requests().values()))  # the step's release is not waited for
        before, counted = requests(), executor.statistics().tables
        plan = executor.plan(batch=IDS)
        assert requests() == before
        assert executor.statistics().tables == counted
        executor.run(batch=IDS)
        after = executor.statistics().tables
    used = "Hybrid" if mode == "auto" else mode
    assert plan.comm_mode == used
    assert plan.bytes.get("servers", 0) == sum(after[name].bytes - counted[name].bytes for name in after)


def test_a_step_that_trains_a_pipe_is_refused_with_the_cure() -> None:
    pipe = ab.Pipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), [1, 1])
    executor = ab.Executor(step_of(pipe, loss=F.mse_loss))
    with pipe, executor, pytest.raises(ValueError, match=r"pipe.describe\(\) .*without the Pipe"):
        executor.plan(batch=(torch.ones(4, 4), torch.ones(4, 1)))


# Jobs.

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


def batches(rank: int, count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        yield torch.randint(0, ROWS // 4, (16 + rank, 3), generator=generator)


def executor_of(
    comm_mode: str, *, sparse: bool = False, accumulate: int = 1, skip_nonfinite: bool = False, **options: object
) -> ab.Executor:
    torch.manual_seed(0)
    model = Model(rows=ROWS, sparse=sparse)
    tables = [model.table.weight, model.bags.weight]
    dense = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.Adam(dense, lr=0.01)]
    step = ab.TrainStep(model, mean_square, optimizers, accumulate=accumulate, skip_nonfinite=skip_nonfinite)
    return ab.Executor(step, comm_mode, seed=3, served="replace", **options)  # type: ignore[arg-type]


def crossed(executor: ab.Executor) -> dict[str, int]:
    tables = sum(loads.bytes for loads in executor.statistics().tables.values())
    return {"workers": executor.statistics().bytes - tables, "servers": tables}


def compare(kinds: list[str]) -> None:
    for kind in kinds:
        compare_one(kind, ab.job().rank)


def compare_one(kind: str, rank: int) -> None:
    """The bytes of a step, as planned before it and as counted; the second step is one like all others."""
    options = dict(KINDS[kind])
    executor = executor_of(str(options.pop("comm_mode")), **options)  # type: ignore[arg-type]
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


@pytest.mark.slow
def test_the_bytes_planned_are_the_bytes_counted() -> None:
    in_job(compare, 2, list(KINDS), servers=2, timeout=300.0)


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
