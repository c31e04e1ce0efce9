"""Several ragged features in one call: each is its own ``nn.EmbeddingBag``, and the servers are asked once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.errors import NotFound, SchemaError
from anabranch.parameter_server import ParameterClient
from anabranch.tables import Normal
from anabranch.tensors import count_rows, flatten, unflatten

ROWS, WIDTH = 30, 4


class TorchRecLike:
    """The methods of TorchRec's ``KeyedJaggedTensor`` that are documented, and nothing else."""

    def __init__(self, of: ab.KeyedJagged) -> None:
        self._of = of

    def keys(self) -> list[str]:
        return self._of.keys()

    def values(self) -> Tensor:
        return self._of.values()

    def lengths(self) -> Tensor:
        return self._of.lengths()

    def weights_or_none(self) -> Tensor | None:
        return self._of.weights_or_none()


def ragged(seed: int, rows: int = 6, *, weighted: bool = False, limit: int = ROWS) -> ab.KeyedJagged:
    """Three features; the last has no ids in this batch at all, and others have empty rows."""
    draw = torch.Generator().manual_seed(seed)
    sizes = {"user": 1, "seen": 4, "bought": 0}
    lists = {
        key: [
            torch.randint(0, limit, (int(torch.randint(0, most + 1, (), generator=draw)),), generator=draw).tolist()
            for _ in range(rows)
        ]
        for key, most in sizes.items()
    }
    weights = {key: [[0.5 + number for number in range(len(row))] for row in each] for key, each in lists.items()}
    return ab.KeyedJagged.from_lists(lists, weights if weighted else None)


class Model(nn.Module):
    """``seen`` and ``bought`` share a table, under bags of different modes."""

    def __init__(self, modes: tuple[str, str, str] = ("sum", "mean", "max")) -> None:
        super().__init__()
        user, seen, bought = (nn.EmbeddingBag(ROWS, WIDTH, mode=mode) for mode in modes)
        bought.weight = seen.weight
        self.bags = ab.EmbeddingBagCollection({"user": user, "seen": seen, "bought": bought})
        self.head = nn.Linear(3 * WIDTH, 1)

    def forward(self, features: Any) -> Tensor:
        pooled = self.bags(features)
        return self.head(torch.cat([pooled[key] for key in ("user", "seen", "bought")], 1))


def by_hand(model: Model, features: ab.KeyedJagged) -> Tensor:
    """The same with ``nn.EmbeddingBag`` on each feature's own lists."""
    pooled, at = [], 0
    lengths = features.lengths().view(3, -1).tolist()
    for key, each in zip(features.keys(), lengths, strict=True):
        ids, weights = features.values()[at : at + sum(each)], features.weights_or_none()
        offsets = torch.tensor([sum(each[:row]) for row in range(len(each))])
        own = None if weights is None else weights[at : at + sum(each)]
        pooled.append(model.bags.bags[key](ids, offsets, per_sample_weights=own))
        at += sum(each)
    return model.head(torch.cat(pooled, 1))


@pytest.mark.parametrize("weighted", [False, True])
def test_each_feature_is_its_own_bag(weighted: bool) -> None:
    model = Model(("sum", "sum", "sum") if weighted else ("sum", "mean", "max"))
    twin = copy.deepcopy(model)
    features = ragged(1, weighted=weighted)
    if weighted:
        features.weights_or_none().requires_grad_()
    given = [features, TorchRecLike(features)][weighted]
    (ours,) = torch.autograd.grad(model(given).square().sum(), model.bags.bags["seen"].weight)
    (theirs,) = torch.autograd.grad(by_hand(twin, features).square().sum(), twin.bags.bags["seen"].weight)
    assert torch.equal(model(given), by_hand(twin, features))
    assert torch.equal(ours, theirs)
    if weighted:
        model(given).square().sum().backward()
        assert features.weights_or_none().grad.abs().sum() > 0


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return (model(batch["ids"])[:, 0] - batch["y"]).square().mean()


def batches(count: int = 6) -> Iterator[dict[str, Any]]:
    for seed in range(count):
        yield {"ids": ragged(seed, 4 + seed % 2), "y": torch.linspace(-1, 1, 4 + seed % 2)}


def trained_plainly(model: Model, count: int = 6) -> Model:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)
    for batch in batches(count):
        optimizer.zero_grad()
        (by_hand(model, batch["ids"])[:, 0] - batch["y"]).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("cache", [None, ab.Cache("LFU", capacity=10)], ids=["uncached", "cached"])
@pytest.mark.parametrize("mode", [None, "PS", "Hybrid"])
def test_a_step_trains_as_the_plain_loop(mode: str | None, cache: ab.Cache | None) -> None:
    model = Model()
    expected = trained_plainly(copy.deepcopy(model))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)
    options = {} if mode is None else {"cache": cache}
    with ab.Executor(ab.TrainStep(model, loss, optimizer), mode, **options) as executor:
        for batch in batches():
            executor.run(batch=batch)
        assert executor.engine() == "tape"
    for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7, msg=name)


def remote(key: str, **changes: Any) -> ab.RemoteEmbedding:
    return ab.RemoteEmbedding(
        key, **{"num_embeddings": ROWS, "embedding_dim": WIDTH, "mode": "sum", "init": Normal(0, 1), **changes}
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_request_reads_all_features(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = None if dynamic else ROWS
    bags = {key: remote(key, num_embeddings=rows) for key in ("user", "seen", "bought")}
    model = nn.ModuleList([ab.EmbeddingBagCollection(bags), nn.Linear(3 * WIDTH, 1)])
    step = ab.TrainStep(
        model,
        lambda model, ids: model[1](torch.cat(list(model[0](ids).values()), 1)).square().mean(),
        torch.optim.Adagrad(model.parameters(), lr=0.1),
    )
    asked: list[list[str]] = []
    pull_many = ParameterClient.pull_many

    def noted(self: ParameterClient, ids: Any, **options: Any) -> Any:
        asked.append([name for name in ids if len(ids[name])])
        return pull_many(self, ids, **options)

    monkeypatch.setattr(ParameterClient, "pull_many", noted)
    with ab.Executor(step, "Hybrid") as executor:
        for seed in range(3):
            asked.clear()
            executor.run(batch=ragged(seed, limit=ROWS))
            assert [names for names in asked if names] == [["user", "seen"]]


@pytest.mark.parametrize("outside", [-1, ROWS])
def test_an_id_outside_a_table_is_named_by_its_place_in_the_users_own_tensor(outside: int) -> None:
    """It was the place among the distinct ids."""
    model = nn.Embedding(ROWS, 2, sparse=True)
    step = ab.TrainStep(model, lambda model, batch: model(batch).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, "PS") as executor, pytest.raises(NotFound, match=rf"ids\[1, 2\] is {outside}"):
        executor.run(batch=torch.tensor([[3, 3, 2], [2, 1, outside]]))


def test_ids_outside_a_table_are_refused_as_by_the_table_alone() -> None:
    model = Model()
    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, "Hybrid") as executor:
        bad = ab.KeyedJagged.from_lists({"user": [[1]], "seen": [[ROWS]], "bought": [[2]]})
        with pytest.raises(NotFound, match=str(ROWS)):
            executor.run(batch={"ids": bad, "y": torch.zeros(1)})


def test_a_graph_is_refused_with_the_reason_and_nothing_changes() -> None:
    model = Model()
    before = copy.deepcopy(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True)
    with ab.Executor(ab.TrainStep(model, loss, optimizer), engine="graph") as executor:
        for _ in range(2):
            with pytest.raises(ab.CaptureError, match="sizes of its features"):
                executor.run(batch=next(batches()))
    for value, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(value, old)


def test_it_counts_the_rows_of_its_batch_and_flattens_into_tensors() -> None:
    features = ragged(2, 5)
    assert count_rows({"ids": features, "y": torch.zeros(5)}) == 5
    with pytest.raises(ValueError, match=r"ids KeyedJagged\(.*rows=5.*y \(4,\)"):
        count_rows({"ids": features, "y": torch.zeros(4)})
    leaves, treedef = flatten(features)
    again = unflatten(treedef, leaves)
    assert again.keys() == features.keys()
    assert torch.equal(again.values(), features.values())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("served", [False, True], ids=["here", "on servers"])
def test_any_number_of_ids_of_a_narrow_dtype_is_accepted(dtype: torch.dtype, served: bool) -> None:
    """Rows begin at 0 and 280, a number that neither 8-bit dtype has; each bag counts its ids."""
    bag = (
        ab.RemoteEmbedding("counts", 4, 1, mode="sum", init=1.0, optimizer=torch.optim.SGD)
        if served
        else nn.EmbeddingBag(4, 1, mode="sum", _weight=torch.ones(4, 1))
    )
    collection = ab.EmbeddingBagCollection({"a": bag})
    counted = collection(ab.KeyedJagged(["a"], torch.ones(300, dtype=dtype), lengths=torch.tensor([280, 20])))
    assert counted["a"].tolist() == [[280.0], [20.0]]
    if served:
        bag.close()


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=str)
def test_ids_that_are_not_integers_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="one dimension of integers"):
        ab.KeyedJagged(["a"], torch.ones(3, dtype=dtype), lengths=torch.tensor([3]))
    with pytest.raises(ValueError, match=r"ids are integers, got 1\.7"):
        ab.KeyedJagged.from_lists({"a": [[1.7]]})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keys": ["a", "a"], "lengths": [1, 1]}, "different names"),
        ({"keys": ["a", "b"], "lengths": [2]}, "1 lengths are not a whole number of rows of 2"),
        ({"keys": ["a"], "lengths": [3]}, "add up to 3, but there are 2"),
        ({"keys": ["a"], "lengths": [3, -1]}, "at least 0, and the least is -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    sizes = {name: torch.tensor(value) for name, value in given.items() if name != "keys"}
    with pytest.raises(ValueError, match=words):
        ab.KeyedJagged(given["keys"], torch.tensor([1, 2]), **sizes)


def test_a_collection_refuses_unsupported_options() -> None:
    with pytest.raises(TypeError, match=r"'a' needs an nn.EmbeddingBag"):
        ab.EmbeddingBagCollection({"a": nn.Embedding(3, 2)})
    with pytest.raises(ValueError, match="give it a mode="):
        ab.EmbeddingBagCollection({"a": remote("a", mode=None)})
    with pytest.raises(ValueError, match=r"'a\.b' names no submodule"):
        ab.EmbeddingBagCollection({"a.b": nn.EmbeddingBag(3, 2)})
    bags = ab.EmbeddingBagCollection({"a": nn.EmbeddingBag(3, 2)})
    with pytest.raises(SchemaError, match=r"\['a'\] are not among \['b'\]"):
        bags(ab.KeyedJagged.from_lists({"b": [[1]]}))
    with pytest.raises(SchemaError, match="weights need 'sum'"):
        bags(ab.KeyedJagged.from_lists({"a": [[1]]}, {"a": [[2.0]]}))


def test_tensors_of_a_jagged_batch_stay_where_they_are() -> None:
    values, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 2])
    with torch.device("meta"):
        batch = ab.KeyedJagged(["a"], values, torch.ones(3, device="cpu"), lengths=lengths)
    assert batch.values() is values
    assert {
        part.device.type for part in (batch.values(), batch.weights_or_none(), batch.lengths()) if part is not None
    } == {"cpu"}
