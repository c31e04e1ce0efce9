"""Values that an optimizer reads in Python: a change between two steps is seen, or the optimizer steps by itself."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import anabranch as ab
from plain_loop import mark_others_slow, treated_as_a_library, why_by_itself


class Own(torch.optim.Optimizer):
    """SGD times the number that ``factor`` reads somewhere."""

    def __init__(self, parameters: Iterable[Tensor], **attributes: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        vars(self).update(attributes)

    def factor(self, parameter: Tensor, group: dict[str, Any]) -> float:
        return 1.0

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


GAIN = 1.0
READ = functools.partial({"gain": 1.0}.get, "gain")

CASES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], Callable[[Any, pytest.MonkeyPatch], object]]] = {
    "attribute": (
        lambda m: optimizer(lambda o, p, g: o.gain)(m.parameters(), gain=1.0),
        lambda o, patch: setattr(o, "gain", 2.0),
    ),
    "attribute_that_hides_the_class's": (
        lambda m: optimizer(lambda o, p, g: o.gain, gain=1.0)(m.parameters()),
        lambda o, patch: setattr(o, "gain", 2.0),
    ),
    "parameters_in_a_set": (
        lambda m: optimizer(lambda o, p, g: 0.5 if p in o.slow else 1.0)(m.parameters(), slow=set()),
        lambda o, patch: o.slow.add(o.param_groups[0]["params"][0]),
    ),
    "attribute_of_a_parameter": (
        lambda m: optimizer(lambda o, p, g: getattr(p, "scale", 1.0))(m.parameters()),
        lambda o, patch: setattr(o.param_groups[0]["params"][0], "scale", 3.0),
    ),
    "list": (
        lambda m: optimizer(lambda o, p, g: o.gains[0])(m.parameters(), gains=[1.0]),
        lambda o, patch: o.gains.__setitem__(0, 2.0),
    ),
    "list_of_the_class": (
        lambda m: optimizer(lambda o, p, g: o.gains[0], gains=[1.0])(m.parameters()),
        lambda o, patch: o.gains.__setitem__(0, 2.0),
    ),
    "default_of_a_method": (
        lambda m: optimizer(lambda o, p, g, gains=[1.0]: gains[0])(m.parameters()),
        lambda o, patch: type(o).factor.__defaults__[0].__setitem__(0, 2.0),
    ),
    "another_class": (
        lambda m: optimizer(lambda o, p, g: 1.0)(m.parameters()),
        lambda o, patch: setattr(o, "__class__", optimizer(lambda o, p, g: 2.0)),
    ),
    "state_of_no_parameter": (
        lambda m: optimizer(lambda o, p, g: o.state["all"].get("gain", 1.0))(m.parameters()),
        lambda o, patch: o.state["all"].__setitem__("gain", 2.0),
    ),
    "container_in_the_state": (
        lambda m: optimizer(lambda o, p, g: o.state[p].setdefault("gains", [1.0])[0])(m.parameters()),
        lambda o, patch: o.state[o.param_groups[0]["params"][0]]["gains"].__setitem__(0, 2.0),
    ),
    "object": (
        lambda m: optimizer(lambda o, p, g: o.held.gain)(m.parameters(), held=SimpleNamespace(gain=1.0)),
        lambda o, patch: setattr(o.held, "gain", 2.0),
    ),
    "minus_zero": (
        lambda m: optimizer(lambda o, p, g: 1.0 if str(o.gain) == "0.0" else 2.0)(m.parameters(), gain=0.0),
        lambda o, patch: setattr(o, "gain", -0.0),
    ),
    "property": (
        lambda m: optimizer(lambda o, p, g: o.gain, gain=property(lambda o: GAIN))(m.parameters()),
        lambda o, patch: patch.setitem(globals(), "GAIN", 2.0),
    ),
    "method_behind_decorators": (
        lambda m: optimizer(torch.no_grad()(functools.wraps(optimizer)(lambda o, p, g: GAIN)))(m.parameters()),
        lambda o, patch: patch.setitem(globals(), "GAIN", 2.0),
    ),
    "function_with_a_cache": (
        lambda m: optimizer(lambda o, p, g: o.gain(), gain=staticmethod(functools.cache(lambda: GAIN)))(m.parameters()),
        lambda o, patch: (patch.setitem(globals(), "GAIN", 2.0), type(o).gain.cache_clear()),
    ),
    "attribute_of_a_module": (
        lambda m: optimizer(lambda o, p, g: math.tau)(m.parameters()),
        lambda o, patch: patch.setattr(math, "tau", 2.0),
    ),
    "name_that_hides_a_builtin": (
        lambda m: optimizer(lambda o, p, g: float(len((1, 1))))(m.parameters()),
        lambda o, patch: patch.setitem(globals(), "len", lambda value: 3),
    ),
    "callable_object": (
        lambda m: optimizer(lambda o, p, g: o.held())(m.parameters(), held=functools.partial([1.0].__getitem__, 0)),
        lambda o, patch: o.held.func.__self__.__setitem__(0, 2.0),
    ),
    "global_callable_object": (
        lambda m: optimizer(lambda o, p, g: READ())(m.parameters()),
        lambda o, patch: patch.setitem(READ.func.__self__, "gain", 2.0),
    ),
    "method_of_another_object": (
        lambda m: optimizer(lambda o, p, g: o.held("gain"))(m.parameters(), held={"gain": 1.0}.get),
        lambda o, patch: o.held.__self__.update(gain=2.0),
    ),
    "code_of_a_method": (
        lambda m: optimizer(lambda o, p, g: 1.0)(m.parameters()),
        lambda o, patch: setattr(type(o).factor, "__code__", (lambda o, p, g: 2.0).__code__),
    ),
    "object_in_a_group": (
        lambda m: optimizer(lambda o, p, g: g["held"].gain)(
            [{"params": m.parameters(), "held": SimpleNamespace(gain=1.0)}]
        ),
        lambda o, patch: setattr(o.param_groups[0]["held"], "gain", 2.0),
    ),
    "number_of_a_group": (
        lambda m: optimizer(lambda o, p, g: g["gain"])([{"params": m.parameters(), "gain": 1.0}]),
        lambda o, patch: o.param_groups[0].update(gain=2.0),
    ),
    "number_of_torchs": (
        lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
        lambda o, patch: o.param_groups[0].update(betas=(0.5, 0.5)),
    ),
    "attribute_of_torchs": (
        lambda m: torch.optim.Adam(m.parameters(), lr=0.1),
        lambda o, patch: o.defaults.update(differentiable=False, more=1),
    ),
    "function_of_torch": (
        lambda m: torch.optim.Adam(m.parameters(), lr=0.1, foreach=False),
        lambda o, patch: patch_torch(patch),
    ),
}
OF_TORCH = {name for name in CASES if "torch" in name}
UNSEEN = {
    "object",
    "callable_object",
    "global_callable_object",
    "method_of_another_object",
    "object_in_a_group",
}
QUICK = ("attribute", "parameters_in_a_set", "attribute_of_a_parameter", "object", "property", "number_of_torchs")


def trained(name: str, engine: Literal["graph"] | None, patch: pytest.MonkeyPatch) -> tuple[list[Tensor], set[str]]:
    """The losses and the weights after six steps, with the change before the fourth, and who updated them."""
    build, change = CASES[name]
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    mine = build(model)
    batches = torch.randn(6, 5, 4)
    losses: list[Tensor] = []
    ways: set[str] = set()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    with (
        patch.context() as patches,
        ab.Executor(ab.TrainStep(model, loss, mine), engine=engine or "tape") as executor,
    ):
        for step, x in enumerate(batches):
            if step == 3:
                change(mine, patches)
            if engine is None:
                mine.zero_grad()
                losses.append(loss(model, x))
                losses[-1].backward()
                mine.step()
                continue
            losses.append(executor.run(batch=x)["loss"])
            if executor.engine() == "graph":
                ways.add("by itself" if why_by_itself(executor) else "captured")
    return [*(value.detach() for value in losses), *(value.detach() for value in model.parameters())], ways


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", mark_others_slow(CASES, QUICK))
def test_a_change_of_state_read_by_a_library_s_optimizer_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    treated_as_a_library(monkeypatch)
    expected, _ = trained(name, None, monkeypatch)
    found, ways = trained(name, "graph", monkeypatch)
    assert all(map(torch.equal, expected, found))
    assert ("captured" in ways) == (name not in UNSEEN)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", mark_others_slow(CASES, QUICK))
def test_a_change_of_state_read_by_a_user_s_optimizer_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = trained(name, None, monkeypatch)
    found, ways = trained(name, "graph", monkeypatch)
    assert all(map(torch.equal, expected, found))
    assert ("by itself" in ways) == (name not in ("number_of_torchs", "attribute_of_torchs"))
    assert ("captured" in ways) == (name in OF_TORCH)
