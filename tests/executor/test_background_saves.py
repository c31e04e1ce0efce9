"""A state that leaves while training continues: ``save(wait=False)``, and what a newcomer takes from a member."""

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
from anabranch.collectives import Workers
from anabranch.deadline import Deadline
from anabranch.errors import BoundaryError
from anabranch.executor import exchange
from anabranch.executor.exchange import send_state
from anabranch.executor.saving import background_saves
from programs import Programs
from toys import in_job, step_of
from waiting import wait_until

BATCH = torch.arange(8.0).reshape(4, 2)


class Gate:
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
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(checkpoint.write)
    monkeypatch.setattr(checkpoint, "write", made)
    yield made
    made.go.set()


def executor(**options: object) -> ab.Executor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.3), nn.Linear(3, 1))
    return ab.Executor(step_of(model, torch.optim.Adam), **options)  # type: ignore[arg-type]


def run(target: ab.Executor, times: int = 1) -> list[float]:
    return [target.run(batch=BATCH)["loss"].item() for _ in range(times)]


def test_a_save_holds_the_state_at_its_call_while_training_continues(gate: Gate, tmp_path: Path) -> None:
    with executor() as first:
        run(first, 3)
        told = []
        first.on("save", lambda record: told.append((record.step, record.path)))
        first.save(tmp_path, wait=False)
        after = run(first, 4)
        assert not list(tmp_path.glob("manifest*"))
        assert told == []
        gate.go.set()
        first.finish_saves()
        assert told == [(3, tmp_path)]
    with executor() as second:
        assert second.resume(tmp_path)
        assert second.step == 3
        assert run(second, 4) == after


def test_one_is_written_at_a_time(gate: Gate, tmp_path: Path) -> None:
    with executor(timeout=0.5) as target:
        target.save(tmp_path, wait=False)
        wait_until(lambda: gate.begun)
        with pytest.raises(ab.DeadlineExceeded, match="save in the background"):
            target.save(tmp_path, wait=False)
        assert gate.begun == 1
        gate.go.set()
        wait_until(lambda: gate.ended == 1)
        target.save(tmp_path, wait=False)
        wait_until(lambda: gate.ended == 2)  # closing has half a second too
    assert checkpoint.read(tmp_path).generation == 2


@pytest.mark.parametrize("call", ["save later", "finish_saves", "load", "close"])
def test_a_failure_is_raised_by_the_next_call_once(call: str, gate: Gate, tmp_path: Path) -> None:
    gate.failure = OSError("the disk is full")
    gate.go.set()
    target = executor()
    target.save(tmp_path / "first", wait=False)
    wait_until(lambda: target._saver.saving._written.done())  # type: ignore[union-attr]
    gate.failure = None
    calls = {
        "save later": lambda: (target.save(tmp_path / "second", wait=False), target.finish_saves()),
        "finish_saves": target.finish_saves,
        "load": lambda: target.load(tmp_path),
        "close": target.close,
    }
    words = "first of step 0 could not be saved in the background: OSError: the disk"
    with pytest.raises(ab.CheckpointError, match=words):
        calls[call]()
    if call.startswith("save"):  # which is made all the same
        target.finish_saves()
        assert checkpoint.read(tmp_path / "second").step == 0
    target.close()


def test_a_failure_after_a_failed_run_goes_to_the_logger(
    gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate.failure = OSError("the disk is full")
    gate.go.set()
    with pytest.raises(KeyError), executor() as target:  # noqa: PT012
        target.save(tmp_path, wait=False)
        raise KeyError
    assert "a checkpoint could not be saved in the background: OSError: the disk is full" in caplog.text


def test_closing_waits_no_longer_than_its_timeout(gate: Gate, tmp_path: Path) -> None:
    target = executor(timeout=0.2)
    target.save(tmp_path, wait=False)
    with pytest.raises(ab.DeadlineExceeded, match="save in the background"):
        target.close()
    gate.go.set()


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


# The state that a newcomer takes from a member goes in pieces, which are checked.

PIECE = 64


class Line:
    """What rank 0 has broadcast, for the others to take."""

    broadcast_bytes = Workers.broadcast_bytes
    device = torch.device("cpu")

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        self.rank, self._sent, self._next = rank, sent, iter(sent)

    def broadcast(self, tensors: list[Tensor], *, source: int, operation: str) -> None:
        for tensor in tensors:
            if self.rank == source:
                self._sent.append(tensor.clone())
            else:
                tensor.copy_(next(self._next))


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    adam = {"step": torch.tensor(3.0), "moments": torch.randn(7, 5).T, "none": torch.zeros(0, 4)}
    others = [torch.tensor([True, False]), torch.randn(3, dtype=torch.complex128), torch.randn(9).bfloat16()]
    return {"w": nn.Parameter(torch.randn(50)), "adam": {("a", 1): adam}, "others": others, "lr": 0.1}


def sent(one: object) -> list[Tensor]:
    messages: list[Tensor] = []
    workers: Any = Line(0, messages)
    send_state(workers, one, 0, takes=False)
    return messages


def taken(messages: list[Tensor], *, takes: bool) -> Any:
    workers: Any = Line(1, messages)
    return send_state(workers, None, 0, takes=takes)


def test_a_state_arrives_as_it_is_in_pieces_and_a_flipped_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_PIECE_BYTES", PIECE)
    there = state()
    messages = sent(there)
    here = taken(messages, takes=True)
    torch.testing.assert_close(here, there, rtol=0.0, atol=0.0)
    pieces = [message.nbytes for message in messages[2:-2]]  # between the head and the digest, with their lengths
    tensors = [there["w"], *there["adam"]["a", 1].values(), *there["others"]]
    assert max(pieces) <= PIECE
    assert sum(pieces) == sum(tensor.nbytes for tensor in tensors)
    assert taken(messages, takes=False) is None
    assert taken(sent({"lr": 0.1}), takes=True) == {"lr": 0.1}  # without tensors
    for number in range(2, len(messages) - 2):
        with pytest.raises(BoundaryError, match="arrived otherwise than it was sent"):
            taken([one ^ 1 if at == number else one for at, one in enumerate(messages)], takes=True)
