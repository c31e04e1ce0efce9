"""``job.json`` says which processes a job has, while it runs, after restarts and at its end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anabranch.launch.job_status import JobFile, status_of
from anabranch.record.process import process_stat


def read(folder: Path) -> dict[str, object]:
    return json.loads((folder / "job.json").read_text())


def entry(role: str, rank: int, pid: int, endpoint: str | None) -> dict[str, object]:
    started = process_stat(pid)[1]
    return {"role": role, "rank": rank, "pid": pid, "endpoint": endpoint, "started": started}


def test_it_lists_the_roles_in_order_and_when_they_began_and_ended(tmp_path: Path) -> None:
    now = 100.0
    record = JobFile(tmp_path, clock=lambda: now)
    assert not (tmp_path / "job.json").exists()  # a job that never began
    record.began("rendezvous", 0, 9, None)
    record.began("expert", 0, 13, "unix:/run/expert-0")
    record.began("worker", 1, 12, None)
    record.began("worker", 0, 11, None)
    first = entry("worker", 0, 11, None)
    second = entry("worker", 1, 12, None)
    expert = entry("expert", 0, 13, "unix:/run/expert-0")
    assert read(tmp_path) == {"roles": [first, second, expert], "started": 100.0, "ended": None}
    record.returns("expert", 0)
    assert read(tmp_path)["roles"] == [first, second, {**expert, "pid": None}]
    record.began("expert", 0, 14, "unix:/run/expert-0")
    assert read(tmp_path)["roles"] == [first, second, {**expert, "pid": 14}]
    record.returns()
    assert [role["pid"] for role in read(tmp_path)["roles"]] == [None] * 3  # type: ignore[attr-defined, index]
    now = 150.0
    record.ended()
    assert read(tmp_path)["ended"] == 150.0
    assert os.listdir(tmp_path) == ["job.json"]  # nothing half written beside it


def test_readers_never_see_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = JobFile(tmp_path)
    record.began("worker", 0, 1, None)
    before = read(tmp_path)
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        assert read(tmp_path) == before
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    record.began("worker", 1, 2, None)
    assert len(read(tmp_path)["roles"]) == 2  # type: ignore[arg-type]


def test_processes_are_listed_before_they_start(tmp_path: Path) -> None:
    other = {"pid": os.getpid(), "run": {"steps": 2000}}  # of another job in the same folder
    (tmp_path / "worker-0.status").write_text(json.dumps(other))
    record = JobFile(tmp_path)
    record.expects({"worker": 1, "parameters": 0, "expert": 1})
    assert [(role.name, role.state) for role in status_of(tmp_path).roles] == [
        ("worker 0", "starting"),
        ("expert 0", "starting"),
    ]
    assert status_of(tmp_path).roles[0].steps is None
    record.began("worker", 0, os.getpid(), None)
    record.returns("worker", 0)
    record.returns("worker", 1)  # a newcomer for which there was no room
    assert [role.state for role in status_of(tmp_path).roles] == ["restarting", "starting"]


def test_a_file_that_cannot_be_written_ends_no_job(tmp_path: Path) -> None:
    told: list[str] = []
    record = JobFile(tmp_path / "gone", told.append)
    record.began("worker", 0, 1, None)
    record.ended()
    assert told == [f"{tmp_path / 'gone' / 'job.json'} is not up to date: No such file or directory"]
