"""``anabranch serve parameters``: one shard as its own process, drained and saved at a signal, and restarted."""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest
import torch

from anabranch.errors import BoundaryError
from anabranch.parameter_server import ParameterClient, ParameterServer
from programs import Program, Programs
from waiting import running, wait_until

SERVE = "import sys; from anabranch.cli import main; sys.argv[0] = 'anabranch'; main()"


def start(programs: Programs, *arguments: str) -> Program:
    return programs.start(SERVE, "serve", "parameters", *arguments)


def endpoint_of(process: Program) -> str:
    word, _, endpoint = process.stdout.readline().strip().rpartition(" ")
    assert word == "listening on"
    return endpoint


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_under_load_loses_no_acknowledged_push_and_refuses_the_others(
    number: signal.Signals, tmp_path: Path, programs: Programs
) -> None:
    clients = 3
    pushed, ended = [0] * clients, list[BaseException]()

    def hammer(number: int, endpoint: str) -> None:
        with ParameterClient([endpoint], retries=0) as client:
            try:
                while True:
                    client.sparse_push("t", torch.tensor([number]), -torch.ones(1, 2))
                    pushed[number] += 1
            except BoundaryError as error:
                ended.append(error)

    arguments = ("--durability", "checkpoint", "--checkpoint-dir", str(tmp_path))
    with start(programs, *arguments) as process:
        endpoint = endpoint_of(process)
        with ParameterClient([endpoint]) as client:
            client.init("t", (8, 2), kind="rows", init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
        with running(*(functools.partial(hammer, number, endpoint) for number in range(clients))):
            wait_until(lambda: min(pushed) >= 20 or ended)
            assert not ended, ended
            process.send_signal(number)
            assert process.wait() == 0
        assert len(ended) == clients
    with start(programs, *arguments) as process, ParameterClient([endpoint_of(process)]) as client:
        kept = client.pull("t")[:clients, 0].tolist()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert all(said <= there <= said + 1 for said, there in zip(pushed, kept, strict=True)), (pushed, kept)


def test_one_that_lingers_saves_at_a_signal_and_serves_its_clients_until_they_go(
    tmp_path: Path, programs: Programs
) -> None:
    arguments = ("--durability", "checkpoint", "--checkpoint-dir", str(tmp_path), "--linger", "1000")
    with start(programs, *arguments) as process:
        with ParameterClient([endpoint_of(process)], retries=0) as client:
            client.init("bias", (1,))
            before = set(tmp_path.rglob("*"))
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: set(tmp_path.rglob("*")) - before)
            assert client.pull("bias").shape == (1,)
        assert process.wait() == 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "arguments", [("--durability", "log"), ("--shard", "2", "--shards", "2"), ("--checkpoint-dir", "kept")]
)
def test_a_shard_that_cannot_be_served_gives_the_reason(arguments: tuple[str, ...], programs: Programs) -> None:
    done = programs.run(SERVE, "serve", "parameters", *arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


def test_a_directory_of_another_number_of_shards_is_refused_in_a_line(tmp_path: Path, programs: Programs) -> None:
    kept = ("--durability", "log", "--checkpoint-dir", str(tmp_path))
    server = ParameterServer(durability="log", checkpoint_dir=tmp_path)
    with server, ParameterClient([server.endpoint]) as client:
        client.init("bias", (1,))
    done = programs.run(SERVE, "serve", "parameters", "--shards", "2", *kept)
    assert done.returncode == 1
    assert "holds the state of a different number of shards (shard-0-of-1)" in done.stderr
    assert "Traceback" not in done.stderr
