"""Services of the command line: they say where they are, drain when told to stop, and leave nothing behind."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from anabranch.cli.experts import experts
from anabranch.cli.keys import keys
from anabranch.cli.serve import serve
from anabranch.errors import BoundaryError
from anabranch.experts import DirectoryServer, ExpertServer, RemoteExpert, expand_uids
from anabranch.experts.server.layers import make_backends_of, make_named_experts
from anabranch.tensors import TensorSpec
from anabranch.transport import Client
from programs import Program, Programs
from waiting import join

SERVE = "import sys; from anabranch.cli import main; sys.argv[0] = 'anabranch'; main()"


@contextmanager
def service(programs: Programs, *arguments: str) -> Iterator[tuple[Program, str]]:
    with programs.start(SERVE, "serve", *arguments) as process:
        line = process.stdout.readline()
        assert line.startswith("listening on ")
        yield process, line.removeprefix("listening on ").strip()


def test_sigterm_under_load_drains_saves_and_exits_with_0(tmp_path: Path, programs: Programs) -> None:
    errors: list[BaseException] = []
    done = [0]

    def load() -> None:
        with Client(retries=2) as client:
            expert = RemoteExpert("ffn.0", endpoint, client=client)
            try:
                while True:
                    expert(torch.ones(2, 8)).sum().backward()
                    done[0] += 1
                    if done[0] == 3:
                        busy.set()
            except BoundaryError as error:
                errors.append(error)

    busy = threading.Event()
    options = ("--uids", "ffn.[0:2]", "--module", "ffn:8", "--checkpoint-dir", str(tmp_path / "saved"))
    with (
        service(programs, "directory") as (names, directory),
        service(programs, "experts", *options, "--directory", directory) as (process, endpoint),
    ):
        thread = threading.Thread(target=load)
        thread.start()
        assert busy.wait(timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        join(thread)
        assert len(errors) == 1
        assert not Path(endpoint.removeprefix("unix:")).parent.exists()
        names.send_signal(signal.SIGTERM)
        assert names.wait() == 0
    assert (tmp_path / "saved" / "ffn.0").is_dir()


EXPERTS = ["experts", "--uids", "ffn.0"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([*EXPERTS, "--module", "nosuch"], 2, "not the name of a module to serve"),
        ([*EXPERTS, "--module", "fleet_modules:misspelt"], 2, "unexpected keyword argument 'arg_schema'"),
        ([*EXPERTS, "--module", "fleet_modules:number"], 2, "returns a mapping of ExpertBackend's arguments"),
        ([*EXPERTS, "--module", "fleet_modules:complete", "--lr", "0.1"], 2, "makes its own; set lr there"),
        ([*EXPERTS, "--module", "ffn:wide"], 2, "whole number above 0, such as ffn:64"),
        ([*EXPERTS, "--optimizer", "nosuch"], 2, "'nosuch'"),
        (["experts"], 2, "which experts?"),
        (["experts", "fleet_modules:make_backends", "--lr", "0.1"], 2, "--lr goes with --uids"),
        (["experts", "fleet_modules:make_backends", "--index", "2", "--count", "2"], 2, "out of range for --count 2"),
        (["experts", "fleet_modules:number"], 2, "returns a list of ExpertBackend, got int"),
        (["experts", "fleet_modules:nosuch"], 2, "cannot be loaded"),
        (["experts", "nosuch.py:make_backends"], 2, "cannot be loaded"),
        ([*EXPERTS, "--device", "abacus"], 2, "no expert can run on 'abacus' here"),
        ([*EXPERTS, "--listen", "tcp://127.0.0.1:0"], 2, "TCP without certificates"),
        ([*EXPERTS, "--listen", "here"], 2, "'here' is not an endpoint"),
        ([*EXPERTS, "--listen", "tcp://192.0.2.1:0", "--insecure"], 1, "cannot listen on tcp://192.0.2.1:0"),
        ([*EXPERTS, "--keys", "/nowhere", "--listen", "tcp://127.0.0.1:0"], 2, "holds no authority.pem"),
        ([*EXPERTS, "--directory", "here"], 2, "'here' is not an endpoint"),
        ([*EXPERTS, "--checkpoint-dir", "/proc/nowhere"], 1, "/proc/nowhere"),
        ([*EXPERTS, "--metrics", "9100"], 2, "metrics are served at HOST:PORT"),
        (["directory", "--listen", "unix:/nowhere/socket"], 2, "/nowhere does not exist"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_a_mistake_on_the_command_line_is_reported_without_a_traceback(
    arguments: list[str], code: int, says: str
) -> None:
    result = CliRunner().invoke(serve, arguments)
    assert result.exit_code == code
    assert isinstance(result.exception, SystemExit)
    assert says in " ".join(result.output.replace("│", " ").split())
    assert "anabranch: serving" not in result.output, "before it is refused"


def test_serve_says_what_it_serves_and_whether_it_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_once(
        make: Callable[[], Any], beside: Callable[[Any], AbstractContextManager[object]], **_: object
    ) -> None:
        with make() as server, beside(server):
            pass

    monkeypatch.setattr("anabranch.transport.server.service.serve_until_stopped", serve_once)
    for uids, text in [
        ("ffn.[0:2]", "ffn.0, ffn.1: new"),
        ("ffn.[0:2]", "ffn.0, ffn.1: restored"),
        ("ffn.[0:10]", f"{', '.join(f'ffn.{i}' for i in range(8))} and 2 more: 2 restored, 8 new"),
    ]:
        options = ["--uids", uids, "--module", "ffn:4", "--checkpoint-dir", str(tmp_path)]
        assert CliRunner().invoke(serve, ["experts", *options]).stderr == f"anabranch: serving {text}\n"
    assert CliRunner().invoke(serve, ["directory"]).stderr == "anabranch: serving a directory of experts\n"


def test_keys_are_made_by_the_command_line_and_never_overwritten(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(keys)
    folder = tmp_path / "keys"
    assert CliRunner().invoke(app, [str(folder)]).exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "authority.key",
        "authority.pem",
        "directory.pem",
        "experts.pem",
        "parameters.pem",
        "worker.pem",
    ]
    assert CliRunner().invoke(app, [str(folder)]).exit_code == 2


def test_patterns_expand() -> None:
    assert expand_uids("ffn.3") == ["ffn.3"]
    assert len(expand_uids("ffn.[0:4].[0:8]")) == 32
    for wrong in ("ffn", "ffn.[0:0]", "ffn.[a:b]", "ffn.01", ""):
        with pytest.raises(ValueError, match="ffn|uid"):
            expand_uids(wrong)


def test_named_experts_have_their_optimizer_size_and_arguments() -> None:
    (backend,) = make_named_experts("nop.0", "nop:4", max_batch_size=7)
    assert (backend.optimizer, backend.forward_pool.max_batch_size) == (None, 7)
    assert backend.schema.inputs == [TensorSpec(4)]
    first, second = make_named_experts("ffn.[0:2]", "ffn:8", "sgd", 0.25)
    assert isinstance(first.optimizer, torch.optim.SGD)
    assert first.optimizer.param_groups[0]["lr"] == 0.25
    assert first.module is not second.module
    assert isinstance(make_named_experts("ffn.0")[0].optimizer, torch.optim.Adam)
    (complete,) = make_named_experts("two.0", "fleet_modules:complete")
    assert isinstance(complete.optimizer, torch.optim.SGD)
    assert complete.scheduler is not None
    assert complete.forward_pool.max_batch_size == 11
    (other,) = make_named_experts("two.0", "fleet_modules:complete", "none", max_batch_size=5)
    assert (other.optimizer, other.forward_pool.max_batch_size) == (None, 5)


def test_a_function_of_a_file_or_module_makes_the_experts_of_one_server(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (backend,) = make_backends_of("fleet_modules:make_backends", 1, 3)
    assert backend.uid == "one.1.3"
    source = (Path(__file__).with_name("fleet_modules.py")).read_text()
    (tmp_path / "train.py").write_text(
        source + 'if __name__ == "__main__":\n    raise SystemExit("the whole script")\n'
    )
    with service(programs, "experts", f"{tmp_path}/train.py:make_backends", "--index", "1", "--count", "2") as found:
        process, endpoint = found
        x = torch.ones(2, 4)
        assert torch.equal(RemoteExpert("one.1.2", endpoint)(x).detach(), x)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def test_the_experts_that_a_directory_lists(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(experts)
    nowhere = f"unix:{tmp_path}/nobody"
    backends = make_named_experts("nop.[0:200]", "nop:4")
    with DirectoryServer() as names, ExpertServer(backends, directory=names.endpoint, ttl=3000.0) as server:
        names.directory.announce(["gone.0"], nowhere, 60.0)
        listed = json.loads(CliRunner().invoke(app, [names.endpoint, "--json"]).stdout)
        assert {one["uid"]: (one["endpoint"], one["state"]) for one in listed} == {
            "gone.0": (nowhere, "gone"), **{backend.uid: (server.endpoint, "running") for backend in backends}
        }  # fmt: skip
        assert {one["uid"] for one in listed if 0 < one["seconds_left"] <= 60} == {"gone.0"}
        lines = CliRunner().invoke(app, [names.endpoint]).stdout.splitlines()
        assert lines[0].split()[:2] == ["gone.0", "gone"]
        assert lines[-1].split()[1] == "running"
        assert lines[-1].endswith(f" s  {server.endpoint}")
    result = CliRunner().invoke(app, [names.endpoint])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)


TEAMS = """
import os, threading
import torch
from anabranch.experts import ExpertBackend, ExpertServer, RemoteExpert
from anabranch.tensors import TensorSpec

torch.set_num_threads(4)
backend = ExpertBackend("same.0", torch.nn.Identity(), args_schema=[TensorSpec(1024)])
with ExpertServer([backend]) as server, torch.no_grad():
    expert, together = RemoteExpert("same.0", server.endpoint), threading.Barrier(8)

    def ask():
        together.wait(timeout=60)
        for _ in range(3):
            with torch.no_grad():
                expert(x)

    x = torch.ones(128, 1024)
    before = len(os.listdir("/proc/self/task"))
    callers = [threading.Thread(target=ask) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    print(len(os.listdir("/proc/self/task")) - before, threading.active_count())
"""


def test_threads_that_read_bring_no_teams_of_threads_along(programs: Programs) -> None:
    done = programs.run(TEAMS)
    assert done.returncode == 0, done.stderr
    more, python = map(int, done.stdout.split())
    # A thread a connection, what the one device thread computes with, and callers' threads whose end is under way.
    assert more <= 8 + 3 + 8
    assert python <= 8 + 4
