"""Sinks get every step's numbers, late and cheaply, and cannot break a training."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.errors import PeerLost, RolledBack
from anabranch.executor.observing import sinks as sinks_module
from anabranch.executor.observing.sinks import SinkFeed
from anabranch.observe import PeerLostRecord, RestartRecord, SaveRecord, StepRecord
from plain_loop import mean_square
from toys import Kept, Seconds, look_of, step_of


class Broken(Kept):
    def scalars(self, step: int, values: dict[str, float]) -> None:
        super().scalars(step, values)
        raise OSError("no space left")


def make_step(**options: Any) -> ab.TrainStep:
    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(batch)
        return out.square().mean(), {"largest": out.abs().max(), "out": out}

    return step_of(nn.Linear(3, 1), loss=loss, lr=0.5, **options)


BATCH = torch.ones(4, 3)


@pytest.fixture
def _read_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps wait for the executor's end, however long they take."""
    monkeypatch.setattr(sinks_module, "_EVERY", math.inf)


@pytest.mark.usefixtures("_read_at_the_end")
def test_every_step_is_reported_with_its_scalars() -> None:
    kept = Kept()
    with ab.Executor(make_step(), sinks=[kept]) as executor:
        losses = [executor.run(batch=BATCH)["loss"].item() for _ in range(4)]
        last = executor.run(batch=BATCH, fetch=["grad_norm"])
        losses.append(last["loss"].item())
    assert [step for step, _ in kept.steps] == [1, 2, 3, 4, 5]
    assert [values["loss"] for _, values in kept.steps] == losses
    assert all(values["learning_rate"] == 0.5 for _, values in kept.steps)
    assert {"loss", "largest", "learning_rate"} == set(kept.steps[0][1])  # and not the output of four rows
    assert kept.steps[-1][1]["grad_norm"] == last["grad_norm"].item()  # where it was computed
    assert kept.steps[-1][1]["rows_per_second"] == pytest.approx(4 * kept.steps[-1][1]["steps_per_second"])
    assert kept.closed == 1


def test_steps_are_the_optimizers_and_several_have_names() -> None:
    kept = Kept()
    model, second = nn.Linear(3, 1), make_step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    step = ab.TrainStep(model, mean_square, optimizer, scheduler=scheduler, accumulate=2)
    second.optimizers[0].add_param_group({"params": [], "lr": 0.25})
    with ab.Executor({"a": step, "b": second}, sinks=[kept]) as executor:
        for _ in range(4):
            executor.run("a", BATCH)
        executor.run("b", BATCH)
    assert [step for step, _ in kept.steps] == [1, 2, 3]
    # Those that the step was taken with, not what the scheduler made of them.
    assert [values["a/learning_rate"] for _, values in kept.steps[:2]] == pytest.approx([0.5, 0.05])
    assert kept.steps[2][1]["b/learning_rate/1"] == 0.25


@pytest.mark.usefixtures("_read_at_the_end")
def test_a_sink_that_raises_is_dropped_and_training_continues() -> None:
    broken, kept = Broken(), Kept()
    executor = ab.Executor(make_step(), sinks=[broken, kept], engine="tape")
    for _ in range(3):
        executor.run(batch=BATCH)
    with pytest.warns(RuntimeWarning, match="Broken raised OSError: no space left") as told:
        executor.close()
    assert len(told) == 1
    assert (len(broken.steps), broken.closed) == (1, 1)
    assert len(kept.steps) == 3


def test_only_rank_0_feeds_sinks_unless_a_sink_asks_for_all() -> None:
    plain, asking = Kept(), Kept()
    asking.every_rank = True  # type: ignore[attr-defined]
    feed = SinkFeed([plain, asking], rank=1)
    feed.step(1, {"loss": 1.0}, 4)
    feed.close()
    assert (len(plain.steps), len(asking.steps)) == (0, 1)
    assert (plain.closed, asking.closed) == (1, 1)


def test_steps_are_read_once_a_second_and_of_quick_ones_some_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = sinks_module._read
    monkeypatch.setattr(sinks_module, "_read", lambda steps: read.append(len(steps)) or real(steps))
    for pace, looks, count in ((8, [8, 8, 4], 20), (2048, [201, 201], 4096)):
        clock, kept = Seconds(), Kept()
        feed = SinkFeed([kept], 0, clock)
        read.clear()
        for step in range(1, count + 1):
            clock.now += 1 / pace
            if feed.due:
                feed.step(step, {"loss": torch.tensor(float(step))}, 2)
        feed.close()
        assert read[:2] == looks[:2]
        assert sum(looks) - 2 <= len(kept.steps) <= sum(looks)
        assert [step for step, _ in kept.steps[:8]] == list(range(1, 9))
        first = next(values for _, values in kept.steps if "steps_per_second" in values)
        assert (first["steps_per_second"], first["rows_per_second"]) == (pace, 2 * pace)  # those left out counted


def test_slow_sinks_get_fewer_steps_and_cost_little() -> None:
    clock = Seconds()

    class Slow(Kept):
        def scalars(self, step: int, values: dict[str, float]) -> None:
            super().scalars(step, values)
            clock.now += 0.002

    slow = Slow()
    feed = SinkFeed([slow], 0, clock)
    for step in range(1, 10_001):
        clock.now += 0.01
        if feed.due:
            feed.step(step, {"loss": float(step)}, 1)
    feed.close()
    steps = [step for step, _ in slow.steps]
    assert steps == sorted(set(steps))
    assert 0.002 * len(steps) < 0.006 * clock.now
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 110


def test_an_event_is_delivered_after_the_steps_before_it() -> None:
    order: list[str] = []

    class Ordered(Kept):
        def scalars(self, step: int, values: dict[str, float]) -> None:
            order.append(f"step {step}")

        def event(self, name: str, facts: dict[str, object]) -> None:
            order.append(name)

    feed = SinkFeed([Ordered()], 0)
    feed.step(1, {"loss": 1.0}, 1)
    feed.event("save", {"step": 1})
    feed.close()
    assert order == ["step 1", "save"]


def test_sinks_are_closed_when_the_executor_cannot_be_made() -> None:
    kept = Kept()
    with pytest.raises(ValueError, match=r"devices= names 'nowhere'; the modules are: "):
        ab.Executor(make_step(), sinks=[kept], devices={"nowhere": "cpu"})
    assert kept.closed == 1


# ``executor.on``: functions called at steps, checkpoints, losses and restarts; and what ``fetch`` tells of a run.


def test_a_step_is_reported_after_it_was_taken_until_the_callback_is_taken_off() -> None:
    seen: list[StepRecord] = []
    with ab.Executor({"train": make_step(accumulate=2)}) as executor:
        with executor.on("step", seen.append) as subscription:
            executor.run("train", BATCH)
            assert not seen
            result = executor.run("train", BATCH, fetch=["out"])
            assert executor.step == 1
        subscription.remove()
        for _ in range(2):
            executor.run("train", BATCH)
    (record,) = seen
    assert (record.step, record.name, record.rows, record.learning_rates) == (1, "train", 4.0, (0.5,))
    assert record.values["loss"] is result["loss"]
    assert record.values["out"] is result["out"]
    assert record.seconds > 0


def test_a_callback_may_save_and_evaluate(tmp_path: Path) -> None:
    model, kept = nn.Linear(3, 1), Kept()
    with ab.Executor({"train": step_of(model), "validate": look_of(model)}, sinks=[kept]) as executor:
        saved: list[SaveRecord] = []
        executor.on("save", saved.append)
        executor.on("step", lambda record: (executor.run("validate", BATCH), executor.save(tmp_path / "c")))
        executor.run("train", BATCH)
    assert [(record.step, record.path) for record in saved] == [(1, tmp_path / "c")]
    ((name, facts),) = kept.events
    assert (name, facts["step"], facts["path"]) == ("save", 1, str(tmp_path / "c"))


def test_an_error_in_a_callback_goes_to_the_caller_with_a_note() -> None:
    def complain(record: StepRecord) -> None:
        raise KeyError("missing")

    with ab.Executor(make_step()) as executor:
        executor.on("step", complain)
        with pytest.raises(KeyError) as caught:
            executor.run(batch=BATCH)
        assert "complain" in caught.value.__notes__[0]
        assert executor.step == 1
        assert executor.statistics().runs == {"default": 1}


@pytest.mark.parametrize(
    ("event", "error", "record"),
    [
        (
            "peer_lost",
            PeerLost("gone", peer="rank 1", operation="sum"),
            PeerLostRecord(step=0, peer="rank 1", operation="sum", message="gone (peer rank 1, operation sum)"),
        ),
        (
            "restart",
            RolledBack("fewer", lost=3, peer="unix:/run/shard"),
            RestartRecord(step=0, peer="unix:/run/shard", lost=3),
        ),
    ],
)
def test_lost_peers_and_servers_that_came_back_with_less_are_reported_before_the_error_is_raised(
    event: Any, error: Exception, record: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    seen: list[object] = []
    with ab.Executor(make_step()) as executor:
        executor.on(event, seen.append)
        monkeypatch.setattr(executor._runners["default"], "run", fail)
        with pytest.raises(type(error)):
            executor.run(batch=BATCH)
    assert seen == [record]


def test_a_restarted_job_is_reported_behind_its_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RestartRecord] = []
    with ab.Executor(make_step()) as executor:
        executor.on("restart", seen.append)
        executor.run(batch=BATCH)
        executor.save(tmp_path)
        executor.load(tmp_path)
        assert not seen  # the first time it is not a restart
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with ab.Executor(make_step()) as executor:
        executor.on("restart", seen.append)
        assert not executor.resume(tmp_path / "nothing")
        assert not seen
        assert executor.resume(tmp_path)
    assert seen == [RestartRecord(step=1, attempt=2, path=tmp_path)]
