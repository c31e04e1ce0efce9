"""A rank that dies or freezes is named on all others, soon, and they end."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from programs import start_ranks

# Each rank believes to be on a host of its own.
ELSEWHERE = """
import os
from dataclasses import replace
from anabranch.liveness import peers

identity = peers.Identity.of_this_process()
peers.Identity.of_this_process = lambda: replace(identity, host=f"host-{os.environ['RANK']}")
"""

RANK = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
import anabranch as ab

operation, heartbeat, rank = sys.argv[1], float(sys.argv[2]), int(os.environ["RANK"])
dist.init_process_group("gloo")  # waits for late starters longer than any timeout here
if operation == "run":
    model = nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    executor = ab.Executor(step, comm_mode="AllReduce", timeout=60.0, heartbeat=heartbeat)
act = {
    "run": lambda: executor.run(batch=torch.ones(2, 4)),
    "all_reduce": lambda: ab.all_reduce(torch.ones(3), timeout=60.0),
    "recv": lambda: ab.recv(1, timeout=60.0) if rank == 0 else ab.send(torch.ones(3), 0, timeout=60.0),
    "send": lambda: ab.send(torch.ones(8 << 20), 1, timeout=60.0) if rank == 0 else ab.recv(0, timeout=60.0),
}[operation]
act()
if rank == 1:
    print("ready", flush=True)
    sys.stdin.readline()  # until the test has done its worst
try:
    act()
except ab.BoundaryError as error:
    facts = {"type": type(error).__name__, "peer": error.peer, "operation": error.operation, "step": error.step}
    print(json.dumps(facts | {"elapsed": error.elapsed, "text": str(error)}), flush=True)
    raise
"""


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("operation", "world", "where"),
    [
        ("run", 3, ""),
        ("run", 3, ELSEWHERE),
        ("all_reduce", 2, ""),
        ("recv", 2, ""),
        pytest.param("send", 2, "", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_rank_is_named_and_the_others_end(operation: str, world: int, where: str, tmp_path: Path) -> None:
    """A frozen process keeps its sockets open, and gloo alone waits for it until the deadline."""
    with start_ranks(tmp_path, where + RANK, world, operation, 1.0 if where else 0.5) as started:
        started[1].send_signal(signal.SIGSTOP)  # the others wait in the collective by now or soon
        for other in (started[0], *started[2:]):
            out, err = other.communicate(60)
            facts = json.loads(out.splitlines()[-1])
            assert (facts["type"], facts["peer"]) == ("PeerLost", "rank 1")
            assert facts["step"] == 1 if operation == "run" else facts["operation"] == operation
            assert ("sent no beat for" if where else "its process is stopped") in facts["text"]
            assert facts["elapsed"] < 30.0  # of 60
            assert "PeerLost" in err
            assert other.returncode == 1


@pytest.mark.parametrize("where", ["", ELSEWHERE])
def test_a_killed_rank_is_named_on_all_others_at_once(where: str, tmp_path: Path) -> None:
    with start_ranks(tmp_path, where + RANK, 3, "run", 5.0) as started:
        started[1].kill()
        for other in (started[0], started[2]):
            facts = json.loads(other.communicate(60)[0].splitlines()[-1])
            assert facts["type"] == "PeerLost"
            # Who looks late, on a busy machine, also finds gone who has ended because of it.
            assert "1" in facts["peer"].removeprefix("ranks ").removeprefix("rank ").split(", ")
            assert "its process has ended" in facts["text"]
            assert facts["elapsed"] < 30.0  # of 60


IS_AWAY = """
import ctypes, sys
import torch
from anabranch.collectives import Workers

with Workers(timeout=60.0, heartbeat=1.0) as workers:
    for turn in range(2):
        workers.all_reduce(torch.ones(1))
        if workers.rank == 1 and turn == 0:
            print("ready", flush=True)
            if sys.argv[1] == "holds the lock":
                ctypes.PyDLL(None).usleep(3_000_000)  # no thread of Python runs meanwhile
            else:
                sys.stdin.readline()
"""


@pytest.mark.parametrize("why", ["holds the lock", "is stopped with all others"])
def test_ranks_of_other_hosts_are_waited_for(why: str, tmp_path: Path) -> None:
    with start_ranks(tmp_path, ELSEWHERE + IS_AWAY, 2, why) as started:
        if why == "is stopped with all others":
            for one in started:
                one.send_signal(signal.SIGSTOP)
            time.sleep(3.0)  # three heartbeats
            for one in started:
                one.send_signal(signal.SIGCONT)
        for one in reversed(started):
            _, err = one.communicate(60)
            assert (one.returncode, err) == (0, "")
