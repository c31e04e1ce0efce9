"""A pipe's output is joined from those of the microbatches: right, or refused with its path."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from pipeline_models import Computes, assert_trains_alike, close, reference
from torch import Tensor, nn

from anabranch import Pipe
from anabranch.pipeline import split
from anabranch.tensors import Structure, flatten


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def outputs_of(make: Callable[[Tensor], Structure], rows: int, chunks: int = 3) -> list[Callable[[], Structure]]:
    """The output in each way to ask for it."""
    x = torch.arange(1.0, 2.0 * rows + 1).reshape(rows, 2)
    pipe = Pipe(nn.Sequential(nn.Identity(), Computes(make)), [1, 1], chunks=chunks)

    def without_gradients() -> Structure:
        with torch.no_grad():
            return pipe(x)

    def of_a_step() -> Structure:
        with torch.no_grad():
            return pipe.step(x, target=None, loss=lambda *_: torch.zeros(())).output

    return [lambda: pipe(x.clone().requires_grad_()), without_gradients, of_a_step]


@dataclasses.dataclass
class Answer:
    y: Tensor


class Named(OrderedDict):
    """A mapping of a class of its own."""


class Hidden:
    """No container."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


JOINED: dict[str, Callable[[Tensor], Structure]] = {
    "rows": lambda x: {"y": x * 2, "z": [x.long()]},
    "tokens": lambda x: (x.reshape(-1), x[:0].repeat(1, 2)[:0].new_zeros(0, 3)),
    "nothing": lambda x: (x, None),
    "dataclass": lambda x: [Answer(x * 2)],
    "mapping": lambda x: Named(y=Answer(x)),
    "text": lambda x: (x, "tanh"),
    "enum": lambda x: (x, Colour.RED),
    "number": lambda x: (x, 12, 0.5, 1 + 2j),
    "flag": lambda x: (x, True, False),
    "dtype": lambda x: {"x": x, "kind": str(x.dtype)},
}


@pytest.mark.parametrize("rows", [6, 7])
@pytest.mark.parametrize("name", JOINED)
def test_rows_and_equal_values_are_the_whole_batchs(name: str, rows: int):
    x = torch.arange(1.0, 2.0 * rows + 1).reshape(rows, 2)
    leaves, treedef = flatten(JOINED[name](x))
    for output in outputs_of(JOINED[name], rows):
        found, structure = flatten(output())
        assert structure == treedef
        for mine, expected in zip(found, leaves, strict=True):
            assert torch.equal(mine, expected) if isinstance(expected, Tensor) else mine == expected


REFUSED: dict[str, tuple[int, Callable[[Tensor], Structure], str]] = {
    "the number of rows": (6, lambda x: (x, len(x)), "output 1 is 2 in one microbatch and 2 in another"),
    "unequal numbers of rows": (7, lambda x: (x, len(x)), "output 1 is 3 in one microbatch and 2 in another"),
    "a flag": (6, lambda x: (x, bool(x.sum() > 10)), "output 1 is False in one microbatch and True in another"),
    "an enum": (
        6, lambda x: (x, Colour.RED if x[0, 0] < 3 else Colour.BLUE), "output 1 is <Colour.RED: 1> in one microbatch",
    ),
    "a tensor or None": (
        6, lambda x: {"y": x, "big": x if x[0, 0] > 4 else None},
        "output big is None in one microbatch and a tensor of shape (2, 2) in another",
    ),
    "an object": (6, lambda x: (x, {1, 2}), "output 1 is {1, 2} in one microbatch and {1, 2} in another"),
    "another length": (6, lambda x: (x,) * (1 + int(x[0, 0] > 4)), "has a different structure in some microbatches"),
    "an LSTM's state": (6, lambda x: (x, torch.zeros(1, len(x), 3)), "output 1 has [1, 1, 1] rows (dim 0) in micro"),
    "a mean": (7, lambda x: x.mean(0), "output has [2, 2, 2] rows (dim 0) in microbatches of [3, 2, 2] rows"),
    "a product": (7, lambda x: [x, [x.T @ x]], "output 1.0 has [2, 2, 2] rows (dim 0)"),
    "a number per microbatch": (6, lambda x: {"y": x, "sum": x.sum()}, "output sum is a tensor without dimensions"),
    "a list with an entry per row": (6, lambda x: list(x.unbind(0)), "list of 2 values"),
    "a ragged selection": (6, lambda x: x[: 2 if x[0, 0] > 4 else 0], "output has [0, 2, 2] rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_microbatch_is_refused_by_path_and_values(name: str):
    rows, make, message = REFUSED[name]
    for output in outputs_of(make, rows):
        with pytest.raises(ValueError, match=re.escape(message)):
            output()
    assert flatten(outputs_of(make, rows, chunks=1)[0]())[0], "one microbatch is the batch"


@pytest.mark.parametrize("wrap", [Answer, lambda y: Named(y=y)])
def test_gradients_of_tensors_in_a_dataclass_or_mapping_are_those_of_the_unsplit_module(
    wrap: Callable[[Tensor], object],
):
    linear, x = nn.Linear(2, 2), torch.ones(5, 2)
    with Pipe(nn.Sequential(linear, Computes(wrap)), [1, 1], chunks=2) as pipe:
        output = pipe(x)
        assert type(output) is type(wrap(x))
        (output["y"] if isinstance(output, Named) else output.y).sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((2, 2), 5.0))


def test_gradients_of_tensors_in_an_object_that_is_not_opened_are_not_lost():
    linear, x = nn.Linear(2, 2), torch.ones(4, 2)
    pipe = Pipe(nn.Sequential(linear, Computes(Hidden)), [1, 1])
    with pipe, pytest.raises(TypeError, match="output is a Hidden, whose tensors a pipe does not see"):
        pipe(x)
    with torch.no_grad():
        pipe(x)
    pipe.step(x, target=None, loss=lambda output, _: output.y.sum())
    assert linear.weight.grad is not None


class Counted(nn.Module):
    def __init__(self, make: Callable[[Tensor], Structure]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.make = make

    def forward(self, x: Tensor) -> Structure:
        return self.make(self.second(torch.tanh(self.first(x))))


def pipe_of(make: Callable[[Tensor], Structure]) -> Pipe:
    return Pipe(split(Counted(make), ["second"], example=torch.zeros(6, 2)), [1, 1], chunks=3)


def test_constants_between_a_split_models_modules_are_compared_too():
    x = torch.randn(7, 2)
    with pipe_of(lambda y: {"y": y, "width": y.shape[1] + 5}) as pipe:
        assert pipe(x)["width"] == 7
        assert pipe(x)["y"].shape == (7, 2)
    with pipe_of(lambda y: {"y": y, "rows": y.shape[0]}) as pipe:
        with pytest.raises(ValueError, match="is 3 in one microbatch and 2 in another"):
            pipe(x)
        with pytest.raises(ValueError, match="is 2 in one microbatch and 2 in another"):
            pipe(x[:6])
    with pipe_of(lambda y: (y, y if len(y) > 2 else None)) as pipe:
        with pytest.raises(ValueError, match="is 'a tensor' in one microbatch and None in another"):
            pipe(x)
        assert pipe(x[:6])[1] is None


class HoldsModel(nn.Module):
    """A loss that is trained too, and holds the model for a penalty over its parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return (y * self.scale - target).square().mean() + 0.1 * sum(p.square().sum() for p in self.model.parameters())


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_loss_that_holds_the_model_leaves_its_layers_to_their_stages(schedule: str) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).double()
    loss, other = HoldsModel(model), HoldsModel(reference(model))
    held = list(model.parameters())
    x, target = torch.randn(2, 8, 4, dtype=torch.float64).unbind(0)
    assert_trains_alike(
        model, [1, 1, 1], x, target, loss=loss, plain=other.model, plain_loss=other, chunks=4, schedule=schedule
    )
    assert close(loss.scale.grad, other.scale.grad)
    assert all(now is before for now, before in zip(model.parameters(), held, strict=True))


def test_a_forward_replaced_on_an_instance_is_the_layers_own() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = inner.forward
    inner.forward = lambda x: before(x) + x  # type: ignore[method-assign]
    model, x = nn.Sequential(inner, nn.Linear(4, 1)), torch.randn(6, 4)
    expected = model(x)
    with Pipe(model, [1, 1], chunks=2) as pipe:
        torch.testing.assert_close(pipe(x), expected)
