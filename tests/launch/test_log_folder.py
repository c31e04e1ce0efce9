"""A job's folders: of its logs, which one running job has and needs no file of, and where its workers meet."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest
from jobs import Ends, Script, launch

from launched import run, start_run
from waiting import wait_until


def test_a_second_job_gets_a_folder_of_its_own(script: Script, tmp_path: Path) -> None:
    """It wrote over the first one's logs, and ended with an error of the launcher."""
    logs, go = tmp_path / "logs", tmp_path / "go"
    path = script(
        """
        import pathlib, sys, time
        print(sys.argv[2], flush=True)
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
        """
    )
    with start_run("--log-dir", logs, path, go, "first") as first:
        wait_until(lambda: (logs / "worker-0.log").exists() and "first" in (logs / "worker-0.log").read_text())
        with start_run("--log-dir", logs, path, go, "second") as second:
            wait_until((tmp_path / "logs.2" / "worker-0.log").exists)
            go.touch()
            _, err = second.communicate(60.0)
        first.communicate(60.0)
    assert (first.returncode, second.returncode) == (0, 0)
    assert err == f"anabranch: a running job writes to {logs}; the logs of this one: {logs}.2\n"
    assert (logs / "worker-0.log").read_text() == "first\n"
    assert (tmp_path / "logs.2" / "worker-0.log").read_text() == "second\n"


def test_the_folder_of_a_second_job_in_the_present_one_lies_beside_it(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--log-dir .` of a second job was a traceback: a dot has no name."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    holder = os.open(".", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    done = run("--log-dir", ".", script(""))
    os.close(holder)
    assert done.stderr == f"anabranch: a running job writes to .; the logs of this one: {tmp_path / 'here.2'}\n"


def test_a_folder_that_a_cleaner_removes_does_not_fail_the_job(script: Script, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    done = run("--workers", 2, "--log-dir", logs, script(f"import shutil; shutil.rmtree({str(logs)!r}, True)"))
    assert done.returncode == 0, done.stderr


def test_workers_meet_through_a_file_that_no_other_user_can_reach_and_the_store_is_on_the_loopback(ended: Ends) -> None:
    """Anybody on the machine could overwrite the addresses in the store of a starting job."""
    source = """
        import os, pathlib, stat
        import anabranch as ab, torch
        from torch.distributed.distributed_c10d import _get_default_store
        ab.job().grid(data=2, pipeline=1)
        meeting = pathlib.Path(os.environ["ANABRANCH_MEETING"])
        assert meeting.stat().st_size > 0
        assert stat.S_IMODE(meeting.parent.stat().st_mode) == 0o700
        store = _get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        rows = [row.split() for name in ("tcp", "tcp6") for row in open(f"/proc/net/{name}").readlines()[1:]]
        listening = [row[1].split(":") for row in rows if row[3] == "0A"]
        port = int(os.environ["MASTER_PORT"])
        print(type(store).__name__, {address for address, at in listening if int(at, 16) == port})
        """
    assert ended(source, workers=2).texts[1] == "FileStore {'0100007F'}\n"


def test_a_machine_without_a_loopback_interface_is_named(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.socket.connect

    def unreachable(self: socket.socket, address: tuple[str, int]) -> None:
        if self.type == socket.SOCK_DGRAM:
            raise OSError(101, "Network is unreachable")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(ConnectionError, match=r"its own address 127\.0\.0\.1: Network is unreachable"):
        launch(script(""), log_dir=tmp_path)
