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


def told(module, name):
    # Says that a call is made that will wait.
    call = getattr(module, name)

    def run(*args, **keywords):
        say()
        return call(*args, **keywords)

    setattr(module, name, run)


def executor():
    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    return ab.Executor(step, "AllReduce", heartbeat=600.0)


class Endless(nn.Module):
    def forward(self, x):
        threading.Event().wait()


if what == "meeting":
    class Handler(logging.Handler):
        def emit(self, record):
            say(record.getMessage())

    logging.getLogger("anabranch").addHandler(Handler())
    meeting.SAID_AFTER = 0.0
    executor()
elif what == "all-reduce":
    made = executor()
    if rank:
        away()
    once_it_waits()
    made.run(batch=torch.ones(1, 2))
elif what == "sum":  # of the second run, in shared memory
    made = executor()
    made.run(batch=torch.ones(1, 2))
    if rank:
        away()
    once_it_waits()
    made.run(batch=torch.ones(1, 2))
elif what == "message":
    dist.init_process_group("gloo")
    if rank:
        away()
    once_it_waits()
    ab.recv(1, timeout=600.0)
elif what == "grid":
    dist.init_process_group("gloo")
    if rank:
        away()
    told(dist, "new_group")
    ab.job().grid(data=1, pipeline=2)
elif what == "pipe":
    dist.init_process_group("gloo")
    pipe = ab.Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), balance=[1, 1], process_group=dist.group.WORLD)
    if rank:
        away()
    once_it_waits()
    pipe(torch.ones(2, 2))
elif what == "server":
    client = ab.ParameterClient(worker=Worker(0, 2, "bsp"), timeout=600.0)
    once_it_waits()
    client.barrier()
elif what == "expert":
    backend = ab.ExpertBackend("slow.0", Endless(), args_schema=[ab.TensorSpec(2)], outputs_schema=ab.TensorSpec(2))
    server = ab.ExpertServer([backend]).__enter__()
    once_it_waits()
    ab.RemoteExpert("slow.0", server.endpoint, forward_timeout=600.0)(torch.ones(1, 2))
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
