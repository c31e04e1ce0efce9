"""Batches that are objects: their contents change from step to step, with or without the object itself."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from plain_loop import Build, TrainingCase, linear, nothing, sgd

BATCHES: dict[str, Build] = {}
X = torch.linspace(-1, 1, 40).reshape(10, 4)


def x_of(i: int) -> Tensor:
    return X[:3] + 0.1 * i


@dataclasses.dataclass
class Plain:
    x: Tensor
    scale: float


@dataclasses.dataclass(eq=False)
class Unequal:
    x: Tensor
    scale: float


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    scale: float


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Tensor
    scale: float


@dataclasses.dataclass
class WithProperty:
    x: Tensor
    _scale: float

    @property
    def scale(self) -> float:
        return self._scale


@dataclasses.dataclass
class Inner:
    scale: Any


@dataclasses.dataclass
class Outer:
    x: Tensor
    inner: Inner

    @property
    def scale(self) -> Any:
        return self.inner.scale


@dataclasses.dataclass
class WithHidden:
    x: Tensor
    scale: float = dataclasses.field(default=1.0, compare=False, repr=False)


@dataclasses.dataclass
class WithoutInit:
    x: Tensor
    scale: float = dataclasses.field(init=False, default=1.0)


@dataclasses.dataclass
class WithClassNumber:
    x: Tensor
    note: str = "a"

    @property
    def scale(self) -> float:
        return 1.0 + len(self.note)


class Own:
    """Hashable by identity, as objects are."""

    def __init__(self, x: Tensor, scale: Any) -> None:
        self.x, self.scale = x, scale


class OwnWithSlots:
    __slots__ = ("scale", "x")

    def __init__(self, x: Tensor, scale: Any) -> None:
        self.x, self.scale = x, scale


class OwnWithGetattr:
    def __init__(self, x: Tensor, scale: Any) -> None:
        self._store = {"x": x, "scale": scale}

    def __getattr__(self, name: str) -> Any:
        store = self.__dict__.get("_store")
        if store is None or name not in store:
            raise AttributeError(name)
        return store[name]


class OwnAlwaysEqual(Own):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7


class OwnUnhashable(Own):
    __hash__ = None  # type: ignore[assignment]


class OwnIterable(Own):
    def __iter__(self) -> Iterator[Any]:
        return iter((self.x, self.scale))

    def __len__(self) -> int:
        return 2


class OwnMapping(Mapping[str, Any]):
    def __init__(self, x: Tensor, scale: Any) -> None:
        self.held = {"x": x, "scale": scale}

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return 2

    x = property(lambda self: self.held["x"])
    scale = property(lambda self: self.held["scale"])


class OwnNamedTuple(NamedTuple):
    x: Tensor
    scale: Any


class AttributeDict(dict):  # type: ignore[type-arg]
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Kind(enum.Enum):
    LOW = 1.0
    HIGH = 2.0


def user_dict(x: Tensor, scale: Any) -> Any:
    return collections.UserDict(x=x, scale=scale)


class AttributeUserDict(collections.UserDict[str, Any]):
    """As a BatchEncoding is."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


def mean_of(m: Any, b: Any) -> Any:
    return m(b.x).square().mean() * b.scale


def item_mean_of(m: Any, b: Any) -> Any:
    return m(b["x"]).square().mean() * b["scale"]


def _play(batch: Callable[[int], Any], loss: Callable[[Any, Any], Any], **keywords: Any) -> TrainingCase:
    model = linear()
    return TrainingCase(model, loss, sgd(model), keywords.pop("change", nothing), batch=batch, **keywords)


def _rows(batch: Any) -> float:
    return 3.0


MAKERS: dict[str, tuple[Callable[[Tensor, Any], Any], Callable[[Any, Any], Any], bool]] = {
    # name: how it is made, the loss that reads it, whether it needs rows=
    "dataclass": (Plain, mean_of, True),
    "dataclass_unequal": (Unequal, mean_of, True),
    "dataclass_frozen": (Frozen, mean_of, True),
    "dataclass_slotted": (Slotted, mean_of, True),
    "dataclass_property": (WithProperty, mean_of, True),
    "dataclass_hidden_field": (WithHidden, mean_of, True),
    "dataclass_nested": (lambda x, s: Outer(x, Inner(s)), mean_of, True),
    "own": (Own, mean_of, True),
    "own_slots": (OwnWithSlots, mean_of, True),
    "own_getattr": (OwnWithGetattr, mean_of, True),
    "own_always_equal": (OwnAlwaysEqual, mean_of, True),
    "own_unhashable": (OwnUnhashable, mean_of, True),
    "own_iterable": (OwnIterable, mean_of, True),
    "own_mapping": (OwnMapping, item_mean_of, True),
    "namespace": (lambda x, s: types.SimpleNamespace(x=x, scale=s), mean_of, True),
    "named_tuple": (OwnNamedTuple, mean_of, False),
    "dict": (lambda x, s: {"x": x, "scale": s}, item_mean_of, False),
    "ordered_dict": (lambda x, s: collections.OrderedDict(x=x, scale=s), item_mean_of, False),
    "attribute_dict": (lambda x, s: AttributeDict(x=x, scale=s), mean_of, True),
    "user_dict": (user_dict, item_mean_of, True),
    "attribute_user_dict": (lambda x, s: AttributeUserDict(x=x, scale=s), mean_of, True),
    "mapping_proxy": (lambda x, s: types.MappingProxyType({"x": x, "scale": s}), item_mean_of, True),
    "chain_map": (lambda x, s: collections.ChainMap({"x": x}, {"scale": s}), item_mean_of, True),
    "default_dict": (lambda x, s: collections.defaultdict(lambda: s, x=x), item_mean_of, True),
    "tuple": (lambda x, s: (x, s), lambda m, b: m(b[0]).square().mean() * b[1], False),
    "list": (lambda x, s: [x, s], lambda m, b: m(b[0]).square().mean() * b[1], False),
    "user_list": (lambda x, s: collections.UserList([x, s]), lambda m, b: m(b[0]).square().mean() * b[1], True),
    "deque": (lambda x, s: collections.deque([x, s]), lambda m, b: m(b[0]).square().mean() * b[1], True),
    "object_in_a_dict": (
        lambda x, s: {"x": x, "meta": Own(x, s)},
        lambda m, b: m(b["x"]).mean() * b["meta"].scale,
        True,
    ),
    "object_in_a_tuple": (lambda x, s: (x, Own(x, s)), lambda m, b: m(b[0]).square().mean() * b[1].scale, True),
    "dict_of_lists": (
        lambda x, s: {"a": [{"x": x}], "s": (s,)},
        lambda m, b: m(b["a"][0]["x"]).mean() * b["s"][0],
        False,
    ),
    "callable": (lambda x, s: lambda: (x, s), lambda m, b: m(b()[0]).square().mean() * b()[1], True),
    "generator": (lambda x, s: iter([x, s]), lambda m, b: m(next(b)).square().mean() * next(b), True),
}


def _fresh(name: str, values: Callable[[int], Any]) -> Build:
    """A new batch a step, its number changing from step to step."""
    make, loss, rows = MAKERS[name]
    return lambda patch: _play(lambda i: make(x_of(i), values(i)), loss, rows=_rows if rows else None)


def _kept(name: str) -> Build:
    """One object for all steps, changed in place before each."""
    make, loss, rows = MAKERS[name]

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        held = make(x_of(0), 1.0)

        def batch(i: int) -> Any:
            if dataclasses.is_dataclass(held) or hasattr(held, "scale"):
                object.__setattr__(held, "x", x_of(i))
                object.__setattr__(held, "scale", _numbers(i))
            else:
                held["x"], held["scale"] = x_of(i), _numbers(i)
            return held

        return _play(batch, loss, rows=_rows if rows else None)

    return build


def _numbers(i: int) -> float:
    return 1.0 + (i >= 5) + 0.5 * (i >= 7)


for _name in MAKERS:
    BATCHES[f"{_name}_number"] = _fresh(_name, _numbers)
    BATCHES[f"{_name}_tensor"] = _fresh(_name, lambda i: torch.tensor(_numbers(i)))
for _name in ("dict", "dataclass", "own", "named_tuple"):
    BATCHES[f"{_name}_number_every_step"] = _fresh(_name, lambda i: 1.0 + 0.1 * i)
    BATCHES[f"{_name}_integer_every_step"] = _fresh(_name, lambda i: 1 + i)
    BATCHES[f"{_name}_boolean"] = _fresh(_name, lambda i: i % 2 == 0)
    BATCHES[f"{_name}_integer_then_float"] = _fresh(_name, lambda i: 1 if i < 5 else 1.5 if i < 7 else True)
    BATCHES[f"{_name}_numpy_number"] = _fresh(_name, lambda i: np.float64(_numbers(i)))
for _name in (
    "dataclass",
    "dataclass_unequal",
    "dataclass_frozen",
    "dataclass_slotted",
    "own",
    "own_slots",
    "own_always_equal",
    "own_unhashable",
    "own_iterable",
    "namespace",
    "dict",
    "user_dict",
):
    BATCHES[f"{_name}_kept_and_changed"] = _kept(_name)


def batch_case(function: Build) -> Build:
    BATCHES[function.__name__] = function
    return function


@batch_case
def tensor_inside_an_object_replaced(patch: pytest.MonkeyPatch) -> TrainingCase:
    held = Own(x_of(0), 1.0)
    return _play(lambda i: held, mean_of, rows=_rows, change=lambda k: setattr(held, "x", x_of(10 * k)))


@batch_case
def tensor_inside_an_object_in_place(patch: pytest.MonkeyPatch) -> TrainingCase:
    held = Own(x_of(0).clone(), 1.0)
    return _play(lambda i: held, mean_of, rows=_rows, change=lambda k: (held.x.fill_(0.3 * k), None)[1])


@batch_case
def class_number_of_a_batch(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Numbered(Own):
        factor = 1.0

    return _play(
        lambda i: Numbered(x_of(i), 1.0),
        lambda m, b: mean_of(m, b) * b.factor,
        rows=_rows,
        change=lambda k: setattr(Numbered, "factor", 1.0 + k),
    )


@batch_case
def class_number_of_a_dataclass_batch(patch: pytest.MonkeyPatch) -> TrainingCase:
    return _play(
        lambda i: WithClassNumber(x_of(i)),
        mean_of,
        rows=_rows,
        change=lambda k: patch.setattr(WithClassNumber, "scale", property(lambda self: 1.0 + k)),
    )


@batch_case
def two_classes_of_batches(patch: pytest.MonkeyPatch) -> TrainingCase:
    return _play(lambda i: [Plain, Unequal, Own][i % 3](x_of(i), 1.0 + i % 3), mean_of, rows=_rows)


@batch_case
def two_classes_of_one_form(patch: pytest.MonkeyPatch) -> TrainingCase:
    class Double(Own):
        @property
        def factor(self) -> float:
            return 2.0

    class Triple(Own):
        @property
        def factor(self) -> float:
            return 3.0

    return _play(
        lambda i: (Double if i < 5 else Triple)(x_of(i), 1.0), lambda m, b: mean_of(m, b) * b.factor, rows=_rows
    )


def _values(name: str, values: Callable[[int], Any], read: Callable[[Any], Any]) -> None:
    """A dict batch with one leaf that is not a tensor."""
    BATCHES[name] = lambda patch: _play(
        lambda i: {"x": x_of(i), "extra": values(i)},
        lambda m, b: m(b["x"]).square().mean() * read(b["extra"]),
        rows=_rows,
    )


_values("none_leaf", lambda i: None if i < 5 else 2.0, lambda v: 1.0 if v is None else v)
_values("none_then_tensor", lambda i: None if i < 5 else torch.ones(3), lambda v: 1.0 if v is None else 1 + v.sum())
_values("text_leaf", lambda i: ["mean", "sum"][(i >= 5)], lambda v: {"mean": 1.0, "sum": 2.0}[v])
_values("text_every_step", lambda i: f"sample-{i}", lambda v: 1.0 + 0.1 * int(v[-1]))
_values("text_unread", lambda i: f"sample-{i}", lambda v: 1.0)
_values("bytes_leaf", lambda i: bytes([1 + (i >= 5)]), lambda v: float(v[0]))
_values("enum_leaf", lambda i: [Kind.LOW, Kind.HIGH][(i >= 5)], lambda v: v.value)
_values("complex_leaf", lambda i: complex(1 + (i >= 5), 1), lambda v: v.real)
_values("list_of_text", lambda i: ["a"] * (1 + (i >= 5)), lambda v: float(len(v)))
_values("list_of_numbers", lambda i: [1.0, 2.0 + i], lambda v: v[0] + v[1])
_values("numpy_leaf", lambda i: np.full(3, 1.0 + i, dtype=np.float32), lambda v: torch.as_tensor(v).sum())
_values("empty_list", lambda i: [] if i < 5 else [1], lambda v: 1.0 + len(v))
_values("empty_dict", lambda i: {} if i < 5 else {"k": 2.0}, lambda v: 1.0 + sum(v.values()))
_values("dict_with_integer_keys", lambda i: {int(i >= 5): 1.0, 7: 2.0}, lambda v: v[7] + min(v))
_values(
    "dict_order", lambda i: {"a": 1.0, "b": 2.0} if i < 5 else {"b": 2.0, "a": 1.0}, lambda v: next(iter(v.values()))
)
_values("range_leaf", lambda i: range(1 + (i >= 5)), lambda v: 1.0 + len(v))
_values("slice_leaf", lambda i: slice(0, 1 + (i >= 5)), lambda v: X[0, v].sum())
_values("set_leaf", lambda i: {1.0, 1.0 + (i >= 5)}, lambda v: sum(v))
_values("size_leaf", lambda i: torch.Size([1 + (i >= 5)]), lambda v: v.numel())
_values("dtype_leaf", lambda i: [torch.float32, torch.bfloat16][(i >= 5)], lambda v: torch.tensor(1.1, dtype=v).float())
_values("device_leaf", lambda i: torch.device("cpu"), lambda v: torch.ones((), device=v))
_values("generator_leaf", lambda i: torch.Generator().manual_seed(int(i >= 5)), lambda v: torch.rand((), generator=v))
_values("function_leaf", lambda i: [torch.sin, torch.cos][(i >= 5)], lambda v: 2 + v(torch.tensor(1.0)))
_values("infinite_number", lambda i: [1.0, float("inf")][(i >= 5)], lambda v: 1.0 if v == float("inf") else v + 1)
_values("nan_number", lambda i: [float("nan"), 2.0][(i >= 5)], lambda v: 1.0 if v != v else v)
_values("minus_zero", lambda i: [0.0, -0.0][(i >= 5)], lambda v: 2.0 + np.copysign(1.0, v))
_values("large_integer", lambda i: 2**60 + (i >= 5), lambda v: float(v % 5 + 1))
_values("integer_as_a_size", lambda i: 2 + i % 3, lambda v: torch.arange(float(v)).sum())
_values("float_used_twice", lambda i: 1.5 + i % 3, lambda v: v * v + torch.full((2,), v).sum())
_values("float_in_a_branch", lambda i: 0.1 * i, lambda v: 1.0 if v < 0.45 else 3.0)
_values("tensor_shape_changes", lambda i: torch.ones(1 + (i >= 5)), lambda v: v.sum())
_values("tensor_without_dimensions", lambda i: torch.tensor(1.0 + i), lambda v: v)
_values("parameter_leaf", lambda i: torch.nn.Parameter(torch.tensor(1.0 + i)), lambda v: v.detach())


@batch_case
def keys_come_and_go(patch: pytest.MonkeyPatch) -> TrainingCase:
    return _play(
        lambda i: {"x": x_of(i)} | ({"mask": torch.tensor([1.0, 0.0, 1.0])[:, None]} if i % 2 else {}),
        lambda m, b: (m(b["x"]) * b.get("mask", 1.0)).square().mean(),
    )


@batch_case
def batch_kept_by_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    kept: list[Any] = []

    def loss(m: Any, b: Any) -> Any:
        kept.append(b["x"])
        return m(b["x"]).square().mean() + sum(k.mean() for k in kept)

    return _play(lambda i: {"x": x_of(i)}, loss, seen=lambda: list(kept))


@batch_case
def batch_written_by_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    given: list[Any] = []

    def batch(i: int) -> Any:
        given.append({"x": x_of(i)})
        return given[-1]

    def loss(m: Any, b: Any) -> Any:
        b["y"] = m(b["x"])
        return b["y"].square().mean()

    return _play(batch, loss, seen=lambda: [len(b) for b in given])


@batch_case
def batch_popped_by_the_loss(patch: pytest.MonkeyPatch) -> TrainingCase:
    given: list[Any] = []

    def batch(i: int) -> Any:
        given.append({"x": x_of(i), "labels": torch.ones(3, 3) * i})
        return given[-1]

    return _play(
        batch,
        lambda m, b: (m(b["x"]) - b.pop("labels")).square().mean(),
        seen=lambda: [sorted(b) for b in given],
    )


@batch_case
def deep_copies_of_one_batch(patch: pytest.MonkeyPatch) -> TrainingCase:
    held = {"x": x_of(0), "scale": 1.0}
    return _play(lambda i: copy.deepcopy(held), item_mean_of, change=lambda k: held.update(scale=1.0 + k))
