"""One change between two steps for each kind of guard of Dynamo's: the next step sees it, or is refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plain_loop import TrainingCase, check, mean_square, reading_inside, sgd

Held = tuple[Callable[[], Any], Callable[[int], object]]
NUMBER = 1.5


class OfClass:
    number = 1.5


def helper() -> float:
    return 1.5


def other(k: int) -> Callable[[], float]:
    return lambda: 1.5 + k


def written(write: Callable[[float], object]) -> Callable[[int], object]:
    return lambda k: write(1.5 + k)


def in_attribute() -> Held:
    held = types.SimpleNamespace(number=1.5)
    return lambda: held.number, written(lambda value: setattr(held, "number", value))


def in_closure() -> Held:
    number = 1.5

    def write(value: float) -> None:
        nonlocal number
        number = value

    return lambda: number, written(write)


def in_global() -> Held:
    return lambda: NUMBER, written(lambda value: globals().update(NUMBER=value))


def in_list() -> Held:
    held = [1.5]
    return lambda: held[0], written(lambda value: held.__setitem__(0, value))


def key_of_dict() -> Held:
    held: dict[str, float] = {}
    return lambda: 2.0 if "key" in held else 1.0, lambda k: held.update(key=1.0) if k == 1 else held.clear()


def in_class() -> Held:
    held = OfClass()
    return lambda: held.number, written(lambda value: setattr(OfClass, "number", value))


def type_of_number() -> Held:
    held: list[Any] = [2]
    return lambda: 3.0 if isinstance(held[0], int) else held[0], lambda k: held.__setitem__(0, [2.5, True][k - 1])


def function_of_a_global() -> Held:
    return lambda: helper(), lambda k: globals().update(helper=other(k))


def default_of_a_function() -> Held:
    def function(number: float = 1.5) -> float:
        return number

    return function, written(lambda value: setattr(function, "__defaults__", (value,)))


def tensor() -> Held:
    held = [torch.ones(3)]
    return lambda: held[0], lambda k: held.__setitem__(0, torch.ones(3, dtype=[torch.float64, torch.int64][k - 1]) * k)


def shape_of_tensor() -> Held:
    held = [torch.ones(3)]
    return lambda: held[0] * held[0].numel(), lambda k: held.__setitem__(0, torch.ones([1, 3][k - 1]))


HOLDERS = [
    in_attribute, in_closure, in_global, in_list, key_of_dict, in_class,
    type_of_number, function_of_a_global, default_of_a_function, tensor, shape_of_tensor,
]  # fmt: skip


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__)
def test_a_value_that_is_read_may_change(holder: Callable[[], Held]) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        patch.setattr(OfClass, "number", 1.5)
        patch.setitem(globals(), "NUMBER", 1.5)
        patch.setitem(globals(), "helper", helper)
        read, change = holder()
        return reading_inside(read, change)  # type: ignore[arg-type]

    got = check(build, "graph")
    assert got.engines[4] == "graph"


class Network(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.act(self.first(x)))) * self.scale  # type: ignore[no-any-return]


def hooked(model: Any, k: int) -> None:
    if k == 1:
        model.hook = model.first.register_forward_hook(lambda module, args, y: y * 2)
    else:
        model.hook.remove()


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "module replaced": lambda m, k: setattr(m, "act", [nn.ReLU(), nn.GELU()][k - 1]),
    "training mode": lambda m, k: m.drop.train(k == 2),
    "number of a module": lambda m, k: setattr(m.drop, "p", 0.1 * k),
    "buffer replaced": lambda m, k: setattr(m, "scale", torch.full((3,), 1.0 + k)),
    "parameter frozen": lambda m, k: m.first.weight.requires_grad_(k == 2),
    "forward hook": hooked,
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("what", CHANGES)
def test_a_module_may_change(what: str) -> None:
    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = Network()
        return TrainingCase(model, mean_square, sgd(model), lambda k: CHANGES[what](model, k))  # type: ignore[arg-type,return-value]

    got = check(build, "graph")
    assert got.engines[4] == "graph"


@pytest.mark.parametrize("form", ["shape", "strides", "dtype"])
def test_the_form_of_a_batch_may_change(form: str) -> None:
    changed: dict[str, Callable[[Tensor], Tensor]] = {
        "shape": lambda x: x[:2],
        "strides": lambda x: x.t().contiguous().t(),
        "dtype": lambda x: x.to(torch.bfloat16),
    }

    def batch(i: int) -> Tensor:
        x = torch.linspace(-1, 1, 12).reshape(3, 4) + 0.1 * i
        return changed[form](x) if i in (5, 7) else x

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = Network()
        return TrainingCase(model, lambda m, x: mean_square(m, x.float()), sgd(model), batch=batch)

    assert check(build, "graph").engines == ["graph"] * 9
