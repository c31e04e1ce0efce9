"""``anabranch serve parameters``: one shard as a process of its own, drained and written by SIGTERM."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from anabranch.errors import BoundaryError
from anabranch.parameter_server import ParameterClient


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from anabranch.cli import main; main()", "serve", "parameters", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_served_shard_says_where_it_is_and_comes_back_after_sigterm(tmp_path: Path) -> None:
    for round_ in range(2):
        process = start("--durability", "checkpoint", "--checkpoint-dir", str(tmp_path))
        try:
            assert process.stdout is not None
            word, _, endpoint = process.stdout.readline().strip().rpartition(" ")
            assert word == "listening on"
            with ParameterClient([endpoint]) as client:
                client.init("n", (2,), init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
                assert client.push_pull("n", -torch.ones(2)).tolist() == [round_ + 1.0] * 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            process.communicate(timeout=30)


def test_sigterm_under_load_loses_no_acknowledged_push_and_tells_the_others(tmp_path: Path) -> None:
    clients = 3
    pushed, ended = [0] * clients, list[BaseException]()

    def hammer(number: int, endpoint: str) -> None:
        with ParameterClient([endpoint], retries=0, timeout=20.0) as client:
            try:
                while True:
                    client.sparse_push("t", torch.tensor([number]), -torch.ones(1, 2))
                    pushed[number] += 1
            except BoundaryError as error:
                ended.append(error)

    def served(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip().rpartition(" ")[2]

    arguments = ("--durability", "checkpoint", "--checkpoint-dir", str(tmp_path))
    with start(*arguments) as process:
        endpoint = served(process)
        with ParameterClient([endpoint]) as client:
            client.init("t", (8, 2), kind="rows", init=0.0, optimizer=functools.partial(torch.optim.SGD, lr=1.0))
        threads = [threading.Thread(target=hammer, args=(number, endpoint)) for number in range(clients)]
        for thread in threads:
            thread.start()
        while min(pushed) < 20:
            assert not ended, ended
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)
        assert len(ended) == clients
    with start(*arguments) as process, ParameterClient([served(process)]) as client:
        kept = client.pull("t")[:clients, 0].tolist()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    assert all(said <= there <= said + 1 for said, there in zip(pushed, kept, strict=True)), (pushed, kept)


@pytest.mark.parametrize("arguments", [("--durability", "log"), ("--shard", "2", "--shards", "2")])
def test_a_shard_that_cannot_be_served_says_why(arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert arguments[0] in error
