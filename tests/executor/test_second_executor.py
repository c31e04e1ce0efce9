"""A second Executor on servers that hold its tables: opening drops nothing, and training refuses unless told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
from anabranch.autodiff.moved_parameter import MovedParameter
from toys import in_job, job_servers, step_of

IDS, Y = torch.tensor([[1, 2], [3, 1]]), torch.tensor([1.0, -1.0])
BATCH = {"ids": IDS, "y": Y}


class Model(nn.Module):
    """A table on the servers, one that is created there, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.item = nn.Embedding(6, 2)
        self.user = ab.RemoteEmbedding("user", 6, 2, init=0.5)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.item(ids).sum(1) + self.user(ids).sum(1))[:, 0]  # type: ignore[no-any-return]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"]), batch["y"])


def look_of(model: nn.Module) -> ab.EvalStep:
    return ab.EvalStep(model, lambda model, batch: {"out": model(batch["ids"])})


def executor_of(model: nn.Module, mode: str = "Hybrid", **options: Any) -> ab.Executor:
    return ab.Executor({"train": step_of(model, torch.optim.Adam, loss), "look": look_of(model)}, mode, **options)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers on which a job has trained two steps; it ended without a word."""
    with job_servers(2, monkeypatch):
        first = executor_of(Model())
        for _ in range(2):
            first.run("train", BATCH)
        first._end(RuntimeError())
        yield


def there() -> dict[str, list[list[float]]]:
    with ab.ParameterClient() as client:
        return {name: client.pull(name).tolist() for name in client.steps()}


def test_opening_planning_and_closing_drop_nothing(servers: None) -> None:
    before = there()
    for served in ("refuse", "adopt", "replace"):
        model = Model()
        with executor_of(model, served=served) as executor:
            assert isinstance(model.item.weight, nn.Parameter)  # unchanged until it is decided
            if served != "refuse":
                executor.plan("train", BATCH)
        assert there() == before


def test_training_planning_and_saving_are_refused_with_table_step_and_cures(servers: None, tmp_path: Path) -> None:
    before = there()
    with executor_of(Model()) as executor:
        run, plan = (partial(use, "train", BATCH) for use in (executor.run, executor.plan))
        for use in (run, plan, partial(executor.save, tmp_path)):
            with pytest.raises(ValueError, match=r"item.weight \(step 2\).*resume.*served='adopt'.*served='replace'"):
                use()
    assert there() == before


@pytest.mark.parametrize("options", [{}, {"cache": ab.Cache()}, {"use_sparse_pull": False}], ids=str)
def test_adopt_trains_on_values_and_state_as_if_nothing_had_come_between(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def new_model() -> Model:
        model = Model()
        if options.get("use_sparse_pull") is False:
            model.user = nn.Embedding(6, 2)  # type: ignore[assignment]
        return model

    reference = new_model()
    with executor_of(reference, "PS", **options) as executor:
        losses = [executor.run("train", BATCH)["loss"] for _ in range(4)]
    with job_servers(1, monkeypatch):
        first = executor_of(new_model(), "PS", **options)
        for _ in range(2):
            first.run("train", BATCH)
        first._end(RuntimeError())
        with executor_of(new_model(), "PS", served="adopt", **options) as second:
            assert [second.run("train", BATCH)["loss"] for _ in range(2)] == losses[2:]


def test_adopting_what_does_not_fit_is_refused_and_changes_nothing(servers: None) -> None:
    before = there()
    model = Model()
    model.item = nn.Embedding(7, 2)
    with executor_of(model, served="adopt") as executor, pytest.raises(ab.SchemaError, match=r"item\.weight"):
        executor.run("train", BATCH)
    assert there() == before


def test_replace_begins_anew(servers: None) -> None:
    with executor_of(Model(), served="replace") as executor:
        again = executor.run("train", BATCH)["loss"]
    with pytest.MonkeyPatch.context() as patch, job_servers(1, patch), executor_of(Model()) as executor:
        assert executor.run("train", BATCH)["loss"] == again


def test_load_and_resume_replace_and_a_load_that_fails_does_not(servers: None, tmp_path: Path) -> None:
    before = there()
    with executor_of(Model()) as executor:
        with pytest.raises(ab.CheckpointError):
            executor.load(tmp_path / "nowhere")
        with pytest.raises(ValueError, match="already hold"):
            executor.run("train", BATCH)
        assert there() == before
        assert not executor.resume(tmp_path / "nowhere")
        first = executor.run("train", BATCH)["loss"]
        executor.save(tmp_path)
        second = executor.run("train", BATCH)["loss"]
    with executor_of(Model()) as executor:
        executor.load(tmp_path)
        assert executor.run("train", BATCH)["loss"] == second
    with executor_of(Model()) as executor:
        assert executor.resume(tmp_path)
        assert executor.run("train", BATCH)["loss"] == second != first


def test_until_it_is_decided_evaluation_uses_the_model_as_it_is_and_remote_rows_as_they_stand(servers: None) -> None:
    model, rows = Model(), torch.tensor(there()["user"])
    plain = model.head(model.item(IDS).sum(1) + rows[IDS].sum(1))[:, 0]
    with executor_of(model) as executor:
        assert torch.equal(executor.run("look", BATCH)["out"], plain)
    with executor_of(Model(), served="replace") as executor:
        with pytest.raises(ValueError, match="hold user of an earlier Executor.*evaluate after"):
            executor.run("look", BATCH)
        executor.run("train", BATCH)
        executor.run("look", BATCH)


def test_evaluations_as_a_graph_before_and_after_the_tables_have_moved_are_the_models(servers: None) -> None:
    model = Model()
    with executor_of(model, served="adopt", engine="graph") as executor:
        for moved in (False, True):
            if moved:
                executor.run("train", BATCH)
            for _ in range(2):
                found = executor.run("look", BATCH)["out"]
                with torch.no_grad():
                    assert torch.equal(found, model(IDS))
            assert type(model.item.weight) is (MovedParameter if moved else nn.Parameter)
        assert executor.engine("look") == executor.engine("train") == "graph"


def test_an_executor_without_a_train_step_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_servers(1, monkeypatch):
        training = executor_of(Model())
        training.run("train", BATCH)
        model = Model()
        model.user = ab.RemoteEmbedding("user", 6, 2, init=0.5)  # no optimizer is known here
        model.words = ab.RemoteEmbedding("words", None, 2)  # type: ignore[assignment]
        with ab.Executor(look_of(model), "Hybrid") as looking:
            for _ in range(2):
                training.run("train", BATCH)
                before = there()
                rows = torch.tensor(before["user"])
                plain = model.head(model.item(IDS).sum(1) + rows[IDS].sum(1))[:, 0]
                assert torch.equal(looking.run(batch=BATCH)["out"], plain)
                assert there() == before
            with pytest.raises(ab.NotFound, match="no table or parameter 'words'.*train it, or load"):
                ab.Executor(ab.EvalStep(model, lambda m, b: {"out": m.words(b["ids"])}), "Hybrid").run(batch=BATCH)
        training.run("train", BATCH)
        training.close()


def test_what_was_given_back_the_next_executor_of_the_model_may_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: the cell that makes the Executor is run again, and that which makes the model is not."""

    def train(model: nn.Module, **options: Any) -> Tensor:
        with ab.Executor(step_of(model), "PS", **options) as executor:
            return executor.run(batch=torch.ones(3, 2))["loss"]  # type: ignore[no-any-return]

    model, other = nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1))
    with job_servers(1, monkeypatch):
        first = train(model)
        ab.Executor(step_of(model), "PS").close()  # opening drops nothing
        with ab.ParameterClient() as client:
            assert client.steps() == {"weight": 1, "bias": 1}
        train(other)  # under names of its own
        second = train(model)
        assert second < first
        model.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
        assert train(model) == 9.0
        with pytest.raises(ValueError, match=r"hold bias \(step 1\), weight \(step 1\)"):
            train(nn.Linear(2, 1))  # a new one would drop what was trained
        assert train(nn.Linear(2, 1), served="adopt") < 9.0
        with pytest.raises(ValueError, match=r"hold bias \(step 2\), weight \(step 2\)"):
            train(model)
        train(nn.Linear(2, 1), served="replace")  # as far as the first one
        with pytest.raises(ValueError, match=r"weight \(step 1\)"):
            train(model)
        train(model, served="replace")
        with ab.ParameterClient() as client:  # another process has trained it since
            client.push("weight", torch.ones(1, 2))
        with pytest.raises(ValueError, match=r"hold weight \(step 2\)"):
            train(model)


def test_two_open_executors_cannot_train_one_remote_embedding() -> None:
    model = Model()
    with executor_of(model) as first:
        first.run("train", BATCH)
        other = Model()
        other.user = model.user
        with pytest.raises(ValueError, match="user is trained by another Executor that is open"):
            executor_of(other)
        before = first.run("look", BATCH)["out"]
        with ab.Executor(look_of(model), "Hybrid") as looking:
            assert torch.equal(looking.run(batch=BATCH)["out"], before)
        first.run("train", BATCH)
        assert not torch.equal(first.run("look", BATCH)["out"], before)


def freezing_later() -> list[str]:
    torch.distributed.init_process_group("gloo")
    rank, said = ab.job().rank, []

    def train(freeze: Callable[[nn.Sequential], object], **options: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 2), nn.Flatten(), nn.Linear(4, 1))
        with ab.Executor(step_of(model), "Hybrid", timeout=60, **options) as executor:
            freeze(model)
            executor.run(batch=IDS + rank)

    train(lambda model: None)
    for layer in (0, 2):
        with pytest.raises((ValueError, ab.BoundaryError)) as caught:
            train(lambda model, layer=layer: model[layer].requires_grad_(rank == 0), served="adopt")  # type: ignore[misc]
        said.append(str(caught.value).partition(" (")[0])
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    with ab.Executor(step_of(model), "PS", consistency="ssp:1") as executor:
        executor.run(batch=torch.ones(2 + rank, 2))
        model.bias.requires_grad_(True)
        with pytest.raises(ValueError, match="bias was frozen when the Executor was made"):
            executor.run(batch=torch.ones(2 + rank, 2))
        model.bias.requires_grad_(False)
        executor.run(batch=torch.ones(2 + rank, 2))
    return said


def test_what_one_worker_freezes_or_all_thaw_where_workers_sum_nothing_is_refused_on_all() -> None:
    for said in in_job(freezing_later, 2, servers=1):
        assert said == [
            f"{names} is frozen on some workers and not on others" for names in ("0.weight", "2.bias, 2.weight")
        ]
