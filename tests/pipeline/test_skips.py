"""Skips: declarations, commands, and every mistake in them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch import Namespace, Pipe, SkipError, pop, skippable, stash, verify_skippables
from anabranch.pipeline.stage.skips import SkipStore, using_store


@skippable(stash=["a"])
class Stash(nn.Module):
    def forward(self, x: Tensor):
        yield stash("a", x)
        return x * 2


@skippable(pop=["a"])
class Pop(nn.Module):
    def forward(self, x: Tensor):
        a = yield pop("a")
        return x + a


@skippable(stash=["a"], shared=["a"])
class ShareA(nn.Module):
    def forward(self, x: Tensor):
        yield stash("a", x)
        return x


@pytest.fixture(autouse=True)
def _own_store():
    with using_store(SkipStore()):
        yield


def faults(module: nn.Module) -> list[str]:
    with pytest.raises(SkipError) as caught:
        verify_skippables(module)
    return str(caught.value).splitlines()[1:]


def test_the_class_stays_itself_and_adds_no_name_to_the_state_dict():
    @skippable(stash=["a"])
    class Layer(nn.Linear):
        def forward(self, x: Tensor):
            yield stash("a", x)
            return super().forward(x)

    layer = Layer(2, 2)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == ["weight", "bias"]
    assert layer(torch.zeros(1, 2)).shape == (1, 2)


def test_a_skippable_without_yield_works():
    @skippable()
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    assert Plain()(torch.zeros(1)).item() == 1.0


def test_namespaces_keep_equal_names_apart():
    inner, outer = Namespace(), Namespace()
    model = nn.Sequential(
        Stash().isolate(outer), Stash().isolate(inner), Pop().isolate(inner, only=["a"]), Pop().isolate(outer, only="a")
    )
    verify_skippables(model)
    assert model(torch.ones(1)).item() == 4 + 2 + 1


def test_a_copied_model_keeps_its_namespaces_apart_from_the_original():
    namespace = Namespace()
    model = nn.Sequential(Stash().isolate(namespace), Pop().isolate(namespace))
    verify_skippables(copy.deepcopy(model))


def test_a_shared_stash_may_have_several_poppers():
    model = nn.Sequential(ShareA(), Pop(), Pop())
    verify_skippables(model)
    assert model(torch.ones(1)).item() == 3.0


def test_every_mismatch_is_in_one_message():
    @skippable(stash=["both"], pop=["both"])
    class Both(nn.Module): ...

    @skippable(pop=["never"])
    class PopNever(nn.Module): ...

    @skippable(stash=["lost"])
    class StashLost(nn.Module): ...

    class Undeclared(nn.Module):
        def forward(self, x: Tensor):
            yield stash("x", x)
            return x

    found = faults(nn.Sequential(Both(), PopNever(), StashLost(), Stash(), Stash(), Pop(), Pop(), Undeclared()))
    assert [line.split("'")[1] for line in found] == ["both", "never", "a", "a", "7", "lost"]
    assert "declared both in stash= and in pop= by '0'" in found[0]
    assert "popped by '1' but no earlier module stashes it" in found[1]
    assert "stashed by '3' and again by '4'" in found[2]
    assert "popped by '5' and again by '6'" in found[3]
    assert "'7' yields in its forward but lacks @ab.skippable" in found[4]
    assert "stashed by '2' but no later module pops it" in found[5]


def test_a_generator_is_a_layer_that_lacks_the_decorator_or_another_modules_own():
    class Rows(nn.Module):
        def forward(self, x: Tensor):
            yield from x

    class Stacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = Rows()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(list(self.rows(x)))

    verify_skippables(nn.Sequential(Stacks()))
    verify_skippables(Stacks())
    (fault,) = faults(nn.Sequential(Stash(), nn.Sequential(Pop(), Rows())))
    assert fault.startswith("* '1.1' yields in its forward")


def test_nested_containers_are_looked_into():
    class Container(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Stash()])

    assert "'0.inner.0'" in faults(nn.Sequential(Container()))[0]
    assert len(faults(nn.Sequential(Pop(), Container()))) == 2, "in the order in which they run"
    verify_skippables(nn.Sequential(nn.Sequential(Stash()), nn.Sequential(nn.Sequential(Pop()))))


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: skippable(stash="abc"), "one string"),
        (lambda: skippable(stash=["a"], shared=["b"]), "neither in stash= nor in pop="),
        (lambda: Stash().isolate(Namespace(), only=["b"]), "declares no skip 'b'"),
    ],
)
def test_declarations_that_name_nothing_are_refused(declare: Callable[[], object], message: str):
    with pytest.raises(SkipError, match=message):
        declare()


@pytest.mark.parametrize(
    ("stashes", "pops", "commands", "message"),
    [
        ((), (), [stash("x", None)], "stashes 'x' but does not declare it"),
        ((), (), [pop("x")], "pops 'x' but does not declare it"),
        (("x",), (), [], r"declares \['x'\] in stash= but its forward did not stash it"),
        (("x",), (), [stash("x", None), stash("x", None)], "stashes 'x' twice"),
        ((), ("x",), [], r"declares \['x'\] in pop= but its forward did not pop it"),
        ((), ("x",), [pop("x")], "pops 'x', which has not been stashed"),
        ((), (), [3], "yielded 3; yield stash"),
    ],
)
def test_misuse_in_forward_names_module_and_skip(stashes: tuple, pops: tuple, commands: list, message: str):
    @skippable(stash=stashes, pop=pops)
    class Misused(nn.Module):
        def forward(self, x: Tensor):
            yield from commands
            return x

    with pytest.raises((RuntimeError, TypeError), match=f"Misused.*{message}"):
        Misused()(torch.zeros(1))


def test_a_skip_that_was_not_stashed_is_named_by_the_stage_that_is_to_send_it():
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stash()

        def forward(self, x: Tensor) -> Tensor:
            return x

    with Pipe(nn.Sequential(Passes(), Pop()), [1, 1]) as pipe, pytest.raises(RuntimeError, match="stage 0 .* skip 'a'"):
        pipe(torch.ones(2, 1))


def test_a_popped_value_is_no_longer_in_memory():
    x = torch.ones(2)
    seen = weakref.ref(x)
    nn.Sequential(Stash(), Pop())(x)
    del x
    assert seen() is None
