"""A parameter that stands for others on servers: what needs their numbers is refused by name, all else goes on."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expert_modules import calling
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import anabranch as ab
from anabranch.autodiff.moved_parameter import Switch
from anabranch.experts import ExpertBackend, RemoteExpert
from anabranch.tensors import TensorSpec


def table() -> ab.RemoteEmbedding:
    return ab.RemoteEmbedding("t", None, 4, init=0.5, optimizer=lambda rows: torch.optim.SGD(rows, lr=0.5))


@pytest.fixture(params=["expert", "table"])
def remote(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    module = RemoteExpert("e.0", "unix:/nobody") if request.param == "expert" else table()  # it is never called
    yield module
    if isinstance(module, ab.RemoteEmbedding):
        module.close()


def ema(model: nn.Module) -> None:
    for mine, theirs in zip(copy.deepcopy(model).parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


def averaged(model: nn.Module) -> None:
    AveragedModel(model).update_parameters(model)


USES: dict[str, Callable[[nn.Module], object]] = {
    "penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
    "norm": lambda m: torch.linalg.vector_norm(torch.stack([p.norm() for p in m.parameters()])),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "ema": ema,
    "AveragedModel": averaged,
    "foreach": lambda m: torch._foreach_add([p.data for p in m.parameters()], 1),
    "gradient": lambda m: torch.autograd.grad(torch.ones((), requires_grad=True), list(m.parameters())),
    "init": lambda m: [nn.init.normal_(p) for p in m.parameters()],
    "save": lambda m: torch.save([p.data.cpu().numpy() for p in m.parameters()], io.BytesIO()),
    "equal": lambda m: [p == p for p in m.parameters()],
    "compiled": lambda m: torch.compile(lambda: sum(p.sum() for p in m.parameters()), backend="eager")(),
}


@pytest.mark.parametrize("use", USES)
def test_the_use_of_its_numbers_is_refused_by_name_with_a_cure(use: str, remote: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), remote)
    name = r"'e.0'.*leave it out" if isinstance(remote, RemoteExpert) else r"RemoteEmbedding t\b.*leave on_servers out"
    with pytest.raises(Exception, match=name) as caught:  # Dynamo wraps what it meets while it traces
        USES[use](model)
    assert isinstance(caught.value, ValueError) or use == "compiled"


def test_what_is_here_can_be_counted(remote: nn.Module) -> None:
    """As summaries of a model do before they print it."""
    model = nn.Sequential(nn.Linear(4, 4), remote)
    assert sum(p.numel() for p in model.parameters()) == 20
    assert sum(p.nbytes for p in model.parameters()) == 80
    assert [len(p) for p in model.parameters()] == [4, 4, 0]


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    lambda p: torch.optim.NAdam(p, lr=0.1),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_pass_over_it(make: Callable[[Any], torch.optim.Optimizer], remote: nn.Module) -> None:
    layer = nn.Linear(4, 4)
    model, plain = nn.Sequential(layer, remote), copy.deepcopy(layer)
    optimizers = make(model.parameters()), make(plain.parameters())
    for _ in range(2):
        for optimizer, module in zip(optimizers, (layer, plain), strict=True):
            module(torch.ones(2, 4)).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters() if module is layer else module.parameters(), 0.5)
            nn.utils.clip_grad_value_(model.parameters() if module is layer else module.parameters(), 0.4)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert torch.equal(layer.weight, plain.weight)
    again = make([{"params": [p for p in model.parameters() if p.dim() > 1]}])
    again.add_param_group({"params": [p for p in model.parameters() if p.dim() < 2]})
    other = make(model.parameters())
    other.load_state_dict(optimizers[0].state_dict())
    other.step()


def test_a_model_around_it_is_moved_copied_saved_and_frozen_as_ever(remote: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), remote)
    (name,) = [name for name, p in model.named_parameters() if isinstance(p, Switch)]
    for one in (
        model,
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        model.to("cpu").eval().train(),
        model.to("meta").to_empty(device="cpu"),
        model.double().half().to(torch.float32),
        model.share_memory(),
    ):
        switch = one.get_parameter(name)
        assert type(switch) is Switch
        assert switch.requires_grad
        assert switch.dtype == torch.float32
        assert switch.device.type == "cpu"
        assert switch.grad is None
        assert name not in one.state_dict()
        assert not one.load_state_dict(one.state_dict()).missing_keys
        assert not one.requires_grad_(False).get_parameter(name).requires_grad
        one.requires_grad_(True).zero_grad()
        assert f"{switch}" == repr(switch)
    assert len({*model.parameters()}) == 3
    frozen = remote.requires_grad_(False)
    for one in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert not any(p.requires_grad for p in one.parameters())


class AddsRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), table()

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.layer(x) + self.table(torch.zeros(len(x), dtype=torch.int64))
        return rows


@pytest.mark.parametrize("keep", [0, 64])
def test_a_served_module_may_have_one(keep: int) -> None:
    module = AddsRow()
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    outer = ExpertBackend("o.0", module, optimizer, args_schema=[TensorSpec(4)], keep_activations=keep)
    with calling(outer) as expert:
        expert(torch.ones(2, 4)).sum().backward()
        assert outer.updates == 1
    assert torch.equal(module.table(torch.tensor([0])), torch.full((1, 4), 0.5 - 0.5 * 2))  # and it trains
    module.table.close()
