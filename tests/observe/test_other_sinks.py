"""TensorBoard and Prometheus show the metrics of a training run, and the dashboard queries existing names."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_metrics import fetch
from torch import nn

import anabranch as ab
from anabranch.experts import DirectoryServer
from anabranch.observe import directory_metrics, expert_metrics, parameter_metrics, serve_metrics

DASHBOARD = Path(__file__).parents[2] / "examples/cluster/grafana.json"


def make_step() -> ab.TrainStep:
    model = nn.Linear(3, 1)
    return ab.TrainStep(
        model,
        lambda m, b: (m(b["x"]).square().mean(), {"largest": m(b["x"]).max()}),
        torch.optim.SGD(model.parameters(), lr=0.5),
    )


BATCH = {"x": torch.ones(4, 3)}


def test_prometheus_sees_the_latest_numbers(tmp_path: Path) -> None:
    sink = ab.observe.PrometheusSink()
    assert sink.url is not None
    assert sink.url.startswith("http://127.0.0.1:")
    with ab.Executor(make_step(), sinks=[sink], engine="tape") as executor:
        for _ in range(3):
            loss = executor.run(batch=BATCH, fetch=["grad_norm"])["loss"].item()
        executor.save(tmp_path)  # an event hands the steps before it over
        seen = fetch(sink.url)
    assert seen["anabranch_training_steps_total"] == 3
    assert seen['anabranch_training_loss{step=""}'] == pytest.approx(loss)
    assert seen['anabranch_training_learning_rate{group="0",step=""}'] == 0.5
    assert seen['anabranch_training_events_total{event="save"}'] == 1
    assert seen['anabranch_training_steps_per_second{step=""}'] > 0
    assert 'anabranch_training_gradient_norm{step=""}' in seen
    assert 'anabranch_training_output{name="largest",step=""}' in seen
    with pytest.raises(OSError, match="refused"):
        fetch(sink.url)


def test_the_steps_of_several_and_their_groups_are_labels() -> None:
    sink = ab.observe.PrometheusSink()
    try:
        sink.scalars(7, {"a/loss": 1.0, "b/loss": 2.0, "b/learning_rate/1": 0.1, "learning_rate/0": 0.2, "b/x/y": 3.0})
        assert sink.url is not None
        seen = fetch(sink.url)
    finally:
        sink.close()
    assert seen['anabranch_training_loss{step="b"}'] == 2
    assert seen['anabranch_training_learning_rate{group="1",step="b"}'] == 0.1
    assert seen['anabranch_training_learning_rate{group="0",step=""}'] == 0.2
    assert seen['anabranch_training_output{name="x/y",step="b"}'] == 3


def test_other_ranks_do_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sink = ab.observe.PrometheusSink(port=1)  # which nobody but root could take
    assert sink.url is None
    sink.close()


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        ab.observe.PrometheusSink(port=taken.getsockname()[1])


def test_the_sinks_are_sinks() -> None:
    sink = ab.observe.PrometheusSink()
    assert isinstance(sink, ab.observe.Sink)
    sink.close()


@pytest.mark.slow
def test_tensorboard_reads_the_written_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    code = (
        "import sys, torch; sys.path.append('..'); import anabranch as ab\n"
        "from test_other_sinks import BATCH, make_step\n"
        "from anabranch.executor.observing import sinks; sinks._EVERY = 600.0\n"
        "sink = ab.observe.TensorBoardSink(sys.argv[1]); assert isinstance(sink, ab.observe.Sink)\n"
        "with ab.Executor(make_step(), sinks=[sink], engine='tape') as executor:\n"
        "    losses = [executor.run(batch=BATCH)['loss'].item() for _ in range(3)]; executor.save(sys.argv[2])\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "read = EventAccumulator(sys.argv[1]); read.Reload()\n"
        "found = [(one.step, one.value) for one in read.Scalars('loss')]\n"
        "assert [step for step, _ in found] == [1, 2, 3], found\n"
        "assert torch.allclose(torch.tensor([v for _, v in found]), torch.tensor(losses))\n"
        "assert any(tag.startswith('events/save') for tag in read.Tags()['tensors']), read.Tags()\n"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "runs"), str(tmp_path / "saved")]
    done = subprocess.run(
        arguments, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_tensorboard_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'anabranch\[tensorboard\]'"):
        ab.observe.TensorBoardSink(tmp_path)


UNASKED = """
import logging, sys
import anabranch as ab
captures = "sympy" in sys.modules
from anabranch import checkpoint

ab.observe.PrometheusSink, ab.observe.TensorBoardSink, ab.Executor
checkpoint.read_newest("no")
extras = "tensorboard", "prometheus_client", "google.protobuf", "fsspec"
print([name for name in extras if name in sys.modules], captures)
logging.getLogger("anabranch.executor").warning("look")
"""


@pytest.mark.slow
def test_a_process_that_imports_anabranch_has_no_extras_in_it_and_a_silent_logger() -> None:
    done = subprocess.run([sys.executable, "-c", UNASKED], capture_output=True, text=True, timeout=200, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[] False", "")


def test_a_directory_exports_its_counters() -> None:
    with DirectoryServer() as server, serve_metrics(":0", lambda: directory_metrics(server)) as url:
        ab.Directory(server.endpoint).announce(["ffn.0"], "unix:/run/experts", ttl=30.0)
        assert fetch(url)['anabranch_requests_total{verb="directory.announce"}'] == 1


# Names.


def every_metric() -> list[Any]:
    """All that a job can show, each family with something in it."""
    sink = ab.observe.PrometheusSink()
    sink.event("save", {})
    sink.scalars(
        1, dict.fromkeys(["loss", "grad_norm", "learning_rate", "steps_per_second", "rows_per_second", "other"], 1.0)
    )
    sink.close()
    module = nn.Linear(4, 4)
    backend = ab.ExpertBackend("ffn.0", module, args_schema=[ab.TensorSpec(4)])
    with ab.ExpertServer([backend]) as experts, ab.ParameterServer() as shard:
        return [*sink._collect(), *expert_metrics(experts), *parameter_metrics(shard)]


def test_names_follow_prometheus() -> None:
    for metric in every_metric():
        assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name), metric.name
        assert not metric.name.endswith(("_total", "_count", "_sum")), f"{metric.name}: the kind says so"
        assert metric.documentation, metric.name
        words = metric.name.split("_")
        if "bytes" in words:  # the unit comes last, before `_total`
            assert words[-1] == "bytes", metric.name
        if "seconds" in words:
            assert words[-1] == "seconds", metric.name


def test_the_dashboard_queries_existing_metrics() -> None:
    known = {f"{metric.name}{'_total' if metric.type == 'counter' else ''}": metric for metric in every_metric()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) > 8
    for query in queries:
        named = re.findall(r"anabranch_\w+", query)
        assert named, query
        for name in named:
            assert name in known, query
            by = re.search(r"by \(([^)]*)\)", query)
            for label in by[1].split(", ") if by else ():
                assert label in {*known[name]._labelnames, "instance", "job"}, query
            if known[name].type == "counter":
                assert f"rate({name}[" in query, f"{query}: a counter is looked at by its rate"
