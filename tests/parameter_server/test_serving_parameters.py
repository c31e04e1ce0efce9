"""``anabranch serve parameters``: one shard as a process of its own, drained and written by SIGTERM."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("arguments", [("--durability", "log"), ("--shard", "2", "--shards", "2")])
def test_a_shard_that_cannot_be_served_says_why(arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert arguments[0] in error
