"""Models that the pipeline's tests split, and the comparison with the unsplit one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch import Pipe, pop, skippable, stash
from anabranch.tensors import Structure


class Computes(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: object) -> object:
        return self.function(x)


def stashing(name: str, make: Callable[[Tensor], tuple[Structure, Tensor]], *, shared: bool = False) -> nn.Module:
    """A layer that stashes the first of two results, and returns the second."""

    @skippable(stash=[name], shared=[name] if shared else [])
    class Stashes(Computes):
        def forward(self, x: Tensor):
            value, x = self.function(x)
            yield stash(name, value)
            return x

    return Stashes(make)


def popping(name: str, join: Callable[[Tensor, Structure], Tensor]) -> nn.Module:
    """A layer that takes what was stashed as its second input."""

    @skippable(pop=[name])
    class Pops(Computes):
        def forward(self, x: Tensor):
            value = yield pop(name)
            return self.function(x, value)

    return Pops(join)


@skippable(stash=["second"])
class StashSecond(nn.Module):
    """Stashes its second input, and returns the sum of both."""

    def forward(self, x: Tensor, y: Tensor):
        yield stash("second", (y, None))
        return x + y


@skippable(pop=["second"])
class PopSecond(nn.Module):
    """Takes a further input by its name."""

    def forward(self, x: Tensor, factor: Tensor):
        y, _ = yield pop("second")
        return x * factor + y


def stash_same() -> nn.Module:
    """Hands out what it returns."""
    return stashing("same", lambda x: (x, x))


def pop_same() -> nn.Module:
    return popping("same", torch.mul)


def stash_columns(stashed: slice, returned: slice) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), stashing("columns", lambda x: (x[:, stashed], x[:, returned])))


def pop_columns() -> nn.Module:
    return popping("columns", lambda x, columns: x.sum(1, keepdim=True) + 3 * columns.sum(1, keepdim=True))


def several(x: Tensor) -> dict:
    """A non-contiguous tensor, an int tensor, None and a number."""
    return {"x": x.t().contiguous().t(), "ids": (x.detach() * 10).long(), "none": None, "scale": 2.0}


def one(parts: dict) -> Tensor:
    assert not parts["x"].requires_grad or parts["x"].dtype == torch.float64
    assert parts["none"] is None
    return parts["x"] * parts["scale"] + parts["ids"]


def add_long(x: Tensor, long: tuple[Tensor, Tensor, None]) -> Tensor:
    value, factors, nothing = long
    assert nothing is None
    return x + value * factors


def changing_model() -> nn.Sequential:
    """Changes in place what has been stashed: unsplit, that changes what is popped."""
    layers = [nn.Linear(4, 4), stash_same(), nn.ReLU(inplace=True), pop_same(), nn.Identity()]
    return nn.Sequential(*layers).double()


def skipping_model(width: int = 5) -> nn.Sequential:
    """Nine layers with a long skip of mixed values, a shared skip, structures between layers and a tied weight."""
    model = nn.Sequential(
        nn.Linear(width, width),
        stashing("long", lambda x: ((torch.sin(x), torch.arange(1, x.shape[1] + 1), None), x)),
        stashing("both", lambda x: (x, torch.cos(x)), shared=True),
        Computes(several),
        Computes(one),
        nn.Sequential(nn.Linear(width, width), popping("both", torch.mul)),
        nn.ReLU(inplace=True),
        popping("long", add_long),
        popping("both", lambda x, _: x),
        nn.Linear(width, width),
    ).double()
    model[9].weight = model[0].weight
    return model


class Scores(nn.Module):
    """Of every row of a table that another layer looks rows up in."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def tied_table() -> nn.Sequential:
    """The table's gradient is sparse where rows are looked up and dense where they are compared with."""
    table = nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
    return nn.Sequential(table, nn.Linear(4, 4).double(), nn.Tanh(), Scores(table.weight))


LAYERS = 11
"""Flattened layers of ``skipping_model``."""


def reference(model: nn.Module) -> nn.Module:
    """A copy to compare with, ties kept."""
    return copy.deepcopy(model)


def close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal within 1e-12 of the largest magnitude."""
    if ours is None or theirs is None:
        return ours is theirs
    if ours.is_sparse and theirs.is_sparse:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    ours, theirs = ours.detach(), theirs.detach()
    return ours.shape == theirs.shape and bool(
        torch.all((ours - theirs).abs() <= 1e-12 * max(1.0, float(theirs.abs().max()) if theirs.numel() else 0.0))
    )


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Every parameter of the same name has the same gradient."""
    expected = dict(theirs.named_parameters())
    found = dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert close(parameter.grad, expected[name].grad), name


def assert_same_buffers(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert close(one, other) if one.is_floating_point() else torch.equal(one, other), name


def assert_trains_alike(
    model: nn.Sequential,
    balance: Sequence[int],
    x: Tensor,
    target: Tensor,
    *,
    plain: nn.Module | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    plain_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    **split: object,
) -> None:
    """A step and a call with its backward give the unsplit model's values, and add up its gradients."""
    plain = reference(model) if plain is None else plain
    ours, theirs = x.clone(), x.clone()
    if x.is_floating_point():
        ours, theirs = ours.requires_grad_(), theirs.requires_grad_()
    with Pipe(model, balance, **split) as pipe:
        result = pipe.step(ours, target, loss=loss)
        expected = (plain_loss or loss)(plain(theirs), target)
        expected.backward()
        assert close(result.loss, expected)
        assert_same_gradients(model, plain)
        y, expected = pipe(ours), plain(theirs)
        assert close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(model, plain)
    assert close(ours.grad, theirs.grad)
