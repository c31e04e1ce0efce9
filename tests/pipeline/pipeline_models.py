"""Models that the pipeline's tests split, and the comparison with the unsplit one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch import Pipe, pop, skippable, stash


@skippable(stash=["long"])
class StashLong(nn.Module):
    """Hands out a tuple of a tensor with gradient, an int tensor and None."""

    def forward(self, x: Tensor):
        yield stash("long", (torch.sin(x), torch.arange(1, x.shape[1] + 1), None))
        return x


@skippable(pop=["long"])
class PopLong(nn.Module):
    def forward(self, x: Tensor):
        value, factors, nothing = yield pop("long")
        assert nothing is None
        return x + value * factors


@skippable(stash=["both"], shared=["both"])
class StashBoth(nn.Module):
    def forward(self, x: Tensor):
        yield stash("both", x)
        return torch.cos(x)


@skippable(pop=["both"])
class PopBoth(nn.Module):
    def __init__(self, used: bool = True) -> None:
        super().__init__()
        self.used = used

    def forward(self, x: Tensor):
        value = yield pop("both")
        return x * value if self.used else x


class Structured(nn.Module):
    """Turns a tensor into a dict of a non-contiguous tensor, an int tensor, None and a number."""

    def forward(self, x: Tensor) -> dict:
        return {"x": x.t().contiguous().t(), "ids": (x.detach() * 10).long(), "none": None, "scale": 2.0}


class Unstructured(nn.Module):
    def forward(self, parts: dict) -> Tensor:
        assert not parts["x"].requires_grad or parts["x"].dtype == torch.float64
        assert parts["none"] is None
        return parts["x"] * parts["scale"] + parts["ids"]


@skippable(stash=["same"])
class StashSame(nn.Module):
    """Hands out what it returns."""

    def forward(self, x: Tensor):
        yield stash("same", x)
        return x


@skippable(pop=["same"])
class PopSame(nn.Module):
    def forward(self, x: Tensor):
        return x * (yield pop("same"))


@skippable(stash=["columns"])
class StashColumns(nn.Module):
    def __init__(self, stashed: slice, returned: slice) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.stashed, self.returned = stashed, returned

    def forward(self, x: Tensor):
        x = self.linear(x)
        yield stash("columns", x[:, self.stashed])
        return x[:, self.returned]


@skippable(pop=["columns"])
class PopColumns(nn.Module):
    def forward(self, x: Tensor):
        return x.sum(1, keepdim=True) + 3 * (yield pop("columns")).sum(1, keepdim=True)


class Computes(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: object) -> object:
        return self.function(x)


def changing_model() -> nn.Sequential:
    """Changes in place what has been stashed: unsplit, that changes what is popped."""
    layers = [nn.Linear(4, 4), StashSame(), nn.ReLU(inplace=True), PopSame(), nn.Identity()]
    return nn.Sequential(*layers).double()


def skipping_model(width: int = 5) -> nn.Sequential:
    """Nine layers with a long skip of mixed values, a shared skip, structures between layers and a tied weight."""
    model = nn.Sequential(
        nn.Linear(width, width),
        StashLong(),
        StashBoth(),
        Structured(),
        Unstructured(),
        nn.Sequential(nn.Linear(width, width), PopBoth()),
        nn.ReLU(inplace=True),
        PopLong(),
        PopBoth(used=False),
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
