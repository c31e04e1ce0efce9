"""The choice of cuts, the description of a pipe, the drawing of a schedule, and the simulated clock."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pipeline_models import LAYERS, Computes, skipping_model, stash_same
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from anabranch import Pipe, SkipError
from anabranch.pipeline import (
    Action,
    Kind,
    balance_by_size,
    balance_by_time,
    draw,
    make_schedule,
    save_picture,
    simulate,
)
from anabranch.pipeline.schedule import PHASES
from anabranch.pipeline.stage import balance
from anabranch.record.spans import Span, heard, on_fault_point
from anabranch.testing import FakeClock

_clock = FakeClock()


class Busy(nn.Module):
    """Takes its time on a clock that stands still otherwise."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Busy.apply(x, self.weight, self.seconds)


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.seconds = seconds
        _clock.advance(seconds)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        _clock.advance(2 * ctx.seconds)
        return grad, grad.sum(), None


def test_time_is_forward_and_backward_of_each_layer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(balance, "time", SimpleNamespace(perf_counter=_clock))
    model = nn.Sequential(Busy(0.006), Busy(0.002), Busy(0.002), Busy(0.002))
    assert balance_by_time(2, model, torch.randn(2, 3)) == [1, 3]


def test_size_counts_parameters_and_tensors_kept_for_backward():
    wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400, bias=False), nn.Linear(400, 4, bias=False), nn.Linear(4, 4))
    assert balance_by_size(2, wide, torch.randn(1, 4)) == [2, 2]
    sparse = nn.Sequential(
        Computes(torch.Tensor.to_sparse), Computes(lambda x: torch.sparse.mm(x, x.detach().to_dense()))
    )
    assert balance_by_size(2, sparse, torch.randn(4, 4)) == [1, 1]
    activations = nn.Sequential(*[nn.Tanh() for _ in range(6)])
    assert balance_by_size(2, activations, torch.randn(100, 10)) == [3, 3]
    assert balance_by_size(3, activations, torch.randn(100, 10)) == [2, 1, 3], "one in the middle has two ends"


def test_measuring_leaves_parameters_buffers_gradients_and_random_numbers_alone():
    model = nn.Sequential(*skipping_model(), nn.BatchNorm1d(5, dtype=torch.float64), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    sample = torch.randn(4, 5, dtype=torch.float64)
    state = torch.get_rng_state()
    for find in (balance_by_time, balance_by_size):
        assert sum(find(3, model, sample)) == LAYERS + 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("by", ["time", "size"])
def test_a_pipe_balances_itself_from_a_sample(by: str):
    sample = torch.randn(4, 5, dtype=torch.float64)
    with Pipe(skipping_model(), by, devices=["cpu", "cpu"], schedule="ZBV", sample=sample) as pipe:
        assert pipe(sample).shape == (4, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"balance": "luck"}, "got 'luck'"),
        ({"balance": "time", "devices": ["cpu"]}, "needs sample="),
        ({"balance": "time", "sample": torch.zeros(2, 5)}, "and devices="),
        ({"balance": "size", "devices": ["cpu"] * 12, "sample": torch.zeros(2, 5)}, "11 layers cannot make 12 stages"),
    ],
)
def test_a_balance_that_cannot_be_found_is_refused(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Pipe(skipping_model(), **arguments)


def test_a_pipe_refuses_skips_that_do_not_match():
    with pytest.raises(SkipError, match="'same' is stashed by '0' but no later module pops it"):
        Pipe(nn.Sequential(stash_same(), nn.Tanh()), [1, 1])


def test_a_pipe_describes_stages_skips_and_after_a_call_times_and_bytes():
    with Pipe(skipping_model(), [4, 4, 3], chunks=2, schedule="1F1B") as pipe:
        before = pipe.describe().splitlines()
        assert before[1].split()[:5] == ["stage", "rank", "device", "layers", "parameters"]
        assert "0 to 3" in before[2]
        assert "both to stage 1" in before[2]
        assert "long to stage 2" in before[2]
        assert " ms" not in before[2]
        x = torch.randn(4, 5, dtype=torch.float64)
        pipe.step(x, x, loss=F.mse_loss)
        after = pipe.describe().splitlines()
        assert all(line.count(" ms") == 2 for line in after[2:])


@given(st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"]), st.integers(1, 6))
def test_every_action_is_in_the_drawing_and_in_the_picture(tmp_path_factory: pytest.TempPathFactory, name: str, m: int):
    schedule = make_schedule(name, 4, m)
    text = draw(schedule)
    for rank, actions in enumerate(schedule.actions):
        row = text.splitlines()[rank + 1]
        for action in actions:
            stage = str(action.stage) if schedule.stages > schedule.ranks else ""
            assert f"{stage}{action.kind.value}{action.microbatch}" in row
    path = tmp_path_factory.mktemp("picture") / "schedule.svg"
    save_picture(schedule, path)
    titles = [element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == sum(map(len, schedule.actions))


def test_a_drawing_of_seconds_shows_every_action():
    schedule = make_schedule("1F1B", 2, 3)
    seconds = {Kind.F: 0.03, Kind.B: 0.06}
    assert draw(schedule, seconds).splitlines()[1:] == draw(schedule).splitlines()[1:]
    assert "holds 2" in draw(schedule, {}), "actions that take no time"


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_stages_run_at_the_same_time(checkpoint: str):
    """Two stages wait for one another: one after the other, neither would end. The order on each is tested below."""
    pairs = [("forward.0.1", "forward.1.0"), ("backward.0.1", "backward.1.0")]
    barriers = [threading.Barrier(2, timeout=20.0) for _ in pairs]
    together = {f"pipeline.{point}": one for pair, one in zip(pairs, barriers, strict=True) for point in pair}

    def meet(point: str) -> None:
        if point in together:
            together[point].wait(timeout=20.0)

    x, model = torch.zeros(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Pipe(model, [1, 1], chunks=2, checkpoint=checkpoint) as pipe, on_fault_point(meet):
        pipe.step(x, x, loss=F.mse_loss)


class Hold(nn.Module):
    """Notes what it keeps for backward."""

    def __init__(self, alive: list[StorageWeakRef]) -> None:
        super().__init__()
        self.alive = alive
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return _Hold.apply(self.linear(x), self.alive)


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alive):
        kept = torch.empty(1, dtype=torch.uint8)
        alive.append(StorageWeakRef(kept.untyped_storage()))
        ctx.save_for_backward(kept)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors[0].dtype == torch.uint8
        return grad, None


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZB1P", "ZBV"])
def test_every_rank_runs_its_schedule_in_order_on_its_own_thread_and_holds_what_the_simulator_says(
    name: str, checkpoint: str
):
    stages, m, ranks = (6 if name in ("Interleaved1F1B", "ZBV") else 3), 5, 3
    rank_of = make_schedule(name, stages, m, ranks=ranks).rank_of
    alive: list[list[StorageWeakRef]] = [[] for _ in range(ranks)]
    most = [0] * ranks
    kinds = {phase: kind for kind, phase in PHASES.items()}
    ran: dict[int, list[Action]] = {}

    def look(span: Span) -> None:
        if not (facts := span[6]) or span[1] != "compute":
            return
        stage, microbatch = facts["stage"], facts["microbatch"]
        ran.setdefault(threading.get_ident(), []).append(Action(kinds[span[0]], stage, microbatch))  # type: ignore[arg-type]
        rank = rank_of[stage]  # type: ignore[index]
        most[rank] = max(most[rank], sum(not one.expired() for one in alive[rank]))

    model = nn.Sequential(*[Hold(alive[rank]) for rank in rank_of])
    x = torch.zeros(m, 2)
    pipe = Pipe(model, [1] * stages, devices=["cpu"] * ranks, chunks=m, checkpoint=checkpoint, schedule=name)
    with pipe, heard(look):
        pipe.step(x, x, loss=F.mse_loss)
    again = {(j, i) for j in range(stages) for i in range(m)} if checkpoint == "always" else set()
    schedule = make_schedule(name, stages, m, ranks=ranks).recomputing(again)
    assert tuple(most) == simulate(schedule).peak_activations
    assert sorted(map(str, ran.values())) == sorted(str(list(actions)) for actions in schedule.actions)
