"""``save(wait=False)``: a copy is written while training continues; copies are few, and no failure is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch import checkpoint
from anabranch.deadline import Deadline
from anabranch.executor.saving import background_saves
from programs import Programs
from toys import in_job
from waiting import wait_until

BATCH = (torch.arange(8.0).reshape(4, 2), torch.ones(4, 1))


class Held:
    """Writes of checkpoints that begin when they are let go, and may be made to fail."""

    def __init__(self, write: object) -> None:
        self.write = write
        self.go = threading.Event()
        self.failure: Exception | None = None
        self.begun = self.ended = 0

    def __call__(self, *arguments: object, **options: object) -> object:
        self.begun += 1
        assert self.go.wait(60)
        if self.failure is not None:
            raise self.failure
        try:
            return self.write(*arguments, **options)  # type: ignore[operator]
        finally:
            self.ended += 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(checkpoint.write)
    monkeypatch.setattr(checkpoint, "write", found)
    yield found
    found.go.set()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def executor(**options: object) -> ab.Executor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    step = ab.TrainStep(model, loss, optimizer, scheduler=scheduler)
    return ab.Executor({"train": step}, **options)  # type: ignore[arg-type]


def run(target: ab.Executor, times: int = 1) -> list[float]:
    return [target.run("train", BATCH)["loss"].item() for _ in range(times)]


def test_a_save_holds_the_state_at_its_call_while_training_continues(held: Held, tmp_path: Path) -> None:
    with executor() as first:
        run(first, 3)
        told = []
        first.on("save", lambda record: told.append((record.step, record.path)))
        first.save(tmp_path, wait=False)
        after = run(first, 4)
        assert not list(tmp_path.glob("manifest*"))
        assert told == []
        held.go.set()
        first.finish_saves()
        assert told == [(3, tmp_path)]
    with executor() as second:
        assert second.resume(tmp_path)
        assert second.step == 3
        assert run(second, 4) == after


def test_one_is_written_at_a_time(held: Held, tmp_path: Path) -> None:
    with executor(timeout=0.5) as target:
        target.save(tmp_path, wait=False)
        wait_until(lambda: held.begun)
        with pytest.raises(ab.DeadlineExceeded, match="save in the background"):
            target.save(tmp_path, wait=False)
        assert held.begun == 1
        held.go.set()
        wait_until(lambda: held.ended == 1)
        target.save(tmp_path, wait=False)
        wait_until(lambda: held.ended == 2)  # closing has half a second too
    assert checkpoint.read(tmp_path).generation == 2


@pytest.mark.parametrize("call", ["save later", "finish_saves", "load", "close"])
def test_a_failure_is_raised_by_the_next_call_once(call: str, held: Held, tmp_path: Path) -> None:
    held.failure = OSError("the disk is full")
    held.go.set()
    target = executor()
    target.save(tmp_path / "first", wait=False)
    wait_until(lambda: target._saver.saving._written.done())  # type: ignore[union-attr]
    held.failure = None
    calls = {
        "save later": lambda: (target.save(tmp_path / "second", wait=False), target.finish_saves()),
        "finish_saves": target.finish_saves,
        "load": lambda: target.load(tmp_path),
        "close": target.close,
    }
    with pytest.raises(
        ab.CheckpointError, match=r"first of step 0 could not be saved in the background: OSError: the disk"
    ):
        calls[call]()
    if call.startswith("save"):  # which is made all the same
        target.finish_saves()
        assert checkpoint.read(tmp_path / "second").step == 0
    target.close()


def test_a_failure_after_a_failed_run_goes_to_the_logger(
    held: Held, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held.failure = OSError("the disk is full")
    held.go.set()
    with pytest.raises(KeyError), executor() as target:  # noqa: PT012
        target.save(tmp_path, wait=False)
        raise KeyError
    assert "a checkpoint could not be saved in the background: OSError: the disk is full" in caplog.text


def test_closing_waits_no_longer_than_its_timeout(held: Held, tmp_path: Path) -> None:
    target = executor(timeout=0.2)
    target.save(tmp_path, wait=False)
    with pytest.raises(ab.DeadlineExceeded, match="save in the background"):
        target.close()
    held.go.set()


def saving_with_a_failure(folder: str) -> list[Any]:
    """Rank 0's second save fails."""
    heard: list[Any] = []
    with executor(comm_mode="AllReduce") as target, pytest.MonkeyPatch.context() as patch:
        target.on("save", lambda record: heard.append(record.step))
        run(target)
        target.save(folder, wait=False)
        run(target)
        target.finish_saves()
        if ab.job().rank == 0:
            patch.setattr(checkpoint, "write", failing)
        target.save(folder, wait=False)
        if ab.job().rank == 0:
            wait_until(lambda: target._saver.saving._written.done())  # type: ignore[union-attr]
        patch.undo()
        with pytest.raises(ab.CheckpointError) as caught:
            target.save(folder)
        target.load(folder)
        return [*heard, str(caught.value), target.step]


def failing(*arguments: object, **options: object) -> None:
    raise OSError("the disk is full")


def test_every_worker_hears_of_the_end_and_of_a_failure(tmp_path: Path) -> None:
    for step, saved, failure, loaded in in_job(saving_with_a_failure, 2, str(tmp_path)):
        assert (step, saved, loaded) == (1, 2, 2)
        assert "could not be saved in the background: OSError: the disk is full; step 2 has been saved" in failure


def test_the_end_of_the_process_reports_failed_saves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save = background_saves.BackgroundSave(1, tmp_path, 0.0, failing)
    for said in ("anabranch: a checkpoint could not be saved in the background: OSError: the disk is full\n", ""):
        background_saves._finish_all()
        assert capfd.readouterr().err == said
    assert save.wait(Deadline.after(60.0)) == "OSError: the disk is full"


ENDS = """
import sys, time, torch
import anabranch as ab
from anabranch import checkpoint

model = torch.nn.Linear(2, 1)
step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
executor = ab.Executor({"train": step})
executor.run("train", torch.ones(2, 2))
write = checkpoint.write
def slowly(*arguments, **options):
    time.sleep(0.2)
    write(*arguments, **options)
checkpoint.write = slowly
executor.save(sys.argv[1], wait=False)
"""


def test_a_script_that_ends_without_closing_its_executor(tmp_path: Path, programs: Programs) -> None:
    done = programs.run(ENDS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert checkpoint.read(tmp_path).step == 1
