"""What Dynamo's guards leave out: looked at before each run, or the step stays on the tape; never a stale number."""

from __future__ import annotations

import builtins
import functools
import logging
import math
import os
import sys
import sysconfig
import types
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import anabranch as ab
from anabranch.errors import CaptureError

STEPS, CHANGED_AT = 6, 4


class Meta(type):
    number = 1.0


class Settings(metaclass=Meta):
    pass


class Once(type):
    """Makes one instance of a class, the textbook's singleton."""

    made: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: object) -> Any:
        if cls not in Once.made:
            Once.made[cls] = super().__call__(*args)
        return Once.made[cls]


class Single(metaclass=Once):
    def __init__(self) -> None:
        self.number = 1.0


class Base:
    number = 1.0


class Derived(Base):
    pass


class Tag:
    """Equal to itself alone."""


FIRST, SECOND, THIRD = Tag(), Tag(), Tag()


class Slotted:
    __slots__ = ("number",)


class Equal:
    """Equal to anything while its list says so."""

    def __init__(self) -> None:
        self.answers = [True]

    def __eq__(self, other: object) -> bool:
        return self.answers[0]

    __hash__ = None  # type: ignore[assignment]


class Asked(nn.Module):
    """Has a scale while nobody sets another."""

    def __getattr__(self, name: str) -> Any:
        return 1.0 if name == "scale" else super().__getattr__(name)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


TEACHERS = {"one": nn.Sequential(Doubled())}


def of_module(value: float) -> types.ModuleType:
    module = types.ModuleType("settings_of_a_run")
    module.number = value  # type: ignore[attr-defined]
    return module


Case = tuple[Callable[[], float], Callable[[pytest.MonkeyPatch], object], str]


def cases() -> dict[str, Case]:
    """For each: what the loss reads, what changes it, and the engine that the step has before the change."""
    ordered = OrderedDict(a=1.0, b=2.0)
    chained = ChainMap[str, float]({}, {"number": 1.0})
    equal, derived, sentinel, asked = Equal(), Derived(), object(), Asked()
    tagged, tagged_second = types.SimpleNamespace(tag=FIRST), types.SimpleNamespace(tag=SECOND)
    tags, layer = [FIRST, THIRD], nn.Identity()
    listed, slotted = [nn.Identity()], [Slotted(), Slotted()]
    held, signed = [sentinel], types.SimpleNamespace(number=0.0)
    settings, plain, places = of_module(1.0), Base(), {"a": 1, "b": 2}
    namespace = types.SimpleNamespace()
    missed: dict[str, float] = {}
    layers = nn.ModuleDict({"other": nn.Identity()})
    lacking = Base()
    filled: dict[str, int] = {}
    defaults = defaultdict[str, float](float)

    def imported() -> float:
        import settings_of_a_run  # type: ignore[import-not-found]

        return settings_of_a_run.number  # type: ignore[no-any-return]

    def helper() -> float:
        return getattr(helper, "scale", 1.0)

    def looked_up() -> float:
        try:
            return missed["scale"]
        except LookupError:
            return 1.0

    def looked_up_in_layers() -> float:
        try:
            raise KeyError
        except KeyError:
            pass
        try:
            return float(len(layers["scale"].weight))  # type: ignore[arg-type]
        except KeyError:
            return 1.0

    def asked_for() -> float:
        try:
            return lacking.scale  # type: ignore[attr-defined, no-any-return]
        except AttributeError:
            return 1.0

    Once.made.clear()
    mask = types.SimpleNamespace(places=frozenset({1}))

    @functools.lru_cache
    def configured() -> dict[str, float]:
        return {"number": 1.0}

    return {
        "what a cache hands out": (
            lambda: configured()["number"],
            lambda patch: configured().update(number=2.0),
            "tape",
        ),
        "singleton": (lambda: Single().number, lambda patch: setattr(Single(), "number", 2.0), "tape"),
        "numbers of a frozenset": (
            lambda: 1.0 if all(isinstance(each, int) for each in mask.places) else 2.0,
            lambda patch: setattr(mask, "places", frozenset({1.0})),
            "graph",
        ),
        "key of a __dict__": (
            lambda: plain.__dict__.get("scale", 1.0),
            lambda patch: patch.setattr(plain, "scale", 2.0, raising=False),
            "graph",
        ),
        "key that is missed and caught": (looked_up, lambda patch: missed.update(scale=2.0), "graph"),
        "layer that is missed after an error of one's own": (
            looked_up_in_layers,
            lambda patch: patch.setitem(layers._modules, "scale", nn.Linear(3, 2)),  # type: ignore[arg-type]
            "graph",
        ),
        "attribute that is missed and caught": (
            asked_for,
            lambda patch: patch.setattr(lacking, "scale", 2.0, raising=False),
            "tape",
        ),
        "vars of what has no weak references": (
            lambda: vars(namespace).get("scale", 1.0),
            lambda patch: patch.setattr(namespace, "scale", 2.0, raising=False),
            "tape",
        ),
        "attribute of a module": (
            lambda: getattr(settings, "scale", 1.0),
            lambda patch: patch.setattr(settings, "scale", 2.0, raising=False),
            "graph",
        ),
        "attribute of a function": (
            helper,
            lambda patch: patch.setattr(helper, "scale", 2.0, raising=False),
            "graph",
        ),
        "attribute in place of __getattr__": (
            lambda: asked.scale,
            lambda patch: patch.setattr(asked, "scale", 2.0, raising=False),
            "graph",
        ),
        "global that hides a built-in": (
            lambda: abs(-1.0),
            lambda patch: patch.setattr(sys.modules[__name__], "abs", lambda _: 2.0, raising=False),
            "graph",
        ),
        "order of a dict": (
            lambda: 1.0 if list(places)[0] == "a" else 2.0,  # noqa: RUF015 - the case
            lambda patch: places.update(a=places.pop("a")),
            "graph",
        ),
        "environment": (
            lambda: float(os.getenv("A_NUMBER_OF_A_RUN", "1.0")),
            lambda patch: patch.setenv("A_NUMBER_OF_A_RUN", "2.0"),
            "graph",
        ),
        "builtins": (
            lambda: number_of_a_run,  # type: ignore[name-defined] # noqa: F821
            lambda patch: patch.setattr(builtins, "number_of_a_run", 2.0),
            "graph",
        ),
        "module": (imported, lambda patch: patch.setitem(sys.modules, "settings_of_a_run", of_module(2.0)), "graph"),
        "order": (lambda: next(iter(ordered.values())), lambda patch: ordered.move_to_end("a"), "graph"),
        "metaclass": (lambda: Settings.number, lambda patch: patch.setattr(Meta, "number", 2.0), "graph"),
        "truth of a dict": (
            lambda: 2.0 if bool(filled) is True else 1.0,
            lambda patch: filled.update(a=1),
            "graph",
        ),
        "truth of a defaultdict": (
            lambda: 2.0 if not defaults else 1.0,
            lambda patch: defaults.__setitem__("a", 1.0),
            "graph",
        ),
        "sign of zero": (
            lambda: 2.0 + math.copysign(1.0, signed.number),
            lambda patch: setattr(signed, "number", -0.0),
            "graph",
        ),
        "method of a part of a module in a dict": (
            lambda: TEACHERS["one"](torch.ones(())),
            lambda patch: patch.setattr(Doubled, "forward", lambda self, x: x * 3),
            "graph",
        ),
        "base class": (
            lambda: derived.number,
            lambda patch: patch.setattr(Derived, "number", 2.0, raising=False),
            "graph",
        ),
        "chain": (lambda: chained["number"], lambda patch: chained.maps[0].update(number=2.0), "tape"),
        "equality": (lambda: 1.0 if equal == 3 else 2.0, lambda patch: equal.answers.__setitem__(0, False), "tape"),
        "equal objects": (
            lambda: 2.0 if tagged.tag == SECOND else 1.0,
            lambda patch: setattr(tagged, "tag", SECOND),
            "graph",
        ),
        "objects equal at first": (
            lambda: 2.0 if SECOND == tagged_second.tag else 1.0,  # noqa: SIM300 - the case
            lambda patch: setattr(tagged_second, "tag", FIRST),
            "graph",
        ),
        "a global in another's place": (
            lambda: 2.0 if tagged_second.tag == SECOND else 1.0,
            lambda patch: patch.setattr(sys.modules[__name__], "SECOND", Tag()),
            "graph",
        ),
        "unequal objects": (
            lambda: 2.0 if tagged.tag != SECOND else 1.0,
            lambda patch: setattr(tagged, "tag", SECOND),
            "graph",
        ),
        "object in a tuple": (
            lambda: 2.0 if tagged.tag in (SECOND, THIRD) else 1.0,
            lambda patch: setattr(tagged, "tag", SECOND),
            "graph",
        ),
        "object in a set": (
            lambda: 2.0 if tagged.tag in {SECOND, THIRD} else 1.0,
            lambda patch: setattr(tagged, "tag", SECOND),
            "graph",
        ),
        "object of a dict": (
            lambda: {FIRST: 1.0, SECOND: 2.0}[tagged.tag],
            lambda patch: setattr(tagged, "tag", SECOND),
            "graph",
        ),
        "place of an object": (lambda: 1.0 + tags.index(THIRD), lambda patch: tags.reverse(), "graph"),
        "count of an object": (
            lambda: 1.0 + tags.count(SECOND),
            lambda patch: tags.__setitem__(0, SECOND),
            "graph",
        ),
        "module in a list": (
            lambda: 2.0 if layer in listed else 1.0,
            lambda patch: listed.__setitem__(0, layer),
            "graph",
        ),
        "objects without weak references": (
            lambda: 2.0 if slotted[0] == slotted[1] else 1.0,
            lambda patch: slotted.__setitem__(0, slotted[1]),
            "tape",
        ),
        "identity": (lambda: 1.0 if held[0] is sentinel else 2.0, lambda patch: held.__setitem__(0, object()), "tape"),
    }


@pytest.mark.parametrize("name", cases())
def test_a_number_that_no_guard_looks_at_is_never_stale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(engine: Any, patch: pytest.MonkeyPatch) -> tuple[list[float], str]:
        patch.setattr(builtins, "number_of_a_run", 1.0, raising=False)
        patch.setitem(sys.modules, "settings_of_a_run", of_module(1.0))
        read, change, _ = cases()[name]
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        step = ab.TrainStep(
            model, lambda m, x: m(x).square().mean() * read(), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        losses, before = [], "tape"
        with ab.Executor(step, engine=engine) as executor, suppress(CaptureError):
            for index in range(STEPS):
                if index == CHANGED_AT:
                    before = "graph"
                    change(patch)
                losses.append(float(executor.run(batch=torch.ones(2, 2))["loss"]))
        return losses, before

    with pytest.MonkeyPatch.context() as patch:
        expected, _ = run("tape", patch)
    found, before = run("graph", monkeypatch)
    assert found == expected[: len(found)]
    assert before == cases()[name][2]


def test_the_count_of_changes_of_a_parameter_is_read_on_the_tape_alone() -> None:
    model = nn.Linear(2, 1)

    def loss(model: Any, x: Any) -> Any:
        return model(x).square().mean() * (1 + model.weight._version % 3)

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor, pytest.raises(CaptureError, match="_version"):
        executor.run(batch=torch.ones(2, 2))


def test_a_function_of_python_that_cannot_be_captured_is_named() -> None:
    model = nn.Linear(2, 1)
    step = ab.TrainStep(
        model,
        lambda m, x: m(x).square().mean() * globals()["RATE"],
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with ab.Executor(step, engine="graph") as executor, pytest.raises(CaptureError, match=r"it calls globals\(\)"):
        executor.run(batch=torch.ones(2, 2))


def test_a_value_that_changes_for_ever_is_refused_without_pytorchs_own_report(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model, seen = nn.Linear(2, 1), [0]

    def loss(model: Any, x: Any) -> Any:
        seen.append(0)
        return model(x).square().mean()

    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor:
        for _ in range(8):
            executor.run(batch=torch.ones(2, 2))
        with pytest.raises(CaptureError, match="change from step to step"):
            executor.run(batch=torch.ones(2, 2))
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [record.name for record in loud if record.name.startswith("torch")]
    assert "torch._dynamo" not in capfd.readouterr().err


WARM = {"lr": 0.1}
RATE = 0.1


class ReadsDict(torch.optim.SGD):
    """Takes its learning rate from a global dict."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = WARM["lr"]
        return super().step(closure)


class ReadsNumber(torch.optim.Optimizer):
    """Takes its learning rate from a global number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-RATE)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[[pytest.MonkeyPatch], object]]] = {
    "a dict": (lambda p: ReadsDict(p, lr=0.1), lambda patch: patch.setitem(WARM, "lr", 0.3)),
    "a number": (ReadsNumber, lambda patch: patch.setitem(globals(), "RATE", 0.3)),
    "a function of PyTorch's": (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda patch: patch.setattr(sys.modules["torch.optim.sgd"], "sgd", lambda params, *_, **__: params[0].zero_()),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_globals_that_an_optimizer_reads_are_never_stale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, change = OPTIMIZERS[name]

    def run(engine: Any, patch: pytest.MonkeyPatch) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        step = ab.TrainStep(model, lambda m, x: m(x).square().mean(), make(model.parameters()))
        losses = []
        with ab.Executor(step, engine=engine) as executor:
            for index in range(STEPS):
                if index == CHANGED_AT:
                    change(patch)
                losses.append(executor.run(batch=torch.ones(2, 2))["loss"])
        return losses

    with pytest.MonkeyPatch.context() as patch:
        expected = run("tape", patch)
    assert all(map(torch.equal, run("graph", monkeypatch), expected))


def reorder(module: nn.Module) -> None:
    module._forward_hooks.move_to_end(next(iter(module._forward_hooks)))


MODULES: dict[str, Callable[[nn.Module], object]] = {
    "order of hooks": reorder,
    "what a call does": lambda module: setattr(module, "_call_impl", lambda x: module.forward(x) * 3),
}


@pytest.mark.parametrize("change", MODULES)
def test_a_module_that_is_called_otherwise_is_noticed(change: str) -> None:
    def run(engine: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        model.register_forward_hook(lambda m, args, y: y * 2)
        model.register_forward_hook(lambda m, args, y: y + 1)
        whole = nn.Sequential(model)
        step = ab.TrainStep(whole, lambda m, x: m(x).square().mean(), torch.optim.SGD(whole.parameters(), lr=0.1))
        losses = []
        with ab.Executor(step, engine=engine) as executor:
            for index in range(STEPS):
                if index == CHANGED_AT:
                    MODULES[change](model)
                losses.append(executor.run(batch=torch.ones(2, 2))["loss"])
        return losses

    assert all(map(torch.equal, run("graph"), run("tape")))


def test_the_kernel_of_attention_is_the_one_that_is_switched_on() -> None:
    def run(engine: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        step = ab.TrainStep(model, attention, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(1, 2, 64, 8)
        with ab.Executor(step, engine=engine) as executor:
            losses = [executor.run(batch=x)["loss"] for _ in range(4)]
            with sdpa_kernel(SDPBackend.MATH):
                losses += [executor.run(batch=x)["loss"] for _ in range(2)]
        return losses

    assert all(map(torch.equal, run("graph"), run("tape")))


def attention(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return F.scaled_dot_product_attention(y, y, y).square().mean()


def test_code_that_checks_for_compilation_runs_on_the_tape_and_is_refused_by_graph() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean() * (2.0 if torch.compiler.is_compiling() else 1.0)

    model = nn.Linear(2, 1)
    x = torch.ones(3, 2)
    expected = loss(model, x).detach()
    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor:
        assert torch.equal(executor.run(batch=x)["loss"], expected)
        with pytest.raises(
            CaptureError, match="the graph was not bitwise equal to the tape, whose step was kept: the loss"
        ):
            executor.run(batch=x)


def test_an_error_that_the_tape_does_not_raise_is_reported_at_the_next_run() -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        return 3.0 if torch.compiler.is_compiling() else model(x).square().mean()

    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor:
        executor.run(batch=torch.ones(3, 2))
        with pytest.raises(CaptureError, match="got float; use engine='tape'"):
            executor.run(batch=torch.ones(3, 2))


@torch.library.custom_op("anabranch_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 2)

OWN = torch.Generator().manual_seed(0)


@torch.library.custom_op("anabranch_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, generator=OWN)


noisy.register_fake(torch.empty_like)

LIBRARY = torch.library.Library("anabranch_tests", "FRAGMENT")
LIBRARY.define("scaled_by_global(Tensor x) -> Tensor")
LIBRARY.impl("scaled_by_global", lambda x: x * len(OPERATORS), "CompositeImplicitAutograd")
torch.library.define("anabranch_tests::of_one_kernel", "(Tensor x) -> Tensor")
torch.library.impl("anabranch_tests::of_one_kernel", "cpu")(lambda x: x * len(OPERATORS))
torch.library.register_fake("anabranch_tests::of_one_kernel", torch.empty_like)

OPERATORS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "doubled": lambda m, x: doubled(m(x)).sum(),
    "noisy": lambda m, x: m(noisy(x)).sum(),
    "scaled_by_global": lambda m, x: torch.ops.anabranch_tests.scaled_by_global(m(x)).sum(),
    "of_one_kernel": lambda m, x: m(torch.ops.anabranch_tests.of_one_kernel(x)).sum(),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_custom_operator_in_python_is_refused(name: str) -> None:
    """Its code would not be read again, and a trial would do once more what it does beside its result."""
    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, OPERATORS[name], torch.optim.SGD(model.parameters(), lr=0.1))
    refusal = f"the custom operator anabranch_tests::{name} is Python"
    with ab.Executor(step, engine="graph") as executor, pytest.raises(CaptureError, match=refusal):
        executor.run(batch=torch.ones(3, 2))


IN_A_LIBRARY = """
import torch

tripled = torch.library.custom_op(
    "anabranch_tests::{name}", lambda x: x * 3, mutates_args=(), schema="(Tensor x) -> Tensor"
)
tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, gradient: gradient * 3, setup_context=lambda ctx, inputs, output: None)
"""


def operator_of_a_library(name: str) -> Any:
    file = f"{sysconfig.get_paths()['purelib']}/a_library.py"
    made: dict[str, Any] = {}
    exec(compile(IN_A_LIBRARY.format(name=name), file, "exec"), made)
    return made["tripled"]


def test_an_operator_of_an_installed_library_with_a_backward_in_python_is_captured() -> None:
    """Experts of transformers call one where the processor has no grouped product."""
    tripled = operator_of_a_library("of_a_library")
    trained = []
    for engine in ("tape", "graph"):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with ab.Executor(ab.TrainStep(model, lambda m, x: tripled(m(x)).sum(), optimizer), engine=engine) as executor:
            losses = [executor.run(batch=torch.ones(3, 2))["loss"] for _ in range(3)]
            assert executor.engine() == engine
        trained.append((losses, list(model.parameters())))
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def of_the_user(*given: Any) -> Any:
    return given[-1] * 3


@pytest.mark.parametrize("registration", ["register_kernel", "register_autograd"])
def test_a_users_kernel_or_backward_of_a_librarys_operator_is_refused(registration: str) -> None:
    name = f"of_both_{registration}"
    tripled = operator_of_a_library(name)
    if registration == "register_kernel":
        tripled.register_kernel("cpu", of_the_user)
    else:
        tripled.register_autograd(of_the_user)
    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, lambda m, x: tripled(m(x)).sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    refusal = f"the custom operator anabranch_tests::{name} is Python"
    with ab.Executor(step, engine="graph") as executor, pytest.raises(CaptureError, match=refusal):
        executor.run(batch=torch.ones(3, 2))


def test_an_object_of_the_step_with_a_finalizer_is_refused() -> None:
    gone: list[int] = []

    class Span:
        def __del__(self) -> None:
            gone.append(1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        span = Span()
        value = model(x).square().mean()
        del span
        return value  # type: ignore[no-any-return]

    model = nn.Linear(2, 1)
    step = ab.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with ab.Executor(step, engine="graph") as executor, pytest.raises(CaptureError, match="__del__"):
        executor.run(batch=torch.ones(3, 2))
    assert not gone
