"""Dynamo in front of the graph engine: what its guards miss is seen or refused, and nothing outlives its executor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from anabranch.errors import CaptureError
from anabranch.graph.dynamo import front as front_module
from anabranch.graph.dynamo.guards.watched_code import WatchedCode


class Scaled(nn.Module):
    def __init__(self, held: object = None) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(4, 3), held

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.layer(x))

    def scaled(self, y: Tensor) -> Tensor:
        return y


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def losses(
    engine: Any, change: Callable[[int, Any, Any], object], model: nn.Module, loss: Any = square
) -> tuple[list[float], str]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    found = []
    with ab.Executor(ab.TrainStep(model, loss, optimizer), engine=engine) as executor:
        for step in range(8):
            change(step, model, optimizer)
            try:
                found.append(float(executor.run(batch=torch.ones(2, 4))["loss"]))
            except CaptureError:
                return found, "refused"
        return found, executor.engine()


def changed_method(kind: type, name: str, step: int, at: int, new: Any) -> None:
    if step == at:
        setattr(kind, name, new)


def double(self: Any, y: Tensor) -> Tensor:
    return y * 2


CHANGES: dict[str, Callable[[type, int, Any, Any], object]] = {
    "a method of the class": lambda kind, step, m, o: changed_method(kind, "scaled", step, 4, double),
    "the code of a method": lambda kind, step, m, o: step == 4 and setattr(kind.scaled, "__code__", double.__code__),  # type: ignore[attr-defined]
    "a list in a tuple": lambda kind, step, m, o: m.held[0].__setitem__(0, 1.0 + step // 4),
    "the learning rate as a tensor": lambda kind, step, m, o: (
        step == 4 and o.param_groups[0].__setitem__("lr", torch.tensor(0.5))
    ),
    "a group replaced": lambda kind, step, m, o: (
        step == 4 and o.param_groups.__setitem__(0, {**o.param_groups[0], "lr": 0.5})
    ),
    "the state cleared": lambda kind, step, m, o: step == 4 and o.state.clear(),
    "the optimizer's own step": lambda kind, step, m, o: step == 4 and setattr(o, "step", lambda: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_that_guards_miss_are_noticed_or_refused(change: str) -> None:
    def run(engine: str) -> list[float]:
        kind = type("Own", (Scaled,), {"scaled": lambda self, y: y})
        if change == "a list in a tuple":
            kind = type("Own", (Scaled,), {"scaled": lambda self, y: y * self.held[0][0]})
        model = kind(([1.0],))
        return losses(engine, lambda step, m, o: CHANGES[change](kind, step, m, o), model)[0]

    found = run("graph")
    assert found == run("tape")[: len(found)]


def test_the_numbers_of_one_model_are_not_symbolic_in_another() -> None:
    """Dynamo keeps what it learns of changing numbers by the name of the code: each front has its own."""
    for p in (0.5, 0.3, 0.5):
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(p))
        assert losses("graph", lambda *_: None, model)[1] == "graph"


def test_gradients_are_where_the_tape_leaves_them() -> None:
    seen: dict[str, list[Tensor]] = {"graph": [], "tape": []}

    def read(step: int, model: Any, _: Any) -> None:
        if step:
            seen[engine].append(model.layer.weight.grad.clone())

    for engine in ("graph", "tape"):
        losses(engine, read, Scaled())
    assert all(map(torch.equal, seen["graph"], seen["tape"]))
    assert len(seen["graph"]) == 7


def test_nothing_outlives_the_executor() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = ab.Executor(ab.TrainStep(model, square, optimizer), engine="graph")
    for _ in range(4):
        executor.run(batch=torch.ones(2, 4))
    assert executor.engine() == "graph"
    executor.close()
    left = [weakref.ref(each) for each in (model, model.layer.weight, optimizer, executor)]
    del model, optimizer, executor
    for _ in range(2):  # the front's finalizer lets go of the program, and that of the parameters
        gc.collect()
    assert [each() for each in left] == [None] * 4


def test_watched_code_sees_methods_bases_and_codes() -> None:
    base = type("Base", (), {"method": lambda self: 1})
    kind = type("Kind", (base,), {"other": lambda self: 2})
    watched = WatchedCode([kind], [kind.other.__code__])  # type: ignore[attr-defined]
    assert watched.unchanged()
    kept = base.method  # type: ignore[attr-defined]
    base.method = lambda self: 3  # type: ignore[attr-defined]
    assert not watched.unchanged()
    base.method = kept  # type: ignore[attr-defined]
    assert watched.unchanged(), "put back, as PyTorch's tracers do"
    kind.other.__code__ = (lambda self: 4).__code__  # type: ignore[attr-defined]
    assert not watched.unchanged()


def test_an_evaluation_is_captured_and_follows_the_parameters() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = {
        "train": ab.TrainStep(model, square, optimizer),
        "validate": ab.EvalStep(model, lambda m, x: {"y": m(x), "mean": m(x).mean()}),
    }
    x = torch.ones(2, 4)
    with ab.Executor(steps, engine="graph") as executor:
        for _ in range(4):
            executor.run("train", x)
            found = executor.run("validate", x)
            with torch.no_grad():
                assert torch.equal(found["y"], model(x))
        assert executor.engine("validate") == "graph"
        assert executor.graph("validate").outputs[:2] == ["y", "mean"]
        assert model.training


def test_a_pytorch_with_broken_guards_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.get_rng_state()
    assert front_module.guards_hold()
    assert torch.equal(torch.get_rng_state(), random)
    monkeypatch.setattr(front_module, "_passed", None)
    monkeypatch.setitem(front_module._SOUND, "skip_nnmodule_hook_guards", True)  # type: ignore[index]
    with pytest.warns(UserWarning, match="does not notice all changes of Python values"):
        assert losses("graph", lambda *_: None, Scaled()) == ([], "refused")
    with pytest.raises(CaptureError, match="failed the self-test"):
        ab.capture(nn.ReLU(), torch.ones(2))


def test_with_torch_compile_switched_off_nothing_is_captured(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(front_module, "_passed", None)
    torch.compiler.set_stance("force_eager")
    try:
        with pytest.raises(CaptureError, match="torch.compile is switched off"):
            ab.capture(nn.ReLU(), torch.ones(2))
    finally:
        torch.compiler.set_stance("default")
    assert not recwarn.list
    assert losses("graph", lambda *_: None, Scaled())[1] == "graph"  # nothing is remembered
