"""What an executor says, counts, caches and refuses when parameters live on servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anabranch as ab
import toys
from programs import Programs
from toys import assert_same, look_of

ROWS = 40


class Model(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 4, sparse=sparse)
        self.register_buffer("offset", torch.tensor([0, 10, 20]))
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids % 10 + self.offset).mean(1))[:, 0]


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["ids"]), batch["y"])


def batches(count: int = 6, rows: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "ids": torch.randint(0, 1000, (rows, 3), generator=generator),
            "y": torch.randn(rows, generator=generator),
        }
        for _ in range(count)
    ]


def new_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def step_of(model: nn.Module, optimizer: Any = torch.optim.Adagrad, **options: Any) -> ab.TrainStep:
    return toys.step_of(model, optimizer, loss, **options)


def trained(
    mode: str | None, *, model: Model | None = None, step: dict[str, Any] | None = None, **options: Any
) -> Model:
    model = new_model() if model is None else model
    with ab.Executor(step_of(model, **(step or {})), mode, **options) as executor:
        for batch in batches():
            executor.run(batch=batch)
    return model


# Where things live.


def test_routes_are_a_table_with_reasons() -> None:
    model = new_model()
    model.head.bias.requires_grad_(False)
    with ab.Executor(step_of(model), "hybrid", routes={"head.weight": "ps"}) as executor:
        found = {route.parameter: route for route in executor.routes()}
        served = [found[name].place.served for name in ("table.weight", "head.weight", "head.bias")]
        assert served == [True, True, False]
        assert (found["table.weight"].shape, found["table.weight"].bytes) == ((ROWS, 4), ROWS * 16)
        lines = str(executor.routes()).split("\n")
        assert lines[0].split("  ")[0] == "parameter"
        assert len(lines) == 4
        assert "frozen" in lines[3]
        assert "routes=" in lines[2]


def test_a_table_that_is_also_a_head_stays_on_the_workers_under_hybrid() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    step = toys.step_of(model)
    with ab.Executor(step, "Hybrid") as executor:
        assert not executor.routes().served
        assert "not only looked up" in str(executor.routes())
        executor.run(batch=torch.tensor([1, 2]))
    with ab.Executor(step, "PS") as executor:
        assert [route.place.value for route in executor.routes()] == ["servers, whole"]
        executor.run(batch=torch.tensor([1, 2]))


def test_options_unsupported_by_servers_are_refused_at_construction_with_the_cure() -> None:
    cure, model, complex_one, limited, remote = "routes=.*AllReduce", *(new_model() for _ in range(4))
    complex_one.head.weight.data = complex_one.head.weight.data.to(torch.complex64)
    limited.table.max_norm = 1.0
    remote.remote = ab.RemoteEmbedding("users", 10, 2)
    clips = step_of(model, clip_grad_norm=1.0)
    refused: list[tuple[str, Any, str | None, dict[str, Any]]] = [
        (f"Rprop.*{cure}", step_of(model, torch.optim.Rprop), "PS", {}),
        (f"complex64.*float16.*{cure}", step_of(complex_one), "PS", {}),
        (f"max_norm=1.0.*{cure}", step_of(limited), "Hybrid", {}),
        (f"optimizers of different steps.*{cure}", {"a": step_of(model), "b": step_of(model)}, "Hybrid", {}),
        ("bsp", clips, "Hybrid", {"consistency": "asp"}),
        ("push_bound", clips, "Hybrid", {"cache": ab.Cache(push_bound=2)}),
        ("use_sparse_pull=False", step_of(model), "PS", {"use_sparse_pull": False, "cache": ab.Cache()}),
        ("comm_mode", step_of(model), None, {"routes": {"table.weight": "PS"}}),
        ("use_sparse_pull", step_of(remote), "Hybrid", {"use_sparse_pull": False}),
    ]
    for words, step, mode, options in refused:
        with pytest.raises(ValueError, match=words):
            ab.Executor(step, mode, **options)
    assert isinstance(model.table.weight, nn.Parameter)  # nothing has been taken over


def test_the_gradient_of_a_parameter_on_servers_cannot_be_fetched() -> None:
    with ab.Executor(step_of(new_model()), "Hybrid") as executor:
        with pytest.raises(ValueError, match="table.weight.grad.*AllReduce"):
            executor.run(batch=batches()[0], fetch=["table.weight.grad"])
        assert executor.run(batch=batches()[0], fetch=["head.weight.grad"])["head.weight.grad"].shape == (1, 4)


# Caches.


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("policy", ["LRU", "LFU", "LFUOpt"])
def test_cached_at_bound_0_is_uncached_to_the_bit(mode: str, policy: str) -> None:
    plain = trained(mode, step={"optimizer": torch.optim.Adam})
    data = batches()
    for prefetch in (True, False):
        cached = new_model()
        step = step_of(cached, torch.optim.Adam)
        cache = ab.Cache(policy, capacity=9)  # type: ignore[arg-type]
        with ab.Executor(step, mode, cache=cache, prefetch=prefetch, dataloaders={"default": data}) as executor:
            for _ in data:
                executor.run()
            loads = executor.statistics().tables["table.weight"]
            assert loads.hits + loads.misses > 0
        assert_same(cached, plain)


# Counting.


def test_statistics_count_by_table_and_record_loads_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "loads.jsonl"
    with ab.Executor(step_of(new_model()), "PS", cache=ab.Cache(capacity=100), log_path=log) as executor:
        for batch in batches(3):
            executor.run(batch=batch)
        first = executor.record_loads()
        executor.run(batch=batches(1)[0])
        second = executor.record_loads()
        total = executor.statistics()
    table = first.tables["table.weight"]
    assert (table.pulls, table.pushes) == (3, 3)
    assert table.hits + table.misses > 0
    assert table.bytes > 0
    assert table.wait_seconds > 0
    assert second.tables["table.weight"].pushes == 1
    assert total.tables["head.weight"].pushes == 4
    assert total.bytes == sum(loads.bytes for loads in total.tables.values())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines == [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["tables"]["table.weight"]["pushes"] for line in lines] == [3, 1]
    assert [(line["runs"]["default"], line["rows"]) for line in lines] == [(3, 24), (1, 8)]
    assert total.steps == 4


# Evaluating, and what goes wrong.


@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
def test_an_id_out_of_range_is_named_and_changes_nothing(mode: str) -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1))
    steps = {"train": toys.step_of(model, torch.optim.Adam), "look": look_of(model)}
    with ab.Executor(steps, mode) as executor:
        executor.run("train", torch.tensor([1, 2]))
        before = executor.run("look", torch.arange(4))["out"]
        with pytest.raises(ab.NotFound, match="table 0.weight has ids 0 to 3.* is 4"):
            executor.run("train", torch.tensor([1, 4]))
        assert torch.equal(executor.run("look", torch.arange(4))["out"], before)
        executor.run("train", torch.tensor([1, 2]))
        assert executor.statistics().steps == 2


# What cached tables run on is compiled when they are made, so that no step waits for a compiler.

SCRIPT = """
import types
import torch
from torch import nn
import anabranch as ab
from anabranch.tables.kernels import caches, rows, vocabulary

def made():
    modules = (caches, rows, vocabulary)
    kernels = {f"{m.__name__}.{name}": k for m in modules for name, k in vars(m).items() if hasattr(k, "signatures")}
    return {name: len(kernel.signatures) for name, kernel in kernels.items()}

model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
step = ab.TrainStep(model, lambda m, ids: m(ids).square().mean(), optimizer)
batches = [torch.randint(50, (9, 2)) for _ in range(8)]
with ab.Executor(step, "Hybrid", cache=ab.Cache("LFU", 10, BOUNDS), dataloaders={"default": batches}) as executor:
    before = made()
    assert before["anabranch.tables.kernels.caches.ask"] == 1, before
    assert before["anabranch.tables.kernels.vocabulary.arrange"] == 1, before
    for _ in batches:
        executor.run()
    after = made()
assert after == before, {name: (before[name], after[name]) for name in after if after[name] != before[name]}
"""


@pytest.mark.parametrize("bounds", ["3, 2", pytest.param("0, 0", marks=pytest.mark.slow)])
def test_no_cached_step_compiles_anything(bounds: str, programs: Programs) -> None:
    """In a process of its own, for in this one the tests before have compiled everything."""
    done = programs.run(SCRIPT.replace("BOUNDS", bounds), timeout=200.0)
    assert done.returncode == 0, done.stderr[-3000:]
