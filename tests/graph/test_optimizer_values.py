"""What a user's optimizer reads in Python: a change between two steps is seen, or the optimizer is left to itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab


class Own(torch.optim.Optimizer):
    """SGD times the number that ``factor`` reads somewhere."""

    def __init__(self, parameters: Iterable[Tensor], **attributes: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        vars(self).update(attributes)

    def factor(self, parameter: Tensor, group: dict[str, Any]) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("seen", torch.zeros(()))
                parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor(parameter, group))


def optimizer(factor: Callable[[Any, Tensor, dict[str, Any]], Any], **members: Any) -> type[Own]:
    return type("Made", (Own,), {"factor": factor, **members})


def patch_torch(patch: pytest.MonkeyPatch) -> None:
    adam = importlib.import_module("torch.optim.adam")
    real = adam._single_tensor_adam

    def halved(parameters: list[Tensor], *arguments: Any, **options: Any) -> None:
        real(parameters, *arguments, **options)
        for parameter in parameters:
            parameter.mul_(0.5)

    patch.setattr(adam, "_single_tensor_adam", halved)


CASES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[[Any], object]]] = {
    "attribute": (
        lambda m: optimizer(lambda o, p, g: o.gain)(m.parameters(), gain=1.0),
        lambda o: setattr(o, "gain", 2.0),
    ),
    "attribute_that_hides_the_class's": (
        lambda m: optimizer(lambda o, p, g: o.gain, gain=1.0)(m.parameters()),
        lambda o: setattr(o, "gain", 2.0),
    ),
    "parameters_in_a_set": (
        lambda m: optimizer(lambda o, p, g: 0.5 if p in o.slow else 1.0)(m.parameters(), slow=set()),
        lambda o: o.slow.add(o.param_groups[0]["params"][0]),
    ),
    "attribute_of_a_parameter": (
        lambda m: optimizer(lambda o, p, g: getattr(p, "scale", 1.0))(m.parameters()),
        lambda o: setattr(o.param_groups[0]["params"][0], "scale", 3.0),
    ),
    "list": (
        lambda m: optimizer(lambda o, p, g: o.gains[0])(m.parameters(), gains=[1.0]),
        lambda o: o.gains.__setitem__(0, 2.0),
    ),
    "list_of_the_class": (
        lambda m: optimizer(lambda o, p, g: o.gains[0], gains=[1.0])(m.parameters()),
        lambda o: o.gains.__setitem__(0, 2.0),
    ),
    "default_of_a_method": (
        lambda m: optimizer(lambda o, p, g, gains=[1.0]: gains[0])(m.parameters()),
        lambda o: type(o).factor.__defaults__[0].__setitem__(0, 2.0),
    ),
    "another_class": (
        lambda m: optimizer(lambda o, p, g: 1.0)(m.parameters()),
        lambda o: setattr(o, "__class__", optimizer(lambda o, p, g: 2.0)),
    ),
    "state_of_no_parameter": (
        lambda m: optimizer(lambda o, p, g: o.state["all"].get("gain", 1.0))(m.parameters()),
        lambda o: o.state["all"].__setitem__("gain", 2.0),
    ),
    "container_in_the_state": (
        lambda m: optimizer(lambda o, p, g: o.state[p].setdefault("gains", [1.0])[0])(m.parameters()),
        lambda o: o.state[o.param_groups[0]["params"][0]]["gains"].__setitem__(0, 2.0),
    ),
    "object": (
        lambda m: optimizer(lambda o, p, g: o.held.gain)(m.parameters(), held=SimpleNamespace(gain=1.0)),
        lambda o: setattr(o.held, "gain", 2.0),
    ),
    "minus_zero": (
        lambda m: optimizer(lambda o, p, g: 1.0 if str(o.gain) == "0.0" else 2.0)(m.parameters(), gain=0.0),
        lambda o: setattr(o, "gain", -0.0),
    ),
    "function_of_torch": (lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=False), lambda _: None),
}
QUICK = ("attribute", "parameters_in_a_set", "attribute_of_a_parameter", "object", "function_of_torch")


def trained(name: str, engine: Literal["auto", "graph"] | None, patch: pytest.MonkeyPatch) -> tuple[list[Tensor], bool]:
    """The losses and the weights after six steps, with the change before the fourth, and whether a graph took part."""
    build, change = CASES[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    mine = build(model)
    batches = torch.randn(6, 5, 4)
    losses, captured = [], False

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    options: dict[str, Any] = {"engine": engine or "tape"}
    if engine == "auto":
        options["capture_after"] = 1
    with patch.context() as patches, ab.Executor(ab.TrainStep(model, loss, mine), **options) as executor:
        for step, x in enumerate(batches):
            if step == 3:
                change(mine)
                if name == "function_of_torch":
                    patch_torch(patches)
            if engine is not None:
                losses.append(executor.run(batch=x)["loss"])
                captured |= executor.engine() == "graph"
                continue
            mine.zero_grad()
            losses.append(loss(model, x))
            losses[-1].backward()
            mine.step()
    return [*(value.detach() for value in losses), *(value.detach() for value in model.parameters())], captured


@pytest.mark.parametrize("engine", ["auto", "graph"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_a_change_of_what_an_optimizer_reads_is_seen(
    name: str, engine: Literal["auto", "graph"], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = trained(name, None, monkeypatch)
    if (name, engine) == ("object", "graph"):
        told = "Made can read self.held .SimpleNamespace., whose changes a graph would not notice"
        with pytest.raises(ab.CaptureError, match=told):
            trained(name, engine, monkeypatch)
        return
    found, captured = trained(name, engine, monkeypatch)
    assert all(map(torch.equal, expected, found))
    assert captured or name in ("object", "container_in_the_state")
