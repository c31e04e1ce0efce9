"""``export`` writes what plain PyTorch and Hugging Face load: tied weights, tables on servers, all stages."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.checkpoint.tensor_file import Blocks
from anabranch.executor.saving import exporting
from plain_loop import mean_square
from toys import in_job, look_of, plain_step, step_of


class Tied(nn.Module):
    """A table, dense layers, two names for one weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 4)
        self.users = nn.Embedding(50, 3)
        self.body = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 30, bias=False)
        self.head.weight = self.words.weight
        self.low = nn.Linear(3, 4).to(torch.bfloat16)
        self.centroids = nn.Parameter(torch.ones(4))  # named as a vocabulary's ids are
        self.register_buffer("counts", torch.arange(3))

    def forward(self, batch: Tensor) -> Tensor:
        users = self.low(self.users(batch).to(torch.bfloat16)).float()
        return self.head(self.body(self.words(batch % 30)) * self.centroids + users)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (None, {}),
        ("PS", {}),
        ("Hybrid", {"cache": ab.Cache(capacity=5, pull_bound=2, push_bound=2)}),
        ("PS", {"use_sparse_pull": False}),
        ("Hybrid", {"row_compression": "int8"}),
    ],
    ids=str,
)
def test_plain_pytorch_loads_an_export_strictly(mode: str | None, options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    with ab.Executor(step_of(model, torch.optim.Adam), mode, **options) as executor:
        before = executor.state_dict()
        copied = copy.deepcopy(before)
        for number in range(3):
            executor.run(batch=torch.arange(number, number + 6))
        assert all(torch.equal(before[name], value) for name, value in copied.items())
        executor.export(tmp_path / "new")
        state = executor.state_dict()
    assert list(state) == list(model.state_dict())
    assert state["head.weight"].data_ptr() == state["words.weight"].data_ptr()
    loaded = safetensors.torch.load_file(tmp_path / "new" / "model.safetensors")
    with (tmp_path / "new" / "model.safetensors").open("rb") as file:
        file.seek(8)
        assert file.read(60).startswith(b'{"__metadata__":{"format":"pt"}')
    plain = Tied()
    assert list(plain.load_state_dict(loaded, strict=True)) == [[], []]
    assert plain.head.weight is plain.words.weight
    for name, value in model.state_dict().items():  # given back
        assert torch.equal(loaded[name], value), name
        assert torch.equal(state[name], value), name
    assert torch.equal(plain(torch.arange(9)), model(torch.arange(9)))


def test_a_dynamic_vocabulary_is_its_ids_and_their_rows(tmp_path: Path) -> None:
    model = nn.Sequential(ab.RemoteEmbedding("users", None, 3))
    step = step_of(model, partial(torch.optim.SGD, momentum=0.9))
    with ab.Executor({"train": step, "look": look_of(model)}, "Hybrid") as executor:
        for ids in ([900, 7, 33], [7]):
            executor.run("train", torch.tensor(ids))
        executor.export(tmp_path)
        loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert sorted(loaded["0.ids"].tolist()) == [7, 33, 900]
        assert torch.equal(executor.run("look", loaded["0.ids"])["out"], loaded["0.weight"])


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.zeros(1))

    def forward(self, model: nn.Module, ids: Tensor) -> Tensor:
        return (model(ids) - self.centres).square().mean()


class Versioned(nn.Embedding):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}


def test_a_state_dict_is_of_one_model_without_the_loss_s_own_parameters() -> None:
    models = {"a": nn.Embedding(9, 1), "b": nn.Sequential(Versioned(9, 1))}
    steps = {}
    for name, model in models.items():
        criterion = Criterion()
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
        steps[name] = ab.TrainStep(model, criterion, optimizer)
    with ab.Executor(steps, "PS") as executor:
        executor.run("b", torch.tensor([1, 2]))
        with pytest.raises(ValueError, match=r"2 models; name one of the steps \['a', 'b'\]"):
            executor.state_dict()
        with pytest.raises(ValueError, match="no step is called 'c'"):
            executor.state_dict("c")
        state = executor.state_dict("b")
    assert list(state) == ["0.weight", "0._extra_state"]
    assert state["0._extra_state"] == {"version": 2}
    assert torch.equal(models["b"][0].weight, state["0.weight"])  # type: ignore[index]


def test_large_exports_are_shards_with_an_index_and_replace_what_was_there(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "a": torch.arange(10.0),
        "b": Blocks(torch.float32, (6, 2), lambda: torch.arange(12.0).view(6, 2).split(4)),
        "c": torch.arange(3),
    }
    (tmp_path / "config.json").write_text("{}")
    for most, files in ((1000, 1), (50, 3), (90, 2), (1000, 1)):
        exporting.export(tmp_path, state, most=most)
        names = sorted(path.name for path in tmp_path.iterdir() if path.name != "config.json")
        if files == 1:
            assert names == ["model.safetensors"]
            loaded = safetensors.torch.load_file(tmp_path / names[0])
        else:
            assert len(names) == files + 1
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == 40 + 48 + 24
            loaded = {
                name: safetensors.torch.load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()
            }
        assert {name: value.tolist() for name, value in loaded.items()} == {
            "a": list(range(10)),
            "b": torch.arange(12).view(6, 2).tolist(),
            "c": [0, 1, 2],
        }
    assert (tmp_path / "config.json").exists()


def test_shards_that_were_not_all_replaced_have_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporting.export(tmp_path, {name: torch.zeros(10) for name in "ab"}, most=50)
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if target.name.startswith("model-00002"):
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        exporting.export(tmp_path, {"a": torch.ones(10), "b": torch.ones(10)}, most=50)
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_what_is_no_tensor_is_refused_and_the_older_export_stays(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        words = False

        def get_extra_state(self) -> object:
            return {"words": 3} if self.words else torch.ones(1)

        def set_extra_state(self, state: object) -> None:
            pass

    model = Extra(2, 1)
    with ab.Executor(step_of(model)) as executor:
        executor.export(tmp_path)
        before = (tmp_path / "model.safetensors").read_bytes()
        model.words = True
        with pytest.raises(ValueError, match=r"_extra_state is a dict \(get_extra_state\), and an export holds"):
            executor.export(tmp_path)
        with pytest.raises(ab.CheckpointError, match="holds an exported model; model.load_state_dict"):
            executor.load(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    with pytest.raises(ab.CheckpointError, match="x changed its number of rows"):
        exporting.export(tmp_path, {"x": Blocks(torch.float32, (3,), lambda: [torch.ones(2)])})
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


class Wide(nn.Module):
    """The first stage of wide & deep: ids pass through it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids, self.table(ids)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        return self.body(self.table(both[0])) + both[1]  # type: ignore[no-any-return]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Wide(), Deep())


def exporting_together(folder: str, kind: str) -> dict[str, dict[str, Any]]:
    model: nn.Module = layers()
    step = step_of(model, loss=lambda m, b: mean_square(m, b[0]))
    options: dict[str, Any] = {"cache": ab.Cache(capacity=5)} if ab.job().servers else {}
    if kind == "pipe":
        grid = ab.job().grid(data=1, pipeline=2)
        model = ab.Pipe(layers(), [1, 1], chunks=2, process_group=grid.pipeline_group)
        step = step_of(model, loss=lambda y, target: y.square().mean())
        if ab.job().servers:
            options = {"comm_mode": "Hybrid", "process_group": grid.data_group}
    with ab.Executor(step, **options) as executor, pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            executor.run(batch=(torch.arange(8) + (8 * ab.job().rank if kind == "data" else 0), torch.zeros(8)))
        both = {"state": executor.state_dict()}
        patch.delattr(Blocks, "whole")  # no rank needs a table whole
        executor.export(folder)
    both["own"] = model.state_dict()
    return {what: {name: value.tolist() for name, value in one.items()} for what, one in both.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "servers"), [("data", 0), ("data", 2), ("pipe", 0), ("pipe", 2)])
def test_rank_0_writes_the_model_of_all_workers_and_stages(kind: str, servers: int, tmp_path: Path) -> None:
    first, second = in_job(exporting_together, 2, str(tmp_path / "out"), kind, servers=servers)
    assert second["state"] == {}
    if kind == "data":  # each worker has read its model back
        assert first["own"] == second["own"] == first["state"]
    loaded = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.tolist() for name, value in loaded.items()} == first["state"]
    plain, exported = layers(), layers()
    exported.load_state_dict(loaded, strict=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    ids = torch.arange(16 if kind == "data" else 8)
    for _ in range(2):
        plain_step(plain, mean_square, optimizer, ids)
    torch.testing.assert_close(exported(torch.arange(20)), plain(torch.arange(20)), rtol=1e-5, atol=1e-6)


# Evaluation only.


class Users(nn.Module):
    """A fixed and a dynamic table without optimizers of their own, and one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = ab.RemoteEmbedding("fixed", 30, 2)
        self.dynamic = ab.RemoteEmbedding("dynamic", None, 2)
        self.plain = nn.Embedding(30, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.count += self.training
        return self.fixed(ids) + self.dynamic(ids * 1000) + self.plain(ids)  # type: ignore[no-any-return]


def evaluating_a_checkpoint(folder: str) -> list[Any]:
    torch.manual_seed(ab.job().rank)
    ids, seen = torch.arange(30), list[Any]()
    trained = Users()
    with ab.Executor({"train": step_of(trained, torch.optim.Adam), "look": look_of(trained)}, "Hybrid") as executor:
        for first in (0, 10):
            executor.run("train", torch.arange(first + ab.job().rank, first + 15))
        executor.save(folder)
        seen.append(executor.run("look", ids)["out"].tolist())
        state = executor.state_dict()
    alone = Users()
    with ab.Executor(look_of(alone)) as executor:
        drawn = torch.get_rng_state()
        executor.load(folder)
        assert torch.equal(torch.get_rng_state(), drawn)
        seen.append(executor.run(batch=ids)["out"].tolist())
        seen.append(executor.state_dict().keys() == state.keys())
        seen.append(all(torch.equal(value, state[name]) for name, value in executor.state_dict().items()))
    if not ab.job().servers:
        seen.append(alone(ids).tolist())  # given back
        with ab.Executor({"train": step_of(alone, torch.optim.Adam), "look": look_of(alone)}, "Hybrid") as executor:
            seen.append(executor.run("look", ids)["out"].tolist())
            executor.run("train", ids)
    return seen


@pytest.mark.parametrize(("workers", "servers"), [(1, 0), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_an_executor_of_evaluations_alone_loads_the_model_of_a_checkpoint(
    workers: int, servers: int, tmp_path: Path
) -> None:
    for trained, loaded, names, values, *later in in_job(
        evaluating_a_checkpoint, workers, str(tmp_path), servers=servers
    ):
        assert [loaded, names, values] == [trained, True, True]
        assert later == [trained] * len(later)
