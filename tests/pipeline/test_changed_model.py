"""A model that changes after its pipe was made: inside a layer it takes effect, around the layers it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pipeline_models import assert_same_gradients, close
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from anabranch import Pipe
from anabranch.pipeline import split

Change = Callable[[nn.Module], object]


def sequential() -> nn.Sequential:
    layers = [nn.Linear(3, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 2)]
    return nn.Sequential(*layers).double()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.h = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for layer in self.h:
            x = torch.tanh(layer(x))
        return x


def by_names() -> tuple[nn.Module, nn.Sequential]:
    model = Stack().double()
    return model, split(model, ["h.1"])


def in_layers() -> tuple[nn.Module, nn.Sequential]:
    model = sequential()
    return model, model


def doubled(_: nn.Module, __: object, output: Tensor) -> Tensor:
    return output * 2


AROUND: list[tuple[str, Callable[[], tuple[nn.Module, nn.Sequential]], Change, str]] = [
    ("replaced", in_layers, lambda m: m.__setitem__(3, nn.Linear(3, 2)), "'3' was replaced"),
    ("replaced inside", in_layers, lambda m: m[2].__setitem__(0, nn.Linear(3, 3)), "'2.0' was replaced"),
    ("appended", in_layers, lambda m: m.append(nn.Tanh()), "'4' was added"),
    ("removed", in_layers, lambda m: m.__delitem__(3), "'3' was removed"),
    ("hooked", in_layers, lambda m: m[2].register_forward_hook(doubled), "'2' was replaced, hooked"),
    ("hooked before", in_layers, lambda m: m.register_forward_pre_hook(print), "the model was replaced, hook"),
    ("wrapped", in_layers, lambda m: setattr(m[2], "forward", torch.relu), "'2' was replaced, hooked or wrapped"),
    *(
        (f"{name} of parts", by_names, change, message)
        for name, change, message in [
            ("replaced", lambda m: setattr(m, "a", nn.Linear(3, 3)), "'a' was replaced"),
            ("appended", lambda m: m.h.append(nn.Linear(3, 3)), "'h.3' was added"),
            ("removed", lambda m: m.h.__delitem__(2), "'h.2' was removed"),
            ("hooked", lambda m: m.register_forward_hook(doubled), "the model was replaced, hooked"),
        ]
    ),
]


@pytest.mark.parametrize(("make", "change", "message"), [case[1:] for case in AROUND], ids=[case[0] for case in AROUND])
def test_a_change_around_the_layers_is_refused_with_its_name_and_the_cure(
    make: Callable[[], tuple[nn.Module, nn.Sequential]], change: Change, message: str
):
    model, layers = make()
    x = torch.randn(4, 3, dtype=torch.float64)
    with Pipe(layers, [len(layers) - 1, 1], chunks=2) as pipe:
        layers(x)
        pipe(x)
        change(model)
        with pytest.raises(ValueError, match=f"{message}.* make a new Pipe of the model"):
            pipe(x)
        with pytest.raises(ValueError, match=message):
            pipe.step(x, target=None, loss=lambda y, _: y.sum())


INSIDE: dict[str, Change] = {
    "hook": lambda m: m[0].register_forward_hook(doubled),
    "hook before": lambda m: m[3].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "hook of backward": lambda m: m[3].register_full_backward_hook(lambda _, grads, __: (grads[0] * 2,)),
    "forward": lambda m: setattr(m[1], "forward", torch.sigmoid),
    "class": lambda m: setattr(m[1], "__class__", nn.Sigmoid),
    "load with assign": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "to": lambda m: m.float().double(),
    "frozen": lambda m: m[0].requires_grad_(False),
    "unfrozen": lambda m: m[3].requires_grad_(True),
    "tied": lambda m: setattr(m[2][0], "weight", m[0].weight),
    "untied": lambda m: setattr(m[2][0], "weight", nn.Parameter(m[2][0].weight.detach() * 2)),
    "weight norm": lambda m: parametrizations.weight_norm(m[0]),
    "orthogonal": lambda m: parametrizations.orthogonal(m[2][0]),
    "pruned": lambda m: prune.l1_unstructured(m[3], "weight", amount=0.5),
    "eval": lambda m: m.eval(),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("change", INSIDE)
@pytest.mark.parametrize(("checkpoint", "schedule"), [("always", "ZB1P"), ("never", "1F1B")])
def test_a_change_inside_a_layer_takes_effect(change: str, checkpoint: str, schedule: str):
    model = sequential()
    if change == "unfrozen":
        model[3].requires_grad_(False)
    elif change == "untied":
        model[2][0].weight = model[0].weight
    plain = copy.deepcopy(model)
    x, target = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    with Pipe(model, [2, 2], chunks=3, checkpoint=checkpoint, schedule=schedule) as pipe:
        pipe.step(x, target, loss=F.mse_loss)
        model.zero_grad()
        for one in (model, plain):
            torch.manual_seed(1)
            INSIDE[change](one)
        result = pipe.step(x, target, loss=F.mse_loss)
        expected = F.mse_loss(plain(x), target)
        expected.backward()
        assert close(result.loss, expected)
        assert_same_gradients(pipe, plain)
        assert close(pipe(x), plain(x))


def test_the_optimizers_state_has_the_names_that_the_parameters_have_now():
    model = sequential()
    with Pipe(model, [2, 2]) as pipe:
        parametrizations.weight_norm(model[0])
        optimizer = torch.optim.Adam(model.parameters())
        pipe.step(torch.ones(2, 3).double(), torch.ones(2, 2).double(), loss=F.mse_loss)
        optimizer.step()
        states = pipe.optimizer_state_dict(optimizer)
        assert sorted(states) == sorted(name for name, _ in model.named_parameters())
        other = torch.optim.Adam(model.parameters())
        pipe.load_optimizer_state_dict(other, states)
        assert len(other.state) == len(states)


def test_a_copy_of_the_model_holds_nothing_of_the_pipe():
    model, x, target = sequential(), torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    plain = copy.deepcopy(model)
    with Pipe(model, [2, 2], chunks=3) as pipe:
        pipe(x).sum().backward()
        pipe.zero_grad()
        other = copy.deepcopy(model)
        pipe(x).sum().backward()
        assert all(parameter.grad is None for parameter in other.parameters())
    for one in (other, plain):
        F.mse_loss(one(x), target).backward()
    assert_same_gradients(other, plain)


def test_gradients_by_autograd_grad_are_those_of_the_model_and_leave_grad_alone():
    model = sequential()
    plain = copy.deepcopy(model)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    with Pipe(model, [2, 2], chunks=3) as pipe:
        ours = torch.autograd.grad(pipe(x).square().sum(), [x, *model.parameters()])
        theirs = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
        assert all(map(close, ours, theirs))
        assert x.grad is None
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(RuntimeError, match="does not compute gradients of gradients"):
            torch.autograd.grad(pipe(x).sum(), x, create_graph=True)  # the gradient that comes in needs none itself
