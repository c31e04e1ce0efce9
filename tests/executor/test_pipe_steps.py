"""A ``TrainStep`` of a ``Pipe``: the plain loop's losses and parameters, on any grid, saved under any split."""

from __future__ import annotations

import copy
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch.executor.engines import engine
from covering import pairwise
from toys import distance, in_job, look_of, plain_window, step_of

# What every worker runs.

STEPS = 4
torch.sparse.check_sparse_tensor_invariants.disable()  # or Adagrad's sparse update warns


@ab.skippable(stash=["ids"])
class Look(nn.Module):
    """Looks up rows of a table, and lets the numbers themselves jump over the layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 5, sparse=sparse)

    def forward(self, ids: Tensor):
        yield ab.stash("ids", ids)
        return self.table(ids).mean(1)


@ab.skippable(pop=["ids"])
class Scale(nn.Module):
    def forward(self, x: Tensor):
        ids = yield ab.pop("ids")
        return x * (1 + ids.sum(1, keepdim=True) / 100)


def new_model(sparse: bool = True, seed: int = 0) -> nn.Sequential:
    """Seven layers; the last weight is the second layer's."""
    torch.manual_seed(seed)
    layers = [Look(sparse), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), Scale(), nn.Tanh(), nn.Linear(5, 5)]
    model = nn.Sequential(*layers).double()
    model[6].weight = model[1].weight
    return model


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """A stage without a table, or without anything else, has empty groups."""
    tables = [value for name, value in model.named_parameters() if "table" in name]
    rest = [value for name, value in model.named_parameters() if "table" not in name]
    decayed = [value for value in rest if value.ndim > 1]
    others = [value for value in rest if value.ndim == 1]
    adamw = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01)
    return [torch.optim.Adagrad([{"params": tables}], lr=0.1), adamw]


def schedulers_of(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.lr_scheduler.LRScheduler]:
    return [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]


def batch_of(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, 30, (rows, 3), generator=generator)
    return ids, torch.randn(rows, 5, generator=generator, dtype=torch.float64)


class Plain:
    """The loop that everybody knows."""

    def __init__(self, case: dict) -> None:
        self.case, self.model = case, new_model()
        optimizers = optimizers_of(self.model)
        self.then = [*optimizers, *schedulers_of(optimizers)]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction=self.case["reduction"])

    def train(self, runs: range, rows: int) -> list[float]:
        accumulate, how = self.case["accumulate"], {"clip": self.case["clip"], "then": self.then}
        how["mean"] = self.case["reduction"] == "mean"
        losses = []
        for first in runs[::accumulate]:
            parts = [batch_of(first + k, rows + k) for k in range(accumulate)]
            losses += plain_window(self.model, self.loss, parts, lambda batch: len(batch[0]), **how)
        return losses


def grid_of(data: int, pipeline: int) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
    """This worker's row and stage, and what an Executor across the rows takes, and a Pipe along one."""
    if data * pipeline == 1:
        return 0, 0, {"comm_mode": None}, {}
    grid = ab.job().grid(data=data, pipeline=pipeline)
    across = {"comm_mode": "AllReduce", "process_group": grid.data_group}
    along = {"process_group": grid.pipeline_group} if pipeline > 1 else {}
    return *divmod(ab.job().rank, pipeline), across, along


class Piped:
    """The same under an executor, on a grid of ``data`` x ``pipeline`` workers, in rows of the grid."""

    def __init__(self, case: dict, seed: int = 0) -> None:
        self.case, self.columns = case, case["data"]
        self.row, self.stage, across, along = grid_of(case["data"], case["pipeline"])
        model = new_model(seed=seed + self.row)  # the first row's is everyone's
        options = {name: case[name] for name in ("schedule", "checkpoint") if name in case}
        self.pipe = ab.Pipe(model, case["balance"], chunks=3, **({"schedule": "1F1B"} | options | along))
        optimizers = optimizers_of(self.pipe)
        reduction = case["reduction"]
        self.step = ab.TrainStep(
            self.pipe,
            lambda output, target: F.mse_loss(output, target, reduction=reduction),
            optimizers,
            reduction=reduction,
            scheduler=schedulers_of(optimizers),
            clip_grad_norm=case["clip"],
            accumulate=case["accumulate"],
            skip_nonfinite=case.get("skip_nonfinite", False),
        )
        self.executor = ab.Executor(
            {"train": self.step, "validate": ab.EvalStep(self.pipe, self.outputs)},
            timeout=60.0,
            served="replace",
            **across | ({"comm_mode": case["mode"]} if "mode" in case else {}),
        )

    def outputs(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        output = model(batch[0])
        return {"loss": F.mse_loss(output, batch[1]), "output": output}

    def shard(self, batch: tuple[Tensor, Tensor], run: int) -> tuple[Tensor | None, Tensor | None]:
        """Unequal shards: one row of the grid gets most, with three one none. Ranks pass only what they must."""
        rows = len(batch[0])
        sizes = [0] * self.columns
        sizes[run % self.columns] = rows - 2
        sizes[(run + 1) % self.columns] += 2
        start = sum(sizes[: self.row])
        x, target = (part[start : start + sizes[self.row]] for part in batch)
        if self.case.get("schedule") in ("ZBV", "Interleaved1F1B") or self.case["pipeline"] == 1:
            return x, target
        return (x, None) if self.stage == 0 else (None, target)

    def train(self, runs: range, rows: int) -> list[float]:
        losses = []
        for run in runs:
            batch = batch_of(run, rows + run % self.case["accumulate"])
            values = self.executor.run("train", self.shard(batch, run), fetch=["loss"] if run % 2 else None)
            assert list(values) == ["loss"]
            losses.append(values["loss"].item())
        return losses


def compare(piped: Piped, plain: Plain) -> float:
    """The largest distance of what this rank has, on servers or here, from the plain loop's."""
    expected = dict(plain.model.named_parameters(remove_duplicate=False))
    here = dict(piped.pipe.named_parameters())
    remote = piped.executor._remote
    if remote is not None and not piped.executor._closed:
        if dist.is_initialized():
            dist.barrier()  # by now everyone has pushed
        here |= {moved.name: remote.client.read_state(moved.name, moved.rule()).values for moved in remote.moved}
    return max([distance(value, expected[name]) for name, value in here.items()] or [0.0])


def train(cases: list[dict]) -> float:
    """The largest distance of losses and parameters from the plain loop's."""
    worst = []
    for case in cases:
        plain, piped = Plain(case), Piped(case)
        runs = range(STEPS * case["accumulate"])
        expected = plain.train(runs, 8)
        with piped.executor as executor:
            losses = piped.train(runs, 8)
            worst += [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
            x, target = batch_of(99, 6)
            values = executor.run("validate", (x, target))
            with torch.no_grad():
                output = plain.model(x)
            worst += [distance(values["output"], output), distance(values["loss"], F.mse_loss(output, target))]
            assert executor.engine("train") == "tape"
            statistics = executor.statistics()
            assert statistics.steps == STEPS
            assert statistics.runs == {"train": len(runs), "validate": 1}
            worst.append(compare(piped, plain))
        piped.pipe.close()
    dist.barrier()
    return max(worst)


def go_on(case: dict, path: str, runs: int, seed: int) -> dict:
    """Train and save; or, with another model and another split, go on from there."""
    piped = Piped(case, seed=seed)
    with piped.executor as executor:
        if not executor.resume(path):
            piped.train(range(runs), 8)
            executor.save(path)
        losses = piped.train(range(runs, runs + 4), 8)
        calls = piped.pipe.calls
    piped.pipe.close()
    return {"losses": losses, "calls": calls}


def skip(case: dict) -> list[Any]:
    """A step with NaN in it changes nothing, on the servers and on any stage; the next one counts.

    One rank is asked to stop; all see it after the same run.
    """
    plain, piped, stopping = Plain(case), Piped(case), list[bool]()
    with piped.executor as executor:
        for run, spoilt in enumerate([False, True, False]):
            x, target = piped.shard(batch_of(run, 8), run)
            if target is not None and spoilt:
                target[0, 0] = torch.nan
            if spoilt and dist.get_rank() == dist.get_world_size() - 1:
                executor.request_stop()
            executor.run("train", (x, target))
            stopping.append(executor.stopping)
        plain.train(range(1), 8)
        plain.train(range(2, 3), 8)
        assert executor.statistics().skipped_steps == 1
        worst = compare(piped, plain)
    piped.pipe.close()
    return [worst < 1e-12, stopping]


def places(case: dict) -> dict:
    """Where the parameters of this rank's stages live, and what cannot be."""
    piped = Piped(case)
    column = piped.executor._workers._group

    def again(**options: object) -> None:
        ab.Executor(piped.step, process_group=column, **options).close()

    with piped.executor as executor:
        homes = {route.parameter: str(route.place) for route in executor.routes()}
    for words, options in {
        "use consistency='bsp', or a Pipe in one process": {"comm_mode": "PS", "consistency": "ssp:1"},
        "routes= names '9.weight'": {"comm_mode": "PS", "routes": {"9.weight": "AllReduce"}},
        "shared by stages on several ranks": {"comm_mode": "AllReduce", "routes": {"1.weight": "PS", "6.weight": "PS"}},
    }.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            again(**options)
    again(comm_mode="Hybrid", routes={"3.bias": "PS", "6.bias": "PS"}, served="replace")  # said on every rank
    piped.pipe.close()
    return homes


def mistakes(case: dict) -> None:
    """What a grid refuses, on every rank, and goes on."""
    piped = Piped(case)
    x, target = batch_of(0, 4)
    executor = piped.executor
    stages = [piped.row * case["pipeline"] + stage for stage in range(case["pipeline"])]
    other = ab.EvalStep(nn.Linear(2, 2), lambda model, batch: {})
    other_batch = (x[piped.stage :], None)
    for kind, words, call in (
        (ValueError, "'loss' and 'grad_norm' only",
         lambda: executor.run("train", (x, target), fetch=["0"])),
        (ValueError, "one microbatch at a time", lambda: executor.run("validate", (x, target), fetch=["0"])),
        (ValueError, "takes batches (x, target)", lambda: executor.run("train", [x])),
        (ValueError if piped.stage else ab.PipelineError, "the ranks of a pipeline take the same batch",
         lambda: executor.run("train", other_batch)),
        (ValueError, f"of which {stages} are stages of one pipeline",
         lambda: ab.Executor({"train": piped.step}, comm_mode="AllReduce")),
        (ValueError, "'other' does not run on the ranks", lambda: ab.Executor({"train": piped.step, "other": other})),
    ):  # fmt: skip
        with pytest.raises(kind, match=re.escape(words)):
            call()
    before = piped.pipe.calls
    executor.run("train", (x, target))
    assert piped.pipe.calls - before in (0, 1)
    executor.close()
    piped.pipe.close()


PADDING = -100


def padded_batch(run: int) -> tuple[Tensor, Tensor]:
    """Rows of 1 to 4 tokens and of padding; every other batch ends with rows of padding alone."""
    ids = torch.randint(0, 30, (8, 4), generator=torch.Generator().manual_seed(run))
    lengths = torch.tensor([4, 1, 2, 1, 1, 3, 1 - run % 2, 1 - run % 2])
    return ids, ids.masked_fill(torch.arange(4) >= lengths[:, None], PADDING)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)


def weigh_tokens(data: int, pipeline: int) -> float:
    """The largest distance from the plain loop's of losses and parameters, where a loss is a mean over tokens."""
    row, _, across, along = grid_of(data, pipeline)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(30, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 30)).double()
    pipe = ab.Pipe(copy.deepcopy(plain), [2, 2], chunks=4, schedule="1F1B", **along)
    plain_sgd = torch.optim.SGD(plain.parameters(), lr=1.0)
    step = step_of(pipe, loss=token_loss, lr=1.0, accumulate=2, rows=lambda batch: (batch[1] != PADDING).sum())
    worst = []
    with ab.Executor({"train": step}, **across) as executor, pipe:
        for run in range(4):
            batches = [padded_batch(run * data + d) for d in range(data)]
            loss = executor.run("train", batches[row])["loss"]
            expected = token_loss(plain(torch.cat([x for x, _ in batches])), torch.cat([t for _, t in batches]))
            worst.append(distance(loss, expected))
            if run % 2:
                window = [padded_batch(i) for i in range((run - 1) * data, (run + 1) * data)]
                token_loss(plain(torch.cat([x for x, _ in window])), torch.cat([t for _, t in window])).backward()
                plain_sgd.step()
                plain_sgd.zero_grad()
        values = dict(plain.state_dict())
        worst += [distance(value, values[name]) for name, value in pipe.state_dict().items()]
    return max(worst)


# The tests.


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
        slow(3, 2, [3, 4], None, False),
        slow(1, 2, [4, 3], "PS", True),
        slow(2, 2, [3, 4], "Hybrid", False),
        slow(1, 3, [2, 2, 3], "PS", False),
    ],
)
def test_a_grid_of_pipelines_trains_as_the_plain_loop(
    data: int, pipeline: int, balance: list[int], mode: str | None, few: bool
):
    """Shards are unequal, and a row of the grid may have none; every rank learns the whole batch's loss."""
    served = {} if mode is None else {"mode": mode}
    chosen = [one | served for one in cases(data, pipeline, balance, few=few)]
    assert max(in_job(train, data * pipeline, chosen, servers=2 if served else 0)) < 1e-12


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    """What two workers with a server find, in one job."""
    return in_job(two_workers, 2, case(1, 2, [4, 3], mode="PS"), case(1, 2, [3, 4]), servers=1)


def two_workers(served: dict, other: dict) -> dict[str, Any]:
    tokens = weigh_tokens(1, 2), weigh_tokens(2, 1)
    return {"tokens": tokens, "places": places(served), "mistakes": mistakes(other), "overflow": overflow()}


def test_tokens_weigh_microbatches_and_runs_of_padded_batches(on_two: list[dict[str, Any]]):
    """In a pipe, across ranks, and on several workers."""
    assert max(weigh_tokens(1, 1), *(one for rank in on_two for one in rank["tokens"])) < 1e-12


@pytest.mark.slow
def test_tokens_weigh_microbatches_and_runs_of_padded_batches_on_a_grid():
    assert max(in_job(weigh_tokens, 4, 2, 2)) < 1e-12


def test_a_step_with_nan_is_passed_over_and_a_stop_seen_on_servers_and_all_stages():
    chosen = case(2, 2, [1, 6], mode="PS", skip_nonfinite=True)
    assert in_job(skip, 4, chosen, servers=1) == [[True, [False, True, True]]] * 4


class Scaled(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaled.factor


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled.apply(x)


def overflow() -> tuple[list[bool], str, int]:
    """Of a step that is not finite on the first stage alone: are parameters as before, the error, and the seed."""
    engine.LATE = {"cpu"}  # as on a GPU, where a process alone does not wait
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Overflow(), nn.Linear(5, 5))
    with ab.Pipe(model, [2, 1], chunks=2, process_group=ab.job().grid(1, 2).pipeline_group) as pipe:
        # As a script in one process has it: the other rank's parameters are left to that rank.
        adam = torch.optim.Adam(model.named_parameters(), fused=True)
        step = ab.TrainStep(pipe, F.mse_loss, adam, clip_grad_norm=1.0)
        assert adam.param_groups[0]["param_names"] == [name for name, _ in pipe.named_parameters()]
        with ab.Executor(step, None, timeout=60.0, seed=7) as executor:
            executor.run(batch=(torch.ones(4, 5), torch.ones(4, 5)))
            before = [parameter.detach().clone() for parameter in pipe.parameters()]
            Scaled.factor = math.inf
            with pytest.raises(ab.NonFinite) as caught:
                executor.run(batch=(torch.ones(4, 5), torch.ones(4, 5)))
            same = list(map(torch.equal, before, pipe.parameters()))
            return same, str(caught.value).partition(" hold")[0], torch.initial_seed()


def test_a_step_that_is_not_finite_on_one_stage_updates_no_other(on_two: list[dict[str, Any]]) -> None:
    first, last = (rank["overflow"] for rank in on_two)
    assert first == [[True, True], "the gradients of 0.weight, 0.bias", 7]
    # A loader that shuffles draws as on the first rank: one has the inputs of a batch, the other its targets.
    assert last == [[True, True], "the gradients of parameters on another rank (or their norm is too large)", 7]


def test_each_stage_has_its_own_parameters_on_the_servers_and_shared_ones_stay_with_the_ranks(on_two):
    first, last = (rank["places"] for rank in on_two)
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
WINDOWED = {"clip": 0.1, "accumulate": 3}


def unsplit(seed: int, mode: str | None = None, **options: Any) -> ab.Executor:
    """An ordinary step of the unsplit model."""
    model = new_model(seed=seed)
    optimizers = optimizers_of(model)
    loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])  # noqa: E731
    step = ab.TrainStep(model, loss, optimizers, scheduler=schedulers_of(optimizers), **options)
    return ab.Executor({"train": step, "validate": ab.EvalStep(model, lambda model, batch: {})}, mode)


def losses_of(executor: ab.Executor, runs: range, accumulate: int = 1) -> list[float]:
    return [executor.run("train", batch_of(run, 8 + run % accumulate))["loss"].item() for run in runs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (case(1, 2, [3, 4], **WINDOWED), case(1, 2, [5, 2], schedule="GPipe", **WINDOWED)),
        (case(2, 2, [2, 5], mode="Hybrid", **WINDOWED), case(1, 3, [3, 2, 2], mode="Hybrid", **WINDOWED)),
        (case(2, 2, [3, 4], **WINDOWED), case(3, 1, [3, 4], **WINDOWED)),
    ],
    ids=str,
)
def test_a_checkpoint_of_one_split_is_loaded_by_another_and_by_none(saved: dict, loaded: dict, tmp_path: Path):
    def train(case: dict, seed: int) -> list[dict]:
        size, servers = case["data"] * case["pipeline"], int("mode" in case)
        return in_job(go_on, size, case, str(tmp_path / "run"), RUNS, seed, servers=servers)

    expected, resumed = train(saved, 0), train(loaded, 77)
    for one in resumed:
        assert one["losses"] == pytest.approx(expected[0]["losses"], rel=1e-11)
    with unsplit(99, saved.get("mode"), clip_grad_norm=0.1, accumulate=3) as executor:
        executor.load(tmp_path / "run")
        assert losses_of(executor, range(RUNS, RUNS + 4), 3) == pytest.approx(expected[0]["losses"], rel=1e-11)
    if saved["data"] == loaded["data"]:
        assert resumed[0]["calls"] == expected[0]["calls"]


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


def test_options_that_no_pipe_supports_are_refused(caplog: pytest.LogCaptureFixture):
    pipe = ab.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=3)
    batch = torch.ones(3, 2), torch.ones(3, 2)
    with ab.Executor(step_of(pipe, loss=F.mse_loss), engine="graph") as executor, pipe:
        assert "its engine is the tape" in caplog.text
        executor.run(batch=batch)
        assert executor.engine() == "tape"
        with pytest.raises(ValueError, match="one number per microbatch"):
            ab.Executor(step_of(pipe, loss=lambda y, t: y)).run(batch=batch)
        with torch.no_grad(), pytest.raises(ValueError, match="gradients are switched off"):
            executor.run(batch=batch)
        with pytest.raises(ValueError, match="does not depend on any parameter"):
            ab.Executor(step_of(pipe, loss=lambda y, t: F.mse_loss(y.detach(), t))).run(batch=batch)
        assert executor.step == 1
        targets = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
        some = step_of(pipe, loss=lambda y, t: F.mse_loss(y, t) if t.any() else y.new_zeros(()))
        ab.Executor(some).run(batch=(batch[0], targets))  # the loss of one microbatch may be constant


def test_a_pipe_inside_the_model_of_a_step_is_not_alone(monkeypatch: pytest.MonkeyPatch):
    """Its gradients are shared as all others; a warning would be an error here."""
    pipe = ab.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    with ab.Executor(step_of(nn.Sequential(pipe, nn.Linear(2, 1)))) as executor, pipe:
        monkeypatch.setenv("WORLD_SIZE", "2")
        executor.run(batch=torch.ones(3, 2))


def test_a_pipe_that_an_executor_only_evaluates_is_alone_where_a_loop_trains_it(monkeypatch: pytest.MonkeyPatch):
    pipe, x = ab.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1]), torch.ones(3, 2)
    with pipe, ab.Executor({"look": look_of(pipe)}) as executor:
        monkeypatch.setenv("WORLD_SIZE", "2")
        executor.run("look", batch=x)
        with pytest.warns(UserWarning, match="each worker trains a model of its own"):
            pipe.step(x, x, loss=F.mse_loss)


class Drops(nn.Module):
    """Drops in train mode, between its layers."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x), 0.5, self.training))


def evaluate_between(workers: int, path: str) -> None:
    """The code around the cut, inside the model and inside its ``first``, drops."""
    model, batch = Drops(nn.Sequential(nn.Linear(5, 5), Drops(nn.Linear(5, 5)))), batch_of(0, 8)[1].float()
    _, _, _, along = grid_of(1, workers)
    with ab.Pipe(ab.pipeline.split(model, ["first.1.second"], example=batch), [1, 1], **along) as pipe:
        look = ab.EvalStep(pipe, lambda model, batch: {"y": model(batch[0])})
        steps: dict[str, Any] = {"train": step_of(pipe, loss=F.mse_loss), "look": look}
        model.first[1].training = False
        before = [module.training for module in model.modules()]
        with ab.Executor(steps) as executor:
            executor.run("train", (batch, batch))
            executor.run("look", (batch, batch))
            assert [module.training for module in model.modules()] == before
            assert pipe.training
            executor.save(path)
            model.training, model.first[1].training = False, True
            executor.load(path)
            assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("workers", [1, slow(2)])
def test_modules_around_a_cut_have_their_modes_back(workers: int, tmp_path: Path):
    path = str(tmp_path / "saved")
    if workers > 1:
        in_job(evaluate_between, workers, workers, path)
    else:
        evaluate_between(1, path)
