"""``Executor.trace``: the next steps as one file, and nothing once they are over."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.deadline import Deadline
from anabranch.executor.observing import run_trace
from anabranch.executor.observing.run_trace import RunTrace
from anabranch.pipeline import Pipe
from anabranch.record import spans
from anabranch.transport import Client, Request, Server, Verb
from traces import Trace, check_valid
from waiting import join

BATCH = {"x": torch.ones(4, 2), "y": torch.zeros(4, 1)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def step_of(model: nn.Module | None = None) -> ab.TrainStep:
    model = nn.Linear(2, 1) if model is None else model
    return ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("engine", "names"), [("tape", ["train", "forward", "backward", "optimizer"]), ("graph", ["train", "graph"])]
)
def test_so_many_steps_are_recorded_and_then_none(engine: str, names: list[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with ab.Executor({"train": step_of()}, engine=engine) as executor:
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


def test_nothing_is_recorded_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("the clock was read for a span")

    monkeypatch.setattr(spans, "monotonic_ns", refuse)
    with ab.Executor({"train": step_of()}) as executor:
        executor.run("train", BATCH)
    assert list(tmp_path.iterdir()) == []


def test_a_with_block_records_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with ab.Executor({"train": step_of()}, engine="tape") as executor:
        executor.run("train", BATCH)
        with executor.trace(path):
            executor.run("train", BATCH)
            executor.run("train", BATCH)
            assert not path.exists()
        trace = check_valid(path)
        assert not spans.begin()
        executor.run("train", BATCH)
        with executor.trace(tmp_path / "second.json"):  # the first has ended
            pass
    assert [event["args"]["step"] for event in trace.spans(category="step")] == [2, 3]
    assert (trace.other["first_step"], trace.other["last_step"], trace.other["complete"]) == (1, 3, True)


def test_a_with_ends_before_its_block_where_its_steps_do(tmp_path: Path) -> None:
    with ab.Executor({"train": step_of()}, engine="tape") as executor:
        with executor.trace(tmp_path / "out.json", steps=1):
            executor.run("train", BATCH)
            executor.trace(tmp_path / "next.json")  # goes on behind the block, to the end
        executor.run("train", BATCH)
    assert len(check_valid(tmp_path / "out.json").spans(category="step")) == 1
    assert len(check_valid(tmp_path / "next.json").spans(category="step")) == 1


def test_a_with_block_that_raises_writes_its_trace_so_far(tmp_path: Path) -> None:
    with ab.Executor({"train": step_of()}, engine="tape") as executor:
        with pytest.raises(KeyError), executor.trace(tmp_path / "out.json"):  # noqa: PT012
            executor.run("train", BATCH)
            raise KeyError
        assert not spans.begin()
    trace = check_valid(tmp_path / "out.json")
    assert (len(trace.spans(category="step")), trace.other["complete"]) == (1, False)


def test_closing_an_executor_early_writes_its_trace_so_far(tmp_path: Path) -> None:
    with ab.Executor({"train": step_of()}, engine="tape") as executor:
        executor.trace(tmp_path / "out.json", steps=30)
        executor.run("train", BATCH)
    trace = check_valid(tmp_path / "out.json")
    assert len(trace.spans("train")) == 1
    assert trace.other["complete"] is False


def test_wrong_arguments_are_refused_at_the_call(tmp_path: Path) -> None:
    with ab.Executor({"train": step_of()}) as executor:
        for steps, kind in ((0, ValueError), (-3, ValueError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(kind, match="steps is a number of optimizer steps"):
                executor.trace(tmp_path / "out.json", steps=steps)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="the folder .* does not exist"):
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
    with (
        Server([double]) as server,
        Client() as client,
        ab.Executor({"train": step_of()}, engine="tape") as executor,
    ):
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


def test_several_requests_at_once_lie_side_by_side_and_their_wait_names_the_servers(tmp_path: Path) -> None:
    meet = threading.Barrier(2)

    def answer(call: ab.transport.Call) -> None:
        meet.wait(50)
        call.reply()

    with (
        Server([Verb("pull", answer)]) as one,
        Server([Verb("pull", answer)]) as other,
        Client() as client,
        ab.Executor({"train": step_of()}, engine="tape") as executor,
    ):
        executor.trace(tmp_path / "out.json", steps=1)
        client.gather([Request(server.endpoint, "pull") for server in (one, other)], Deadline.after(50.0))
        executor.run("train", BATCH)
    trace = check_valid(tmp_path / "out.json")
    assert {trace.place(event)[1] for event in trace.spans("pull", category="crossing")} == {"requests", "requests 2"}
    assert {*trace.spans("wait")[0]["args"]["peer"].split(", ")} == {one.endpoint, other.endpoint}
    assert len(trace.arrows) == 4


def test_stages_of_a_pipe_have_their_actions_and_arrows_for_their_messages(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    pipe = Pipe(model, balance=[1, 1], chunks=2, checkpoint="never")
    step = ab.TrainStep(pipe, nn.MSELoss(), torch.optim.SGD(pipe.parameters(), lr=0.1))
    with ab.Executor({"train": step}) as executor:
        executor.trace(tmp_path / "out.json", steps=1)
        executor.run("train", (BATCH["x"], BATCH["y"]))
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


class _Everyone:
    """Ranks that are threads."""

    def __init__(self, rank: int, size: int, shelf: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self._size, self._shelf, self._barrier = rank, size, shelf, barrier

    def all_gather_bytes(self, data: bytes, *, operation: str) -> list[bytes]:
        self._barrier.wait(50)
        self._shelf[self.rank] = data
        self._barrier.wait(50)
        return list(self._shelf)

    def gather_bytes(self, data: bytes, *, operation: str) -> list[bytes]:
        everything = self.all_gather_bytes(data, operation=operation)
        return everything if self.rank == 0 else []


def _on_ranks(work: Callable[[_Everyone], object], size: int = 2) -> list[object]:
    shelf, barrier, results = [b""] * size, threading.Barrier(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(_Everyone(rank, size, shelf, barrier))  # type: ignore[call-overload]
        except Exception as error:  # noqa: BLE001 - for the test
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    join(*threads)
    return list(results)


def test_ranks_on_machines_of_their_own_state_by_how_much_their_clocks_may_be_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(["first", "second"])
    monkeypatch.setattr("anabranch.record.trace.host", lambda: next(hosts))

    def work(everyone: _Everyone) -> None:
        trace = RunTrace(tmp_path / "out.json", 1, first=0, everyone=everyone)
        trace.finish(1)

    assert _on_ranks(work) == [None, None]
    trace: Trace = check_valid(tmp_path / "out.json")
    first, second = trace.other["processes"]
    assert [first["name"], second["name"]] == ["worker 0", "worker 1"]
    assert first["offset_error_us"] == 0
    assert abs(second["offset_us"]) <= second["offset_error_us"]  # it is the same clock, and was found to be
    assert second["offset_error_us"] > 0


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ((2, 0), ("refused on rank 1: steps is", "steps is a number")),
        ((2, 3), ("the same number of steps", "the same number of steps")),
    ],
)
def test_a_refusal_on_one_rank_is_a_refusal_on_all(steps: Sequence[int], words: Sequence[str], tmp_path: Path) -> None:
    def work(everyone: _Everyone) -> object:
        return RunTrace(tmp_path / "out.json", steps[everyone.rank], first=0, everyone=everyone)

    errors = _on_ranks(work)
    for error, word in zip(errors, words, strict=True):
        assert isinstance(error, ValueError)
        assert word in str(error)
    assert not spans.begin()


def test_only_rank_0_needs_the_folder(tmp_path: Path) -> None:
    def work(everyone: _Everyone) -> None:
        path = tmp_path / "out.json" if everyone.rank == 0 else tmp_path / "absent" / "out.json"
        RunTrace(path, 1, first=0, everyone=everyone).finish(1)

    assert _on_ranks(work) == [None, None]
    assert check_valid(tmp_path / "out.json").processes == ["worker 0", "worker 1"]


def test_a_long_trace_keeps_its_first_spans_and_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_trace.spans, "CAPACITY", 6)
    with ab.Executor({"train": step_of()}, engine="tape") as executor:
        executor.trace(tmp_path / "out.json", steps=50)
        for _ in range(50):
            executor.run("train", BATCH)
    trace = check_valid(tmp_path / "out.json")
    kept = ["train", "forward", "backward", "optimizer", "forward", "backward"]
    assert [event["name"] for event in trace.spans()] == kept
    assert trace.other["dropped_spans"] == {trace.processes[0]: 50 * 4 - 6}
