"""A rank that dies or freezes is named on all others, soon, and they end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from programs import start_ranks

RANK = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
import anabranch as ab

operation, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")  # waits for late starters longer than any timeout here
if operation == "run":
    model = nn.Linear(4, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    executor = ab.Executor(step, comm_mode="AllReduce", timeout=60.0, heartbeat=0.5)
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


@pytest.mark.parametrize(
    ("operation", "world"),
    [("run", 3), ("all_reduce", 2), ("recv", 2), pytest.param("send", 2, marks=pytest.mark.slow)],
)
def test_a_stopped_rank_is_named_by_its_beats_and_the_others_end(operation: str, world: int, tmp_path: Path) -> None:
    """A frozen process keeps its sockets open, and gloo alone waits for it until the deadline."""
    with start_ranks(tmp_path, RANK, world, operation) as started:
        started[1].send_signal(signal.SIGSTOP)  # the others wait in the collective by now or soon
        for other in (started[0], *started[2:]):
            out, err = other.communicate(60)
            facts = json.loads(out.splitlines()[-1])
            assert (facts["type"], facts["peer"]) == ("PeerLost", "rank 1")
            assert facts["step"] == 1 if operation == "run" else facts["operation"] == operation
            assert "its process is stopped" in facts["text"]
            assert facts["elapsed"] < 30.0  # of 60; two beats on a clock of its own: test_peers.py
            assert "PeerLost" in err
            assert other.returncode == 1


def test_a_killed_rank_is_named_on_all_others_at_once(tmp_path: Path) -> None:
    with start_ranks(tmp_path, RANK, 3, "run") as started:
        started[1].kill()
        for other in (started[0], started[2]):
            facts = json.loads(other.communicate(60)[0].splitlines()[-1])
            assert facts["type"] == "PeerLost"
            # Who looks late, on a busy machine, also finds gone who has ended because of it.
            assert "1" in facts["peer"].removeprefix("ranks ").removeprefix("rank ").split(", ")
            assert facts["elapsed"] < 30.0  # of 60
