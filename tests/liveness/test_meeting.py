"""Workers meet: a rank that waits for the others names them, ends at its deadline, and sees that one has ended."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch.errors import DeadlineExceeded, PeerLost
from anabranch.launch.meeting.addresses import held_port
from anabranch.liveness import meeting
from programs import start
from toys import in_job, run_in_job
from waiting import wait_until


def executor(**options: float) -> ab.Executor:
    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, lambda m, b: m(b).mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    return ab.Executor(step, **options)  # type: ignore[arg-type]


def late(folder: str) -> list[str | None]:
    """Rank 1 comes when rank 0 has given up once."""
    marker, said = Path(folder) / "given up", list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("anabranch").addHandler(handler)
    if ab.job().rank == 0:
        meeting.SAID_AFTER, meeting.LOOK_SECONDS = 0.0, 0.01
        with pytest.raises(DeadlineExceeded, match="meet.*rank 1|rank 1.*meet") as caught:
            executor(timeout=0.6)
        assert caught.value.elapsed is not None
        assert caught.value.elapsed < meeting.BACKEND_GRACE
        marker.touch()
    else:
        wait_until(marker.exists)
    with executor() as made:
        made.run(batch=torch.full((2, 2), 1.0 + ab.job().rank))
        return [made.comm_mode, *said]


def test_a_rank_says_whom_it_waits_for_until_its_timeout_and_meets_them_later(tmp_path: Path) -> None:
    first, second = in_job(late, 2, str(tmp_path))
    assert first[0] == second[0] == "AllReduce"
    assert first[1] == "waiting for rank 1 to make an Executor; comm_mode=None trains alone"
    assert not any("waiting" in line for line in second[1:])


class GivesUp:
    """A deadline that is over once these files are there, in turn, and this rank has looked for the others since."""

    def __init__(self, here: Path, *awaited: Path) -> None:
        self._here, self._awaited, self._there = here, list(awaited), False

    def expired(self) -> bool:
        self._here.touch()  # as what says that this rank has come is by now
        if self._there:
            Path(f"{self._awaited.pop(0)} was seen").touch()
        self._there = bool(self._awaited) and self._awaited[0].exists()
        return not self._awaited

    def elapsed(self) -> float:
        return 0.0


def gone_again(folder: str) -> str | None:
    """Rank 0 gives up once rank 1 has seen it; rank 2 comes behind that, and rank 1 gives up once it has seen that."""
    came, gone = ([Path(folder, f"{one} {what}") for one in range(3)] for what in ("came", "gone"))
    rank = ab.job().rank
    if rank == 2:
        wait_until(gone[0].exists)
    awaited = [[Path(f"{came[0]} was seen")], [came[0], came[2]], [gone[1]]][rank]
    deadline = SimpleNamespace(after=lambda seconds: GivesUp(came[rank], *awaited))
    with (
        patch.object(meeting, "Deadline", deadline),
        pytest.raises(DeadlineExceeded, match="not all ranks arrived") as caught,
    ):
        executor()
    gone[rank].touch()
    return caught.value.peer


def test_a_rank_that_has_given_up_is_one_that_has_not_come(tmp_path: Path) -> None:
    _, *others = in_job(gone_again, 3, str(tmp_path))
    assert others == ["rank 0"] * 2


RANK = """
import os, sys, threading
import torch.distributed as dist
from torch.distributed import TCPStore
from anabranch.collectives import Workers
from anabranch.errors import PeerLost


def end() -> None:
    TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])).wait(["anabranch/0/0/1"])
    os._exit(0)


if os.environ["RANK"] == "0" and sys.argv[1] == "first":
    threading.Thread(target=end, daemon=True).start()
elif os.environ["RANK"] == "1" and sys.argv[1] == "connecting":
    dist.init_process_group = lambda *_, **__: os._exit(0)
try:
    Workers(timeout=60.0)
except PeerLost as error:
    print(error.peer, error.operation)
"""


@pytest.mark.parametrize(("what", "world", "ends"), [("first", 3, 0), ("connecting", 2, 1)])
def test_a_rank_that_ends_as_ranks_meet_is_named(what: str, world: int, ends: int, tmp_path: Path) -> None:
    """Rank 0, with which the store ends, where another has not come; and a rank that all have seen."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with held_port("127.0.0.1") as port, ExitStack() as stack:
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pair = [stack.enter_context(start(script, what, environment={**common, "RANK": rank})) for rank in "01"]
        assert pair[ends].wait(60) == 0
        assert pair[1 - ends].communicate(60)[0] == f"rank {ends} meet\n"


def after_training() -> str:
    """Rank 0 makes another Executor for itself, which the other rank does not."""
    executor().close()
    if ab.job().rank:
        return ""
    with pytest.raises(PeerLost, match="its process has ended") as caught:
        executor()
    return str(caught.value.peer)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    assert in_job(after_training, 2) == ["rank 1", ""]


def speaking(configured: bool) -> None:
    if configured:
        logging.basicConfig(format="own: %(message)s")
    with executor() as made:
        made.run(batch=torch.full((2, 2), 1.0 + ab.job().rank))


@pytest.mark.parametrize(("workers", "mode"), [(2, "'AllReduce'"), (1, "None")])
def test_workers_of_a_job_say_what_they_do_unless_the_script_has_configured_logging(workers: int, mode: str) -> None:
    first, *others = run_in_job(speaking, workers, False).check().logs
    lines = [line for line in first.splitlines() if line.startswith("anabranch: ")]
    assert lines[0] == f"anabranch: comm_mode is {mode} (workers: {workers}, servers: 0)"
    if workers > 1:
        assert lines.pop(1).startswith("anabranch: the job ends with the first worker that is killed or freezes: run(")
    assert lines[1:] == ["anabranch: default: 2 workers x 2 rows = 4 rows a step"][: workers - 1]
    assert not any("anabranch: " in log for log in others)
    assert not any("comm_mode is" in log for log in run_in_job(speaking, workers, True).check().logs)
