"""``executor.on``: functions called at steps, checkpoints, losses and restarts; and what ``fetch`` tells of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_sinks import BATCH, make_step
from torch import nn

import anabranch as ab
from anabranch.errors import PeerLost, RolledBack
from anabranch.observe import PeerLostRecord, RestartRecord, SaveRecord, StepRecord
from toys import Kept


def test_a_step_is_reported_after_it_was_taken() -> None:
    seen: list[StepRecord] = []
    with ab.Executor({"train": make_step(accumulate=2)}, engine="tape") as executor:
        executor.on("step", seen.append)
        executor.run("train", BATCH)
        assert not seen
        result = executor.run("train", BATCH, fetch=["out"])
        assert executor.step == 1
    (record,) = seen
    assert (record.step, record.name, record.rows, record.learning_rates) == (1, "train", 4.0, (0.5,))
    assert record.values["loss"] is result["loss"]
    assert record.values["out"] is result["out"]
    assert record.seconds > 0


def test_a_callback_can_be_taken_off() -> None:
    seen: list[int] = []
    with ab.Executor(make_step(), engine="tape") as executor:
        first = executor.on("step", lambda record: seen.append(1))
        with executor.on("step", lambda record: seen.append(2)):
            executor.run(batch=BATCH)
        first.remove()
        first.remove()
        executor.run(batch=BATCH)
    assert seen == [1, 2]


def test_a_callback_may_save_and_evaluate(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    train = ab.TrainStep(model, lambda m, b: m(b["x"]).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    validate = ab.EvalStep(model, lambda m, b: {"out": m(b["x"])})
    kept = Kept()
    with ab.Executor({"train": train, "validate": validate}, engine="tape", sinks=[kept]) as executor:
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

    with ab.Executor(make_step(), engine="tape") as executor:
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
            PeerLost("gone", peer="rank 1", operation="all_reduce"),
            PeerLostRecord(
                step=0, peer="rank 1", operation="all_reduce", message="gone (peer rank 1, operation all_reduce)"
            ),
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
    with ab.Executor(make_step(), engine="tape") as executor:
        executor.on(event, seen.append)
        monkeypatch.setattr(executor._runners["default"], "run", fail)
        with pytest.raises(type(error)):
            executor.run(batch=BATCH)
    assert seen == [record]


def test_a_restarted_job_is_reported_once_it_has_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RestartRecord] = []
    with ab.Executor(make_step(), engine="tape") as executor:
        executor.on("restart", seen.append)
        executor.run(batch=BATCH)
        executor.save(tmp_path)
        executor.load(tmp_path)
        assert not seen  # the first time it is not a restart
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with ab.Executor(make_step(), engine="tape") as executor:
        executor.on("restart", seen.append)
        assert not executor.resume(tmp_path / "nothing")
        assert not seen
        assert executor.resume(tmp_path)
    assert seen == [RestartRecord(step=1, attempt=2, path=tmp_path)]


def test_unknown_events_and_uncallable_values_are_refused() -> None:
    with ab.Executor(make_step(), engine="tape") as executor:
        with pytest.raises(ValueError, match="'peer_lost'"):
            executor.on("epoch", print)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="function of one record"):
            executor.on("step", None)  # type: ignore[call-overload]


# What fetch tells of a run.
