"""A job's folders: of its logs, which one running job has and needs no file of, and where its workers meet."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import launch

from anabranch.launch.meeting.rendezvous import Rendezvous
from launched import run, start_run
from waiting import wait_until

Script = Callable[[str], Path]


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


def test_pipes_in_a_log_folder_do_not_hang_the_job(script: Script, tmp_path: Path) -> None:
    """Each waited for a reader, or a writer, and no signal ended that."""
    for name in ("worker-0.log", "worker-1.log", "rendezvous-0.log", "worker-0.error", "worker-1.status", "job.json"):
        os.mkfifo(tmp_path / name)
    path = script("import os, sys; print('hello'); sys.exit(os.environ['RANK'] == '1')")
    done = run("--workers", 2, "--log-dir", tmp_path, path, timeout=60.0)
    assert (done.returncode, done.stdout) == (1, "hello\n"), done.stderr
    assert "rank 1" in done.stderr


def test_workers_meet_through_a_file_that_no_other_user_can_reach(script: Script, tmp_path: Path) -> None:
    """Anybody on the machine could overwrite the addresses in the store of a starting job."""
    path = script(
        """
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
        print(type(store).__name__)
        """
    )
    outcome = launch(path, workers=2, log_dir=tmp_path)
    assert (outcome.exit_code, (tmp_path / "worker-1.log").read_text()) == (0, "FileStore\n")


def test_a_machine_without_a_loopback_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def unreachable(self: socket.socket, address: tuple[str, int]) -> None:
        if self.type == socket.SOCK_DGRAM:
            raise OSError(101, "Network is unreachable")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    with pytest.raises(ConnectionError, match=r"its own address 127\.0\.0\.1: Network is unreachable"):
        Rendezvous(None)


LISTENING = "0A"
LOOPBACK = "0100007F"


def listening_addresses(port: int) -> set[str]:
    """The local addresses, in the kernel's hexadecimal, on which somebody listens at the port."""
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == LISTENING]
    return {address for address, end in ends if int(end, 16) == port}


def test_the_store_listens_on_the_loopback_alone() -> None:
    with Rendezvous(None) as rendezvous:
        assert listening_addresses(rendezvous.port) == {LOOPBACK}
