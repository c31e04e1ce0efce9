"""A rank that dies or freezes is named on all others, soon, and they end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from anabranch.launch.meeting.addresses import held_port
from programs import start

PEER = """
import json, os, sys
import torch, torch.nn.functional as F
from torch import nn
import anabranch as ab

mode, rank = sys.argv[1], int(os.environ["RANK"])
model = nn.Linear(4, 1)
step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
timeout = 8.0 if mode == "slow" else 60.0
torch.distributed.init_process_group("gloo")  # waits for late starters longer than any timeout here
with ab.Executor(step, comm_mode="AllReduce", timeout=timeout, heartbeat=0.5) as executor:
    executor.run(batch=torch.ones(2, 4))
    if rank == 1:
        print("ready", flush=True)
        sys.stdin.readline()  # until the test has done its worst, or rank 0 has given up
    try:
        executor.run(batch=torch.ones(2, 4))
    except ab.BoundaryError as error:
        facts = {"type": type(error).__name__, "peer": error.peer, "operation": error.operation, "step": error.step,
                 "elapsed": error.elapsed, "text": str(error)}
        print(json.dumps(facts), flush=True)
        raise
"""


ALONE = """
import json, os, sys
import torch, torch.distributed as dist
import anabranch as ab

operation, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")
run = {
    "all_reduce": lambda: ab.all_reduce(torch.ones(3), timeout=60.0),
    "recv": lambda: ab.recv(1, timeout=60.0) if rank == 0 else ab.send(torch.ones(3), 0, timeout=60.0),
    "send": lambda: ab.send(torch.ones(8 << 20), 1, timeout=60.0) if rank == 0 else ab.recv(0, timeout=60.0),
}[operation]
run()
if rank == 1:
    print("ready", flush=True)
    sys.stdin.readline()
try:
    run()
except ab.BoundaryError as error:
    facts = {"type": type(error).__name__, "peer": error.peer, "operation": error.operation, "elapsed": error.elapsed}
    print(json.dumps(facts | {"text": str(error)}), flush=True)
    raise
"""


class Ranks:
    """The ranks of a job without a launcher: nobody but themselves watches over them."""

    def __init__(self, directory: Path, mode: str, world: int, source: str = PEER) -> None:
        script = directory / "peer.py"
        script.write_text(source)
        self._stack = ExitStack()
        port = str(self._stack.enter_context(held_port("127.0.0.1")))
        self.processes = [
            start(
                script,
                mode,
                environment={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                },
            )
            for rank in range(world)
        ]

    def wait_until_ready(self) -> None:
        stdout = self.processes[1].stdout
        assert stdout is not None
        assert stdout.readline() == "ready\n"

    def facts(self, rank: int, timeout: float) -> tuple[dict[str, object], str]:
        out, err = self.processes[rank].communicate(timeout=timeout)
        return json.loads(out.splitlines()[-1]), err

    def close(self) -> None:
        with self._stack:
            for process in self.processes:
                with process:
                    pass


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    job = Ranks(tmp_path, *request.param)
    yield job
    job.close()


@pytest.mark.parametrize("ranks", [("stop", 3)], indirect=True)
def test_a_stopped_rank_is_named_by_its_beats_and_the_others_end(ranks: Ranks) -> None:
    ranks.wait_until_ready()
    # Rank 0 and 2 wait in the collective by now or soon; they count from their own start.
    ranks.processes[1].send_signal(signal.SIGSTOP)
    for rank in (0, 2):
        facts, stderr = ranks.facts(rank, timeout=60)
        assert facts["type"] == "PeerLost"
        assert facts["peer"] == "rank 1"
        assert facts["step"] == 1
        assert "its process is stopped" in facts["text"]
        assert facts["elapsed"] < 30.0  # of 60; two beats on a clock of its own: test_peers.py
        assert "PeerLost" in stderr
        assert ranks.processes[rank].returncode == 1


@pytest.mark.parametrize("ranks", [("kill", 3)], indirect=True)
def test_a_killed_rank_is_named_on_all_others_at_once(ranks: Ranks) -> None:
    ranks.wait_until_ready()
    ranks.processes[1].kill()
    ranks.processes[1].wait(60)
    for rank in (0, 2):
        facts, _ = ranks.facts(rank, timeout=60)
        assert facts["type"] == "PeerLost"
        # Who looks late, on a busy machine, also finds gone who has ended because of it.
        assert "1" in facts["peer"].removeprefix("ranks ").removeprefix("rank ").split(", ")
        assert facts["elapsed"] < 30.0  # of 60


@pytest.mark.parametrize(
    ("ranks", "operation"),
    [
        (("all_reduce", 2, ALONE), "all_reduce"),
        (("recv", 2, ALONE), "recv"),
        pytest.param(("send", 2, ALONE), "send", marks=pytest.mark.slow),
    ],
    indirect=["ranks"],
)
def test_a_stopped_rank_is_named_to_a_reduction_and_to_a_message(ranks: Ranks, operation: str) -> None:
    """A frozen process keeps its sockets open, and gloo alone waits for it until the deadline."""
    ranks.wait_until_ready()
    ranks.processes[1].send_signal(signal.SIGSTOP)
    facts, stderr = ranks.facts(0, timeout=60)
    assert facts["type"] == "PeerLost"
    assert facts["peer"] == "rank 1"
    assert facts["operation"] == operation
    assert "its process is stopped" in facts["text"]
    assert facts["elapsed"] < 30.0  # of 60
    assert "PeerLost" in stderr
    assert ranks.processes[0].returncode == 1
