"""The ids that a step will look up are learned from the leaves of its batches, and their rows read before it begins."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
import toys
from anabranch.executor.loaders.leaf_ids import LeafIds
from anabranch.parameter_server import ParameterClient

ROWS = 1000
Batch = Any


class Sequences(NamedTuple):
    seen: Tensor
    targets: Tensor


@dataclasses.dataclass
class Interaction:
    user: Tensor
    item: Tensor


def ids(*shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, ROWS, shape)


def ragged(rows: int = 8) -> ab.KeyedJagged:
    return ab.KeyedJagged.from_lists({key: [ids(count + 1).tolist() for count in range(rows)] for key in "ab"})


def clicks() -> dict[str, Tensor]:
    return {
        "label": torch.randint(0, 2, (16,)),
        "x": ids(16, 5),
        "mixed": torch.cat([torch.rand(16, 2), ids(16, 3)], 1),
    }


def sequences() -> Sequences:
    seen = ids(4, int(torch.randint(20, 24, ())), low=1)
    return Sequences(seen, ids(4, 1))


FORMS: dict[str, tuple[Callable[[], Batch], Callable[[Any], Tensor], str]] = {
    "a column": (clicks, lambda b: b["x"][:, 3], "batch.x[:, 3]"),
    "among dense numbers": (clicks, lambda b: b["mixed"][:, 2:].long(), "batch.mixed[:, 2:]"),
    "an offset a field": (clicks, lambda b: b["x"] + torch.arange(5) * 9, "batch.x + offsets"),
    "two towers": (lambda: Interaction(ids(8), ids(8)), lambda b: b.item.to(torch.int32), "batch.item"),
    "a sequence without its end": (sequences, lambda b: b.seen[:, :-1], "batch.0[:, :-1]"),
    "a sequence and its target": (sequences, lambda b: torch.cat([b.seen, b.targets], 1), "batch.0 and batch.1, some"),
    "without padding": (sequences, lambda b: b.seen[b.seen > 250], "batch.0, some"),
    "distinct": (sequences, lambda b: b.seen.unique(), "batch.0"),
    "positions": (sequences, lambda b: torch.arange(b.seen.shape[1]), "the ids of the last steps"),
    "moved and flattened": (
        clicks, lambda b: b["x"][:, 1:3].int().to("cpu").contiguous().cpu().flatten().long(), "batch.x[:, 1:3]"
    ),
    "no leaf, moved and flattened": (
        clicks, lambda b: torch.arange(20).to("cpu").view(4, 5).t().contiguous().cpu().flatten(),
        "the ids of the last steps",
    ),
    "ragged": (ragged, lambda b: b.values()[: int(b.lengths()[:8].sum())], "batch.a"),
    "sparse": (lambda: ids(4, 3).to_sparse_csr(), lambda b: b.col_indices(), "batch"),
}  # fmt: skip


def steps(learned: LeafIds, batch: Callable[[], Any], look: Callable[[Any], Any], count: int) -> list[bool]:
    """Whether all ids of each of so many steps were expected."""
    known = []
    for _ in range(count):
        one = batch()
        expected = learned.begin(one).get("t", torch.empty(0))
        looked_up = look(one).reshape(-1).long()
        known.append(bool(torch.isin(looked_up, expected).all()))
        learned.end([("t", looked_up)] if learned.watching else (), () if known[-1] else {"t"})
    return known


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("form", FORMS)
def test_two_steps_show_what_a_lookup_is_of(form: str) -> None:
    batch, look, text = FORMS[form]
    learned = LeafIds()
    torch.manual_seed(2)
    known = steps(learned, batch, look, 12)
    assert known[:2] == [False, False]
    assert sum(known) >= (6 if form == "positions" else 9)  # a longer sequence has more positions
    assert learned.describe() == {"t": text}
    assert not learned.watching
    later = batch()
    assert set(learned.of(later)["t"].tolist()) >= set(look(later).reshape(-1).tolist())


@pytest.mark.parametrize("look", [lambda b: b["x"][:, 1] * 7919 % ROWS, lambda b: ids(40)], ids=["hashed", "drawn"])
def test_what_no_leaf_has_is_looked_at_ten_times_and_left_alone(look: Callable[[Any], Tensor]) -> None:
    learned, watched = LeafIds(), 0
    for _ in range(14):
        watched += learned.watching
        assert not any(steps(learned, clicks, look, 1))
    assert (watched, learned.describe()) == (10, {})


def test_leaves_that_are_equal_by_chance_are_distinguished_when_a_lookup_misses() -> None:
    learned, count = LeafIds(), 0

    def batch() -> dict[str, Tensor]:
        nonlocal count
        count += 1
        x = ids(8)
        return {"a": x if count < 4 else ids(8), "b": x}

    known = steps(learned, batch, lambda b: b["b"], 8)
    assert known == [False, False, True, False, False, True, True, True]
    assert learned.describe() == {"t": "batch.b"}


@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:The PyTorch API of nested tensors")
def test_leaves_of_any_kind_are_no_obstacle() -> None:
    others = {
        "by column": ids(4, 3).to_sparse_csc(),
        "nested": torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]),
        "half": torch.rand(16).to(torch.float8_e4m3fn),
        "complex": torch.rand(16, dtype=torch.complex64),
        "images": torch.rand(2, 3, 4, 4),
        "nan": torch.tensor([torch.nan, torch.inf] * 8),
        "number": torch.tensor(3),
        "meta": torch.empty(16, device="meta"),
        **{str(kind): torch.zeros(16, dtype=kind) for kind in (torch.uint16, torch.uint32, torch.uint64)},
        "rest": (None, 7, "text", torch.empty(0, 5), torch.zeros(16, dtype=torch.bool)),
    }
    learned = LeafIds()
    assert steps(learned, lambda: others | clicks(), lambda b: b["x"][:, 1], 3) == [False, False, True]
    assert not any(steps(learned, lambda: others | clicks(), lambda b: ids(20), 9))


def test_a_batch_that_its_step_changes_in_place_teaches_nothing_wrong() -> None:
    learned = LeafIds()
    steps(learned, clicks, lambda b: b["x"].mul_(3).remainder_(ROWS), 14)
    assert learned.describe() == {}


# Executors.


class Model(nn.Module):
    """Looks ``look(batch)`` up: ids by table, of which there are three."""

    def __init__(self, look: Callable[[Any], Mapping[str, Tensor]], names: str = "abc") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleDict({name: nn.Embedding(ROWS, 2) for name in names})
        self.head = nn.Linear(2, 1)
        self.look = look

    def forward(self, batch: Any) -> Tensor:
        rows = [self.tables[name](some).flatten(0, -2).mean(0) for name, some in self.look(batch).items()]
        return self.head(torch.stack(rows).sum(0)).square().mean()


def step_of(model: nn.Module, **options: Any) -> ab.TrainStep:
    return toys.step_of(model, torch.optim.Adagrad, lambda model, batch: model(batch), **options)


@contextmanager
def pulls(patch: pytest.MonkeyPatch) -> Iterator[list[dict[str, set[int]]]]:
    """The ids of each request for rows, by table; a ``+`` marks those of the next step."""
    pulled: list[dict[str, set[int]]] = []
    pull_many = ParameterClient.pull_many

    def noted(self: ParameterClient, requested: Mapping[str, Tensor], **options: Any) -> Any:
        ahead = "+" * bool(options.get("ahead"))
        if max(map(len, requested.values())) < ROWS:  # else an executor gives its tables back
            pulled.append(
                {name.removesuffix(".weight")[-1] + ahead: set(some.tolist()) for name, some in requested.items()}
            )
        return pull_many(self, requested, **options)

    with patch.context() as here:
        here.setattr(ParameterClient, "pull_many", noted)
        yield pulled


def fields(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"a": batch["x"][:, 0], "b": batch["x"][:, 1] + 1, "c": batch["x"][:, 2:].flatten()}


def data(count: int = 6) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    return [{"x": ids(6, 5) % (ROWS - 1), "rows": torch.zeros(6)} for _ in range(count)]


def same_as_plain(model: nn.Module, batches: list[Any], **options: Any) -> list[str]:
    """Train alone and with servers; the results are the same. Returns how each table's ids are known at the end."""
    plain = copy.deepcopy(model)
    with ab.Executor(step_of(plain), None) as executor:
        for batch in batches:
            executor.run(batch=batch)
    with ab.Executor(step_of(model, **options.pop("step", {})), "Hybrid", **options) as executor:
        for batch in batches:
            executor.run(batch=batch)
        known = [route.ids for route in executor.routes() if route.ids]
    toys.assert_near(model, plain, 1e-6)
    return known


@pytest.mark.parametrize("engine", ["tape", pytest.param("graph", marks=pytest.mark.slow)])
def test_the_third_step_pulls_all_tables_in_one_message(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pulls(monkeypatch) as pulled:
        known = same_as_plain(Model(fields), data(4), engine=engine)
    assert known == ["batch.x[:, 0]", "batch.x[:, 1] + offsets", "batch.x[:, 2:]"]
    assert [sorted(one) for one in pulled] == [["a"], ["b"], ["c"]] * 2 + [["a", "b", "c"]] * 2


class Positions(nn.Module):
    """A transformer's lookups, as Hugging Face has them: ids, a slice of a buffer, and a buffer of one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places, self.kinds = nn.Embedding(ROWS, 2), nn.Embedding(40, 2), nn.Embedding(2, 2)
        self.register_buffer("position_ids", torch.arange(40).expand(1, -1))
        self.register_buffer("token_type_ids", torch.zeros(1, 40, dtype=torch.long))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        count, length = batch["input_ids"].shape
        places = self.position_ids[:, :length].to(batch["input_ids"].device).contiguous()
        kinds = self.token_type_ids[:, :length].expand(count, length)
        rows = self.words(batch["input_ids"]) + self.places(places.view(-1, length)) + self.kinds(kinds)
        return (rows.sum(-1) * batch["attention_mask"]).square().mean()


def test_a_transformer_s_words_positions_and_kinds_are_known() -> None:
    batches = [
        {"input_ids": ids(3, length), "attention_mask": (ids(3, length) > 200).long()} for length in (20, 22, 21, 20)
    ]
    known = same_as_plain(Positions(), batches)
    assert known[:2] == ["batch.input_ids", "the ids of the last steps"]
    assert "when looked up" not in known


def test_a_lookup_of_other_ids_reads_those_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = data(6)
    torch.manual_seed(2)
    batches[4]["more"] = ids(6)

    def look(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"a": torch.cat([batch["x"][:, 0], batch["more"]]) if "more" in batch else batch["x"][:, 0]}

    with pulls(monkeypatch) as pulled:
        same_as_plain(Model(look, "a"), batches)
    first = set(batches[4]["x"][:, 0].tolist())
    assert pulled[4:6] == [{"a": first}, {"a": set(batches[4]["more"].tolist()) - first}]
    assert pulled[6:] == [{"a": set(batches[5]["x"][:, 0].tolist())}]


def test_ids_that_the_step_names_are_pulled_from_the_first_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return fields(batch) | {"b": batch["x"][:, 1] * 7919 % ROWS}

    options = {"ids": lambda batch: {"tables.b.weight": look(batch)["b"]}}
    with pulls(monkeypatch) as pulled:
        known = same_as_plain(Model(look), data(4), step=options)
    assert known == ["batch.x[:, 0]", "ids=", "batch.x[:, 2:]"]
    assert [sorted(one) for one in pulled] == [["b"], ["a"], ["c"]] * 2 + [["a", "b", "c"]] * 2
    assert same_as_plain(Model(look), data(4))[1] == "when looked up"


def test_wrong_ids_cost_bytes_and_change_no_number() -> None:
    wrong = {"ids": lambda batch: {"tables.a.weight": [1, -5, ROWS + 3], "tables.b.weight": torch.ones(2, 2).int()}}
    assert same_as_plain(Model(fields), data(4), step=wrong)[0] == "ids="


def test_ids_of_no_table_are_refused_before_anything_happens() -> None:
    with ab.Executor(step_of(Model(fields), ids=lambda batch: {"tables.x.weight": batch["x"]}), "Hybrid") as executor:
        with pytest.raises(ValueError, match=r"tables\.x\.weight.*tables\.a\.weight"):
            executor.run(batch=data(1)[0])
        assert executor.step == 0


def test_an_error_of_ids_is_raised_by_the_step_of_its_batch() -> None:
    batches = [*data(3), {"other": torch.zeros(6)}]
    step = step_of(Model(fields), ids=lambda batch: {"tables.a.weight": batch["x"][:, 0]})
    with ab.Executor(step, "Hybrid", cache=ab.Cache(capacity=ROWS), dataloaders={"default": batches}) as executor:
        for _ in range(3):
            executor.run()
        with pytest.raises(KeyError, match="x"):
            executor.run()
        executor.run(batch=batches[0])
        assert executor.step == 4


def test_the_features_of_a_ragged_batch_are_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    bags = ab.EmbeddingBagCollection({key: nn.EmbeddingBag(ROWS, 2, mode="sum") for key in "ab"})
    model = nn.ModuleDict({"bags": bags, "head": nn.Linear(2, 1)})

    def loss(model: Any, batch: Any) -> Tensor:
        return model["head"](sum(model["bags"](batch["ids"]).values())).square().mean()  # type: ignore[no-any-return]

    batches = [{"ids": ragged(count)} for count in range(4, 9)]
    options: dict[str, Any] = {"cache": ab.Cache(capacity=ROWS), "dataloaders": {"default": batches}}
    with pulls(monkeypatch) as pulled, ab.Executor(toys.step_of(model, loss=loss), "Hybrid", **options) as executor:
        for _ in batches:
            executor.run()
        known = [route.ids for route in executor.routes() if route.ids]
    assert known == ["batch.ids.a", "batch.ids.b"]
    assert sum("a+" in one and "b+" in one for one in pulled) == 2
