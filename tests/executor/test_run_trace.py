"""``Executor.trace``: the next steps as one file, and nothing once they are over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.deadline import Deadline
from anabranch.pipeline import Pipe
from anabranch.record import spans
from anabranch.transport import Client, Request, Server, Verb
from toys import in_job, step_of
from traces import check_valid

BATCH = torch.ones(4, 2)


def executor_of(*mode: Any, engine: Any = "tape") -> ab.Executor:
    return ab.Executor({"train": step_of(nn.Linear(2, 1))}, *mode, engine=engine)


@pytest.mark.parametrize(
    ("engine", "names"), [("tape", ["train", "forward", "backward", "optimizer"]), ("graph", ["train", "graph"])]
)
def test_so_many_steps_are_recorded_and_then_none(engine: str, names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with executor_of(engine=engine) as executor:
        executor.run("train", BATCH)
        executor.run("train", BATCH)  # the graph is there
        executor.trace(path, steps=3)
        for _ in range(3):
            assert not path.exists()
            executor.run("train", BATCH)
        trace = check_valid(path)
        assert not spans.begin()
        path.unlink()
        executor.run("train", BATCH)
    assert not path.exists()
    assert [event["name"] for event in trace.spans()] == names * 3
    assert [event["args"]["step"] for event in trace.spans(category="step")] == [3, 4, 5]
    assert (trace.other["first_step"], trace.other["last_step"], trace.other["complete"]) == (2, 5, True)
    assert trace.processes == [f"process {os.getpid()}"]


def test_an_early_end_writes_the_trace_so_far(tmp_path: Path) -> None:
    with executor_of() as executor:
        with pytest.raises(KeyError), executor.trace(tmp_path / "block.json"):  # noqa: PT012
            executor.run("train", BATCH)
            raise KeyError
        assert not spans.begin()
        executor.trace(tmp_path / "closed.json", steps=30)
        executor.run("train", BATCH)
    for name in ("block", "closed"):
        trace = check_valid(tmp_path / f"{name}.json")
        assert (len(trace.spans(category="step")), trace.other["complete"]) == (1, False)


def test_wrong_arguments_are_refused_at_the_call(tmp_path: Path) -> None:
    with executor_of() as executor:
        with pytest.raises(ValueError, match="in a folder that exists"):
            executor.trace(tmp_path / "absent" / "out.json")
        assert not spans.begin()
        executor.trace(tmp_path / "out.json")
        with pytest.raises(RuntimeError, match="is already recording a trace"):
            executor.trace(tmp_path / "other.json")
    with pytest.raises(RuntimeError, match="closed"):
        executor.trace(tmp_path / "out.json")


def _contains(outer: dict[str, float], inner: dict[str, float]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


def test_a_request_contains_its_serving_and_arrows_lead_there_and_back(tmp_path: Path) -> None:
    double = Verb("double", lambda call: call.reply([2 * tensor for tensor in call.tensors]))
    with Server([double]) as server, Client() as client, executor_of() as executor:
        executor.trace(tmp_path / "out.json", steps=1)
        client.call(Request(server.endpoint, "double", "users", tensors=[torch.ones(5)]), Deadline.after(50.0))
        executor.run("train", BATCH)
    trace = check_valid(tmp_path / "out.json")
    (asked,) = trace.spans("double users", category="crossing")
    (served,) = trace.spans("double users", category="serve")
    assert asked["args"] == {"peer": server.endpoint, "sent_bytes": 20, "received_bytes": 20}
    assert (served["args"]["received_bytes"], served["args"]["sent_bytes"]) == (20, 20)
    assert _contains(asked, served)
    (wait,) = trace.spans("wait")
    assert wait["args"] == {"peer": server.endpoint, "operation": "double users"}
    assert asked["ts"] <= wait["ts"] <= asked["ts"] + asked["dur"]
    names = [(trace.at(source)[0]["cat"], trace.at(target)[0]["cat"]) for source, target in trace.arrows]
    assert names == [("crossing", "serve"), ("serve", "crossing")]


def test_stages_of_a_pipe_have_their_actions_and_arrows_for_their_messages(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    pipe = Pipe(model, balance=[1, 1], chunks=2, checkpoint="never")
    with ab.Executor({"train": step_of(pipe, loss=nn.MSELoss())}) as executor:
        executor.trace(tmp_path / "out.json", steps=1)
        executor.run("train", (BATCH, torch.zeros(4, 1)))
    trace = check_valid(tmp_path / "out.json")
    computed = {
        (event["name"], event["args"]["stage"], event["args"]["microbatch"])
        for event in trace.spans(category="compute")
        if event["name"] != "optimizer"
    }
    assert computed == {(phase, j, i) for phase in ("forward", "backward") for j in (0, 1) for i in (0, 1)}
    ends = [(trace.at(source)[-1]["name"], trace.at(target)[-1]["name"]) for source, target in trace.arrows]
    assert len(ends) == 4
    for way in ("activations", "gradients"):
        assert {event["args"]["bytes"] for event in trace.spans(f"send {way}")} == {2 * 3 * 4}
    assert {event["args"]["peer"] for event in trace.spans("receive gradients")} == {"stage 1"}


def traced_by_two(folder: str) -> list[str]:
    """Both are refused what one of them must not say, and then trace as on machines of their own."""
    rank, said = ab.job().rank, []
    with pytest.MonkeyPatch.context() as patch, executor_of("AllReduce") as executor:
        patch.setattr("anabranch.record.trace.host", lambda: f"host {rank}")
        for steps in ((2, 0), (2, 3)):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                executor.trace(f"{folder}/out.json", steps=steps[rank])
            said.append(str(caught.value))
            assert not spans.begin()
        executor.trace(f"{folder}/{'absent/' * rank}out.json", steps=1)  # only rank 0 needs the folder
        executor.run("train", BATCH)
    return said


def test_ranks_are_refused_together_and_state_by_how_much_their_clocks_may_be_off(tmp_path: Path) -> None:
    first, second = in_job(traced_by_two, 2, str(tmp_path))
    assert "rank 1 cannot trace: steps is" in first[0]
    assert "steps is a number" in second[0]
    assert all("the same number of steps" in said[1] for said in (first, second))
    first, second = check_valid(tmp_path / "out.json").other["processes"]
    assert [first["name"], second["name"]] == ["worker 0", "worker 1"]
    assert first["offset_error_us"] == 0
    assert abs(second["offset_us"]) <= second["offset_error_us"]  # it is the same clock, and was found to be
    assert second["offset_error_us"] > 0
