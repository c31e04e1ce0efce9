"""Ctrl-C ends every wait for other workers and for servers at once, and the process with it.

Each program prints a line from inside its wait; only then it is interrupted. Left alone, each waits for minutes.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from anabranch.launch.meeting.addresses import held_port
from programs import start

PROGRAM = """
import logging, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from torch import nn
import anabranch as ab
from anabranch.liveness import meeting
from anabranch.parameter_server.client.parameter_client import Worker
from anabranch.record import spans

what, rank = sys.argv[1], int(os.environ.get("RANK", 0))
signal.signal(signal.SIGINT, signal.default_int_handler)


def say(line="waits"):
    print(line, flush=True)


def away():
    say("away")
    threading.Event().wait()


def once_it_waits():
    # Says that a wait has lasted.
    def look():
        while not any(one["name"] == "wait" for one in spans.open_spans()):
            time.sleep(0.01)
        say()

    threading.Thread(target=look, daemon=True).start()


def executor():
    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    return ab.Executor(step, "AllReduce", heartbeat=600.0)


class Endless(nn.Module):
    def forward(self, x):
        threading.Event().wait()


if what in ("message", "grid", "pipe"):
    dist.init_process_group("gloo")
if what == "meeting":
    class Handler(logging.Handler):
        def emit(self, record):
            say(record.getMessage())

    logging.getLogger("anabranch").addHandler(Handler())
    meeting.SAID_AFTER = 0.0
    wait = executor
elif what in ("all-reduce", "sum"):
    made = executor()
    wait = lambda: made.run(batch=torch.ones(1, 2))
    if what == "sum":  # of the second run, in shared memory
        wait()
elif what == "message":
    wait = lambda: ab.recv(1, timeout=600.0)
elif what == "grid":
    wait = lambda: ab.job().grid(data=1, pipeline=2)
elif what == "pipe":
    pipe = ab.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), balance=[1, 1], process_group=dist.group.WORLD)
    wait = lambda: pipe(torch.ones(2, 2))
elif what == "server":
    wait = ab.ParameterClient(worker=Worker(0, 2, "bsp"), timeout=600.0).barrier
elif what == "expert":
    backend = ab.ExpertBackend("slow.0", Endless(), args_schema=[ab.TensorSpec(2)], outputs_schema=ab.TensorSpec(2))
    server = ab.ExpertServer([backend]).__enter__()
    wait = lambda: ab.RemoteExpert("slow.0", server.endpoint, forward_timeout=600.0)(torch.ones(1, 2))
if rank and what != "meeting":
    away()
elif what == "grid":  # whose wait is no span
    new_group = dist.new_group
    dist.new_group = lambda *args, **keywords: (say(), new_group(*args, **keywords))[1]
elif what != "meeting":
    once_it_waits()
wait()
say("came back")
"""


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        ("meeting", [0]), ("meeting", [1]), ("all-reduce", [0, 1]), ("sum", [0, 1]), ("message", [0, 1]),
        ("grid", [0, 1]), ("pipe", [0, 1]), ("server", []), ("expert", []),
    ],
    ids=str,
)  # fmt: skip
def test_ctrl_c_ends_a_wait_and_the_process(what: str, ranks: list[int], tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(PROGRAM)
    with held_port("127.0.0.1") as port, ExitStack() as stack:
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started = [
            stack.enter_context(start(script, what, environment={**meeting, "RANK": str(rank)})) for rank in ranks
        ] or [stack.enter_context(start(script, what))]
        for other in started[1:]:
            assert other.stdout.readline() == "away\n"
        line = started[0].stdout.readline()
        if what == "meeting":
            assert line == f"waiting for rank {1 - ranks[0]} to make an Executor; comm_mode=None trains alone\n"
        else:
            assert line == "waits\n"
        started[0].send_signal(signal.SIGINT)
        out, err = started[0].communicate(120.0)
    assert "came back" not in out
    assert "KeyboardInterrupt" in err
