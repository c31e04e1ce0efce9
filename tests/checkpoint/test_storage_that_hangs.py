"""A store that never answers, and Ctrl-C in the middle of an upload: an error, and a whole checkpoint."""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from concurrent.futures._base import DoneAndNotDoneFutures
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from saves import assert_whole, save

from anabranch import checkpoint
from anabranch.checkpoint.storage import SECONDS_VARIABLE, Storage
from anabranch.errors import CheckpointError
from waiting import wait_until

OPERATIONS = ("ls", "find", "info", "makedirs", "put_file", "get_file", "rm_file")


class Hanging(MemoryFileSystem):  # type: ignore[misc]  # of a package without types
    """A file system of memory, of which an operation does not come back until it is let go."""

    protocol = "hanging"
    store: ClassVar[dict[str, object]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = True

    operation = ""
    after = 0
    interrupts = False
    go = threading.Event()
    ended = 0
    hangs = False

    def _hang(self, operation: str) -> None:
        if operation != Hanging.operation:
            return
        if Hanging.after:
            Hanging.after -= 1
            return
        Hanging.operation, Hanging.hangs = "", True
        if Hanging.interrupts:
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
        try:
            assert Hanging.go.wait(60.0)
        finally:
            Hanging.ended += 1
            Hanging.hangs = False

    def __getattribute__(self, name: str) -> Any:
        real = super().__getattribute__(name)
        if name not in OPERATIONS:
            return real

        def call(*arguments: object, **options: object) -> object:
            self._hang(name)
            return real(*arguments, **options)

        return call


def wait_for_what_hangs(futures: Sequence[Future[object]], seconds: float) -> DoneAndNotDoneFutures[object]:
    """Ends with the call that hangs, and with no other, however slow this machine is."""
    wait_until(lambda: futures[0].done() or Hanging.hangs)
    return wait(futures, 0)


@pytest.fixture
def url() -> Iterator[str]:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    Hanging.operation, Hanging.after, Hanging.interrupts, Hanging.ended, Hanging.hangs = "", 0, False, 0, False
    Hanging.go = threading.Event()
    Hanging.store.clear()
    yield f"hanging://{uuid.uuid4().hex}/run"
    Hanging.go.set()


def let_go(calls: int) -> None:
    """Returns once what hung has come about, late."""
    Hanging.go.set()
    wait_until(lambda: Hanging.ended == calls)
    for thread in threading.enumerate():
        if thread.name == "anabranch-storage":
            thread.join(60.0)


CALLS = [("ls", 0), ("put_file", 0), ("put_file", 2), ("info", 2), ("rm_file", 0)]


@pytest.mark.parametrize(("operation", "after"), CALLS)
def test_a_save_to_a_store_that_does_not_answer_is_an_error(
    url: str, operation: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(url, step)
    with monkeypatch.context() as patch:
        patch.setenv(SECONDS_VARIABLE, "0.05")
        patch.setattr("anabranch.checkpoint.storage.wait", wait_for_what_hangs)
        Hanging.operation, Hanging.after = operation, after
        with pytest.raises(CheckpointError, match=rf"{url}: no answer for 0 s.*{SECONDS_VARIABLE}.*unchanged"):
            save(url, 3)
    assert_whole(checkpoint.read(url), 2, 3)  # 3 if only the removal of 1 was left
    let_go(1)
    assert_whole(checkpoint.read(url), 2, 3)
    save(url, 4)
    assert_whole(checkpoint.read(url), 4)
    files, root = fsspec.core.url_to_fs(url)
    assert len(files.find(root)) == 6, "two generations of three files: left-overs are gone"


@pytest.mark.parametrize(("operation", "read"), [("find", True), ("get_file", True), ("info", True), ("ls", False)])
def test_a_load_from_a_store_that_does_not_answer_is_an_error(
    url: str, operation: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(url, 1)
    with monkeypatch.context() as patch:
        patch.setenv(SECONDS_VARIABLE, "0.05")
        patch.setattr("anabranch.checkpoint.storage.wait", wait_for_what_hangs)
        Hanging.operation = operation
        with pytest.raises(CheckpointError, match=rf"{url}: no answer for 0 s"):
            checkpoint.read_newest(url) if read else checkpoint.read(url)
    let_go(1)
    assert_whole(checkpoint.read(url), 1)


@pytest.mark.parametrize("nth", range(3))
def test_ctrl_c_in_the_middle_of_an_upload_leaves_the_checkpoint_before(url: str, nth: int) -> None:
    save(url, 1)
    Hanging.operation, Hanging.after, Hanging.interrupts = "put_file", nth, True
    with pytest.raises(KeyboardInterrupt):
        save(url, 2)
    assert_whole(checkpoint.read(url), 1)
    let_go(1)  # the upload goes on although nobody waits for it; its manifest may arrive once all else is there
    assert_whole(checkpoint.read(url), 1, 2) if nth == 2 else assert_whole(checkpoint.read(url), 1)
    save(url, 3)
    assert_whole(checkpoint.read(url), 3)


def test_an_invalid_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("soon", "0", "nan"):
        monkeypatch.setenv(SECONDS_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{SECONDS_VARIABLE}='{wrong}' is not a number of seconds"):
            Storage("memory://x")


def test_the_time_of_a_call_grows_with_the_bytes(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []
    with (tmp_path / "file").open("wb") as file:
        file.truncate(5 << 20)

    def noted(futures: Sequence[Future[object]], limit: float) -> DoneAndNotDoneFutures[object]:
        seconds.append(limit)
        return wait(futures, limit)

    monkeypatch.setattr("anabranch.checkpoint.storage.wait", noted)
    Storage(url).put(tmp_path / "file", "file")
    assert seconds == [65.0]
