"""Plans of one process, and their arithmetic on a machine that is made up."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anabranch as ab
from anabranch.executor.loaders.loading import BoundLoader
from anabranch.executor.plan import Plan, PlanRow, choose
from anabranch.executor.plan.costs import RowsHeld, StepFacts, plan_of
from anabranch.executor.plan.machine_profile import LinkSpeed, Profile, Update
from anabranch.executor.plan.step_survey import StepSurvey, TableLookups, survey_step
from anabranch.executor.routes import Place
from anabranch.executor.running.window import HEADER_SIZE

# Powers of two, so that sums are exact.
MACHINE = Profile(
    copy=0.0,
    fresh=0.25,
    distinct=0.0,
    updates={"SGD": Update(0.0, 2.0)},
    workers=LinkSpeed(1024.0, 1.0),
    pull=LinkSpeed(16.0, 1.0, 4.0),
    push=LinkSpeed(32.0, 2.0, 8.0),
    pull_whole=LinkSpeed(64.0, 1.0),
    push_whole=LinkSpeed(128.0, 4.0),
)
FACTS = StepFacts("train")

ALONE = 8 * HEADER_SIZE
CARRIED = (3 + 2 + HEADER_SIZE) * 4  # elements, flags, header


def table(place: Place, **options: Any) -> RowsHeld:
    tensor = nn.Parameter(torch.zeros(100, 4)) if place is Place.WORKERS else None
    facts = {"tensor": tensor, "looked_up": True, "optimizer": "SGD", **options}
    return RowsHeld("table", (100, 4), torch.float32, place, **facts)


def head(place: Place) -> RowsHeld:
    return RowsHeld("head", (3,), torch.float32, place, nn.Parameter(torch.zeros(3)), optimizer="SGD")


def survey(read: int = 10, moved: int = 9, seconds: float = 8.0) -> StepSurvey:
    return StepSurvey(seconds, {"table": TableLookups(20, read, moved)})


def planned(*holdings: RowsHeld, surveys: list[StepSurvey | None] | None = None, rank: int = 0, **facts: Any) -> Plan:
    facts = {"mean": False, **facts}
    return plan_of(
        "PS", holdings, StepFacts("train", **facts), MACHINE, surveys or [survey(), survey()], rank, servers=1
    )


def test_summed_gradients_cost_their_bytes_and_a_latency_per_bucket() -> None:
    plan = planned(head(Place.WORKERS))
    assert plan.bytes == {"workers": CARRIED}
    assert plan.parts == {"compute": 8.0, "optimizers": 6.0, "workers": 1024.0 + CARRIED}
    assert plan.step_seconds == 8.0 + 6.0 + 1024.0 + CARRIED
    assert [(row.name, row.boundary, row.bytes) for row in plan.rows] == [("head", "workers", 20)]


def test_a_large_tables_dense_gradient_takes_new_memory_in_each_run() -> None:
    held = RowsHeld("table", (1 << 20, 8), torch.float32, Place.HERE, looked_up=True)
    assert planned(held, accumulate=2).parts["tables"] == 2 * 0.25 * (32 << 20)
    assert planned(table(Place.HERE)).parts["tables"] == 0.0


def test_sums_of_other_dtypes_leave_the_header_its_own_message() -> None:
    held = RowsHeld("half", (3,), torch.float16, Place.WORKERS, nn.Parameter(torch.zeros(3).half()))
    plan = planned(held)
    assert plan.bytes == {"workers": (3 + 2) * 4 + ALONE}  # summed in float32
    assert plan.parts["workers"] == 2 * 1024.0 + 20.0 + ALONE


def test_runs_that_are_accumulated_compute_each_and_tell_their_rows() -> None:
    plan = planned(head(Place.WORKERS), accumulate=3)
    assert plan.bytes == {"workers": CARRIED + 2 * ALONE}
    assert plan.parts["compute"] == 24.0
    assert plan.parts["workers"] == 3 * 1024.0 + CARRIED + 2 * ALONE


def test_rows_on_servers_are_read_and_moved_by_their_number() -> None:
    plan = planned(table(Place.ROWS))
    size = 4 + 16
    assert plan.bytes == {"workers": ALONE, "servers": 10 * size + 9 * size}
    assert plan.parts["servers"] == 16.0 + 32.0 + (10 * size + 4 * 10) + (2 * 9 * size + 8 * 9)
    assert "optimizers" not in plan.parts  # that is the servers' business


def test_the_slowest_worker_makes_the_time_and_ones_own_batch_the_bytes() -> None:
    surveys: list[StepSurvey | None] = [survey(), survey(read=100, moved=50, seconds=9.0)]
    first, second = (planned(table(Place.ROWS), surveys=surveys, rank=rank) for rank in range(2))
    assert first.step_seconds == second.step_seconds
    assert first.parts["compute"] == 9.0
    assert (first.bytes["servers"], second.bytes["servers"]) == (19 * 20, 150 * 20)


def test_parameters_held_whole_are_read_and_pushed_once_a_step() -> None:
    plan = planned(head(Place.WHOLE), accumulate=2)
    assert plan.bytes["servers"] == 24
    assert plan.parts["servers"] == 64.0 + 128.0 + 12.0 + 48.0


def test_a_table_read_whole_costs_all_of_its_rows_and_pushes_those_that_moved() -> None:
    plan = planned(table(Place.WHOLE_TABLE))
    assert plan.bytes["servers"] == 100 * 20 + 9 * 20
    assert plan.parts["servers"] == 16.0 + 32.0 + (100 * 20 + 4 * 100) + (2 * 9 * 20 + 8 * 9)


def test_ids_of_a_dynamic_vocabulary_are_long_and_lengthen_those_they_are_pushed_with() -> None:
    dynamic = RowsHeld("users", (-1, 4), torch.float32, Place.ROWS, looked_up=True)
    surveys: list[StepSurvey | None] = [
        StepSurvey(1.0, {"table": TableLookups(20, 10, 9), "users": TableLookups(5, 5, 5)})
    ]
    plan = planned(table(Place.ROWS), dynamic, surveys=surveys)
    assert [row.bytes for row in plan.rows] == [10 * 20 + 9 * 24, (5 + 5) * 24]


def test_sparse_gradients_travel_as_long_as_the_longest_workers() -> None:
    surveys: list[StepSurvey | None] = [survey(moved=3), survey(moved=9)]
    plan = planned(table(Place.WORKERS, sparse=True), surveys=surveys)
    assert plan.bytes["workers"] == ALONE + 16 + 80 + 144  # counts; ids in blocks of 16 bytes; rows


def test_a_frozen_table_is_read_and_not_moved() -> None:
    assert planned(table(Place.ROWS, trained=False)).bytes["servers"] == 10 * 20


def test_without_a_batch_a_plan_says_which_parts_it_leaves_out() -> None:
    plan = planned(table(Place.ROWS), head(Place.WORKERS), surveys=[None, None])
    assert plan.bytes["workers"] == CARRIED
    assert [row.bytes for row in plan.rows] == [None, 20]
    assert "without a batch" in str(plan)


def test_a_plan_with_a_cache_says_that_fewer_rows_may_cross() -> None:
    assert "upper bounds" in str(planned(table(Place.ROWS), caches=True))
    assert "upper bounds" not in str(planned(head(Place.WORKERS), caches=True))


@pytest.mark.parametrize("quick", ["AllReduce", "Hybrid"])
def test_the_cheapest_plan_is_taken_and_the_reason_names_the_others(quick: str) -> None:
    rows = 1 if quick == "Hybrid" else 90
    plans: Any = {
        "AllReduce": planned(table(Place.WORKERS), surveys=[survey(rows, rows)] * 2),
        "Hybrid": planned(table(Place.ROWS), surveys=[survey(rows, rows)] * 2),
    }
    other = next(mode for mode in plans if mode != quick)
    choice = choose(plans)
    assert choice.mode == quick
    assert f"bytes with {'servers' if quick == 'Hybrid' else 'workers'}" in choice.why
    assert choice.why.endswith(f"; {1000 * plans[other].step_seconds:.3g} ms with {other!r}")


def test_no_line_is_longer_than_a_terminal_and_long_names_keep_both_ends() -> None:
    name = "encoder.layers.11.feed_forward.intermediate.dense.weight"
    row = PlanRow(name, (100_000_000, 8), Place.WHOLE_TABLE.value, "servers", 6_400_000_000, 1234.5)
    parts = {"compute": 0.01234, "optimizers": 12.5, "servers": 1234.5}
    lines = str(Plan("train", "PS", 16, 4, (row,), {"servers": 6_400_000_000}, parts)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[2].startswith("encoder.laye...dense.weight servers, table read whole  6,400,000,000")


def test_a_link_speed_fits_its_measurements() -> None:
    link = LinkSpeed.of_rows(20, small=(64, 2.0), large=(4096, 65.0), wide=75.0)
    assert link.cost(64 * 20, 64) == pytest.approx(2.0)
    assert link.cost(4096 * 20, 4096) == pytest.approx(65.0)
    assert link.cost(4 * 4096 * 20, 4096) == pytest.approx(75.0)


def test_a_link_that_a_hiccup_turned_over_has_no_negative_cost() -> None:
    assert LinkSpeed.through([(1000, 2.0), (5000, 1.0)]).cost(10_000) >= 0
    assert LinkSpeed.of_rows(20, small=(64, 3.0), large=(4096, 2.0), wide=1.0).cost(100, 5) >= 0


# Looking at a batch.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4, padding_idx=-1)
        self.bags = nn.EmbeddingBag(50, 4)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = torch.cat([self.table(ids[:, 0]), self.bags(ids)], 1)
        return self.head(self.drop(self.norm(found)))  # type: ignore[no-any-return]


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().mean()  # type: ignore[no-any-return]


IDS = torch.tensor([[1, 2], [49, 2], [1, 3], [49, 1]])


def step_of(model: nn.Module) -> ab.TrainStep:
    return ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_survey_counts_ids_and_leaves_padding_out_of_moved_rows() -> None:
    model = Model()
    found = survey_step(step_of(model), IDS, {model.table.weight: "table", model.bags.weight: "bags"})
    assert found.tables == {"table": TableLookups(4, 2, 1), "bags": TableLookups(8, 4, 4)}
    assert found.seconds > 0


def test_a_survey_leaves_everything_unchanged() -> None:
    model = Model().eval()
    model.head.bias.grad = torch.ones(1)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    seen: list[bool] = []
    model.register_forward_hook(lambda module, *_: seen.append(module.training))
    model.head.bias.register_post_accumulate_grad_hook(lambda _: pytest.fail("a gradient was handed to a hook"))
    survey_step(step_of(model), IDS, {model.table.weight: "table"})
    assert seen == [True] * 4  # as a step would run it
    assert not model.training
    assert torch.equal(random, torch.get_rng_state())
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(model.head.bias.grad, torch.ones(1))
    assert model.table.weight.grad is None


def test_a_look_at_lookups_by_function_sees_their_ids() -> None:
    model = nn.Sequential(nn.Embedding(10, 2))
    step = ab.TrainStep(
        model,
        lambda model, ids: F.embedding(input=ids, weight=model[0].weight, padding_idx=3).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    found = survey_step(step, torch.tensor([3, 4, 4]), {model[0].weight: "0.weight"})
    assert found.tables == {"0.weight": TableLookups(3, 2, 1)}


def test_reentrant_checkpoints_are_timed_by_their_forward() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(3, 3)
    step = ab.TrainStep(
        layer,
        lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True).sum(),
        torch.optim.SGD(layer.parameters(), lr=0.1),
    )
    assert survey_step(step, torch.ones(2, 3), {}).seconds > 0
    assert layer.weight.grad is None


def test_planning_does_not_change_training() -> None:
    losses = []
    for plans in (False, True):
        torch.manual_seed(0)
        with ab.Executor(step_of(Model()), "Hybrid", seed=1) as executor:
            for _ in range(3):
                if plans:
                    executor.plan(batch=IDS)
                losses.append(float(executor.run(batch=IDS)["loss"]))
    assert losses[:3] == losses[3:]


def test_a_plan_is_of_the_loaders_next_batch_which_stays_the_next() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(12).view(6, 2), batch_size=2)
    seen: list[list[int]] = []

    def noted(model: nn.Module, ids: Tensor) -> Tensor:
        seen.append(ids.flatten().tolist())
        return loss(model, ids)

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


def test_the_first_batch_of_a_loader_is_fetched_once_and_its_error_stays() -> None:
    fetched: list[int] = []

    def batches() -> Any:
        for number in range(2):
            fetched.append(number)
            yield number
        raise OSError("the disk")

    loader = BoundLoader(batches(), rank=0, world_size=1)
    assert (loader.first(), loader.first(), loader.next_batch()) == (0, 0, 0)
    assert loader.first() == 1
    assert loader.next_batch() == 1
    assert fetched == [0, 1]
    for take in (loader.first, loader.next_batch):
        with pytest.raises(OSError, match="the disk"):
            take()
    loader.close()


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


def test_auto_on_a_single_worker_needs_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with ab.Executor(step_of(Model()), "Auto") as executor:
        executor.run(batch=IDS)
        assert executor.comm_mode == "AllReduce"
    assert capsys.readouterr().out == "comm_mode='auto' chooses 'AllReduce': the job has no other workers\n"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (step_of(Model()), {"consistency": "asp"}), "under consistency='asp'"),
        (lambda: (step_of(nn.Sequential(_table())), {}), "RemoteEmbedding 'ids' lives on servers"),
    ],
)
def test_auto_refuses_steps_that_it_cannot_plan(make: Any, words: str) -> None:
    step, options = make()
    with pytest.raises(ValueError, match=words):
        ab.Executor(step, "auto", **options)


def _table() -> nn.Module:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return nn.Sequential(ab.RemoteEmbedding("ids", 10, 2, optimizer=optimizer), nn.Linear(2, 1))


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


def test_stages_of_one_time_take_that_of_all_microbatches_and_one_for_each_other_stage() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    with ab.Pipe(model, [1, 1, 1], chunks=4, checkpoint="never") as pipe:
        times = {"forward": 4.0, "backward": 8.0}  # of all microbatches
        pipe._engine.observed.seconds.update({(j, phase): times[phase] for j in range(3) for phase in times})
        simulated = pipe.simulated(rows=8)
    assert simulated.makespan == 12.0 * (4 + 3 - 1) / 4
    assert simulated.bubble == pytest.approx((3 - 1) / (4 + 3 - 1))


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
