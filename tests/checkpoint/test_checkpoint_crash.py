"""A save that is killed, or meets a failing disk, at any point: the new checkpoint is whole, or the one before is.

The sweeps run in processes of their own, forked by a program that has nothing but the checkpoint to lose: one
child for each fault point, killed there by SIGKILL.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from saves import assert_whole, save

from anabranch import checkpoint
from anabranch.checkpoint import generations, tensor_file, writing
from anabranch.errors import CheckpointError
from anabranch.record.spans import on_fault_point
from programs import Programs

# Saves `before` times undisturbed and then once more, killed at the nth fault point; prints "acknowledged" if it came
# that far. Directories are DIR/0, DIR/1, ... until a child lives through its save.
SWEEP = """
import os, signal, sys
import torch
from anabranch import checkpoint
from anabranch.record.spans import on_fault_point

torch.set_num_threads(1)
top, before = sys.argv[1], int(sys.argv[2])

def save(directory, step):
    groups = {"model": {"w": torch.full((3,), float(step)), "b": torch.ones(1)}, "rank0": {"rng": torch.tensor(step)}}
    checkpoint.write(directory, groups, {"step": step}, step=step)

def child(nth):
    directory = os.path.join(top, str(nth))
    for step in range(before):
        save(directory, step)
    left = nth
    def kill(name):
        nonlocal left
        left -= 1
        if left < 0:
            print(nth, "killed", name, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    with on_fault_point(kill):
        save(directory, before)
    print(nth, "acknowledged", "-", flush=True)
    os._exit(0)

nth = 0
while True:
    pid = os.fork()
    if not pid:
        child(nth)
    _, status = os.waitpid(pid, 0)
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
    nth += 1
"""

BEFORE_MANIFEST = {"claimed", "file_opened", "header_written", "tensor_written", "file_synced", "file_renamed"}
BEFORE_MANIFEST |= {"directory_made", "files_durable", "manifest_written", "manifest_synced"}


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that is possible: these tests sync thousands of files, and none asks what a real disk keeps."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="anabranch-") as directory:
        path = Path(directory) / "checkpoints"
        path.mkdir()
        yield path


@pytest.mark.parametrize("before", [*(pytest.param(few, marks=pytest.mark.slow) for few in (0, 1)), 2])
def test_a_save_killed_at_any_point_leaves_the_new_or_the_previous_checkpoint_whole(
    tmp_path: Path, before: int, programs: Programs
) -> None:
    run = programs.run(SWEEP, tmp_path, before)
    assert run.returncode == 0, run.stderr
    outcomes = [line.split() for line in run.stdout.splitlines()]
    assert outcomes[-1][1] == "acknowledged"
    seen = {name.removeprefix("checkpoint.") for _, _, name in outcomes}
    assert seen >= BEFORE_MANIFEST - ({"directory_made"} if before else set())
    assert seen >= {"manifest_renamed", "durable"}
    for nth, outcome, point in outcomes:
        directory = tmp_path / nth
        made = outcome == "acknowledged" or point.removeprefix("checkpoint.") not in BEFORE_MANIFEST
        found = checkpoint.read_newest(directory)
        if made:
            assert found is not None
            assert_whole(found, before)
        elif before:
            assert found is not None
            assert_whole(found, before - 1)
        else:
            assert found is None
        for generation in generations.complete_generations(directory):
            checkpoint.read(directory, generation=generation)  # one that is being removed is never half there
        # The next save is as if nothing had happened, and leaves no trace of the one that was killed.
        save(directory, 100)
        assert_whole(checkpoint.read(directory), 100)
        left = [path.name for path in directory.iterdir() if path.name != ".lock"]
        assert len(left) == 3 * min(2, 1 + made + before), (point, left)
        assert not any(name.endswith(".new") for name in left)


class Disk:
    """Fails the nth call of a function that a save makes of a module, and every one after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, nth: int, code: int) -> None:
        self.left, self.code = nth, code
        self.real: Callable[..., object] = getattr(module, name, open)
        monkeypatch.setattr(module, name, self, raising=False)

    def __call__(self, *args: object, **options: object) -> object:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args, **options)


@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        (os, "fsync", errno.EIO),
        (os, "rename", errno.ENOSPC),
        (os, "open", errno.EACCES),
        (writing, "open", errno.ENOSPC),  # of files that are written
    ],
)
def test_a_failing_disk_costs_the_new_checkpoint_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, code: int, before: int
) -> None:
    for nth in range(100):
        directory = tmp_path / str(nth)
        directory.mkdir()
        for step in range(before):
            save(directory, step)
        with monkeypatch.context() as patch:
            Disk(patch, module, name, nth, code)
            try:
                save(directory, before)
            except CheckpointError as error:
                failed = str(error)
            else:
                break
        assert f"cannot save step {before} to {directory}" in failed
        assert os.strerror(code) in failed
        found = checkpoint.read_newest(directory)
        if found is None:
            assert before == 0
        else:
            assert_whole(found, found.step)
            assert found.step >= before - 1
        save(directory, 100)
        assert_whole(checkpoint.read(directory), 100)
    else:
        pytest.fail("the save never came through")
    assert nth > 0
    assert_whole(checkpoint.read(directory), before)


class FullDisk:
    """Stands for ``open`` in a module: files that hold ``room`` bytes more, together, and then no byte."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, path: Path, mode: str, buffering: int) -> object:
        return _FullFile(self, open(path, mode, buffering=buffering))


class _FullFile:
    def __init__(self, disk: FullDisk, file: object) -> None:
        self.disk, self.file = disk, file

    def write(self, data: memoryview) -> int:
        if not self.disk.room and len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: self.disk.room]
        self.disk.room -= len(part)
        written: int = self.file.write(part)  # type: ignore[attr-defined]
        return written

    def fileno(self) -> int:
        return self.file.fileno()  # type: ignore[attr-defined,no-any-return]

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()  # type: ignore[attr-defined]


def test_a_full_disk_keeps_earlier_saves_and_frees_the_space_of_the_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    size = sum(map(len, before.values()))
    for room in range(0, size, 31):
        with monkeypatch.context() as patch:
            patch.setattr(writing, "open", FullDisk(room), raising=False)
            with pytest.raises(CheckpointError, match="No space left on device; earlier checkpoints there are unch"):
                save(tmp_path, 1)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.setattr(writing, "open", FullDisk(2 * size), raising=False)
    save(tmp_path, 1)
    assert_whole(checkpoint.read(tmp_path), 1)


@functools.cache
def strace() -> str | None:
    """Why strace cannot inject faults here, ``None`` if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(
        ["strace", "-f", "-qq", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO", "true"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return None if probe.returncode == 0 else f"strace cannot trace here: {probe.stderr.strip()[:200]}"


STRACED = """
import sys
import torch
from anabranch import checkpoint
from anabranch.errors import CheckpointError
print("started", flush=True)
try:
    checkpoint.write(sys.argv[1], {"model": {"w": torch.full((3,), 1.0), "b": torch.ones(1)},
        "rank0": {"rng": torch.tensor(1)}}, {"step": 1}, step=1)
except CheckpointError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inject", "words"),
    [
        *[(f"fsync:error=EIO:when={nth}+", "Input/output error") for nth in (2, 5)],
        ("rename:error=ENOSPC:when=2+", "No space left on device"),
        ("fsync:signal=SIGKILL:when=3", ""),
        ("rename:signal=SIGKILL:when=3", ""),
    ],
)
def test_the_kernel_failing_or_killing_at_the_nth_call_leaves_a_whole_checkpoint(
    tmp_path: Path, inject: str, words: str
) -> None:
    if reason := strace():
        pytest.skip(reason)  # no strace here, or the kernel forbids it to look
    save(tmp_path, 0)
    options = ["-f", "-qq", "-o", tmp_path.parent / "trace", "-e", "trace=fsync,rename", "-e", f"inject={inject}"]
    run = subprocess.run(
        ["strace", *options, sys.executable, "-c", STRACED, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.stdout.startswith("started"), run.stderr
    assert words in run.stdout
    assert run.returncode == (0 if words else -9)
    found = checkpoint.read(tmp_path)
    assert_whole(found, found.step)
    save(tmp_path, 100)
    assert_whole(checkpoint.read(tmp_path), 100)


def test_every_file_is_durable_before_its_name_and_every_name_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    def logged(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            target = args[0]
            if isinstance(target, int):
                target = os.readlink(f"/proc/self/fd/{target}")
            log.append(f"{name} {Path(str(target)).name}")
            return function(*args)

        return call

    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, logged(name, getattr(os, name)))
    save(tmp_path / "run", 0)
    assert log == [
        f"fsync {tmp_path.name}",
        "fsync .model-00000001.safetensors.new",
        "fsync .rank0-00000001.safetensors.new",
        "rename .model-00000001.safetensors.new",
        "rename .rank0-00000001.safetensors.new",
        "fsync run",
        "fsync .manifest-00000001.json.new",
        "rename .manifest-00000001.json.new",
        "fsync run",
    ]


def test_old_generations_are_removed_only_after_the_new_one_is_durable(tmp_path: Path) -> None:
    save(tmp_path, 0)
    save(tmp_path, 1)
    seen: list[tuple[str, int]] = []
    with on_fault_point(lambda name: seen.append((name, len(generations.complete_generations(tmp_path))))):
        save(tmp_path, 2)
    durable = seen.index(("checkpoint.durable", 3))
    assert all(count >= 2 for _, count in seen)
    assert [name for name, _ in seen].index("checkpoint.removed") > durable


def test_one_copy_of_one_tensor_at_a_time_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[memoryview]] = []
    most = 0
    real = tensor_file._bytes_of

    def counted(tensor: torch.Tensor) -> memoryview:
        nonlocal most
        data = real(tensor)
        copies.append(weakref.ref(data))
        most = max(most, sum(copy() is not None for copy in copies))
        return data

    monkeypatch.setattr(tensor_file, "_bytes_of", counted)
    checkpoint.write(tmp_path, {"m": {f"w{i}": torch.ones(64, 32).t() for i in range(4)}}, None, step=0)
    assert most == 1
