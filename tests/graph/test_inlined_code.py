"""Three changes that Dynamo's guards miss: NumPy values, methods of classes, and code replaced in place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from covering import slow_except
from plain_loop import TrainingCase, check, mean_square, sgd


def doubled(self: Any, value: float) -> float:
    return value * 2


def helper(value: float) -> float:
    return value


class Plain:
    def scale(self, value: float) -> float:
        return value

    @property
    def share(self) -> float:
        return 1.0


class Base(nn.Module):
    def __init__(self, read: Callable[[Any], Any], held: object = None) -> None:
        super().__init__()
        self.layer, self.read, self.held, self.plain = nn.Linear(2, 2), read, held, Plain()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.read(self)  # type: ignore[no-any-return]


class Model(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def one(model: Any) -> float:
    return 1.0


REPLACED: dict[str, tuple[Callable[[Any], Any], object, str, object]] = {
    "forward": (one, Model, "forward", lambda self, x: self.layer(x) * 2),
    "the forward of a base class": (one, Base, "forward", lambda self, x: self.layer(x) * 2),
    "a method of a plain class": (lambda m: m.plain.scale(1.0), Plain, "scale", doubled),
    "a property": (lambda m: m.plain.share, Plain, "share", property(lambda self: 2.0)),
    "the code of a method": (lambda m: m.plain.scale(1.0), Plain.scale, "__code__", doubled.__code__),
    "the code of a function": (lambda m: helper(1.0), helper, "__code__", (lambda value: value * 2).__code__),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("what", REPLACED)
def test_code_that_is_replaced_is_used_from_the_next_step_on(what: str) -> None:
    read, place, name, new = REPLACED[what]

    def build(patch: pytest.MonkeyPatch) -> TrainingCase:
        model = Model(read)
        change = lambda k: patch.setattr(place, name, new, raising=False)  # noqa: E731
        return TrainingCase(model, mean_square, sgd(model), change, batch=lambda i: torch.ones(1, 2))

    assert check(build, "graph").refused_at is None


def run_as_graph(model: nn.Module) -> None:
    step = ab.TrainStep(model, mean_square, sgd(model))
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(2):
            executor.run(batch=torch.ones(1, 2))


@pytest.mark.parametrize(
    ("held", "read", "message"),
    [
        (np.array(2.0), lambda m: float(m.held), "reads held, a NumPy value"),
        (np.float64(2.0), lambda m: m.held, "reads held, a NumPy value"),
        (np.int64(2), lambda m: int(m.held), "reads held, a NumPy value"),
        (np.bool_(True), lambda m: 2.0 if m.held else 1.0, ".*branch.*held: graph input"),
    ],
    ids=["array", "float64", "int64", "bool"],
)
def test_numpy_values_read_as_numbers_are_refused_with_the_line_and_the_name(
    held: object, read: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ab.CaptureError, match=rf"(?s)test_inlined_code.py:\d+: the step {message}"):
        run_as_graph(Model(read, held))


MODULE = """
FACTOR = 1.0

def loss(model, batch):
    return FACTOR * model(batch).square().mean()
"""


def imported(path: Path, *, known: bool) -> ModuleType:
    """Return the module as an import does; ``known``: in ``sys.modules``."""
    module = ModuleType("imported_twice")
    if known:
        sys.modules["imported_twice"] = module
    exec(compile(MODULE, path, "exec"), vars(module))
    return module


def loss_after_a_change(module: ModuleType) -> tuple[float, float]:
    """Return the loss of a graph after the module's variable was changed, and what it should be."""
    model, x = nn.Linear(2, 1), torch.ones(4, 2)
    step = ab.TrainStep(model, module.loss, torch.optim.SGD(model.parameters(), lr=0.0))
    with ab.Executor(step, engine="graph") as executor:
        executor.run(batch=x)
        module.FACTOR = 3.0  # type: ignore[attr-defined]
        return executor.run(batch=x)["loss"].item(), module.loss(model, x).item()


@pytest.mark.parametrize("known", slow_except([True, False], True))
def test_variables_of_a_module_that_was_imported_anew_are_its_own(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo guards those of the module of that name that was imported last."""
    monkeypatch.setitem(sys.modules, "imported_twice", sys)  # removed afterwards
    for number in range(2):
        module = imported(tmp_path / f"{number}.py", known=known or not number)
        loss, expected = loss_after_a_change(module)
        assert loss == pytest.approx(expected)
