"""A step of which the user has compiled a part keeps what that computes: on the tape, where it stays compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import anabranch as ab
from anabranch.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Step = tuple[nn.Module, Any]

runs: list[int] = []


def counting(module: fx.GraphModule, inputs: object) -> Callable[..., object]:
    """A backend whose results are its own."""

    def run(*args: Tensor) -> object:
        runs.append(1)
        return module.forward(*args)

    return run


def compiled(function: Any) -> Any:
    return torch.compile(function, backend=counting)


class Squash(nn.Module):
    """Of a file that TorchDynamo compiles by itself; it leaves those of torch alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), Squash(), nn.Linear(8, 4))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def model() -> Step:
    return compiled(two_layers()), mean_square


def layer() -> Step:
    made = two_layers()
    made[1] = compiled(made[1])
    return made, mean_square


def layer_in_place() -> Step:
    made = two_layers()
    made[1].compile(backend=counting)
    return made, mean_square


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers()

    @compiled
    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


def decorated_forward() -> Step:
    return Decorated(), mean_square


def loss() -> Step:
    return two_layers(), compiled(mean_square)


def function_in_a_dict() -> Step:
    functions = {"activation": compiled(lambda x: torch.tanh(x))}
    return two_layers(), lambda model, x: functions["activation"](model(x)).square().mean()


class Loss:
    @compiled
    def __call__(self, model: nn.Module, x: Tensor) -> Any:
        return model(x).square().mean()


def loss_of_a_class() -> Step:
    return two_layers(), Loss()


PARTS = [model, layer, layer_in_place, decorated_forward, loss, function_in_a_dict, loss_of_a_class]


def train(made: Step, steps: int, change: Callable[[int], object] = lambda k: None, **options: Any) -> tuple[str, int]:
    """The engine in the end, and how often compiled code ran in the last step."""
    whole, loss = made
    step = ab.TrainStep(whole, loss, torch.optim.SGD(whole.parameters(), lr=0.1))
    with ab.Executor(step, **options) as executor:
        for k in range(steps):
            change(k)
            runs.clear()
            executor.run(batch=torch.ones(2, 4))
        return executor.engine(), len(runs)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_step_with_a_compiled_part_is_not_a_graph(part: Callable[[], Step]) -> None:
    assert train(part(), 2) == ("tape", 1)
    with pytest.raises(CaptureError, match=r"is compiled by torch\.compile"):
        train(part(), 2, engine="graph")


def test_compiling_a_layer_after_capture_ends_the_graph() -> None:
    made = two_layers()

    def change(k: int) -> None:
        if k == 4:
            made[1].compile(backend=counting)

    assert train((made, mean_square), 4, engine="graph") == ("graph", 0)
    with pytest.raises(CaptureError, match=r"is compiled by torch\.compile"):
        train((made, mean_square), 7, change, engine="graph")
