"""The memory of answers to clients that never read, on a parameter server, and its release once they are gone."""

from __future__ import annotations

import functools
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from anabranch.parameter_server import ParameterClient
from anabranch.parameter_server.messages import PullMessage, PullPart
from anabranch.tables import Constant, RowOptimizer, TableSpec
from anabranch.transport import RequestHeader, pack
from anabranch.transport.frame import Hello, encode
from programs import Programs
from waiting import wait_until

SERVE = "import sys; from anabranch.cli import main; sys.argv[0] = 'anabranch'; main()"
SGD = RowOptimizer.from_factory(functools.partial(torch.optim.SGD, lr=1.0))
WIDTH, ROWS, CLIENTS = 256, 25_000, 40
# MiB of all answers together, and what threads and requests may add.
ANSWERS, MORE = CLIENTS * WIDTH * ROWS * 4 >> 20, 128


def memory_of(pid: int, line: str) -> int:
    """MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(each for each in status.splitlines() if each.startswith(line)).split()[1]) // 1024


@pytest.mark.slow  # the budget itself is tested in tests/transport/test_unread_answers.py
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unread_answers_cost_their_bytes_once_and_nothing_once_the_clients_are_gone(programs: Programs) -> None:
    """Forty of 25 MB each took 740 MB while they were there, and hundreds for as long as the server ran."""
    ids = torch.randint(0, 1000, (ROWS,))
    message = pack(PullMessage([PullPart("t", ROWS)]))
    request = [*encode(Hello()), *encode(RequestHeader("pull", seconds=600.0, payload=message), [ids])]
    asked = b"".join(bytes(part) for part in request)
    with programs.start(SERVE, "serve", "parameters") as process:
        endpoint = process.stdout.readline().split()[-1]
        with ParameterClient([endpoint]) as client:
            client.init_table(TableSpec("t", 1000, WIDTH, initial=Constant(0.0)), SGD)
            client.sparse_pull("t", ids)
        before = memory_of(process.pid, "VmRSS")
        with ExitStack() as stack:
            for _ in range(CLIENTS):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.settimeout(60)
                sock.connect(endpoint.removeprefix("unix:"))
                sock.sendall(asked)
                assert sock.recv(1)  # the greeting
            with ParameterClient([endpoint]) as client:
                # Each has its answer or its refusal; the clients that do not read lose theirs to this one.
                wait_until(lambda: client.sparse_pull("t", ids[:10]).shape == (10, WIDTH))
                wait_until(lambda: pulls(client) >= CLIENTS // 2)
            assert memory_of(process.pid, "VmHWM") <= before + ANSWERS + MORE
        wait_until(lambda: memory_of(process.pid, "VmRSS") <= before + MORE)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0


def pulls(client: ParameterClient) -> int:
    (statistics,) = client.statistics()
    return statistics.tables["t"].rows_pulled // ROWS
