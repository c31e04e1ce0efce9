"""The picture of a job, drawn as text at the widths of narrow and wide terminals."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from anabranch.launch.job_status import JobStatus, RoleStatus, TrackedLoop
from anabranch.launch.output.picture import picture

WORKER = RoleStatus(
    "worker", 0, 11, None, "waiting", 412, "parameters 0", 3.21, operation="pull users",
    loads={"users": {"hits": 93, "misses": 7}},
)  # fmt: skip
STORED = {"uptime": 10.0, "bytes": 5_000_000, "stored_bytes": 1, "rows": 1_234_567, "clocks": [412, 410], "lag": 3}
SERVER = RoleStatus("parameters", 0, 12, "unix:/run/p0", "running", service=STORED)
CALLED = {"ffn.0": {"rows": 100, "busy_seconds": 4.2}, "ffn.1": {"rows": 50, "busy_seconds": 0.0}}
SERVED = {"uptime": 10.0, "bytes": 0, "queue_tasks": 5, "experts": CALLED}
EXPERT = RoleStatus("expert", 0, 13, None, "running", service=SERVED)
JOB = JobStatus(
    (WORKER, replace(WORKER, rank=1, state="running", waiting_for=None, crossing={"workers": 2e6}), SERVER, EXPERT),
    started=100.0,
    ended=None,
    seconds=75.0,
    progress=(TrackedLoop("epoch", 1, 3, 9.0), TrackedLoop("training", 412, 800, 41.2)),
    loss=0.25,
    steps_per_second=12.34,
)


def shown(job: JobStatus, columns: int, before: JobStatus | None = None, lines: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=columns)
    with console.capture() as drawn:
        console.print(picture(job, before, lines=lines))
    return [line.rstrip() for line in drawn.get().splitlines()]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal_and_none_is_broken_in_two(columns: int) -> None:
    lines = shown(JOB, columns)
    assert len(lines) == 8
    assert all(len(line) <= columns for line in lines)
    assert any("…" in line for line in lines) == (columns < 200)


def test_the_whole_picture_at_80_columns() -> None:
    head, bar, loss, first, second, server, expert, crossing = shown(JOB, 80)
    assert head.startswith("anabranch · 2 workers, 1 server, 1 expert · 1:15 ──")
    assert bar.startswith("epoch 1/3 · training ━")
    assert bar.endswith("412/800 51% · 10.0/s · 0:39 left")
    assert loss == "loss 0.25 · 12.3 steps/s"
    assert first == "worker 0      11  waiting  3.2 s for parameters 0 (pull users)  step 412 · cach…"
    assert second == "worker 1      11  running  step 412 · cache 93%"
    assert server == "parameters 0  12  running  1.2M rows · stale 2 of 3 steps · 500 kB/s"
    assert expert == "expert 0      13  running  ffn.0, ffn.1 · queue 5 · busy 42% · 15 rows/s · 0 B/s"
    assert crossing == "crossing  workers 2.0 MB/s"
    assert shown(replace(JOB, script="train.py", folder="logs"), 80)[1] == "train.py · logs"


def test_services_have_the_rates_of_the_last_moment() -> None:
    server = replace(SERVER, service={**STORED, "uptime": 9.0, "bytes": 4_000_000})
    expert = replace(EXPERT, service={**SERVED, "uptime": 8.0})
    lines = shown(replace(JOB, roles=(SERVER, EXPERT)), 200, replace(JOB, roles=(server, expert)))
    assert any(line.endswith("1.0 MB/s") for line in lines)
    assert any("busy 0% · 0 rows/s" in line for line in lines)


def test_roles_that_run_well_make_room_for_those_that_do_not() -> None:
    roles = tuple(RoleStatus("worker", rank, rank, None, "running", 7) for rank in range(20))
    roles = (*roles, RoleStatus("expert", 0, 9, None, "stopped"))
    lines = shown(replace(JOB, roles=roles), 80, lines=12)
    assert len(lines) <= 12
    assert any(line.split() == ["expert", "0", "9", "stopped"] for line in lines)
    assert lines[-1].split() == ["15", "more", "15", "running"]


def test_unknown_values_are_left_out() -> None:
    lines = shown(JobStatus((RoleStatus("worker", 0, 1, None, "starting"),), None, None), 80)
    assert [line.split() for line in lines[1:]] == [["worker", "0", "1", "starting"]]
    ended = JobStatus((RoleStatus("worker", 0, 1, None, "gone"),), 1.0, 2.0, 1.0)
    assert "0:01 · ended" in shown(ended, 80)[0]
    endless = replace(JOB, progress=(TrackedLoop(None, 7, None, 2.0),))
    assert shown(endless, 80)[1].split() == ["progress", "7", "·", "3.5/s"]


def test_names_are_shown_and_neither_read_as_markup_nor_move_the_cursor() -> None:
    loud = replace(WORKER, waiting_for="[blink]p", operation="[bold]")
    evil = replace(WORKER, waiting_for="a\x1b[2Jb\nc", crossing={"table \x1b[3J": 5e3}, operation="\x9b2J")
    lines = shown(replace(JOB, roles=(loud, evil), progress=(TrackedLoop("[red]l\r\x1b[A", 1, 2, 1.0),)), 120)
    assert lines[1].startswith("[red]l")
    assert "for [blink]p ([bold])" in lines[3]
    assert len(lines) == 6
    assert not any("\x1b" in line or "\x9b" in line or "\r" in line for line in lines)
