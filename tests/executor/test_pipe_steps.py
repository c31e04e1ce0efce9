"""A ``TrainStep`` of a ``Pipe``: the plain loop's losses and parameters, on any grid, saved under any split."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pipe_job
import pytest
import torch
import torch.nn.functional as F
from pipe_job import Piped, Plain, batch_of, compare, new_model, optimizers_of, schedulers_of
from small_parts import in_job
from torch import nn

import anabranch as ab
from covering import pairwise


def case(data: int, pipeline: int, balance: list[int], **changes: object) -> dict[str, object]:
    plain = {"reduction": "mean", "clip": None, "accumulate": 1}
    return {"data": data, "pipeline": pipeline, "balance": balance, **plain, **changes}


MIXED = ("mean", "sum"), (None, 0.1), (1, 3)


def cases(data: int, pipeline: int, balance: list[int], *, few: bool = False) -> list[dict[str, object]]:
    """All ways to reduce, clip and accumulate, or ``few`` with each two of them; a schedule of two chunks a rank."""
    chosen = [one.values for one in pairwise(*MIXED, slow=False)] if few else product(*MIXED)
    mixed = [
        case(data, pipeline, balance, reduction=reduction, clip=clip, accumulate=accumulate)
        for reduction, clip, accumulate in chosen
    ]
    return [*mixed, case(data, pipeline, [1, 2, 1, 3], schedule="ZBV")] if pipeline == 2 else mixed


ON_SERVERS = [
    *(case(1, 1, [3, 4], mode="Hybrid", reduction=r, clip=c, accumulate=a, checkpoint=k)
      for r, c, a, k in [("mean", None, 1, "always"), ("sum", 0.1, 3, "except_last"), ("mean", 0.1, 3, "never")]),
    case(1, 1, [1, 2, 1, 3], mode="PS", reduction="sum", schedule="ZBV"),
    case(1, 1, [3, 4], mode="PS", clip=0.1, accumulate=3),
]  # fmt: skip


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("chosen", [*cases(1, 1, [3, 4]), *ON_SERVERS], ids=str)
def test_a_pipe_in_one_process_trains_as_the_plain_loop(chosen: dict):
    plain, piped = Plain(chosen), Piped(chosen)
    runs = range(4 * chosen["accumulate"])
    with piped.executor, piped.pipe:
        losses = piped.train(runs, 8)
    assert losses == pytest.approx(plain.train(runs, 8), rel=1e-12)
    assert compare(piped, plain) < 1e-12
    assert piped.executor.engine("train") == "tape"


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("data", "pipeline", "balance", "mode", "few"),
    [
        (2, 2, [4, 3], None, True),
        slow(3, 1, [3, 4], None, False),
        slow(1, 3, [2, 2, 3], None, False),
        slow(3, 2, [3, 4], None, False),
        (1, 2, [4, 3], "PS", True),
        slow(2, 2, [4, 3], "Hybrid", True),
        slow(2, 2, [3, 4], "PS", False),
        slow(1, 3, [2, 2, 3], "PS", False),
    ],
)
def test_a_grid_of_pipelines_trains_as_the_plain_loop(
    data: int, pipeline: int, balance: list[int], mode: str | None, few: bool
):
    """Shards are unequal, and a row of the grid may have none; every rank learns the whole batch's loss."""
    served = {} if mode is None else {"mode": mode}
    chosen = [one | served for one in cases(data, pipeline, balance, few=few)]
    assert max(in_job(pipe_job.train, data * pipeline, chosen, servers=2 if served else 0)) < 1e-12


def test_a_step_with_nan_is_passed_over_on_servers_and_all_stages():
    chosen = case(2, 2, [1, 6], mode="PS", skip_nonfinite=True)
    assert max(in_job(pipe_job.skip, 4, chosen, servers=1)) < 1e-12


def test_each_stage_has_its_own_parameters_on_the_servers_and_shared_ones_stay_with_the_ranks():
    first, last = in_job(pipe_job.places, 2, case(1, 2, [4, 3], mode="PS"), servers=1)
    assert first == {
        "0.table.weight": "servers, by row",
        "1.weight": "workers",  # the last layer's, too
        "1.bias": "servers, whole",
        "3.weight": "servers, whole",
        "3.bias": "servers, whole",
    }
    assert last == {"6.weight": "workers", "6.bias": "servers, whole"}


RUNS = 3
"""Before saving: one window of three runs."""
KEPT = {"clip": 0.1, "accumulate": 3}


def unsplit(seed: int, mode: str | None = None, **options: Any) -> ab.Executor:
    """An ordinary step of the unsplit model."""
    model = new_model(seed=seed)
    optimizers = optimizers_of(model)
    step = ab.TrainStep(
        model,
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizers,
        scheduler=schedulers_of(optimizers),
        **options,
    )
    return ab.Executor({"train": step, "validate": ab.EvalStep(model, lambda model, batch: {})}, mode)


def losses_of(executor: ab.Executor, runs: range, accumulate: int = 1) -> list[float]:
    return [executor.run("train", batch_of(run, 8 + run % accumulate))["loss"].item() for run in runs]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (case(1, 2, [3, 4], **KEPT), case(1, 2, [5, 2], schedule="GPipe", **KEPT)),
        slow(case(2, 2, [2, 5], mode="Hybrid", **KEPT), case(1, 3, [3, 2, 2], mode="Hybrid", **KEPT)),
        slow(case(2, 2, [2, 5], **KEPT), case(1, 1, [3, 4], **KEPT)),
        slow(case(1, 3, [1, 3, 3], **KEPT), case(2, 2, [6, 1], **KEPT)),
        slow(case(2, 2, [3, 4], **KEPT), case(3, 1, [3, 4], **KEPT)),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_split_is_loaded_by_another_and_by_the_unsplit_model(
    saved: dict, loaded: dict, tmp_path: Path
):
    expected, found = (
        in_job(
            pipe_job.go_on,
            one["data"] * one["pipeline"],
            one,
            str(tmp_path / "run"),
            RUNS,
            seed,
            servers=int("mode" in one),
        )
        for one, seed in ((saved, 0), (loaded, 77))
    )
    for one in found:
        assert one["losses"] == pytest.approx(expected[0]["losses"], rel=1e-11)
    with unsplit(99, saved.get("mode"), clip_grad_norm=0.1, accumulate=3) as executor:
        executor.load(tmp_path / "run")
        assert losses_of(executor, range(RUNS, RUNS + 4), 3) == pytest.approx(expected[0]["losses"], rel=1e-11)
    if saved["data"] == loaded["data"]:
        assert found[0]["calls"] == expected[0]["calls"]


def test_a_pipe_resumes_from_a_checkpoint_of_the_unsplit_model(tmp_path: Path):
    with unsplit(0) as executor:
        losses_of(executor, range(3))
        executor.save(tmp_path)
        expected = losses_of(executor, range(3, 6))
    piped = Piped(case(1, 1, [2, 5]), seed=5)
    with piped.executor, piped.pipe:
        piped.executor.load(tmp_path)
        assert piped.train(range(3, 6), 8) == pytest.approx(expected, rel=1e-12)


def test_a_resumed_pipe_draws_on_where_it_was(tmp_path: Path):
    """Dropout's masks come from the pipe's own stream, whose place is saved."""

    def program(seed: int) -> tuple[ab.Pipe, ab.Executor]:
        torch.manual_seed(seed)
        pipe = ab.Pipe(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5)), [2, 1], chunks=2)
        step = ab.TrainStep(pipe, F.mse_loss, torch.optim.SGD(pipe.parameters(), lr=0.1))
        return pipe, ab.Executor({"train": step}, seed=seed)

    batches = [tuple(torch.randn(2, 6, 5)) for _ in range(5)]
    pipe, executor = program(1)
    with executor, pipe:
        for batch in batches[:2]:
            executor.run("train", batch)
        executor.save(tmp_path)
        expected = [executor.run("train", batch)["loss"].item() for batch in batches[2:]]
    other, executor = program(2)
    with executor, other:
        executor.load(tmp_path)
        assert [executor.run("train", batch)["loss"].item() for batch in batches[2:]] == expected
        assert (other.seed, other.calls) == (pipe.seed, pipe.calls)


def test_a_grid_refuses_unsupported_steps_on_every_rank_and_continues():
    in_job(pipe_job.mistakes, 2, case(1, 2, [3, 4]))


def test_a_rank_that_is_asked_to_stop_stops_all_ranks_after_the_same_run():
    assert in_job(pipe_job.stop, 4, case(2, 2, [3, 4])) == [[False, True, True, True]] * 4


def test_options_that_no_pipe_supports_are_refused(caplog: pytest.LogCaptureFixture):
    pipe = ab.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="leave out rows="):
        ab.Executor(ab.TrainStep(pipe, F.mse_loss, optimizer, rows=len))
    with ab.Executor(ab.TrainStep(pipe, F.mse_loss, optimizer), engine="graph") as executor, pipe:
        assert "its engine is the tape" in caplog.text
        executor.run(batch=(torch.ones(3, 2), torch.ones(3, 2)))
        assert executor.engine() == "tape"
        with pytest.raises(ValueError, match="one number per microbatch"):
            ab.Executor(ab.TrainStep(pipe, lambda y, t: y, optimizer)).run(batch=(torch.ones(3, 2), torch.ones(3, 2)))
