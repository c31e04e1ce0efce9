"""The files in which a process leaves what it does for readers of its job."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.record.process import STATUS_VARIABLE, ProcessRecord, process_record, read_status, record_process
from anabranch.record.spans import Lasting
from anabranch.transport import Server
from programs import Programs
from waiting import wait_until


@pytest.fixture
def record(tmp_path: Path) -> Iterator[ProcessRecord]:
    with ProcessRecord(tmp_path / "worker-0") as made:
        assert process_record() is made
        yield made


def read(folder: Path, name: str = "worker-0") -> dict[str, object]:
    return json.loads((folder / f"{name}.status").read_text())


def test_facts_are_read_at_each_write_and_the_file_is_replaced_atomically(
    record: ProcessRecord, tmp_path: Path
) -> None:
    path, done = tmp_path / "worker-0.status", 1
    record.put(done=lambda: done, run=lambda: {"loss": 0.5})
    assert read(tmp_path) == {"pid": os.getpid(), "done": 1, "run": {"loss": 0.5}}
    before = path.stat().st_ino
    record.write()
    assert path.stat().st_ino == before  # nothing new
    done = 2
    record.write()
    assert read(tmp_path)["done"] == 2
    assert [other.name for other in tmp_path.iterdir()] == ["worker-0.status"]


def test_facts_that_are_settled_keep_their_last_values_and_those_of_a_successor_stay(
    record: ProcessRecord, tmp_path: Path
) -> None:
    steps = [3]
    first, second = (lambda: steps[0]), (lambda: 10 * steps[0])
    record.put(run=first)
    record.settle(run=first)
    steps[0] = 4
    record.write()
    assert read(tmp_path)["run"] == 3
    record.put(run=second)
    record.settle(run=first)  # of an Executor that is closed after the next was made
    steps[0] = 5
    record.write()
    assert read(tmp_path)["run"] == 50


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"pid": null}', '{"pid": 7'])
def test_a_file_of_another_form_is_no_record(text: str, tmp_path: Path) -> None:
    """Of its errors the supervisor of a job would have died."""
    (tmp_path / "worker-0.status").write_text(text)
    assert read_status(tmp_path / "worker-0", 7) == {}


def test_a_folder_that_was_removed_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with ProcessRecord(tmp_path / "logs" / "worker-0", tmp_path / "logs") as record:
        record.put(done=lambda: 1)
        shutil.rmtree(tmp_path / "logs")
        record.put(done=lambda: 2)


def test_a_process_without_a_launcher_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATUS_VARIABLE, raising=False)
    record_process()
    assert process_record() is None


def test_an_open_span_is_written_by_itself_and_leaves_with_its_end(record: ProcessRecord, tmp_path: Path) -> None:
    with Lasting("load", "load"):
        wait_until((tmp_path / "worker-0.status").exists)
        (one,) = read(tmp_path)["open"]  # type: ignore[misc]
        assert one["name"] == "load"
    wait_until(lambda: "open" not in read(tmp_path))


def test_a_server_keeps_its_facts_up_to_date_by_itself(record: ProcessRecord, tmp_path: Path) -> None:
    queue = [3]

    def facts() -> dict[str, object]:
        return read(tmp_path)["parameters"]  # type: ignore[return-value]

    with Server([], role="parameters", facts=lambda: {"queue": queue[0]}):
        assert facts()["queue"] == 3
        assert {"uptime", "bytes", "calls", "requests"} <= set(facts())
        queue[0] = 4
        wait_until(lambda: facts()["queue"] == 4)
    uptime = facts()["uptime"]
    record.write()
    assert facts()["uptime"] == uptime  # it serves no more, and has served


_PROCESS = """
import os
from anabranch.record.process import process_record

run = {"steps": 1}
process_record().put(run=lambda: run)
run["steps"] = 2
if os.fork() == 0:
    run["steps"] = 3
    assert process_record() is None
else:
    os.wait()
"""


def test_a_process_leaves_its_last_facts_at_its_end_and_its_forks_nothing(tmp_path: Path, programs: Programs) -> None:
    with programs.start(_PROCESS, environment={STATUS_VARIABLE: str(tmp_path / "worker-0")}) as process:
        assert process.wait() == 0
    assert read(tmp_path) == {"pid": process.pid, "run": {"steps": 2}}


_BAR = """
import io, logging, sys
from anabranch.record.process import process_record

process_record()
sys.stderr = io.StringIO()
logging.getLogger("anabranch.executor").info("2 workers")
print(sys.stderr.getvalue(), end="")
sys.stderr.close()
logging.getLogger("anabranch.executor").info("nobody reads this, and training goes on")
sys.stderr = None
logging.getLogger("anabranch.executor").info("nor this")
print("ends")
"""


def test_messages_go_where_a_progress_bar_has_put_stderr(tmp_path: Path, programs: Programs) -> None:
    """They began behind the bar and went on in the next line."""
    ended = programs.run(_BAR, environment={STATUS_VARIABLE: str(tmp_path / "worker-0")})
    assert ended.stdout == "anabranch: 2 workers\nends\n"
