"""``anabranch run --trace``: one file of all processes, however the job ends."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from jobs import Script

from anabranch.launch.job import traced
from launched import run, start_run
from traces import Trace, check_valid

STEPS = 4

_TRAINING = f"""
import torch
from torch import nn
import anabranch as ab


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))


def loss(model, batch):
    return (model(batch["ids"]) - batch["y"]).square().mean()


torch.manual_seed(0)
model = Model()
optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.table, model.head)]
step = ab.TrainStep(model, loss, optimizers)
with ab.Executor({{"train": step}}, comm_mode="Hybrid", engine="tape") as executor:
    for _ in range({STEPS}):
        executor.run("train", {{"ids": torch.randint(50, (8, 3)), "y": torch.ones(8, 1)}})
    if ab.job().rank == 1:
        raise RuntimeError("no more milk")
    executor.run("train", {{"ids": torch.randint(50, (8, 3)), "y": torch.ones(8, 1)}})
"""


def arrows(trace: Trace, name: str) -> Counter[tuple[str, str]]:
    """Processes between which a flow of spans of this name goes."""
    return Counter(
        (trace.place(source)[0], trace.place(target)[0])
        for source, target in trace.arrows
        if trace.at(source)[-1]["name"] == name
    )


@pytest.mark.slow
def test_a_job_that_fails_leaves_a_trace_of_all_its_processes_on_one_clock(script: Script, tmp_path: Path) -> None:
    path = script(_TRAINING)
    whole, logs = tmp_path / "whole.json", tmp_path / "logs"
    done = run("--workers", 2, "--servers", 1, "--trace", whole, "--log-dir", logs, path, patient=True)
    assert done.returncode == 1
    assert f"the trace: {whole}" in done.stderr
    assert not list(logs.glob(".spans-*"))

    trace = check_valid(whole)
    assert trace.processes == ["worker 0", "worker 1", "parameters 0"]
    for worker in ("worker 0", "worker 1"):
        steps = trace.spans("train", category="step", process=worker)
        assert len(steps) >= STEPS
        for name in ("forward", "backward", "optimizer"):
            found = trace.spans(name, process=worker)[:STEPS]
            assert all(s["ts"] <= f["ts"] <= s["ts"] + s["dur"] for s, f in zip(steps, found, strict=False))
        assert {event["args"]["peer"] for event in trace.spans("pull", process=worker)} == {"parameters 0"}
    waits = trace.spans("wait", process="worker 1")
    assert {event["args"]["peer"] for event in waits} == {"rank 0", "parameters 0"}
    assert all(event["args"]["bytes"] > 0 for event in trace.spans("all_reduce of gradients"))

    # Across both boundaries: what is served lies inside what asks, and who sums has an arrow from who came last.
    pairs = [(trace.at(source)[-1], trace.at(target)[-1]) for source, target in trace.arrows]
    pushed = [(asked, served) for asked, served in pairs if asked["name"] == "push" and asked["cat"] == "crossing"]
    assert len(pushed) >= 2 * STEPS
    for asked, served in pushed:
        assert served["cat"] == "serve"
        assert asked["ts"] <= served["ts"]
        assert served["ts"] + served["dur"] <= asked["ts"] + asked["dur"]
    workers = ("worker 0", "worker 1")
    assert set(arrows(trace, "pull")) == {
        pair for worker in workers for pair in ((worker, "parameters 0"), ("parameters 0", worker))
    }
    summed = arrows(trace, "all_reduce of gradients")
    assert summed.total() >= STEPS
    assert set(summed) <= {workers, workers[::-1]}


def test_a_job_that_is_interrupted_leaves_a_trace(script: Script, tmp_path: Path) -> None:
    path = script(
        """
        import time
        from anabranch.record import spans
        with spans.span("before", "compute"):
            pass
        with spans.span("sleeping", "compute"):
            print("ready", flush=True)
            time.sleep(600)
        """
    )
    out = tmp_path / "out.json"
    with start_run("--trace", out, path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() in ("ready", b"ready")
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    trace = check_valid(out)
    assert {"before", "sleeping"} == {event["name"] for event in trace.spans()}


def test_a_job_without_recorded_spans_is_reported_and_leaves_no_file(tmp_path: Path) -> None:
    told: list[str] = []
    with traced(tmp_path / "out.json", tmp_path, dict, told.append):
        pass
    assert list(tmp_path.iterdir()) == []
    assert len(told) == 1
    assert "no trace was written" in told[0]


def test_a_full_disk_is_reported_and_does_not_change_the_job_s_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("anabranch.launch.job.write_trace", full)
    told: list[str] = []
    with traced(tmp_path / "out.json", tmp_path, dict, told.append) as environment:
        part = Path(next(iter(environment.values()))) / "worker-0.1.spans"
        part.write_text('{"process": "worker 0", "pid": 1, "host": "a", "began": 0}\n')
    assert list(tmp_path.iterdir()) == []
    assert told == [f"no trace was written to {tmp_path / 'out.json'}: No space left on device"]
