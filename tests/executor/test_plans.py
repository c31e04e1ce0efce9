"""Plans of one process, and their arithmetic on links that are made up."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import anabranch as ab
from anabranch.executor import LinkCost, ModeCost, Plan
from anabranch.executor.plan import planner
from anabranch.executor.plan.survey import StepSurvey, TableRows, survey_step
from anabranch.executor.routes import CommMode, plan_routes
from anabranch.executor.running.window import HEADER_SIZE
from anabranch.executor.spec import Spec
from anabranch.executor.steps import distinct_models
from anabranch.parameter_server import Consistency
from plain_loop import mean_square
from toys import job_servers
from waiting import wait_until


def test_times_are_of_the_links_and_of_the_slowest_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    links = {"workers": LinkCost(1024.0, 1.0), "servers": LinkCost(16.0, 2.0)}  # powers of two, so that sums are exact
    surveys = [StepSurvey({"compute": seconds}, {"table.weight": TableRows(10, 9)}) for seconds in (8.0, 9.0)]
    monkeypatch.setattr(planner, "_measured", lambda *_: (links, surveys, 0))

    def planned(model: nn.Module, mode: CommMode, **options: Any) -> Plan:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = {"train": ab.TrainStep(model, lambda model, batch: torch.zeros(()), optimizer, **options)}
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
    def __init__(self, max_norm: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4, padding_idx=-1, max_norm=max_norm)
        self.bags = nn.EmbeddingBag(50, 4, padding_idx=3, max_norm=max_norm)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.cat([self.table(ids[:, 0]), self.bags(ids)], 1)
        return self.head(self.drop(self.norm(found)))  # type: ignore[no-any-return]


IDS = torch.tensor([[1, 2], [49, 2], [1, 3], [49, 1]])


def step_of(model: nn.Module) -> ab.TrainStep:
    return ab.TrainStep(model, mean_square, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("served", [True, False])
def test_a_survey_counts_ids_and_leaves_padding_out_of_moved_rows(served: bool) -> None:
    model = Model()
    tables = {model.table.weight: ("table", served), model.bags.weight: ("bags", served)}
    found = survey_step(step_of(model), IDS, tables)
    assert found.tables == {"table": TableRows(2, 1), "bags": TableRows(4, 3)}
    assert found.parts["compute"] > 0


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

    model = Model()
    step = ab.TrainStep(model, noted, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="tape", dataloaders={"default": loader}) as executor:
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
        step = ab.TrainStep(model, lambda model, x: model(x).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor(step) as executor:
            plan = executor.plan(batch=torch.ones(8, 4))
        assert model[1].training
    (row,) = [row for row in plan.rows if row.boundary == "experts"]
    size = 8 * 4 * 4
    assert (row.name, row.bytes) == ("linear.0", 5 * size)  # inputs twice, outputs, and the gradients of both
    assert plan.bytes == {"experts": row.bytes}
    assert plan.parts["experts"] > 0
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)


# What is refused.


def test_a_plan_needs_a_training_step() -> None:
    model = nn.Linear(2, 1)
    step = ab.EvalStep(model, lambda model, x: {"y": model(x)})
    with ab.Executor({"validate": step}) as executor, pytest.raises(ValueError, match="step 'validate' trains nothing"):
        executor.plan("validate")


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
def test_planning_only_reads_live_servers_and_lists_every_possible_mode(server: None, mode: Any) -> None:
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
    assert [one.comm_mode for one in plan.modes] == [None, "PS", "Hybrid"]
    assert ModeCost(used, plan.bytes, plan.step_seconds) in plan.modes
    assert [sorted(one.bytes) for one in plan.modes] == [[], ["servers"], ["servers"]]
    assert plan.bytes.get("servers", 0) == sum(after[name].bytes - counted[name].bytes for name in after)
    assert all(str(one) in str(plan).splitlines() for one in plan.modes)
    assert ("their bandwidth is not measured" in str(plan)) is (mode is None)


def test_a_mode_that_the_model_does_not_allow_has_no_line(server: None) -> None:
    model = Model()
    step = ab.TrainStep(model, mean_square, torch.optim.NAdam(model.parameters()))
    with ab.Executor(step, None) as executor:
        assert [one.comm_mode for one in executor.plan(batch=IDS).modes] == [None]


def piped(survey: bool) -> list[Tensor]:
    """Losses, gradients, state and the next random numbers after four steps of a pipe, with a plan in their middle."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)
    )
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    with ab.Pipe(model, [3, 3], chunks=4) as pipe:
        step = ab.TrainStep(pipe, F.mse_loss, torch.optim.Adam(pipe.parameters()))
        with ab.Executor(step) as executor:
            losses = [executor.run(batch=(x, y))["loss"] for _ in range(2)]
            if survey:
                executor.plan(batch=(x, y))
            gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            losses += [executor.run(batch=(x, y))["loss"] for _ in range(2)]
    return [*losses, *gradients, *model.state_dict().values(), torch.rand(3)]


def test_planning_a_pipe_does_not_change_its_training() -> None:
    seen, unseen = piped(survey=True), piped(survey=False)
    assert len(seen) == len(unseen) > 20
    assert all(map(torch.equal, seen, unseen))


def test_a_pipe_s_plan_lists_the_traffic_between_its_stages() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with ab.Pipe(model, [1, 2], chunks=4) as pipe:
        step = ab.TrainStep(pipe, F.mse_loss, torch.optim.SGD(pipe.parameters(), lr=0.1), accumulate=3)
        with ab.Executor(step) as executor:
            plan = executor.plan(batch=(torch.randn(8, 4), torch.randn(8, 2)))
            assert pipe.calls == 0
    first, second = plan.rows[-2:]
    activations = 3 * 8 * 8 * 4  # runs, rows, width; the gradients are as many
    assert (first.name, first.place, first.shape, first.bytes) == ("stage 0", "rank 0, layers 0", (40,), activations)
    assert (second.name, second.boundary, second.shape, second.bytes) == ("stage 1", "pipeline", (18,), activations)
    assert plan.parts["compute"] > 0
    assert first.seconds > 0
    assert plan.step_seconds == sum(plan.parts.values())
    assert re.search(r"the schedule alone idles ranks \d+% of the time", str(plan))
    assert max(map(len, str(plan).splitlines()[:-1])) <= 80


@pytest.mark.parametrize(("mode", "named"), [("PS", "under 'PS'"), (None, "with RemoteEmbedding")])
def test_a_pipe_that_a_survey_would_train_elsewhere_is_refused_with_the_cure(mode: Any, named: str) -> None:
    table = ab.RemoteEmbedding("t", 9, 4, mode="sum") if mode is None else nn.EmbeddingBag(9, 4, mode="sum")
    with ab.Pipe(nn.Sequential(table, nn.Linear(4, 1)), [1, 1]) as pipe:
        step = ab.TrainStep(pipe, F.mse_loss, torch.optim.SGD(pipe.parameters(), lr=0.1))
        with (
            ab.Executor(step, mode or "Hybrid") as executor,
            pytest.raises(ValueError, match=rf"trains a Pipe {named}.*plan its module without the Pipe"),
        ):
            executor.plan(batch=(torch.ones(4, 2, dtype=torch.int64), torch.ones(4, 1)))
