"""The file in which a process leaves its facts for readers of its job."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from anabranch.status_file import STATUS_VARIABLE, StatusFile, status_file
from anabranch.transport import Server
from waiting import wait_until


def test_facts_are_read_at_each_write_and_the_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.status"
    file, done = StatusFile(path), 1
    file.put(done=lambda: done, run=lambda: {"loss": 0.5})
    file.changed()
    assert json.loads(path.read_text()) == {"pid": os.getpid(), "done": 1, "run": {"loss": 0.5}}
    before = path.stat().st_ino
    file.changed()
    assert path.stat().st_ino == before  # nothing new
    done = 2
    file.drop("run")
    file.changed()
    assert json.loads(path.read_text()) == {"pid": os.getpid(), "done": 2}
    assert [other.name for other in tmp_path.iterdir()] == ["worker-0.status"]


def test_a_folder_that_was_removed_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    file = StatusFile(tmp_path / "logs" / "worker-0.status")
    shutil.rmtree(tmp_path / "logs")
    file.write()


def test_a_process_without_a_launcher_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATUS_VARIABLE, raising=False)
    assert status_file() is None


def test_a_server_keeps_its_facts_up_to_date_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATUS_VARIABLE, str(tmp_path / "parameters-0"))
    path, queue = tmp_path / "parameters-0.status", [3]

    def facts() -> dict[str, object]:
        return json.loads(path.read_text())["parameters"]

    with Server([], role="parameters", facts=lambda: {"queue": queue[0]}):
        assert facts()["queue"] == 3
        assert {"uptime", "bytes", "calls", "requests"} <= set(facts())
        queue[0] = 4
        wait_until(lambda: facts()["queue"] == 4)
