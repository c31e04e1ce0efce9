"""Two runs that save to one path: the later one is told whose checkpoints are there, and nothing is replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anabranch as ab
from anabranch import checkpoint
from anabranch.checkpoint import reading
from anabranch.job import JOB_VARIABLE
from anabranch.testing import faults
from toys import in_job, step_of


def executor(**options: Any) -> ab.Executor:
    return ab.Executor(step_of(nn.Linear(2, 1)), **options)


def run(target: ab.Executor, times: int = 1) -> None:
    for _ in range(times):
        target.run(batch=torch.ones(2, 2))


ANOTHER = (
    r"newest checkpoint, of step {}, was saved by another run \(.*process \d+ on .*\) at \d{{4}}-\d\d-\d\d \d\d:\d\d"
)


@pytest.fixture(params=["folder", "storage"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "folder" else f"memory://{tmp_path}"


def test_another_runs_checkpoints_are_not_replaced(place: str) -> None:
    with executor() as first, executor() as second:
        run(first, 3)
        first.save(place)
        run(second, 6)
        with pytest.raises(ab.CheckpointError, match=ANOTHER.format(3) + ".*another folder.*resume or load"):
            second.save(place)
        assert checkpoint.read(place).step == 3
        first.save(place)
        second.save(f"{place}/second")


@pytest.mark.parametrize("how", ["load", "resume"])
def test_a_run_that_is_continued_is_handed_on(place: str, how: str) -> None:
    with executor() as first, executor() as second, executor() as third:
        run(first, 2)
        first.save(place)
        getattr(second, how)(place)
        getattr(third, how)(place)
        run(second)
        second.save(place)
        second.save(place)
        assert checkpoint.read(place).step == 3
        for other in (first, third):  # that still lives, and that has loaded what has been gone on from since
            with pytest.raises(ab.CheckpointError, match=ANOTHER.format(3)):
                other.save(place)


def test_a_run_that_is_continued_is_handed_on_in_its_other_folders(place: str) -> None:
    """A job keeps its best and its last checkpoint; only the last one is loaded when it goes on."""
    with executor() as first, executor() as other, executor() as second:
        run(first, 1)
        first.save(f"{place}/best")
        run(first, 1)
        first.save(f"{place}/last")
        other.save(f"{place}/others")
        assert second.resume(place)
        run(second)
        second.save(f"{place}/best")
        with pytest.raises(ab.CheckpointError, match=ANOTHER.format(0)):
            second.save(f"{place}/others")
        first.save(f"{place}/last")  # the first still lives, and has saved since: that is not handed on
        first.save(f"{place}/third")
        with pytest.raises(ab.CheckpointError, match=ANOTHER.format(2)):
            second.save(f"{place}/third")


def test_a_run_that_is_continued_twice_is_handed_on_in_its_other_folders(place: str) -> None:
    """The run between found nothing better, so it saved no best checkpoint."""
    for best in (True, False, True):
        with executor() as target:
            target.resume(f"{place}/last")
            run(target)
            if best:
                target.save(f"{place}/best")
            target.save(f"{place}/last")
    assert checkpoint.read(f"{place}/best").step == 3


def test_a_run_continues_also_where_the_newest_is_damaged(tmp_path: Path) -> None:
    with executor() as first, executor() as second:
        first.save(tmp_path)
        run(first)
        first.save(tmp_path)
        newest = tmp_path / "model-00000002.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1])
        second.load(tmp_path)
        assert second.step == 0
        second.save(tmp_path)
    (tmp_path / "manifest-00000003.json").write_text("{}")
    with executor() as third, pytest.raises(ab.CheckpointError, match=ANOTHER.format(1)):  # the newest that is readable
        third.save(tmp_path)


def test_a_checkpoint_that_no_executor_has_saved_is_not_replaced(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, {"t": {"rows": torch.ones(1)}}, {"shard": 0}, step=9)
    with executor() as target, pytest.raises(ab.CheckpointError, match="of step 9, was saved by something other than"):
        target.save(tmp_path)


def test_one_start_of_the_launcher_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_VARIABLE, "one start")
    with executor() as first, executor() as second:  # the second after a restart, perhaps with nothing to resume
        first.save(tmp_path)
        second.save(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with executor(comm_mode=None) as third, pytest.raises(ab.CheckpointError, match=ANOTHER.format(0)):
        third.save(tmp_path)  # each process trains alone, and saves alone
    monkeypatch.setenv(JOB_VARIABLE, "another start")
    with executor(comm_mode=None) as fourth, pytest.raises(ab.CheckpointError, match=ANOTHER.format(0)):
        fourth.save(tmp_path)


def test_a_save_in_the_background_is_refused_too(tmp_path: Path) -> None:
    with executor() as first, executor() as second:
        first.save(tmp_path)
        second.save(tmp_path, wait=False)
        with pytest.raises(ab.CheckpointError, match=ANOTHER.format(0)):
            second.finish_saves()
        with pytest.raises(ab.CheckpointError, match="is not a folder|Not a directory|cannot save"):
            second.save(tmp_path / ".lock")


# Generations that are replaced while they are read.


def replacing(monkeypatch: pytest.MonkeyPatch, name: str, replace: Callable[[], None], times: int = 2) -> list[str]:
    """Let a writer save twice, and so remove what was there, at the first ``times`` calls of ``reading.<name>``."""
    function, calls = getattr(reading, name), []

    def after(path: Path, *arguments: Any, **options: Any) -> Any:
        calls.append(path.name)
        if len(calls) <= times:
            replace()
        return function(path, *arguments, **options)

    monkeypatch.setattr(reading, name, after)
    return calls


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("where", ["load_manifest", "check", "load", "download 1", "download 2"])
def test_a_generation_that_is_replaced_while_it_is_read_is_read_anew(
    tmp_path: Path, where: str, search: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy = [False]

    def replace() -> None:
        if not busy[0]:
            busy[0] = True
            run(writer)
            writer.save(place)
            writer.save(place)
            busy[0] = False

    place = f"memory://{tmp_path}" if where.startswith("download") else str(tmp_path)
    with ExitStack() as stack:
        writer, reader = stack.enter_context(executor()), stack.enter_context(executor())
        writer.save(place)
        if where.startswith("download"):  # of the manifest, of the model
            stack.enter_context(faults.at("checkpoint.download", int(where[-1]), replace))
        else:
            replacing(monkeypatch, where, replace)
        assert (reader.resume if search else reader.load)(place) in (True, None)
        assert reader.step == checkpoint.read(place).step > 0
    assert not caplog.records  # nothing is damaged


def loading_while_another_saves(folder: str) -> int:
    """Another run saves while rank 1 reads what both have agreed to load."""
    with executor(comm_mode="AllReduce") as target, executor(comm_mode=None) as writer:
        target.save(folder)
        read, left = checkpoint.Checkpoint.tensors, [1]

        def tensors(self: checkpoint.Checkpoint, group: str, **options: Any) -> Any:
            if ab.job().rank == 1 and group == "optimizer" and left:
                left.pop()
                writer._saver._run = target._saver._run
                run(writer, 3)
                writer.save(folder)
                writer.save(folder)
                assert self.generation == 1
            return read(self, group, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint.Checkpoint, "tensors", tensors)
            target.load(folder)
        return target.step


def test_all_workers_read_anew_what_was_replaced_for_one(tmp_path: Path) -> None:
    assert in_job(loading_while_another_saves, 2, str(tmp_path)) == [3, 3]
