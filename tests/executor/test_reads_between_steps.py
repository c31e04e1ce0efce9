"""Between two steps the model answers from the applied state, and a look at it changes nothing on the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import mean_square
from toys import Users, job_servers, step_of

ROWS = 12
CACHES = [None, ab.Cache(capacity=4), ab.Cache(capacity=ROWS)]


class Model(nn.Module):
    """A table of one kind and a dense layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table: nn.Module = nn.Embedding(ROWS, 3) if kind == "rows" else nn.EmbeddingBag(ROWS, 3, mode="sum")
        self.head = nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        return self.head(rows if rows.ndim == 2 else rows.sum(1))  # type: ignore[no-any-return]


BATCHES = [torch.tensor([[0, 5, 5], [3, 1, 0]]), torch.tensor([[5, 2, 7], [1, 1, 9]]), torch.tensor([[3, 3, 2]])]
EVERY = torch.arange(ROWS)[:, None]


def looks(model: nn.Module) -> list[Tensor]:
    """What a user sees of the model by hand, twice: in evaluation mode, without a graph, and its dense layer."""
    model.eval()
    seen = [model(EVERY).detach()]
    with torch.no_grad():
        seen += [model(BATCHES[0]), model(EVERY)]
    model.train()
    seen += [model(BATCHES[0]).detach()]
    return [*seen, *(value.detach().clone() for value in model.head.parameters())]  # type: ignore[union-attr]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_looks_inside_a_window_and_after_a_failed_run_see_the_last_step(mode: str, cache: ab.Cache | None) -> None:
    model, plain, failing = Model("rows"), Model("rows"), [False]

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        value = mean_square(model, ids)
        if failing[0]:
            raise KeyboardInterrupt
        return value

    mine, theirs = (step_of(one, loss=loss, accumulate=2) for one in (model, plain))
    with ab.Executor(mine, mode, cache=cache) as executor, ab.Executor(theirs) as other:
        for ids in BATCHES:
            for one in (executor, other):
                one.run(batch=ids)
            same(looks(model), looks(plain))
        failing[0] = True
        with pytest.raises(KeyboardInterrupt):
            executor.run(batch=BATCHES[1])
        same(looks(model), looks(plain))


def users_step(model: Users, loss: Callable[..., Tensor] = Users.loss) -> ab.TrainStep:
    return ab.TrainStep(model, loss, torch.optim.SGD(model.head.parameters(), lr=0.1))


def executor_of(model: Users, **options: Any) -> ab.Executor:
    return ab.Executor(users_step(model), "Hybrid", **options)


TRAINED, UNSEEN = torch.tensor([1, 2, 3, 4]), torch.tensor([101, 102, 103, 104, 105])


def rows_there(executor: ab.Executor) -> tuple[int, int]:
    assert executor._remote is not None
    users = executor._remote.client.statistics()[0].tables["users"]
    return users.rows, users.evictions


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("cache", [*CACHES, ab.Cache(capacity=9, pull_bound=3, push_bound=3)], ids=str)
@pytest.mark.parametrize("mode", ["PS", "Hybrid"])
def test_looks_admit_no_ids_and_evict_no_rows(mode: str, cache: ab.Cache | None) -> None:
    model = Users(4)
    with ab.Executor(users_step(model), mode, cache=cache) as executor:
        assert torch.equal(model(TRAINED), torch.zeros(4, 2))  # before the first run
        for runs in range(1, 4):
            executor.run(batch=TRAINED)
            assert torch.equal(model(UNSEEN), torch.zeros(5, 2))  # in training mode, with a graph
            model.eval()
            assert torch.equal(model(UNSEEN), torch.zeros(5, 2))
            assert torch.equal(model(TRAINED), torch.full((4, 2), -float(runs)))
            with torch.no_grad():
                model(UNSEEN)
            model.train()
        assert rows_there(executor) == (4, 0)


# Asking ahead.


def test_a_batch_that_is_only_prefetched_admits_and_evicts_nothing() -> None:
    model, data = Users(4), [TRAINED, TRAINED, TRAINED, UNSEEN[:4]]
    with executor_of(model, cache=ab.Cache(capacity=ROWS), dataloaders={"default": data}) as executor:
        for _ in data[:-1]:
            executor.run()
        assert executor._remote is not None
        executor._remote.tables.wait_until_quiet()
        assert executor._remote.tables._coming is not None  # the fourth batch's rows have come
        assert rows_there(executor) == (4, 0)
        assert torch.equal(model(TRAINED), torch.full((4, 2), -3.0))
        executor.run()
        assert rows_there(executor) == (4, 4)


# Gradients.


def test_gradients_of_a_tensor_kept_from_a_run_and_in_an_evaluation_take_nothing_to_the_servers() -> None:
    model, kept = Users(4), list[Tensor]()

    def keeping(model: nn.Module, ids: Tensor) -> Tensor:
        kept.append(model(ids))
        return kept[-1].sum() + 0 * model.head.weight.sum()  # type: ignore[union-attr,operator]

    def slope(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
        with torch.enable_grad():
            model(ids).sum().backward()
        return {}

    steps = {"train": users_step(model, keeping), "slope": ab.EvalStep(model, slope)}
    with ab.Executor(steps, "Hybrid", engine="tape") as executor:
        executor.run("train", TRAINED)
        for late in (lambda: model(TRAINED).sum().backward(), lambda: executor.run("slope", TRAINED)):
            with pytest.raises(ValueError, match=r"users .*outside .*executor\.run.*no_grad"):
                late()
        executor.run("train", TRAINED)
        assert torch.equal(model(TRAINED), torch.full((4, 2), -2.0))


# Ids.


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("moved", [True, False], ids=["table", "RemoteEmbedding"])
@pytest.mark.parametrize("kind", ["rows", "bags"])
@pytest.mark.parametrize(
    "ids", [torch.tensor([[1.5]]), torch.tensor([[True]]), torch.tensor([[float("nan")]]), torch.tensor([[1]]).byte()]
)
def test_ids_that_torch_refuses_are_refused(ids: Tensor, kind: str, moved: bool) -> None:
    model = Model(kind)
    with pytest.raises(RuntimeError):
        model.table(ids)
    if not moved:
        model.table = ab.RemoteEmbedding("table.weight", ROWS, 3, mode="sum" if kind == "bags" else None)
    with ab.Executor(step_of(model), "Hybrid") as executor:
        executor.run(batch=BATCHES[0])
        before = looks(model)
        for look in (lambda: executor.run(batch=ids), lambda: model(ids)):
            with pytest.raises(ab.SchemaError, match=rf"table\.weight.*{ids.dtype}.*ids\.long"):
                look()
        same(looks(model), before)
        executor.run(batch=BATCHES[0].int())


# What a table's capacity costs is counted and said: ids that find no room, and rows that leave for others.


def counts(executor: ab.Executor) -> tuple[int, int]:
    users = executor.statistics().tables["users"]
    return users.unadmitted, users.evicted


@pytest.mark.parametrize("cache", [None, ab.Cache(capacity=3), ab.Cache(capacity=99, pull_bound=5)], ids=str)
def test_ids_without_room_are_counted_and_said_once(cache: ab.Cache | None) -> None:
    model = Users(capacity=4)
    with executor_of(model, cache=cache) as executor:
        executor.run(batch=torch.tensor([1, 2, 3, 4]))
        assert counts(executor) == (0, 0)
        executor.run(batch=torch.tensor([1, 2, 3, 4, 5, 5, 6]))
        assert counts(executor) == (2, 0)
        with pytest.warns(RuntimeWarning, match=r"table users has no room .* capacity=4, .*\(there are 1\)") as given:
            executor.run(batch=torch.tensor([6, 4, 3, 2, 1, 7, 8]))
        assert given[0].filename == __file__
        assert counts(executor) == (5, 0)
        assert torch.equal(model(torch.arange(1, 9))[:, 0], torch.tensor([-3.0, -3, -3, -3, 0, 0, 0, 0]))
        first = executor.record_loads().tables["users"]
        executor.run(batch=torch.tensor([11, 12]))
        assert counts(executor) == (5, 2)
        later = executor.record_loads().tables["users"]
    assert [(first.unadmitted, first.evicted), (later.unadmitted, later.evicted)] == [(5, 0), (0, 2)]
    assert counts(executor) == (5, 2)  # after the end


def test_ids_that_admission_leaves_out_and_tables_without_capacity_are_not_at_an_edge() -> None:
    model = Users(None, admission=0.5)
    with executor_of(model) as executor:
        executor.run(batch=torch.arange(100))
        assert counts(executor) == (0, 0)
        assert 0 < executor._remote.client.statistics()[0].tables["users"].rows < 100  # type: ignore[union-attr]


def test_the_shards_of_a_table_count_together_and_one_warning_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity is divided between them, and ids are not spread quite evenly."""
    with job_servers(3, monkeypatch):
        model, ids = Users(capacity=300), torch.arange(300)
        with executor_of(model) as executor:
            executor.run(batch=ids)
            with pytest.warns(RuntimeWarning, match=r"capacity=300, .*\(there are 3\)"):
                executor.run(batch=ids)
            untrained = int((model(ids)[:, 0] == 0).sum())
            assert untrained > 0
            assert counts(executor) == (2 * untrained, 0)
