"""Saved under one mode, number of workers and of servers, loaded under another: training continues as it would have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch import checkpoint
from anabranch.parameter_server.client.saved_tables import SavedTables
from anabranch.tables import row_block
from anabranch.tables.snapshot import RowSnapshot
from toys import job_servers, look_of, step_of

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "row_wise_adagrad": lambda p: ab.RowWiseAdagrad(p, lr=0.1, lr_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "ftrl": lambda p: ab.FTRL(p, lr=0.1, l1=0.01),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 4)
        self.twin = nn.EmbeddingBag(30, 4)
        self.twin.weight = self.table.weight
        self.head = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).sum(1) + self.twin(ids))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["y"])


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "ids": torch.randint(0, 30, (6, 3), generator=generator),
        "y": torch.randint(0, 2, (6,), generator=generator),
    }


def new_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def numbers(executor: ab.Executor, model: Model) -> dict[str, Tensor]:
    """All parameters as they are now."""
    rows = executor.run("look", torch.arange(30))["rows"]
    return {"table": rows, **{name: value.detach().clone() for name, value in model.head.named_parameters()}}


def executor_of(model: Model, optimizer: str, mode: str | None, **options: object) -> ab.Executor:
    made = OPTIMIZERS[optimizer](model.parameters())
    train = ab.TrainStep(model, loss, made, scheduler=torch.optim.lr_scheduler.ExponentialLR(made, 0.9))
    look = ab.EvalStep(model, lambda model, ids: {"rows": model.table(ids)})
    return ab.Executor({"train": train, "look": look}, mode, **options)  # type: ignore[arg-type]


def train(executor: ab.Executor, steps: range) -> None:
    for step in steps:
        executor.run("train", batch_of(step))


MOVES = [
    (("Hybrid", 2), ("Hybrid", 3)),
    (("Hybrid", 0), (None, 0)),
    ((None, 0), ("Hybrid", 1)),
    (("PS", 1), ("Hybrid", 2)),
    ((None, 0), ("PS", 2)),
    (("PS", 0), (None, 0)),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("optimizer", "move"), [*zip(OPTIMIZERS, cycle(MOVES), strict=False)], ids=str)
def test_training_continues_as_if_uninterrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, move: tuple[tuple[str | None, int], ...]
) -> None:
    first, second = move
    plain = new_model()
    with executor_of(plain, optimizer, None) as executor:
        train(executor, range(6))
        wanted = numbers(executor, plain)
    before = new_model()
    with job_servers(first[1], monkeypatch), executor_of(before, optimizer, first[0]) as executor:
        train(executor, range(3))
        executor.save(tmp_path)
        saved = numbers(executor, before)
        executor.run("train", batch_of(3))  # saving leaves it able to go on
    after = new_model(seed=1)
    with job_servers(second[1], monkeypatch), executor_of(after, optimizer, second[0]) as executor:
        executor.run("train", batch_of(9))
        assert executor.resume(tmp_path)
        for name, value in numbers(executor, after).items():
            assert torch.equal(value, saved[name]), name
        train(executor, range(3, 6))
        assert executor.statistics().steps == 6
        for name, value in numbers(executor, after).items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-12)


def test_rows_created_on_servers_come_back_with_their_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = torch.tensor([3, -7, 2**60, 5, 6])

    def trained(folder: Path | None, steps: range, shards: int) -> Tensor:
        users = ab.RemoteEmbedding("users", None, 4, dtype=torch.float64)
        model = nn.Sequential(users, nn.Linear(4, 1, dtype=torch.float64))
        with torch.no_grad():
            for parameter in model[1].parameters():
                parameter.fill_(0.5)
        look = ab.EvalStep(model, lambda m, ids: {"rows": m[0](ids)})
        made = {"train": step_of(model, torch.optim.Adagrad), "look": look}
        cache = ab.Cache(capacity=3)
        with job_servers(shards, monkeypatch), ab.Executor(made, "Hybrid", cache=cache) as executor:
            if folder is not None and steps.start:
                executor.load(folder)
            for step in steps:
                executor.run("train", everyone[[step % 5, (step + 1) % 4]])
            if folder is not None and not steps.start:
                executor.save(folder)
            return executor.run("look", everyone)["rows"]

    wanted = trained(None, range(6), 1)
    trained(tmp_path, range(3), 2)
    torch.testing.assert_close(trained(tmp_path, range(3, 6), 3), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mode", "optimizer"), [("PS", "adagrad"), ("Hybrid", "adamw")])
def test_a_save_beside_training_streams_what_is_on_servers(
    mode: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither saver nor loader has a table whole, and what is saved is of the step at which it was asked for."""
    monkeypatch.setitem(RowSnapshot.__init__.__kwdefaults__, "buffer", 400)
    part, trained = SavedTables._part, threading.Event()
    made, read, names = checkpoint.write, list[int](), list[str]()

    def late(*arguments: Any) -> Any:
        assert trained.wait(60)
        return part(*arguments)

    def measured(path: Path, groups: dict[str, Any], state: Any, *, more: Any, **options: Any) -> Any:
        def each() -> Any:
            for name, group in more:
                read.append(max([len(tensor) for tensor in group.values()]))
                names.append(name)
                yield name, group

        assert not any(name.startswith("table") for name in groups["model"])
        return made(path, groups, state, more=each(), **options)

    monkeypatch.setattr(SavedTables, "_part", late)
    monkeypatch.setattr(checkpoint, "write", measured)
    model = new_model()
    with job_servers(2, monkeypatch), executor_of(model, optimizer, mode) as executor:
        executor.run("train", batch_of(0))
        saved = numbers(executor, model)
        executor.save(tmp_path, wait=False)
        executor.run("train", batch_of(1))
        trained.set()
        executor.finish_saves()
        assert len(read) > 0
        assert max(read) < 30
        expected = numbers(executor, model)
    model = new_model(seed=1)
    with job_servers(3, monkeypatch), executor_of(model, optimizer, mode) as executor:
        looks, pieces = list[int](), row_block.pieces
        with monkeypatch.context() as patch:
            for user in ("executor.running.remote", "parameter_server.client.remote_tables"):
                patch.setattr(f"anabranch.{user}.write_rows", None)  # which has the whole table
            patch.setattr(row_block, "pieces", lambda group: looks.append(0) or pieces(group))
            executor.load(tmp_path)
        assert len(looks) == 2 * sum("rows" in name for name in names)  # to check it, and to send it
        for name, value in numbers(executor, model).items():
            assert torch.equal(value, saved[name]), name
        executor.run("train", batch_of(1))
        for name, value in numbers(executor, model).items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_a_save_that_fails_elsewhere_leaves_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with executor_of(new_model(), "sgd", "Hybrid") as executor:
        executor.run("train", batch_of(0))
        together = executor._saver._together

        def failing(act: Callable[[], Any], failed: str) -> Any:
            result = together(act, failed)
            if failed.startswith("could not save"):
                raise ab.CheckpointError("rank 1 has failed")
            return result

        monkeypatch.setattr(executor._saver, "_together", failing)
        with pytest.raises(ab.CheckpointError, match="rank 1"):
            executor.save(tmp_path, wait=False)
        executor.finish_saves()  # what had begun
        assert not [thread for thread in threading.enumerate() if thread.name == "anabranch-snapshot"]


def test_a_table_of_another_shape_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, rows = torch.arange(8), []
    for width in (4, 2):
        model = nn.Sequential(ab.RemoteEmbedding("users", 8, width))
        steps = {"train": step_of(model), "look": look_of(model)}
        with job_servers(1, monkeypatch), ab.Executor(steps, "Hybrid") as executor:
            executor.run("train", ids)
            if width == 4:
                executor.save(tmp_path)
                continue
            rows.append(executor.run("look", ids)["out"])
            with pytest.raises(ab.CheckpointError, match="RemoteEmbedding users is .*, but the checkpoint has"):
                executor.load(tmp_path)
            rows.append(executor.run("look", ids)["out"])
    assert torch.equal(*rows)
    model = nn.Sequential(ab.RemoteEmbedding("users", 8, 4), ab.RemoteEmbedding("more", 5, 2))
    refused = pytest.raises(ab.CheckpointError, match=r"1\.on_servers")
    with job_servers(0, monkeypatch), ab.Executor({"train": step_of(model)}, "Hybrid") as executor, refused:
        executor.load(tmp_path)


def test_a_push_in_flight_does_not_change_loaded_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model()
    cache = ab.Cache(capacity=3, pull_bound=1, push_bound=1)
    with executor_of(model, "adagrad", "Hybrid", cache=cache) as executor:
        assert executor._remote is not None
        executor.run("train", batch_of(0))
        executor.save(tmp_path)
        saved = numbers(executor, model)
        client = executor._remote.client
        push, never = client.push_many, threading.Event()

        def late(*args: Any, **options: Any) -> None:
            never.wait(timeout=0.5)  # longer than loading takes
            push(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(client, "push_many", late)
            executor.run("train", batch_of(1))
            executor.load(tmp_path)
        for name, value in numbers(executor, model).items():
            assert torch.equal(value, saved[name]), name
