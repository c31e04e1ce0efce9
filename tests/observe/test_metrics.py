"""The page for Prometheus shows the counters of the servers, and ends with them."""

from __future__ import annotations

import signal
import sys
import urllib.request
from contextlib import suppress

import pytest
import torch
from torch import nn

from anabranch.errors import NonFinite, SchemaError
from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
from anabranch.observe import expert_metrics, parameter_metrics, serve_metrics
from anabranch.parameter_server import ParameterClient, ParameterServer
from anabranch.tensors import TensorSpec
from anabranch.transport import Client, Deadline, Request
from programs import Programs


def fetch(url: str) -> dict[str, float]:
    """The samples of a page, by name and labels."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


def test_an_expert_server_exports_its_counters() -> None:
    module = nn.Linear(4, 4)
    backend = ExpertBackend("ffn.0", module, torch.optim.SGD(module.parameters(), lr=0.1), args_schema=[TensorSpec(4)])
    with ExpertServer([backend]) as server, serve_metrics(":0", lambda: expert_metrics(server)) as url:
        assert url.startswith("http://127.0.0.1:")
        expert = RemoteExpert("ffn.0", server.endpoint)
        for _ in range(3):
            expert(torch.ones(2, 4)).sum().backward()
        with pytest.raises(NonFinite):
            expert(torch.full((1, 4), float("nan")))
        with Client() as client, suppress(SchemaError):
            client.call(Request(server.endpoint, "expert.forward", "ffn.0", schema=b"other"), Deadline.after(60.0))
        page = fetch(url)
    assert page['anabranch_requests_total{verb="expert.backward"}'] == 3
    assert page['anabranch_expert_rows_total{pool="ffn.0_forward"}'] == 6
    assert page['anabranch_expert_batches_total{pool="ffn.0_backward"}'] == 3
    assert page['anabranch_expert_updates_total{uid="ffn.0"}'] == 3
    assert page['anabranch_errors_total{kind="non_finite"}'] == 1
    assert page['anabranch_errors_total{kind="another_schema"}'] == 1
    assert sum(value for name, value in page.items() if name.startswith("anabranch_refused_values_total{peer=")) == 1
    # Three forwards of 32 bytes, three backwards of 64, and the NaN's 16.
    assert page["anabranch_received_bytes_total"] == 3 * 32 + 3 * 64 + 16
    assert page["anabranch_sent_bytes_total"] == 3 * 32 + 3 * 32
    assert page['anabranch_expert_queue_rows{pool="ffn.0_forward"}'] == 0
    with pytest.raises(OSError, match="refused"):
        fetch(url)


def test_a_shard_exports_its_counters() -> None:
    with (
        ParameterServer() as server,
        ParameterClient([server.endpoint]) as client,
        serve_metrics("127.0.0.1:0", lambda: parameter_metrics(server)) as url,
    ):
        client.init("bias", (2,), init=1.0)
        client.pull("bias")
        page = fetch(url)
    assert page['anabranch_requests_total{verb="pull"}'] == 1
    assert page["anabranch_connections"] >= 1


def test_the_command_line_serves_them(programs: Programs) -> None:
    arguments = ["serve", "experts", "--uids", "nop.0", "--module", "nop:4", "--metrics", ":0"]
    program = (
        "import sys; from anabranch.observe import metrics; from prometheus_client import exposition\n"
        "import prometheus_client; start = prometheus_client.start_http_server\n"
        "def told(*a, **k):\n"
        "    made = start(*a, **k); print(made[0].server_port, flush=True); return made\n"
        "prometheus_client.start_http_server = told\n"
        "from anabranch.cli import main; main()"
    )
    with programs.start(program, *arguments) as process:
        port = process.stdout.readline().strip()
        assert process.stdout.readline().startswith("listening on ")
        assert fetch(f"http://127.0.0.1:{port}/metrics")["anabranch_connections"] == 0
        process.send_signal(signal.SIGINT)  # as Ctrl-C does
        assert process.wait() == 0


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ModuleNotFoundError, match=r"anabranch\[metrics\]"), serve_metrics(":0", list):
        pass


@pytest.mark.parametrize("address", ["9100", "host:port", "host:70000", ""])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"), serve_metrics(address, list):
        pass
