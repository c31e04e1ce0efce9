"""A long wait of a worker is reported on the screen, with the process that it waits for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.launch.job_status import JobStatus, RoleStatus, State, status_of
from anabranch.launch.output.long_waits import LongWaits
from anabranch.record.words import ACTIVITIES
from launched import start_run
from waiting import wait_until


def role(name: str, state: State, seconds: float | None = None, peer: str = "", operation: str = "pull") -> RoleStatus:
    kind, rank = name.split()
    waits = {} if seconds is None else {"waiting_for": peer, "waiting_seconds": seconds, "operation": operation}
    return RoleStatus(kind, int(rank), 1, None, state, **waits)  # type: ignore[arg-type]


class Told:
    """What is told of a job that looks like this at each look, two seconds apart."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.roles: tuple[RoleStatus, ...] = ()
        self._waits = LongWaits(Path("logs"), self.lines.append, self._look_at)

    def _look_at(self, folder: Path) -> JobStatus:
        if not self.roles:
            raise ValueError(f"{folder} is gone")
        return JobStatus(self.roles, 0.0, None)

    def look(self, *roles: RoleStatus, stopped: bool = False) -> list[str]:
        self.roles = roles
        if stopped:
            self._waits.begin()
        self._waits.check()
        lines = self.lines[:]
        self.lines.clear()
        return lines


def test_a_wait_is_reported_after_ten_seconds_and_then_less_and_less_often() -> None:
    told = Told()
    found = [told.look(role("worker 0", "waiting", seconds, "worker 1")) for seconds in (8.0, 12.0, 20.0, 37.0, 40.0)]
    assert found == [[], ["rank 0 waits for rank 1 in pull (12 s)"], [], ["rank 0 waits for rank 1 in pull (37 s)"], []]
    told.look(role("worker 0", "running"))
    assert told.look(role("worker 0", "waiting", 11.0, "worker 1")) == ["rank 0 waits for rank 1 in pull (11 s)"]


def test_a_line_gives_the_deadline_of_a_wait_where_it_is_known_and_names_do_not_move_the_cursor() -> None:
    waits = replace(role("worker 0", "waiting", 12.0, "worker 1", "all_reduce"), waiting_limit=599.6)
    assert Told().look(waits) == ["rank 0 waits for rank 1 in all_reduce (12 s, at most 600 s)"]
    waits = role("worker 0", "waiting", 12.0, "expert \x1b[2Jffn.0\n", "forward\r")
    assert Told().look(waits) == ["rank 0 waits for expert ?[2Jffn.0? in forward? (12 s)"]


def test_waits_for_the_same_process_share_a_line_with_its_state() -> None:
    roles = [role(f"worker {rank}", "waiting", 10.0 + rank, "parameters 0") for rank in (0, 2, 1)]
    other = role("worker 3", "waiting", 10.0, "worker 9", "all_reduce")
    assert Told().look(*roles, role("parameters 0", "stopped"), other) == [
        "ranks 0, 1, 2 wait for parameters 0 in pull (12 s); parameters 0 is stopped",
        "rank 3 waits for rank 9 in all_reduce (10 s)",
    ]


def test_activities_of_workers_are_reported_once_and_again_when_they_last() -> None:
    told = Told()

    def fetching(*seconds: float) -> list[str]:
        words = ACTIVITIES["load"]
        roles = [role(f"worker {rank}", "running") for rank in range(len(seconds))]
        return told.look(*(replace(r, doing=words, doing_seconds=s) for r, s in zip(roles, seconds, strict=True)))

    assert fetching(8.0, 9.0) == []
    assert fetching(12.0, 13.0) == ["each of ranks 0, 1 is fetching a batch from its loader (13 s)"]
    assert fetching(12.0, 0.0) == []  # another batch, as slow
    assert fetching(40.0, 0.0) == ["rank 0 is fetching a batch from its loader (40 s)"]
    for words in ACTIVITIES.values():
        assert len(f"anabranch: rank 10 {words} (100 s)") <= 79


def test_the_time_for_which_everything_was_stopped_is_no_wait_and_a_folder_that_is_gone_has_none() -> None:
    """After Ctrl-Z and `fg` the screen named those that had waited when everything was stopped."""
    assert Told().look(role("worker 0", "waiting", 60.0, "worker 1"), stopped=True) == []
    assert Told().look() == []


@pytest.mark.slow
def test_a_job_s_screen_names_a_frozen_process(tmp_path: Path, script: Callable[[str], Path]) -> None:
    path = script(
        """
        import torch, anabranch as ab
        model = torch.nn.Linear(2, 1)
        step = ab.TrainStep(model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
        with ab.Executor(step, comm_mode="AllReduce", heartbeat=100.0) as executor:
            for _ in range(10**9):
                executor.run(batch=torch.full((2, 2), 1.0 + ab.job().rank))
        """
    )
    with start_run("--workers", "2", "--log-dir", tmp_path, path) as job:
        wait_until((tmp_path / "job.json").exists)
        wait_until(lambda: (status_of(tmp_path).roles[0].steps or 0) > 3)
        pid = status_of(tmp_path).roles[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: (status_of(tmp_path).roles[0].waiting_seconds or 0.0) > 14.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        job.send_signal(signal.SIGINT)
        _, told = job.communicate(60.0)
    assert "anabranch: rank 0 waits for rank 1 in all_reduce of gradients (1" in told
    assert "rank 1 is stopped" in told
