"""A store that never answers, and Ctrl-C in the middle of an upload: an error, and a whole checkpoint."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from anabranch import checkpoint
from anabranch.checkpoint.bounded_call import NoProgress, StoragePatience, bounded
from anabranch.checkpoint.storage import SECONDS_VARIABLE, Storage
from anabranch.errors import CheckpointError
from anabranch.testing import FakeClock
from waiting import wait_until


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
    since = 0.0

    def _hang(self, operation: str) -> None:
        if operation != Hanging.operation:
            return
        if Hanging.after:
            Hanging.after -= 1
            return
        Hanging.operation, Hanging.since = "", time.monotonic()
        if Hanging.interrupts:
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
        try:
            assert Hanging.go.wait(60.0)
        finally:
            Hanging.ended += 1

    def ls(self, *arguments: object, **options: object) -> object:
        self._hang("ls")
        return super().ls(*arguments, **options)

    def find(self, *arguments: object, **options: object) -> object:
        self._hang("find")
        return super().find(*arguments, **options)

    def info(self, *arguments: object, **options: object) -> object:
        self._hang("info")
        return super().info(*arguments, **options)

    def makedirs(self, *arguments: object, **options: object) -> object:
        self._hang("makedirs")
        return super().makedirs(*arguments, **options)

    def put_file(self, *arguments: object, **options: object) -> object:
        self._hang("put_file")
        return super().put_file(*arguments, **options)

    def get_file(self, *arguments: object, **options: object) -> object:
        self._hang("get_file")
        return super().get_file(*arguments, **options)

    def rm_file(self, *arguments: object, **options: object) -> object:
        self._hang("rm_file")
        return super().rm_file(*arguments, **options)


class Impatient(StoragePatience):
    """Ends with the call that hangs, and with no other, however slow this machine is."""

    def __init__(self, seconds: float, size: int = 0) -> None:
        super().__init__(seconds, size)
        self.began = time.monotonic()

    def left(self) -> float:
        return 0.0 if self.began < Hanging.since else 0.01


@pytest.fixture
def url() -> Iterator[str]:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    Hanging.operation, Hanging.after, Hanging.interrupts, Hanging.ended, Hanging.since = "", 0, False, 0, 0.0
    Hanging.go = threading.Event()
    Hanging.store.clear()
    yield f"hanging://{uuid.uuid4().hex}/run"
    Hanging.go.set()


def saved(url: str, step: int) -> None:
    groups = {"model": {"weight": torch.full((3,), float(step))}, "optimizer": {"m": torch.full((2,), float(step))}}
    checkpoint.write(url, groups, {"epoch": step}, step=step)


def assert_whole(url: str, *steps: int) -> None:
    found = checkpoint.read(url)
    assert found.step in steps
    assert found.state == {"epoch": found.step}
    assert found.tensors("model")["weight"].tolist() == [float(found.step)] * 3
    assert found.tensors("optimizer")["m"].tolist() == [float(found.step)] * 2


def let_go(calls: int) -> None:
    """Returns once what hung has come about, late."""
    Hanging.go.set()
    wait_until(lambda: Hanging.ended == calls)
    for thread in threading.enumerate():
        if thread.name == "anabranch-storage":
            thread.join(60.0)


CALLS = [("ls", 0), ("put_file", 0), ("put_file", 1), ("put_file", 2), ("info", 0), ("info", 2), ("rm_file", 0)]


@pytest.mark.parametrize(("operation", "after"), CALLS)
def test_a_save_to_a_store_that_does_not_answer_is_an_error(
    url: str, operation: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        saved(url, step)
    with monkeypatch.context() as patch:
        patch.setenv(SECONDS_VARIABLE, "0.05")
        patch.setattr("anabranch.checkpoint.storage.StoragePatience", Impatient)
        Hanging.operation, Hanging.after = operation, after
        with pytest.raises(CheckpointError, match=rf"{url}: no answer for 0 s.*{SECONDS_VARIABLE}.*unchanged"):
            saved(url, 3)
    assert_whole(url, 2, 3)  # 3 if only the removal of 1 was left
    let_go(1)
    assert_whole(url, 2, 3)
    saved(url, 4)
    assert_whole(url, 4)
    files, root = fsspec.core.url_to_fs(url)
    assert len(files.find(root)) == 6, "two generations of three files: left-overs are gone"


@pytest.mark.parametrize(("operation", "read"), [("find", True), ("get_file", True), ("info", True), ("ls", False)])
def test_a_load_from_a_store_that_does_not_answer_is_an_error(
    url: str, operation: str, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(url, 1)
    with monkeypatch.context() as patch:
        patch.setenv(SECONDS_VARIABLE, "0.05")
        patch.setattr("anabranch.checkpoint.storage.StoragePatience", Impatient)
        Hanging.operation = operation
        with pytest.raises(CheckpointError, match=rf"{url}: no answer for 0 s"):
            checkpoint.read_newest(url) if read else checkpoint.read(url)
    let_go(1)
    assert_whole(url, 1)


@pytest.mark.parametrize("nth", range(3))
def test_ctrl_c_in_the_middle_of_an_upload_leaves_the_checkpoint_before(url: str, nth: int) -> None:
    saved(url, 1)
    Hanging.operation, Hanging.after, Hanging.interrupts = "put_file", nth, True
    with pytest.raises(KeyboardInterrupt):
        saved(url, 2)
    assert_whole(url, 1)
    let_go(1)  # the upload goes on although nobody waits for it; its manifest may arrive once all else is there
    assert_whole(url, 1, 2) if nth == 2 else assert_whole(url, 1)
    saved(url, 3)
    assert_whole(url, 3)


def test_an_invalid_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("soon", "0", "nan"):
        monkeypatch.setenv(SECONDS_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{SECONDS_VARIABLE}='{wrong}' is not a number of seconds"):
            Storage("memory://x")


def test_patience_grows_with_the_bytes_and_restarts_with_progress() -> None:
    clock = FakeClock()
    patience = StoragePatience(60.0, 3 << 30, clock)
    clock.advance(3000.0)
    assert patience.left() == pytest.approx(60.0 + 3072.0 - 3000.0)
    patience.moved()  # it tells how far it is: silence is no longer taken for work on all of it
    assert patience.left() == pytest.approx(60.0 + 1024.0)
    clock.advance(2000.0)
    assert patience.left() < 0


def test_errors_and_values_are_those_of_the_call() -> None:
    assert bounded(lambda: 3, StoragePatience(60.0)) == 3
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"], StoragePatience(60.0))
    go = threading.Event()
    with pytest.raises(NoProgress, match="no answer for 0 s"):
        bounded(lambda: go.wait(60.0), StoragePatience(0.01))
    go.set()
